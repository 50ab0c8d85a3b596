"""A device's numbers are compared with the host's and with float64's, whichever is nearer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from acclimate_conformance.checks.dtypes.references import nearest
from acclimate_conformance.checks.dtypes.sampled.places import HOST, LAYOUTS, Place
from fresh_process import plain_environment

PRODUCTS_OF_32_BITS = """
import types
import torch
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.dtypes.operators import reductions_with_options

def prod(x, dim, keepdim=False, *, dtype=None):
    host = x.cpu()
    if host.dtype is not torch.float16:
        return host.prod(dim, keepdim, dtype=dtype).to(x.device)
    return host.float().prod(dim, keepdim, dtype=dtype).to(dtype or host.dtype).to(x.device)

library = torch.library.Library("aten", "IMPL")
library.impl("prod.dim_int", prod, "PrivateUse1")
reductions_with_options.function(types.SimpleNamespace(accelerator=get_accelerator()))
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_device_may_multiply_in_more_bits_than_the_host() -> None:
    """The host's product of float16 overflows on the way to 0, which makes it NaN."""
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCTS_OF_32_BITS], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


INF, NAN = float("inf"), float("nan")


def chosen(
    found: list[float], on_host: list[float], exact: list[float], by_element: bool = True
) -> list[float]:
    given = (torch.tensor(found), torch.tensor(on_host), torch.tensor(exact, dtype=torch.float64))
    return nearest(*given, by_element).tolist()


def test_a_number_that_float64_gives_is_right_where_the_host_overflows() -> None:
    assert chosen([0.0, 2e38, INF], [NAN, INF, NAN], [0.0, 2e38, INF]) == [0.0, pytest.approx(2e38), INF]


def test_a_number_instead_of_nan_is_wrong_if_float64_gives_nan() -> None:
    reference = torch.tensor(chosen([2.0, INF], [NAN, NAN], [NAN, NAN]))
    assert reference.isnan().all()


def test_each_number_is_compared_with_the_nearer_reference() -> None:
    assert chosen([1.0, 4.0], [1.5, 4.5], [1.25, 9.0]) == [1.25, 4.5]


def test_a_device_may_be_off_as_far_as_the_host_where_large_terms_cancel() -> None:
    assert chosen([2e-5], [-1e-5], [0.0], by_element=False) == [pytest.approx(2e-5)]
    assert chosen([2e-4], [-1e-5], [0.0], by_element=False) == [0.0]
    assert chosen([2e-5], [-1e-5], [0.0]) == [0.0]


def test_a_complex_number_is_compared_by_its_parts() -> None:
    found, on_host = torch.tensor([1 + 2j]), torch.tensor([1.5 + 2.5j])
    assert nearest(found, on_host, torch.tensor([1 + 9j], dtype=torch.complex128)).tolist() == [1 + 2.5j]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.int32])
@pytest.mark.parametrize("layout", [None, *LAYOUTS.values()])
def test_a_place_of_exact_numbers_keeps_them_and_their_layout(dtype: torch.dtype, layout: object) -> None:
    values = (torch.arange(12) / 4).reshape(3, 4).to(dtype).t()
    ordinary, exact = Place(HOST, layout), Place(HOST, layout).exactly()  # type: ignore[arg-type]
    made, wide = ordinary.put(values), exact.put(values)
    assert torch.equal(made, values)
    assert torch.equal(wide, values.to(wide.dtype))
    assert (wide.stride(), wide.storage_offset()) == (made.stride(), made.storage_offset())
    assert wide.dtype == {torch.int32: torch.int32, torch.complex64: torch.complex128}.get(
        dtype, torch.float64
    )
