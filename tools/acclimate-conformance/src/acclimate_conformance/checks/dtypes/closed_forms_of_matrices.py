"""Operators on matrices whose results are known without torch."""

from __future__ import annotations

import math
from typing import Any

import torch

from acclimate_conformance.checks.dtypes.closed_forms import Known, On

_TRIANGLES = [[2.0, 1.0], [0.0, 2.0]]
_UPPER, _LOWER = [[2.0, 4.0], [0.0, 1.0]], [[2.0, 0.0], [4.0, 1.0]]

_COLUMNS, _ABOVE = [[3.0, 1.0], [4.0, 2.0]], [[5.0, 2.2], [0.0, 0.4]]
"""A matrix, and R of its QR decomposition without signs."""


_BATCH = [[[0.0, 2.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [0.0, 3.0]]]
_COMPLEX = [[1 + 2j, 3j], [4, 5 - 1j]]
_HERMITIAN = [[4, 2j], [-2j, 10]]


def _complex(on: On, numbers: Any) -> torch.Tensor:
    """In the complex dtype whose parts are of the dtype that is tried."""
    return on(numbers, torch.complex128 if on.dtype is torch.float64 else torch.complex64)


def _residual(matrix: torch.Tensor) -> torch.Tensor:
    """By how much a matrix moves its eigenvectors out of their direction."""
    values, vectors = torch.linalg.eig(matrix)
    moved: torch.Tensor = matrix.to(vectors.dtype) @ vectors - vectors * values
    return moved.abs() > 1e-3


def _put_together(u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return u @ torch.diag(s) @ v


def _into_itself(on: On) -> list[torch.Tensor]:
    """Solutions that replace the right side, as torch documents of out."""
    given = [on([[10], [2]]), on([[2, 6]]), on([[2], [5]])]
    torch.linalg.solve_triangular(on(_UPPER), given[0], upper=True, out=given[0])
    torch.linalg.solve_triangular(on(_UPPER), given[1], upper=True, left=False, out=given[1])
    torch.linalg.solve_triangular(on(_LOWER), given[2], upper=False, out=given[2])
    rows = on([[10, 0], [2, 0]])
    torch.linalg.solve_triangular(on(_UPPER), rows[:, :1], upper=True, out=rows[:, :1])
    return [*given, rows[:, :1]]


MATRICES: dict[str, Known] = {
    # Each column of Q, and with it the row of R, may have either sign.
    "qr": (
        lambda on: [
            torch.matmul(*torch.linalg.qr(on(_COLUMNS))),
            torch.linalg.qr(on(_COLUMNS)).Q.square().sum(0),
            torch.linalg.qr(on(_COLUMNS)).R.abs(),
            torch.linalg.qr(on(_COLUMNS), mode="r").R.abs(),
            torch.matmul(*torch.linalg.qr(on([*_COLUMNS, [0, 0]]), mode="complete")),
            torch.linalg.qr(on([*_COLUMNS, [0, 0]]), mode="complete").Q.square().sum(0),
            torch.geqrf(on(_COLUMNS)).a.triu().abs(),
            torch.linalg.householder_product(*torch.geqrf(on(_COLUMNS))).square().sum(1),
            torch.ormqr(*torch.geqrf(on(_COLUMNS)), on(_COLUMNS), transpose=True).abs(),
            torch.ormqr(*torch.geqrf(on(_COLUMNS)), on([[3, 4]]), left=False).abs(),
        ],
        [
            _COLUMNS, [1, 1], _ABOVE, _ABOVE, [*_COLUMNS, [0, 0]], [1, 1, 1], _ABOVE, [1, 1], _ABOVE,
            [[5, 0]],
        ],
    ),
    "eigenvalues of any matrix": (
        lambda on: [
            torch.linalg.eigvals(on([[1, 5], [0, 2]])).real.sort().values,
            torch.linalg.eigvals(on([[0, 2], [-2, 0]])).imag.sort().values,
            torch.linalg.eig(on([[1, 5], [0, 2]])).eigenvalues.real.sort().values,
            _residual(on([[1, 5], [3, 2]])),
        ],
        [[1, 2], [-2, 2], [1, 2], [[False, False], [False, False]]],
    ),
    "singular values": (
        lambda on: [
            torch.linalg.svdvals(on([[0, 2], [3, 0], [0, 0]])),
            torch.linalg.svd(on([[0, 2], [3, 0], [0, 0]])).S,
            _put_together(*torch.linalg.svd(on(_COLUMNS))),
            _put_together(*torch.linalg.svd(on([*_COLUMNS, [0, 0]]), full_matrices=False)),
            torch.linalg.svd(on([*_COLUMNS, [0, 0]])).U.square().sum(0),
            torch.linalg.svd(on([*_COLUMNS, [0, 0]])).U.square().sum(1),
        ],
        [[3, 2], [3, 2], _COLUMNS, [*_COLUMNS, [0, 0]], [1, 1, 1], [1, 1, 1]],
    ),
    "least squares": (
        lambda on: [
            torch.linalg.lstsq(on([[1, 0], [0, 2], [0, 0]]), on([[1], [4], [9]])).solution,
            torch.linalg.lstsq(on([[1, 1], [1, 2], [1, 3]]), on([[1], [2], [4]])).solution,
        ],
        [[[1], [2]], [[-2 / 3], [1.5]]],
    ),
    "ldl": (
        lambda on: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(on([[4, 8], [8, 17]])), on([[4], [9]])),
        [[-1], [1]],
    ),
    "eigenvalues of a triangle": (
        lambda on: [torch.linalg.eigvalsh(on(_TRIANGLES), UPLO=part) for part in ("U", "L", "u")]
        + [torch.linalg.eigh(on(_TRIANGLES), part).eigenvalues for part in ("U", "L")],
        [[1, 3], [2, 2], [1, 3], [1, 3], [2, 2]],
    ),
    "cholesky": (
        lambda on: [
            torch.linalg.cholesky(on([[4, 8], [8, 17]])),
            torch.linalg.cholesky(on([[4, 8], [8, 17]]), upper=True),
            torch.cholesky_solve(on([[4], [9]]), on(_LOWER)),
            torch.cholesky_solve(on([[4], [9]]), on(_UPPER), upper=True),
            torch.cholesky_inverse(on(_UPPER), upper=True),
        ],
        [_LOWER, _UPPER, [[-1], [1]], [[-1], [1]], [[4.25, -2], [-2, 1]]],
    ),
    "solutions": (
        lambda on: [
            torch.linalg.solve_triangular(on(_UPPER), on([[10], [2]]), upper=True),
            torch.linalg.solve_triangular(on(_LOWER), on([[2], [5]]), upper=False),
            torch.linalg.solve_triangular(on(_UPPER), on([[9], [2]]), upper=True, unitriangular=True),
            torch.linalg.solve_triangular(on(_UPPER), on([[2, 6]]), upper=True, left=False),
            torch.linalg.solve_triangular(
                on(_UPPER), on([[2, 9]]), upper=True, left=False, unitriangular=True
            ),
            torch.linalg.solve_triangular(
                on(_LOWER), on([[9, 2]]), upper=False, left=False, unitriangular=True
            ),
            torch.linalg.solve(on([[0, 2], [1, 0]]), on([[4], [3]])),
            torch.linalg.solve(on([[0, 2], [1, 0]]), on([[4, 6]]), left=False),
            torch.linalg.solve(on([[0, 2], [1, 0]]), on([4, 3])),
            torch.linalg.lu_solve(
                *torch.linalg.lu_factor(on([[0, 2], [1, 0]])), on([[4], [3]]), adjoint=True
            ),
            *_into_itself(on),
        ],
        [
            [[1], [2]], [[1], [1]], [[1], [2]], [[1, 2]], [[2, 1]], [[1, 2]], [[3], [2]], [[3, 4]], [3, 2],
            [[1.5], [4]], [[1], [2]], [[1, 2]], [[1], [1]], [[1], [2]],
        ],
    ),
    "powers and inverses": (
        lambda on: [
            *(torch.linalg.matrix_power(on([[0, 2], [1, 0]]), n) for n in (-1, 0, 3)),
            torch.linalg.inv(on([[0, 2], [1, 0]])),
            torch.linalg.det(on([[0, 2], [1, 0]])),
            *torch.linalg.slogdet(on([[0, 2], [1, 0]])),
        ],
        [
            [[0, 1], [0.5, 0]], [[1, 0], [0, 1]], [[0, 4], [2, 0]], [[0, 1], [0.5, 0]], -2, -1,
            math.log(2),
        ],
    ),
    "batches of which one matrix is singular": (
        lambda on: [
            *torch.linalg.slogdet(on(_BATCH)),
            torch.linalg.det(on(_BATCH)),
            torch.linalg.inv_ex(on(_BATCH)).info,
            torch.linalg.inv_ex(on(_BATCH)).inverse[0],
            torch.linalg.inv_ex(on(_BATCH)).inverse[2],
            torch.linalg.lu_factor_ex(on(_BATCH)).info,
            torch.linalg.cholesky_ex(on([[[4, 8], [8, 17]], [[1, 2], [2, 1]], [[4, 0], [0, 9]]])).info,
            torch.linalg.cholesky_ex(on([[[4, 8], [8, 17]], [[1, 2], [2, 1]], [[4, 0], [0, 9]]])).L[2],
            torch.linalg.matrix_rank(on(_BATCH)),
        ],
        [
            [-1, 0, 1], [math.log(2), -math.inf, math.log(6)], [-2, 0, 6], [0, 2, 0], [[0, 1], [0.5, 0]],
            [[0.5, 0], [0, 1 / 3]], [0, 2, 0], [0, 2, 0], [[2, 0], [0, 3]], [2, 1, 2],
        ],
    ),
    "complex matrices": (
        lambda on: [
            part
            for found in (
                torch.linalg.cholesky(_complex(on, _HERMITIAN)),
                torch.linalg.cholesky(_complex(on, _HERMITIAN), upper=True),
                _complex(on, [_COMPLEX, _COMPLEX]).mH @ _complex(on, [_COMPLEX, _COMPLEX]),
                torch.bmm(_complex(on, [_COMPLEX] * 2).mH, _complex(on, [_COMPLEX] * 2))[1:],
                torch.bmm(_complex(on, [_COMPLEX] * 2), _complex(on, [_COMPLEX] * 2).mT.conj())[1:],
                torch.baddbmm(
                    _complex(on, [_COMPLEX] * 2), _complex(on, [_COMPLEX] * 2).conj(),
                    _complex(on, [_COMPLEX] * 2)
                )[:1],
            )
            for part in (found.real, found.imag)
        ],
        [
            [[2, 0], [0, 3]], [[0, 0], [-1, 0]], [[2, 0], [0, 3]], [[0, 1], [0, 0]],
            [[[21, 26], [26, 35]]] * 2, [[[0, -1], [1, 0]]] * 2, [[[21, 26], [26, 35]]], [[[0, -1], [1, 0]]],
            [[[14, 1], [1, 42]]], [[[0, 23], [-23, 0]]], [[[6, 3], [28, 31]]], [[[-10, -9], [12, 11]]],
        ],
    ),
    "pseudo-inverses": (
        lambda on: [
            torch.linalg.pinv(on([[2, 0]])),
            torch.linalg.matrix_rank(on([[1, 1], [1, 1]]), hermitian=True),
        ],
        [[[0.5], [0]], 1],
    ),
    "norms of matrices": (
        lambda on: [
            torch.linalg.matrix_norm(on([[3, 0], [-4, 0]]), how)
            for how in ("fro", "nuc", 1, -1, 2, math.inf, -math.inf)
        ],
        [5, 5, 7, 0, 5, 4, 3],
    ),
    "triangles and diagonals": (
        lambda on: [
            torch.tril(on([[1, 2], [3, 4]]), -1),
            torch.triu(on([[1, 2], [3, 4]]), 1),
            torch.diag(on([1, 2]), -1),
            on([[1, 2], [3, 4]]).diagonal(1),
            on([[1, 2], [3, 4]]).trace(),
            torch.cross(on([[1, 0, 0]]), on([[0, 1, 0]]), dim=1),
        ],
        [[[0, 0], [3, 0]], [[0, 2], [0, 0]], [[0, 0, 0], [1, 0, 0], [0, 2, 0]], [2], 5, [[0, 0, 1]]],
    ),
}  # fmt: skip
"""Of matrices: each triangle, side and norm."""
