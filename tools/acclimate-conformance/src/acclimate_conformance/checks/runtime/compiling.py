"""Checks of compilers: the backend of torch.compile, and Triton."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import UnknownCompileBackendError
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    equal,
    exactly,
    is_host,
    refused,
    require,
    require_close,
    shares_memory,
    short,
)
from acclimate_conformance.checks.check import check


@check(
    "compile_backend", "get_compile_backend",
    promise="A compiled module gives the same results and gradients as eager, also after its weights "
    "changed.",
    timeout_s=240, once=True,
)  # fmt: skip
def compiles(accelerator: Accelerator) -> str | None:
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")

    torch._dynamo.reset()
    device = accelerator.current_device_name()
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(16, 64, generator=generator) for _ in range(2)]
    module = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.GELU()).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = torch.compile(module, backend=backend)
        for step, batch in enumerate(values):  # with other weights and inputs each time
            found, wanted = (batch.to(device).requires_grad_() for _ in range(2))
            result, expected = compiled(found), module(wanted)
            what = f'call {step + 1} of a module compiled with "{backend}"'
            require_close(result, expected, torch.float32, what)
            for parameter in module.parameters():
                parameter.grad = None
            expected.square().sum().backward()
            gradients = [wanted.grad, *(parameter.grad for parameter in module.parameters())]
            for parameter in module.parameters():
                parameter.grad = None
            result.square().sum().backward()
            ours = [found.grad, *(parameter.grad for parameter in module.parameters())]
            for actual, of_eager in zip(ours, gradients, strict=True):
                require(actual is not None, f"{what} has no gradient")
                if actual is not None and of_eager is not None:
                    require_close(actual, of_eager, torch.float32, f"a gradient of {what}")
            optimizer.step()
        linear = torch.nn.Linear(64, 8).to(device)
        compiled = torch.compile(linear, backend=backend)
        with torch.no_grad():
            for batch in values:
                result, expected = compiled(batch.to(device)), linear(batch.to(device))
                require_close(
                    result, expected, torch.float32, f'a layer compiled with "{backend}", in no_grad,'
                )
                linear.weight.mul_(-2)
    told = [" ".join(str(w.message).split()) for w in said if accelerator.device_type in str(w.message)]
    return f'"{backend}" says: {told[0][:160]}' if told else None


_MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    " in no_grad": torch.no_grad,
    " in inference_mode": torch.inference_mode,
}
"""In which a compiler may plan memory in other ways, each with a text."""


@check(
    "compile_backend", "get_compile_backend",
    promise="A compiled function changes its inputs, returns views of them, and draws numbers as eager does.",
    timeout_s=240, once=True,
)  # fmt: skip
def compiled_functions_have_effects(accelerator: Accelerator) -> None:
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")
    torch._dynamo.reset()
    device = accelerator.current_device_name()

    def work(x: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        x.mul_(2)
        part = x[1:]
        part.clamp_(max=9)
        total[1:].add_(x.sum())
        return [x + 1, part, (x > 3).to(torch.int32), x.argmax(), x.sum(0, keepdim=True)]

    what = f'a function compiled with "{backend}"'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(work, backend=backend)
        # A compiler takes sizes that change for variables.
        for length, records in ((5, True), (8, False)):
            given, counted = torch.arange(length * 3.0).reshape(length, 3), torch.zeros(3)
            ours, count = given.clone().to(device), counted.clone().to(device)
            with torch.set_grad_enabled(records):
                found, wanted = compiled(ours, count), work(given, counted)
            for number, (actual, expected) in enumerate(zip(found, wanted, strict=True)):
                require(
                    actual.dtype == expected.dtype and equal(actual, expected),
                    f"result {number + 1} of {what}, of {length} rows, is wrong",
                )
            require(equal(ours, given) and equal(count, counted), f"{what} changes its inputs otherwise")
            require(shares_memory(found[1], ours), f"{what} returns a copy instead of a view of its input")
        with torch.no_grad():  # the same tensors again, with other numbers
            for tensor in (ours, given):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 7)
            require(
                equal(compiled(ours, count)[0], work(given, counted)[0]), f"{what} repeats its last result"
            )
        doubled = torch.compile(lambda x: (x * 2, x.sum(0)), backend=backend)
        many = [torch.full((4, 3), float(n)).to(device) for n in range(6)]
        for name, mode in _MODES.items():
            with mode():
                results = [doubled(x) for x in many]
            for number, (first, second) in enumerate(results):
                require(
                    equal(first, torch.full((4, 3), 2.0 * number))
                    and equal(second, torch.full((3,), 4.0 * number)),
                    f"a result of {what} changes when it is called again{name}",
                )
        if not is_host(accelerator):  # whose code takes long to compile, and is torch's
            _require_each_call_trains(accelerator, backend)
        dropped = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * 3, backend=backend)
        ones = torch.ones(301, device=device)
        accelerator.manual_seed(3)
        first, second = dropped(ones).cpu(), dropped(ones).cpu()
        accelerator.manual_seed(3)
        require(not equal(first, second), f"dropout in {what} has the same mask twice")
        require(equal(dropped(ones), first), f"dropout in {what} does not repeat after manual_seed()")


_CALLS = 24


def _lossy(x: torch.Tensor, weight: torch.Tensor, *, factor: float = 1.0) -> dict[str, Any]:
    """What programs compile: a loss as one number, with results of several kinds beside it."""
    product = (x @ weight).tanh() * factor
    return {
        "loss": product.square().mean(), "parts": [product, None, product.argmax(-1)], "given": x,
        "count": x.shape[0], "largest": (product.amax(), product.detach().sum()),
    }  # fmt: skip


def _require_each_call_trains(accelerator: Accelerator, backend: str) -> None:
    """Each of many calls gives its own results, and gradients of the one that is a single number."""
    device = accelerator.current_device_name()
    compiled = torch.compile(_lossy, backend=backend, dynamic=False)
    start = torch.linspace(-1, 1, 12).reshape(4, 3)
    for turn in range(_CALLS):
        values = [(start.t() + turn / 8).contiguous(), start * (1 + turn % 5)]
        ours, theirs = ([v.to(place).requires_grad_() for v in values] for place in (device, "cpu"))
        found, wanted = compiled(ours[0], ours[1], factor=2.0), _lossy(theirs[0], theirs[1], factor=2.0)
        what = f'call {turn + 1} of a function that "{backend}" compiled'
        pairs = [(found["loss"], wanted["loss"]), (found["parts"][0], wanted["parts"][0])]
        pairs += [*zip(found["largest"], wanted["largest"], strict=True)]
        require(found["loss"].requires_grad, f"the loss of {what} has no history")
        (found["loss"] + found["largest"][0]).backward()
        (wanted["loss"] + wanted["largest"][0]).backward()
        pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)]
        for number, (actual, expected) in enumerate(pairs):
            require_close(actual, expected, torch.float32, f"number {number + 1} of {what}")
        same = found["given"] is ours[0] and found["parts"][1] is None and found["count"] == 3
        require(same, f"{what} returns its argument, None and a number otherwise")


def _plus(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x + number) * 2


_ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "(x + 1) * 2": _plus(1),
    "(x + 2) * 2": _plus(2),
    "(x - 1) * 2": lambda x: (x - 1) * 2,
    "(2 + x) as int32": lambda x: (x + 2).to(torch.int32),
    "(2 + x) as float16": lambda x: (x + 2).to(torch.float16),
}
"""Functions as long as each other that differ in a constant, an operator or a dtype."""


@check(
    "compile_backend", "get_compile_backend",
    promise="Compiled functions that differ in one constant, operator or dtype each give their own results.",
    timeout_s=240, once=True,
)  # fmt: skip
def compiled_functions_keep_apart(accelerator: Accelerator) -> None:
    backend = exactly(accelerator.get_compile_backend(), str, "get_compile_backend()")
    torch._dynamo.reset()
    given = torch.tensor([0.5, 3.0, -7.0])
    there = given.to(accelerator.current_device_name())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = {
            what: torch.compile(function, backend=backend, dynamic=False) for what, function in _ALIKE.items()
        }
        for turn in (1, 2):
            for what, function in compiled.items():
                found, wanted = function(there), _ALIKE[what](given)
                require(
                    found.dtype == wanted.dtype and equal(found, wanted),
                    f'call {turn} of {what} compiled with "{backend}", beside functions that differ in one '
                    f"constant, operator or dtype, gives {found.tolist()} ({short(found.dtype)}), not "
                    f"{wanted.tolist()} ({short(wanted.dtype)})",
                )


@check(
    "get_compile_backend", "set_compile_backend",
    promise="set_compile_backend accepts a backend that torch has, and refuses any other.",
)  # fmt: skip
def compile_backend_chosen(accelerator: Accelerator) -> None:
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


@check(
    "is_triton_supported", "prefer_triton_grouped_mm",
    promise="If is_triton_supported is True, a Triton kernel runs and gives right results.",
    timeout_s=180, once=True,
)  # fmt: skip
def triton(accelerator: Accelerator) -> None:
    supported = exactly(accelerator.is_triton_supported(), bool, "is_triton_supported()")
    preferred = exactly(accelerator.prefer_triton_grouped_mm(), bool, "prefer_triton_grouped_mm()")
    require(
        supported or not preferred,
        "prefer_triton_grouped_mm() is True, but is_triton_supported() is False",
    )
    if not supported:
        raise NotOfferedError("is_triton_supported() is False")
    from acclimate_conformance.checks.triton_kernel import add_one

    values = torch.arange(1000, dtype=torch.float32, device=accelerator.current_device_name())
    require(equal(add_one(values), values.cpu() + 1), "a Triton kernel that adds 1 gives wrong results")
