"""Checks of what follows from operands: the dtype of a result, and its order in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import BrokenPromiseError, note_of_lacks, refused, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.claims import lacking
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.dtypes.operators import require_alike
from acclimate_conformance.checks.dtypes.sampled.comparing import is_refusal

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_Combine = Callable[[Any, Any], torch.Tensor]
_COMBINED: dict[str, _Combine] = {
    "torch.add": torch.add,
    "torch.sub": torch.sub,
    "torch.mul": torch.mul,
    "torch.div": torch.div,
    "torch.div, rounded down,": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "torch.remainder": torch.remainder,
    "torch.pow": torch.pow,
    "torch.maximum": torch.maximum,
    "torch.eq": torch.eq,
    "torch.lt": torch.lt,
    "torch.atan2": torch.atan2,
    "torch.copysign": torch.copysign,
    "torch.bitwise_and": torch.bitwise_and,
    "torch.logical_or": torch.logical_or,
    "torch.where": lambda a, b: torch.where((a if isinstance(a, torch.Tensor) else b) > 1, a, b),
    "torch.clamp": lambda a, b: torch.clamp(a, min=b),
    "torch.cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "torch.Tensor.add_": lambda a, b: a.clone().add_(b),
    "torch.Tensor.mul_": lambda a, b: a.clone().mul_(b),
    "torch.Tensor.copy_": lambda a, b: a.clone().copy_(b),
}
"""Operators of two operands, in any two dtypes."""
_SHAPES = {
    "a tensor and another": ([1, 2, 3], [2, 1, 2]),
    "a tensor and one without dimensions": ([1, 2, 3], 2),
    "a tensor without dimensions and one with": (2, [1, 2, 3]),
    "two tensors without dimensions": (3, 2),
}
_PYTHONS: tuple[int | float | bool, ...] = (2, 2.5, True)
"""Numbers of Python, of each kind."""


def _pairs(dtypes: list[torch.dtype]) -> Iterator[tuple[str, Callable[[str], tuple[Any, Any]]]]:
    """Two operands with a text, by the device that they are on."""
    for first, second in product(dtypes, dtypes):
        for what, (left, right) in _SHAPES.items():

            def both(
                device: str, a: Any = left, b: Any = right, f: torch.dtype = first, s: torch.dtype = second
            ) -> tuple[Any, Any]:
                return torch.tensor(a).to(f).to(device), torch.tensor(b).to(s).to(device)

            yield f"{what}, of {short(first)} and {short(second)}", both
    for dtype, number, data in product(dtypes, _PYTHONS, ([1, 2, 3], 3)):

        def one(device: str, d: torch.dtype = dtype, n: Any = number, v: Any = data) -> tuple[Any, Any]:
            return torch.tensor(v).to(d).to(device), n

        def other(device: str, one: Callable[[str], tuple[Any, Any]] = one) -> tuple[Any, Any]:
            return one(device)[::-1]

        shape = "" if isinstance(data, list) else " without dimensions"
        yield f"a tensor{shape} of {short(dtype)} and {number!r}", one
        yield f"{number!r} and a tensor{shape} of {short(dtype)}", other


@check(
    "supported_dtypes",
    promise="Operators on two dtypes, tensors without dimensions and Python's numbers give the dtype of "
    "torch's type promotion, and its numbers.",
    once=True,
)  # fmt: skip
def results_have_torchs_dtype(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    absent: set[str] = set()
    for what, operands in _pairs([*supported(accelerator), *_WHOLE]):
        here, there = operands("cpu"), operands(device)
        for name, combine in _COMBINED.items():
            try:
                wanted = combine(*here)
            except (RuntimeError, TypeError, AttributeError):  # torch takes no such pair
                continue
            try:
                found = combine(*there)
            except Exception as error:
                if not is_refusal(error) and not lacking(accelerator, error):
                    raise BrokenPromiseError(
                        f"{name} of {what} raises {describe(error, whole=True)}"
                    ) from error
                absent.add(name)
                continue
            require_alike(found, wanted, f"{name} of {what}", by_element=True)
    return note_of_lacks(absent)


_WITHOUT_A_DTYPE: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "torch.ones": lambda device, x: torch.ones(2, device=device),
    "torch.zeros": lambda device, x: torch.zeros(2, device=device),
    "torch.empty": lambda device, x: torch.empty(2, device=device).zero_(),
    "torch.eye": lambda device, x: torch.eye(2, device=device),
    "torch.full": lambda device, x: torch.full((2,), 1.5, device=device),
    "torch.tensor": lambda device, x: torch.tensor([1.5, 2], device=device),
    "torch.as_tensor": lambda device, x: torch.as_tensor([1.5], device=device),
    "torch.scalar_tensor": lambda device, x: torch.scalar_tensor(1.5, device=device),
    "torch.arange": lambda device, x: torch.arange(0.0, 1.0, 0.25, device=device),
    "torch.linspace": lambda device, x: torch.linspace(0, 1, 5, device=device),
    "torch.logspace": lambda device, x: torch.logspace(0, 1, 2, device=device),
    "torch.rand": lambda device, x: torch.rand(2, device=device) * 0,
    "torch.randn": lambda device, x: torch.randn(2, device=device) * 0,
    "torch.normal": lambda device, x: torch.normal(0.0, 1.0, (2,), device=device) * 0,
    "torch.hann_window": lambda device, x: torch.hann_window(4, device=device),
    "torch.fft.fftfreq": lambda device, x: torch.fft.fftfreq(4, device=device),
    "torch.nn.Linear": lambda device, x: torch.nn.Linear(2, 2, device=device).weight * 0,
    "torch.complex": lambda device, x: torch.complex(
        torch.ones(2, device=device), torch.zeros(2, device=device)
    ),
    "torch.tensor of complex numbers": lambda device, x: torch.tensor([1j], device=device),
    "torch.div of integers": lambda device, x: x / x,
    "torch.div of an integer": lambda device, x: x / 2,
    "torch.div of truth values": lambda device, x: x.bool() / 2,
    "torch.div of uint8": lambda device, x: x.byte() / x.short(),
    "torch.reciprocal of integers": lambda device, x: x.reciprocal(),
    "torch.mul of integers and a fraction": lambda device, x: x * 1.5,
    "torch.add of integers and a fraction": lambda device, x: 1.5 + x,
    "torch.add of integers and a complex number": lambda device, x: x + 1j,
    "torch.pow of integers to a fraction": lambda device, x: x**0.5,
    "torch.sqrt of integers": lambda device, x: x.sqrt(),
    "torch.exp of integers": lambda device, x: x.exp(),
    "torch.sigmoid of integers": lambda device, x: x.sigmoid(),
    "torch.sin of truth values": lambda device, x: x.bool().sin(),
    "torch.atan2 of integers": lambda device, x: torch.atan2(x, x),
    "torch.xlogy of integers": lambda device, x: torch.xlogy(x, x),
    "torch.copysign of integers": lambda device, x: x.copysign(-x),
    "torch.logsumexp of integers": lambda device, x: x.logsumexp(0),
    "torch.clamp of integers by a fraction": lambda device, x: x.clamp(max=1.5),
    "torch.where of two fractions": lambda device, x: torch.where(x > 1, 1.5, 0.25),
    "torch.where of integers and a fraction": lambda device, x: torch.where(x > 1, x, 1.5),
    "torch.angle of integers": lambda device, x: (-x).angle(),
    "torch.mean of integers in a dtype": lambda device, x: x.mean(dtype=torch.float32),
    "torch.sum of integers": lambda device, x: x.sum(),
}
"""Calls that say no dtype, or take integers where floating-point numbers come out."""


@check(
    "supported_dtypes",
    promise="Results whose dtype nothing says have torch's default dtype, also where that is not float32; "
    "means of integers are refused.",
    once=True,
)  # fmt: skip
def results_have_the_default_dtype(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    before = torch.get_default_dtype()
    absent: set[str] = set()
    try:
        for default in supported(accelerator):
            torch.set_default_dtype(default)
            integers = torch.tensor([1, 2, 5])
            for name, call in _WITHOUT_A_DTYPE.items():
                what = f"{name} while the default dtype is {short(default)}"
                try:
                    wanted = call("cpu", integers)
                except RuntimeError:  # torch itself has it in few dtypes
                    continue
                try:
                    found = call(device, integers.to(device))
                except Exception as error:
                    if not is_refusal(error) and not lacking(accelerator, error):
                        raise BrokenPromiseError(f"{what} raises {describe(error, whole=True)}") from error
                    absent.add(name)
                    continue
                if wanted.is_complex():
                    require(found.dtype == wanted.dtype, f"{what} gives {short(found.dtype)}")
                    found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
                require_alike(found, wanted, what, by_element=True)
            for name in ("mean", "var", "std"):
                with refused(f"torch.{name} of integers", RuntimeError):
                    getattr(integers.to(device), name)()
    finally:
        torch.set_default_dtype(before)
    return note_of_lacks(absent)


_Function = Callable[[torch.Tensor], torch.Tensor]
_BY_ELEMENT: dict[str, _Function] = {
    "torch.add": lambda x: x + x,
    "torch.add of a number": lambda x: x + 1,
    "torch.sub": lambda x: x - x * 2,
    "torch.rsub": lambda x: 2 - x,
    "torch.mul": lambda x: x * x,
    "torch.mul of a number without dimensions": lambda x: x * torch.ones((), device=x.device),
    "torch.div": lambda x: x / (x + 1),
    "torch.pow": lambda x: x**2,
    "torch.maximum": lambda x: torch.maximum(x, x * 2),
    "torch.gt": lambda x: x > x,
    "torch.eq of a number": lambda x: x == 3,
    "torch.where": lambda x: torch.where(x > 1, x, x * 2),
    "torch.addcmul": lambda x: torch.addcmul(x, x, x),
    "torch.lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "torch.clamp": lambda x: x.clamp(1, 5),
    "torch.neg": torch.neg,
    "torch.exp": lambda x: (x / 999).exp(),
    "torch.sqrt": torch.sqrt,
    "torch.sigmoid": torch.sigmoid,
    "torch.tanh": torch.tanh,
    "torch.relu": torch.relu,
    "torch.nn.functional.gelu": functional.gelu,
    "torch.nn.functional.silu": functional.silu,
    "torch.nn.functional.leaky_relu": functional.leaky_relu,
    "torch.isnan": torch.isnan,
}
"""Operators by element: torch documents that they keep channels_last."""
_AS_ANOTHER: dict[str, _Function] = {
    "torch.clone": torch.clone,
    "torch.Tensor.to, another dtype,": lambda x: x.to(torch.int32),
    "torch.Tensor.to, copy=True,": lambda x: x.to(x.device, copy=True),
    "torch.Tensor.to, the host,": lambda x: x.to("cpu"),
    "torch.empty_like": torch.empty_like,
    "torch.zeros_like": torch.zeros_like,
    "torch.ones_like, another dtype,": lambda x: torch.ones_like(x, dtype=torch.int32),
    "torch.full_like": lambda x: torch.full_like(x, 2),
    "torch.rand_like": torch.rand_like,
    "torch.randn_like": torch.randn_like,
    "torch.randint_like": lambda x: torch.randint_like(x, 5),
}
"""Functions with an option memory_format, whose default keeps the order of a dense tensor."""
_ORDERS: dict[str, tuple[_Function, torch.memory_format]] = {
    "channels_last": (
        lambda x: x.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.channels_last
    ),
    "channels_last_3d": (
        lambda x: x.reshape(1, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        torch.channels_last_3d,
    ),
}  # fmt: skip
_DENSE: dict[str, _Function] = {
    **{name: arrange for name, (arrange, _) in _ORDERS.items()},
    "transposed": lambda x: x.reshape(8, 15).t(),
    "permuted": lambda x: x.reshape(2, 3, 20).permute(1, 2, 0),
}


@check(
    "supported_dtypes",
    promise="Operators by element keep channels_last, and copies and what is made like a tensor lie in "
    "memory as it does, or as memory_format says.",
)  # fmt: skip
def results_keep_the_memory_format(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    numbers = (torch.arange(120.0) % 7).to(device)
    absent: set[str] = set()
    for table, orders in ((_BY_ELEMENT, dict.fromkeys(_ORDERS)), (_AS_ANOTHER, dict.fromkeys(_DENSE))):
        for order, (name, call) in product(orders, table.items()):
            given = _DENSE[order](numbers)
            try:
                found = call(given)
            except NotImplementedError:
                absent.add(name)
                continue
            require(
                found.stride() == given.stride(),
                f"{name} of a tensor that is {order} has the strides {found.stride()}, not {given.stride()}",
            )
    for order, (arrange, kept) in _ORDERS.items():
        given = arrange(numbers)
        plain = given.contiguous()
        require_alike(plain, given.cpu().contiguous(), f"contiguous() of a tensor that is {order}", True)
        for form in (kept, torch.contiguous_format):
            for name, make in _in_format(form).items():
                for source in (given, plain):
                    found = make(source)
                    wanted = (given if form is kept else plain).stride()
                    called = f"{name} with memory_format={form}"
                    require(
                        found.stride() == wanted,
                        f"{called} has the strides {found.stride()}, not {wanted}",
                    )
                    require(
                        found.is_contiguous(memory_format=form),
                        f"{called} has the strides {found.stride()}, of another format",
                    )
                    if name not in ("torch.empty_like", "torch.empty", "torch.zeros_like"):
                        require_alike(found, given.cpu(), called, True)
    return note_of_lacks(absent)


def _in_format(form: torch.memory_format) -> dict[str, _Function]:
    """Functions that are told how their result lies in memory."""
    return {
        "torch.Tensor.contiguous": lambda x: x.contiguous(memory_format=form),
        "torch.Tensor.to": lambda x: x.to(memory_format=form),
        "torch.Tensor.float": lambda x: x.int().float(memory_format=form),
        "torch.clone": lambda x: x.clone(memory_format=form),
        "torch.nn.Module.to": lambda x: _moved(x, form),
        "torch.empty": lambda x: torch.empty(x.shape, device=x.device, memory_format=form),
        "torch.empty_like": lambda x: torch.empty_like(x, memory_format=form),
        "torch.zeros_like": lambda x: torch.zeros_like(x, memory_format=form),
    }


def _moved(x: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
    """A parameter of a module after the module was moved to a memory format."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(x.clone())
    module.to(memory_format=form)  # type: ignore[call-overload]
    found: torch.Tensor = module.weight
    return found.detach()
