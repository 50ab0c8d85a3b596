"""Checks of data that other libraries and Python make, and of tensors that torch makes of it on a device."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.programs import Program, raised, require_as_on_the_host, there

_KINDS = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "as it lies": lambda a: a,
    "transposed": lambda a: a.T,
    "every second column": lambda a: a[:, ::2],
    "every second row from the second": lambda a: a[1::2],
    "a column": lambda a: a[:, 3],
    "nothing": lambda a: a[:0],
    "one number": lambda a: a[1:2, 2],
    "one number without dimensions": lambda a: a[1, 2, ...],
    "in the order of Fortran": lambda a: a.copy(order="F"),
    "repeated": lambda a: a[:1].repeat(3, 0)[:, None],
}
_INTO = (None, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
_WAYS: dict[str, Callable[[Any, Any, str], torch.Tensor]] = {
    "torch.as_tensor": lambda a, dtype, place: torch.as_tensor(a, dtype=dtype, device=place),
    "torch.tensor": lambda a, dtype, place: torch.tensor(a, dtype=dtype, device=place),
    "torch.asarray": lambda a, dtype, place: torch.asarray(a, dtype=dtype, device=place),
    "new_tensor": lambda a, dtype, place: torch.empty(0, device=place).new_tensor(a, dtype=dtype),
    "from_numpy": lambda a, dtype, place: torch.from_numpy(a).to(place, dtype, non_blocking=True),
    "copy_": lambda a, dtype, place: torch.empty(a.shape, dtype=dtype or torch.float32, device=place).copy_(
        torch.from_numpy(a)
    ),
}


def _arrays(place: str, way: str) -> Any:
    import numpy as np

    told = {}
    for kind in _KINDS:
        base = (np.arange(24).reshape(4, 6) % 5).astype(kind)
        for lies, view in _LAYOUTS.items():
            for dtype in _INTO:
                if kind.startswith("complex") and dtype is not None:
                    continue
                if kind == "float64" and dtype is None:
                    continue  # which a device may lack
                made = _WAYS[way](view(base), dtype, place)
                told[f"{kind} {lies} in {dtype}"] = made
    return told


def _of_python(place: str) -> Any:
    def make(value: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(value, device=place, **options)

    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    there_rows = [torch.tensor(1.5, device=place), torch.tensor(2.5, device=place)]
    return [
        make([[1, 2], [3, 4]]),
        make([1, 2.5]),
        make([True, False]),
        make([True, 2]),
        make([]),
        make([[], []]),
        make(3),
        make(2.5),
        make(True),
        make(2 + 1j, dtype=torch.complex64),
        make(range(5)),
        make((1, (2))),
        make([1, 2], dtype=torch.float16),
        make([1.75, -1.75], dtype=torch.int32),
        make([0.0, 2.0], dtype=torch.bool),
        make(array.array("f", [1.5, 2.5])),
        make(bytes([1, 2, 255])[2]),
        make(rows[0]),
        make([1.0], requires_grad=True),
        make([t.tolist() for t in rows]),
        torch.stack([torch.as_tensor(t, device=place) for t in rows]),
        torch.as_tensor(there_rows, device=place),
        make([float(t) for t in there_rows]),
        make(there_rows),
        torch.as_tensor(array.array("i", [1, 2]), device=place),
        torch.asarray(memoryview(b"abcd"), device=place),
        torch.frombuffer(bytearray(b"\x01\x00\x02\x00"), dtype=torch.int16).to(place),
        torch.asarray([1, 2], device=place, copy=True),
        torch.asarray(rows[1], device=place, requires_grad=True),
        torch.scalar_tensor(4, device=place),
        torch.full((), 2, device=place),
        make(float("nan")),
        make(float("-inf")),
        make([2**31, -(2**62)]),
        make(-1),
        make(255, dtype=torch.uint8),
        make(-128, dtype=torch.int8),
        raised(lambda: make([[1], [2, 3]])),
        raised(lambda: make(["a"])),
        raised(lambda: make(None)),
        raised(lambda: make(2**64)),
        raised(lambda: make([rows[0], rows[1]])),
        torch.Tensor([1, 2]).to(place),
        torch.LongTensor([1, 2]).to(place),
    ]


def _to_arrays(place: str) -> Any:
    import numpy as np

    x: Any = there(place, 3, 4)
    three: Any = np.int64(3)
    forced = x.t().numpy(force=True)
    before = forced.copy()
    kept = x.detach().cpu().clone()
    x.mul_(2)
    unchanged = place == "cpu" or bool((forced == before).all())
    graded = there(place, 3).requires_grad_()
    return [
        before.tolist(),
        unchanged,
        graded.numpy(force=True).tolist(),
        x.cpu().numpy().tolist(),
        np.asarray(x.cpu()).dtype.name,
        kept.numpy().tolist(),
        torch.view_as_complex(x.view(6, 2)).conj().cpu().resolve_conj().numpy().tolist().__repr__(),
        np.asarray(x.bfloat16().float().cpu()).tolist(),
        raised(graded.numpy),
        np.add(x.cpu().numpy(), 1).tolist(),
        float(np.float32(x[0, 0].item())),
        np.array([float(v) for v in x[0]]).tolist(),
        (x * np.float32(2)),
        (x + np.int64(3)),
        x[np.array([0, 2])],
        x[:, np.int64(1)],
        x[np.array([True, False, True])],
        torch.full((2,), np.float64(1.5), dtype=torch.float32, device=place),
        torch.zeros(three, device=place),
    ]


def _refused_arrays(place: str) -> Any:
    if place == "cpu":
        return [True, True, True]
    import numpy as np

    x = torch.ones(3, device=place)
    return [raised(lambda: np.asarray(x)), raised(x.numpy), raised(lambda: np.array(x))]


_PROGRAMS: dict[str, Program] = {
    **{f"{way} of arrays": lambda place, way=way: _arrays(place, way) for way in _WAYS},  # type: ignore[misc]
    "tensors of Python's numbers": _of_python,
    "arrays of tensors": _to_arrays,
    "arrays that torch refuses to make": _refused_arrays,
}


@check(
    "current_device_name",
    "device_name",
    promise="Tensors that are made of arrays and of Python's data hold their numbers, in any layout and "
    "dtype.",
    of="tensors",
)
def foreign_data_is_taken(accelerator: Accelerator) -> str | None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise NotOfferedError("numpy is not installed") from None
    return require_as_on_the_host(accelerator, _PROGRAMS)
