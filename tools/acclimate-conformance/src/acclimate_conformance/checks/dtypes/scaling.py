"""Checks that mixed precision follows torch's own: the same calls give the same results."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    device_names,
    distance,
    is_host,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import reduced_dtypes

_STEPS = 14
_SCRIPTS = 3


class _Steps(torch.optim.SGD):
    """Returns how often it was called, as optimizers return a loss."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.taken += 1
        return self.taken


def _trace(scaler_class: Any, devices: list[str], seed: int) -> list[Any]:
    """The result and the state after each call of a random sequence."""
    choose = random.Random(seed)
    options = {"init_scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
    scaler = scaler_class(**options)
    weights = [torch.nn.Parameter(torch.ones(3, device=devices[i % len(devices)])) for i in range(5)]
    weights[4].requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": [weights[1], weights[4]], "lr": 0.25}]
    optimizers = [
        _Steps(groups, lr=0.5),
        _Steps(weights[2:4], lr=0.125),
    ]
    seen: list[Any] = [scaler.state_dict()]
    for _ in range(_STEPS):
        bad = choose.choice([None, None, None, 0, 1, 2, 3])
        value = choose.choice([float("inf"), float("-inf"), float("nan")])
        unscales = [choose.random() < 0.5 for _ in optimizers]
        losses = [weight.sum() * (i + 1) for i, weight in enumerate(weights[:4])]
        for scaled in scaler.scale(losses):
            scaled.backward()
        if bad is not None:
            with torch.no_grad():
                gradient = weights[bad].grad
                if gradient is not None:
                    gradient[-1] = value
        for optimizer, unscale in zip(optimizers, unscales, strict=True):
            if unscale:
                scaler.unscale_(optimizer)
                seen.append([_numbers(w.grad) for group in optimizer.param_groups for w in group["params"]])
            seen.append(("step", scaler.step(optimizer)))
        scaler.update(choose.choice([None, None, None, 32.0]))
        for optimizer in optimizers:
            optimizer.zero_grad()
        kept = choose.choice(["state", "pickled", "copied", "", "", ""])
        if kept == "state":
            saved = scaler.state_dict()
            scaler = scaler_class(**options)
            scaler.load_state_dict(saved)
        elif kept:
            scaler = pickle.loads(pickle.dumps(scaler)) if kept == "pickled" else copy.deepcopy(scaler)
        seen += [scaler.get_scale(), scaler.state_dict(), [_numbers(weight) for weight in weights]]
        seen += [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
    return seen


def _numbers(tensor: torch.Tensor | None) -> str:
    """The numbers as text; of many the ends, and sums that tell each of the others."""
    if tensor is None:
        return "none"
    there = tensor.detach().cpu()
    if there.numel() <= _SHOWN:
        return str(there.tolist())
    exact = there.double().nan_to_num(-1.0, -2.0, -3.0)
    sums = [float(exact.sum()), float((exact * torch.arange(len(exact))).sum())]
    return str([there[:3].tolist(), there[-3:].tolist(), sums])


_SHOWN = 100


@check(
    "amp",
    promise="amp.GradScaler returns and keeps what torch's does, with several groups, optimizers and "
    "devices.",
    of="operators",
)
def scaler_does_what_torchs_does(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    places = [[accelerator.current_device_name()]] + ([names, names[::-1]] if len(names) > 1 else [])

    def torchs(**options: Any) -> Any:
        return torch.amp.GradScaler("cpu", **options)

    for seed in range(_SCRIPTS):
        wanted = _trace(torchs, ["cpu"], seed)
        for devices in places:
            found = _trace(accelerator.amp.GradScaler, devices, seed)
            for number, (actual, expected) in enumerate(zip(found, wanted, strict=True)):
                require(
                    actual == expected,
                    f"a GradScaler for parameters on {', '.join(devices)} gives {actual} where torch's gives "
                    f"{expected} (result {number} of script {seed})",
                )


@check(
    "amp",
    promise="The operators with which torch's GradScaler unscales gradients and moves its scale give the "
    "host's numbers.",
    of="operators",
)
def operators_of_the_scaler(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    try:
        for bad, noted, scale in product(_BAD, (0.0, 1.0), (1.0, 0.125)):
            for place in range(_GRADIENTS) if bad is not None else (0,):
                called = f"torch._amp_foreach_non_finite_check_and_unscale_ of {_GRADIENTS} tensors"
                what = f"{called}, with {bad} in the one at {place}, and a note of {noted} before"
                _require_as_on_the_host(what, device, _unscaled, bad, place, noted, scale)
        for bad, count in product(_BAD, _MANY):
            for place in (-1, 10, 64) if count == _MANY[-1] and bad == _BAD[1] else (-1,):
                what = (
                    f"torch._amp_foreach_non_finite_check_and_unscale_ of {count} tensors, with {bad} in "
                    f"{'the last' if place < 0 else f'number {place + 1}'}"
                )
                _require_as_on_the_host(what, device, _unscaled_many, bad, count, place)
        for dtype, length in product(accelerator.supported_dtypes(), (1, 3, 7, 33, 1003)):
            what = (
                f"torch._amp_foreach_non_finite_check_and_unscale_ of {length} {short(dtype)} numbers, the "
            )
            what += "last infinite"
            with suppress(RuntimeError):  # the host may lack it in this dtype
                _unscaled_in_16_bits("cpu", dtype, length)
                _require_as_on_the_host(what, device, _unscaled_in_16_bits, dtype, length)
        for scale, overflows, steps in product((8.0, 1e38, 3e38), (0.0, 1.0, 2.0), (0, 1, 2)):
            what = f"torch._amp_update_scale_ of {scale} after {steps} good steps, of 3 until it grows, "
            what += f"with {overflows} of overflow"
            _require_as_on_the_host(what, device, _updated, scale, overflows, steps)
    except NotImplementedError as error:
        raise NotOfferedError(f"torch's GradScaler needs operators that it lacks: {error}") from error


_BAD = (None, float("inf"), float("-inf"), float("nan"))
_GRADIENTS = 4


_MANY = (110, 111, 300)
"""How many gradients: torch's kernels for CUDA take up to 110 at once."""


def _unscaled_many(device: str, bad: float | None, count: int, place: int) -> list[Any]:
    gradients = [torch.full((n % 3 + 1,), float(n)).to(device) for n in range(count)]
    if bad is not None:
        gradients[place][-1] = bad
    found = torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((1,), 0.5, device=device))
    return [float(found), [_numbers(gradient) for gradient in gradients[:2] + gradients[-3:]]]


def _unscaled_in_16_bits(device: str, dtype: torch.dtype, length: int) -> list[Any]:
    gradients = [torch.ones(length, dtype=dtype).to(device), torch.ones(length, dtype=dtype).to(device)]
    gradients[1][-1] = float("inf")
    found = torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((1,), 0.5, device=device))
    return [float(found), [_numbers(gradient) for gradient in gradients]]


def _unscaled(device: str, bad: float | None, place: int, noted: float, scale: float) -> list[Any]:
    gradients = [torch.arange(1.0, length + 1).to(device) for length in (1, 3, 17, 70_001)]
    if bad is not None:
        gradients[place][-1] = bad
    found = torch.full((1,), noted, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((1,), scale, device=device))
    return [float(found), [_numbers(gradient) for gradient in gradients]]


def _updated(device: str, scale: float, overflows: float, steps: int) -> list[Any]:
    now, tracker = (
        torch.full((), scale, device=device),
        torch.full((), steps, dtype=torch.int32, device=device),
    )
    torch._amp_update_scale_(now, tracker, torch.full((), overflows, device=device), 4.0, 0.25, 3)
    return [float(now), int(tracker)]


def _require_as_on_the_host(what: str, device: str, call: Callable[..., list[Any]], *given: Any) -> None:
    found, wanted = call(device, *given), call("cpu", *given)
    # As text: NaN is not equal to itself.
    require(repr(found) == repr(wanted), f"{what} gives {found!r:.200}, and on the host {wanted!r:.200}")


@check(
    "amp",
    promise="An autocast object and a decorated function work each time, and with the given cache_enabled.",
)  # fmt: skip
def autocast_can_be_used_again(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    dtype = reduced_dtypes(accelerator)[0]
    ones = torch.ones(8, 8, device=device)
    for cached in (False, True):
        block = accelerator.amp.autocast(dtype=dtype, cache_enabled=cached)

        @accelerator.amp.autocast(dtype=dtype, cache_enabled=cached)  # type: ignore[untyped-decorator]
        def decorated(cached: bool = cached) -> torch.dtype:
            _require_cache(cached)
            return (ones @ ones).dtype

        for turn in (1, 2, 3):
            with block:
                now = (ones @ ones).dtype
                _require_cache(cached)
            require(now == dtype, f"in turn {turn} of one autocast object a product is {now}, not {dtype}")
            now = decorated()
            require(
                now == dtype, f"in call {turn} of a function with autocast a product is {now}, not {dtype}"
            )

            _require_casts(accelerator, dtype, device, cached)


def _require_casts(accelerator: Accelerator, dtype: torch.dtype, device: str, cached: bool) -> None:
    """A weight that changes within a block is read again if casts are not kept; errors change nothing."""
    given = torch.ones(8, 8, device=device)
    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    with torch.no_grad(), accelerator.amp.autocast(dtype=dtype, cache_enabled=cached):
        first = float(torch.nn.functional.linear(given, weight)[0, 0])
        weight.mul_(2)
        second = float(torch.nn.functional.linear(given, weight)[0, 0])
    wanted = (8.0, 16.0)
    told = f"within autocast(cache_enabled={cached}) a product"
    require(
        cached or (first, second) == wanted,
        f"{told} before and after its weight doubles is {first} and {second}",
    )
    with accelerator.amp.autocast(dtype=dtype, cache_enabled=cached):
        for wrong in (
            lambda: given @ given[:3],
            lambda: torch.mm(given, given[0]),
            lambda: given + given[:3],
        ):
            with suppress(RuntimeError):
                wrong()  # type: ignore[no-untyped-call]
            now = (given @ given).dtype
            require(
                now == dtype, f"{told} after an operator that was refused is {short(now)}, not {short(dtype)}"
            )
    with accelerator.amp.autocast(dtype=dtype, cache_enabled=cached):
        now = (given @ given).dtype
    require(now == dtype, f"{told} in a block after one with an error is {short(now)}, not {short(dtype)}")


def _require_cache(asked: bool) -> None:
    told = torch.is_autocast_cache_enabled()
    require(told == asked, f"within autocast(cache_enabled={asked}) is_autocast_cache_enabled() is {told}")


@check("amp", promise="amp.custom_fwd casts every input that torch's casts, and no other.")
def custom_functions_cast_every_input(accelerator: Accelerator) -> None:
    dtype = reduced_dtypes(accelerator)[0]
    wanted = _casts(
        torch.amp.custom_fwd, "cpu", dtype, {"device_type": "cpu"}, torch.amp.autocast("cpu", dtype)
    )
    device = accelerator.current_device_name()
    block = accelerator.amp.autocast(dtype=dtype)
    found = _casts(accelerator.amp.custom_fwd, device, dtype, {}, block)
    require(found == wanted, f"custom_fwd(cast_inputs=float32) gives {found}, torch's {wanted}")
    if not is_host(accelerator):
        kept = _casts(accelerator.amp.custom_fwd, "cpu", dtype, {}, accelerator.amp.autocast(dtype=dtype))
        require(kept[0] == dtype, f"custom_fwd casts a tensor on the host to {kept[0]}")


def _casts(custom_fwd: Any, device: str, dtype: torch.dtype, options: Any, block: Any) -> list[torch.dtype]:
    """The dtypes in which a custom function gets several inputs."""
    seen: list[torch.dtype] = []

    class Several(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32, **options)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            seen.extend(tensor.dtype for tensor in given)
            return given[0] * 2

    given = [
        torch.ones(2, dtype=kind, device=device) for kind in (dtype, dtype, torch.float32, torch.int64, dtype)
    ]
    with block:
        Several.apply(*given)  # type: ignore[no-untyped-call]
    return seen


_FUSED: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}),
    (torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"betas": (0.5, 0.75), "weight_decay": 0.125}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"betas": (0.5, 0.75), "weight_decay": 0.25}),
    (torch.optim.AdamW, {"amsgrad": True, "eps": 0.5}),
    (torch.optim.Adagrad, {"lr_decay": 0.5, "weight_decay": 0.125}),
)


@check(
    "amp",
    promise="With GradScaler, fused optimizers skip steps whose gradients overflow, and unscale the others.",
    of="operators",
)
def fused_optimizers_skip_overflow(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    lacks: list[str] = []
    for kind, options in _FUSED:
        name = f"{kind.__name__}({', '.join(f'{key}={value}' for key, value in options.items())})"
        try:
            found = _with_overflow(accelerator.amp.GradScaler, kind, options, device, {"fused": True})
        except (RuntimeError, NotImplementedError, TypeError) as error:
            lacks.append(f"{name} that is fused: {error}")
            continue
        wanted = _with_overflow(accelerator.amp.GradScaler, kind, options, device, {"foreach": False})
        for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            apart = max(distance(a, b) for a, b in zip(ours, theirs, strict=True))
            how = "that overflows" if step in _OVERFLOWS else "of finite gradients"
            require(
                apart <= 1e-4,
                f"after step {step}, {how}, parameters, gradients or counted steps of a fused {name} are "
                f"off by "
                f"{apart:.1e}",
            )
    return f"it has no {lacks[0]}" if lacks else None


_OVERFLOWS = (1, 3)


def _with_overflow(
    scaler_class: Any, kind: Any, options: dict[str, Any], device: str, how: dict[str, bool]
) -> list[list[torch.Tensor]]:
    """The parameters after each step."""
    weights = [torch.nn.Parameter(torch.linspace(1, 2, length).to(device)) for length in (5, 1, 33)]
    optimizer = kind(weights, lr=0.125, **options, **how)
    scaler = scaler_class(init_scale=64.0, backoff_factor=0.25)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(sum((weight * weight * (step + 1)).sum() for weight in weights)).backward()
        if step in _OVERFLOWS and weights[step - 1].grad is not None:
            weights[step - 1].grad[-1] = (float("inf"), float("nan"))[step // 2]  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        seen.append(
            [
                part.detach().cpu().double().clone()
                for weight in weights
                for part in (weight, *_steps_of(optimizer, weight), *_gradient(weight, step))
            ]
        )
    return seen


def _gradient(weight: torch.nn.Parameter, step: int) -> list[torch.Tensor]:
    """What a step leaves as the gradient: unscaled, as torch's own kernels do."""
    from torch.optim.optimizer import _get_capturable_supported_devices

    # Devices that torch does not list there have fused kernels that may leave the gradient as it is.
    has_common_kernels = weight.device.type in ("cpu", *_get_capturable_supported_devices())
    is_open = step in _OVERFLOWS or not has_common_kernels
    return [] if weight.grad is None or is_open else [weight.grad]


def _steps_of(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> list[torch.Tensor]:
    """How many steps an optimizer counts for a parameter; one that is skipped does not count."""
    step = optimizer.state[weight].get("step")
    return [] if step is None else [torch.as_tensor(step).reshape(1)]
