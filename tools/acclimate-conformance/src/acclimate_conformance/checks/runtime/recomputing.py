"""Checks of blocks that are computed twice: checkpoints, compiled and not, draw the same numbers again."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import exactly, is_host, require
from acclimate_conformance.checks.check import check

_LENGTH = 1000
_Function = Callable[[torch.Tensor], torch.Tensor]


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x.sin(), 0.5).sin()


def _masked(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * (torch.rand_like(x) > 0.5)).sin()


def _bernoulli(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * torch.bernoulli(torch.full_like(x, 0.5))).sin()


def _kept(block: _Function) -> _Function:
    return lambda x: checkpoint(block, x, use_reentrant=False)


def _kept_with_reentry(block: _Function) -> _Function:
    return lambda x: checkpoint(block, x, use_reentrant=True)


def _twice(block: _Function) -> _Function:
    """Two in a row, and a draw between them, of which neither may take the other's numbers."""

    def run(x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        noise = torch.rand_like(x) * 0
        second: torch.Tensor = checkpoint(block, first + noise, use_reentrant=False)
        return second

    return run


def _within(block: _Function) -> _Function:
    return _kept(_kept(block))


_EAGER: dict[str, _Function] = {
    "a checkpoint with dropout": _kept(_dropped),
    "a checkpoint with dropout, use_reentrant=True": _kept_with_reentry(_dropped),
    "a checkpoint with rand_like": _kept(_masked),
    "a checkpoint with bernoulli": _kept(_bernoulli),
    "two checkpoints with dropout": _twice(_dropped),
    "a checkpoint within another, with dropout": _within(_dropped),
}
_COMPILED: dict[str, _Function] = {
    "dropout": _dropped,
    "a checkpoint with dropout": _kept(_dropped),
    "a checkpoint with rand_like": _kept(_masked),
    "two checkpoints with dropout": _twice(_dropped),
}


@check(
    "compile_backend", "get_compile_backend", "random",
    promise="Within a checkpoint, backward() draws the numbers of forward() again, compiled and not.",
    timeout_s=240, once=True,
)  # fmt: skip
def checkpoints_draw_again(accelerator: Accelerator) -> None:
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")
    torch._dynamo.reset()
    device = accelerator.current_device_name()
    for what, function in _EAGER.items():
        _require_same_mask(accelerator, device, function, f"random(): {what}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled_ones = _COMPILED
        if is_host(accelerator):  # whose compiler is torch's own, and slow
            compiled_ones = {what: _COMPILED[what] for what in ("a checkpoint with dropout",)}
        for what, function in compiled_ones.items():
            compiled = torch.compile(function, backend=backend, dynamic=False)
            told = f'{what} in a function compiled with "{backend}"'
            for _ in range(2):
                _require_same_mask(accelerator, device, compiled, told)
        if is_host(accelerator):
            return
        inner = torch.compile(_dropped, backend=backend, dynamic=False)
        told = f'a checkpoint of a function compiled with "{backend}", with dropout'
        _require_same_mask(accelerator, device, _kept(inner), told)
        with torch.no_grad():  # which compiles anew, and may not change the next call
            torch.compile(_kept(_dropped), backend=backend, dynamic=False)(torch.ones(9, device=device))
        compiled = torch.compile(_COMPILED["a checkpoint with dropout"], backend=backend, dynamic=False)
        _require_same_mask(accelerator, device, compiled, f"{told}, after a call in no_grad,")


def _require_same_mask(accelerator: Accelerator, device: str, function: _Function, what: str) -> None:
    """Fails unless the gradient of each element is zero where the element was dropped, and nowhere else."""
    given = torch.linspace(0.5, 1, _LENGTH).to(device).requires_grad_()
    result = function(given)
    after = accelerator.get_rng_state().clone()
    torch.rand(5, device=device)
    other = accelerator.get_rng_state().clone()
    result.sum().backward()
    kept, slope = result.detach().cpu() != 0, given.grad
    require(0.1 < float(kept.double().mean()) < 0.9, f"{what} keeps {int(kept.sum())} of {_LENGTH} numbers")
    require(slope is not None, f"{what} has no gradient")
    if slope is None:
        return
    wrong = int(((slope.cpu() != 0) != kept).sum())
    require(wrong == 0, f"{what} draws other numbers in backward(), at {wrong} of {_LENGTH} places")
    now = accelerator.get_rng_state()
    require(torch.equal(now.cpu(), other.cpu()), f"{what} changes the state of the generator in backward()")
    require(not torch.equal(after.cpu(), other.cpu()), f"{what}: a draw after it leaves the state")
