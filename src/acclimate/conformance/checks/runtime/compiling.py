"""Checks of compilers: the backend of torch.compile, and Triton."""

from __future__ import annotations

import warnings

import torch

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import (
    NotOfferedError,
    equal,
    exactly,
    refused,
    require,
    require_close,
)
from acclimate.conformance.checks.check import check
from acclimate.errors import UnknownCompileBackendError


@check("compile_backend", "get_compile_backend", timeout_s=240)
def compiles(accelerator: Accelerator) -> str | None:
    """A function compiled with the accelerator's backend gives the same results and gradients as eager."""
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x) * x).sum(-1)

    torch._dynamo.reset()
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    found, wanted = (v.to(accelerator.current_device_name()).requires_grad_() for v in (values, values))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = torch.compile(function, backend=backend)
        result = compiled(found)
    result.sum().backward()
    expected = function(wanted)
    expected.sum().backward()
    require_close(result, expected, torch.float32, f'a function compiled with "{backend}"')
    require(found.grad is not None, f'a function compiled with "{backend}" has no gradient')
    if found.grad is not None and wanted.grad is not None:
        require_close(
            found.grad, wanted.grad, torch.float32, f'the gradient of a function compiled with "{backend}"'
        )
    told = [" ".join(str(w.message).split()) for w in said if accelerator.device_type in str(w.message)]
    return f'"{backend}" says: {told[0][:160]}' if told else None


@check("get_compile_backend", "set_compile_backend")
def compile_backend_chosen(accelerator: Accelerator) -> None:
    """set_compile_backend accepts a backend that torch has, and refuses any other."""
    before = accelerator.get_compile_backend()
    try:
        for backend in ("eager", "aot_eager"):
            accelerator.set_compile_backend(backend)
            now = accelerator.get_compile_backend()
            require(now == backend, f'after set_compile_backend("{backend}") it is "{now}"')
        with refused('set_compile_backend("no such")', UnknownCompileBackendError):
            accelerator.set_compile_backend("no such")
        now = accelerator.get_compile_backend()
        require(now == "aot_eager", f'after a backend was refused it is "{now}"')
    finally:
        accelerator.set_compile_backend(before)


@check("is_triton_supported", "prefer_triton_grouped_mm", timeout_s=180)
def triton(accelerator: Accelerator) -> None:
    """If is_triton_supported is True, a Triton kernel runs and gives right results."""
    supported = exactly(accelerator.is_triton_supported(), bool, "is_triton_supported()")
    preferred = exactly(accelerator.prefer_triton_grouped_mm(), bool, "prefer_triton_grouped_mm()")
    require(
        supported or not preferred,
        "prefer_triton_grouped_mm() is True, but is_triton_supported() is False",
    )
    if not supported:
        raise NotOfferedError("is_triton_supported() is False")
    from acclimate.conformance.checks.triton_kernel import add_one

    values = torch.arange(1000, dtype=torch.float32, device=accelerator.current_device_name())
    require(equal(add_one(values), values.cpu() + 1), "a Triton kernel that adds 1 gives wrong results")
