"""Checks that compiled functions follow what surrounds them: devices, dtypes, modes, modules, sizes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    equal,
    exactly,
    in_thread,
    is_host,
    is_on,
    require,
    require_close,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.programs import there


class _Scaled(nn.Module):
    """Has what a compiler may take for a constant: a number, a mode, a buffer, and a default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.factor = 2.0
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        shift = torch.arange(4.0, device=x.device).to(x.dtype)
        found: torch.Tensor = self.norm(x).sin() * self.factor + shift
        return found if self.training else -found


@check(
    "compile_backend", "get_compile_backend",
    promise="A compiled function follows the device, dtype, mode, stream and thread of each call, and what "
    "changes in its module.",
    timeout_s=240, once=True,
)  # fmt: skip
def compiled_functions_follow_their_surroundings(accelerator: Accelerator) -> None:
    if is_host(accelerator):
        raise NotOfferedError("a host's compiler is torch's own")
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")
    torch._dynamo.reset()
    device = accelerator.current_device_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, plain = _Scaled().to(device), _Scaled()
        compiled: Any = torch.compile(module, backend=backend)
        _require_module_followed(compiled, module, plain, device, f'a module compiled with "{backend}"')
        _require_calls_followed(accelerator, device, backend)


def _require_module_followed(compiled: Any, module: _Scaled, plain: _Scaled, device: str, what: str) -> None:
    def compare(how: str, rows: int = 6) -> None:
        x = there("cpu", rows, 4, seed=rows)
        require_close(compiled(x.to(device)), plain(x), torch.float32, f"{what}, {how}")
        for (name, ours), (_, theirs) in zip(module.named_buffers(), plain.named_buffers(), strict=True):
            near = torch.allclose(ours.cpu().double(), theirs.double(), rtol=1e-4, atol=1e-5)
            require(near, f"{what}, {how}, has the buffer {name} {ours.tolist()}, not {theirs.tolist()}")

    compare("in training")
    compare("called again")
    for owner in (module, plain):
        owner.eval()
    compare("in evaluation")
    for owner in (module, plain):
        owner.factor = 5.0
    compare("after its number changed")
    with torch.no_grad():
        for owner in (module, plain):
            owner.norm.weight.mul_(-3)
        compare("after its weight changed")
    for owner in (module, plain):
        owner.train()
    compare("in training again")
    compare("with more rows", 9)
    for owner in (module, plain):
        owner.norm.weight = nn.Parameter(torch.full_like(owner.norm.weight, 0.5))
    compare("after its weight was replaced")


def _require_calls_followed(accelerator: Accelerator, device: str, backend: str) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.ones(x.shape[-1], device=x.device)
        x.add_(1)
        return (x + y) @ y.t(), made

    compiled: Any = torch.compile(work, backend=backend)
    what = f'a function compiled with "{backend}"'

    def compare(how: str, place: str = device, *, same: bool = False, transposed: bool = False) -> None:
        given = [there("cpu", 4, 4, seed=n) for n in (1, 2)]
        given = [t.t() if transposed else t for t in given]
        ours = [t.clone().to(place) for t in given]
        if same:
            given[1], ours[1] = given[0], ours[0]
        wanted, found = work(*given)[0], compiled(*ours)[0]
        require(is_on(found, place), f"{what} {how}, gives a tensor on {found.device}")
        require_close(found, wanted, torch.float32, f"{what} {how},")
        require(equal(ours[0], given[0]), f"{what} {how}, changes its input otherwise")

    compare("called first")
    compare("of one tensor twice", same=True)
    compare("of transposed tensors", transposed=True)
    for name in device_names(accelerator)[::-1]:
        compare(f"of tensors on {name}", name)
    side = accelerator.Stream()
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        compare("on another stream")
    accelerator.current_stream().wait_stream(side)
    in_thread(lambda: compare("in another thread"))
    ones = torch.ones(4, 4, device=device)
    for dtype in [d for d in accelerator.supported_dtypes() if d in (torch.bfloat16, torch.float16)][:1]:
        with accelerator.amp.autocast(dtype=dtype):
            found = compiled(ones.clone(), ones)[0]
        require(found.dtype == dtype, f"{what} within amp.autocast, gives {found.dtype}, not {dtype}")
    found = compiled(ones.clone(), ones)[0]
    require(found.dtype == torch.float32, f"{what} after amp.autocast, gives {found.dtype}")
    weight = ones.clone().requires_grad_()
    tracked = compiled(ones.clone(), weight)[0]
    require(tracked.requires_grad, f"{what} of a tensor that requires a gradient gives one that does not")
    with torch.no_grad():
        untracked = compiled(ones.clone(), weight)[0]
    require(not untracked.requires_grad, f"{what} in no_grad, gives a tensor that requires a gradient")
    traced: Any = torch.compile(work, backend="aot_eager")
    traced(ones.cpu().clone(), ones.cpu())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        made = compiled(ones.clone(), ones)[1]
        # Torch 2.11 compiles no other program for another default dtype, whatever the device.
        on_host = traced(ones.cpu().clone(), ones.cpu())[1]
    finally:
        torch.set_default_dtype(before)
    require(made.dtype == on_host.dtype, f"{what} makes {made.dtype} while the default dtype is float64")
