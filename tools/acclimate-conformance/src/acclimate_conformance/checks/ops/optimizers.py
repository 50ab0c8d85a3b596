"""Checks of DeepSpeed's optimizer ops, called as DeepSpeed calls them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import distance, equal, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.ops.builders import builder_of, usable_builders

_STEPS = 3
_ROUNDING = 1e-5  # of float32 over so many steps, relative to the largest element
_LENGTHS = (1, 17, 1037, (1 << 18) + 3)
"""Elements of the tensors of one group; the last is more than a megabyte."""


@dataclass(frozen=True)
class _Settings:
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    decay: float = 0.1
    decoupled: bool = True
    bias_correction: bool = True


_CASES = {
    "decoupled decay": _Settings(),
    "decay in the gradient": _Settings(decoupled=False, decay=0.05),
    "no bias correction and no decay": _Settings(bias_correction=False, decay=0.0, lr=0.003, eps=1e-6),
    "other decays of the moments": _Settings(beta1=0.5, beta2=0.9, lr=0.02),
}


@dataclass
class _Group:
    """Parameters with their gradients and state, on a device or as float64 on the host."""

    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]
    first: list[torch.Tensor]
    second: list[torch.Tensor]


_Update = Callable[[Any, int, int, _Settings, _Group], None]
_Rule = Callable[[int, _Settings, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@check(
    "create_op_builder", "op_builders",
    promise="The optimizer ops update every tensor of a group, in each mode, like the same rule in torch.",
    timeout_s=600, once=True,
)  # fmt: skip
def optimizer_ops_compute(accelerator: Accelerator) -> None:
    for name in usable_builders(accelerator, _OPTIMIZERS, f"it has none of {', '.join(_OPTIMIZERS)}"):
        update, rule, on_device, has_modes = _OPTIMIZERS[name]
        module = builder_of(accelerator, name).load()
        place = accelerator.current_device_name() if on_device else "cpu"
        for number, (case, settings) in enumerate(_CASES.items()):
            if not has_modes and not (settings.decoupled and settings.bias_correction):
                continue
            # All tensors in the first case; a few elements show a mode.
            lengths = _LENGTHS if number == 0 else _LENGTHS[:3]
            _compare(f"{name} with {case}", update, rule, module, place, lengths, settings)


def _compare(
    what: str,
    update: _Update,
    rule: _Rule,
    module: Any,
    place: str,
    lengths: Sequence[int],
    settings: _Settings,
) -> None:
    generator = torch.Generator().manual_seed(7)
    start = [torch.randn(length, generator=generator) for length in lengths]
    actual = _Group([], [p.clone().to(place) for p in start], *_zeros(start, torch.float32, place))
    wanted = _Group([], [p.double() for p in start], *_zeros(start, torch.float64, "cpu"))
    for step in range(1, _STEPS + 1):
        settings = replace(settings, lr=settings.lr / step)
        gradients = [torch.randn(length, generator=generator) for length in lengths]
        actual.gradients = [gradient.clone().to(place) for gradient in gradients]
        update(module, 1_000_003, step, settings, actual)  # a number that no optimizer of a program has
        for kept, gradient in zip(actual.gradients, gradients, strict=True):
            require(equal(kept, gradient), f"{what} changes a gradient")
        for index, gradient in enumerate(gradients):
            rule(step, settings, gradient.double(), wanted.parameters[index], wanted.first[index],
                 wanted.second[index])  # fmt: skip
    for state in ("parameters", "first", "second"):
        if state == "second" and rule is not _adam_rule:
            continue
        for index, length in enumerate(lengths):
            apart = distance(getattr(actual, state)[index], getattr(wanted, state)[index])
            named = "parameter" if state == "parameters" else f"{state} state"
            require(
                apart <= _ROUNDING,
                f"the {named} {index + 1} of {len(lengths)}, of {length} elements, is off by {apart:.1e} "
                f"after {_STEPS} steps of {what}",
            )


def _zeros(like: list[torch.Tensor], dtype: torch.dtype, place: str) -> list[list[torch.Tensor]]:
    return [[torch.zeros(len(tensor), dtype=dtype, device=place) for tensor in like] for _ in range(2)]


def _cpu_adam(module: Any, number: int, step: int, s: _Settings, group: _Group) -> None:
    # Two optimizers at a time, as a program has them: each keeps its own mode.
    module.create_adam(number, s.lr, s.beta1, s.beta2, s.eps, s.decay, s.decoupled, False)
    module.create_adam(number + 1, s.lr, s.beta1, s.beta2, s.eps, s.decay, not s.decoupled, False)
    for g, p, m, v in zip(group.gradients, group.parameters, group.first, group.second, strict=True):
        module.adam_update(
            number, step, s.lr, s.beta1, s.beta2, s.eps, s.decay, s.bias_correction, p, g, m, v
        )
    module.destroy_adam(number + 1)
    module.destroy_adam(number)


def _fused_adam(module: Any, number: int, step: int, s: _Settings, group: _Group) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=group.parameters[0].device)
    module.multi_tensor_adam(
        2048 * 32, flag, [group.gradients, group.parameters, group.first, group.second],
        s.lr, s.beta1, s.beta2, s.eps, step, int(s.decoupled), int(s.bias_correction), s.decay,
    )  # fmt: skip


def _cpu_lion(module: Any, number: int, step: int, s: _Settings, group: _Group) -> None:
    module.create_lion(number, s.lr, s.beta1, s.beta2, s.decay, False)
    for g, p, m in zip(group.gradients, group.parameters, group.first, strict=True):
        module.lion_update(number, step, s.lr, s.beta1, s.beta2, s.decay, p, g, m)
    module.destroy_lion(number)


def _fused_lion(module: Any, number: int, step: int, s: _Settings, group: _Group) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=group.parameters[0].device)
    lists = [group.gradients, group.parameters, group.first]
    module.multi_tensor_lion(2048 * 32, flag, lists, s.lr, s.beta1, s.beta2, step, s.decay)


def _cpu_adagrad(module: Any, number: int, step: int, s: _Settings, group: _Group) -> None:
    module.create_adagrad(number, s.lr, s.eps, s.decay, False)
    for g, p, m in zip(group.gradients, group.parameters, group.first, strict=True):
        module.adagrad_update(number, step, s.lr, s.eps, s.decay, p, g, m)
    module.destroy_adagrad(number)


def _adam_rule(
    step: int, s: _Settings, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    if s.decoupled:
        p.mul_(1 - s.lr * s.decay)
    else:
        g = g + s.decay * p
    m.lerp_(g, 1 - s.beta1)
    v.lerp_(g * g, 1 - s.beta2)
    first, second = (1 - s.beta1**step, 1 - s.beta2**step) if s.bias_correction else (1.0, 1.0)
    p.sub_(s.lr * (m / first) / ((v / second).sqrt() + s.eps))


def _lion_rule(
    step: int, s: _Settings, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    p.mul_(1 - s.lr * s.decay).sub_(s.lr * (s.beta1 * m + (1 - s.beta1) * g).sign())
    m.lerp_(g, 1 - s.beta2)


def _adagrad_rule(
    step: int, s: _Settings, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    g = g + s.decay * p
    m.add_(g * g)
    p.sub_(s.lr * g / (m.sqrt() + s.eps))


_OPTIMIZERS: dict[str, tuple[_Update, _Rule, bool, bool]] = {
    "CPUAdamBuilder": (_cpu_adam, _adam_rule, False, True),
    "FusedAdamBuilder": (_fused_adam, _adam_rule, True, True),
    "CPULionBuilder": (_cpu_lion, _lion_rule, False, False),
    "FusedLionBuilder": (_fused_lion, _lion_rule, True, False),
    "CPUAdagradBuilder": (_cpu_adagrad, _adagrad_rule, False, False),
}
"""By builder: a call of its module, the rule, whether it works on the device, and whether it has modes."""


@check(
    "create_op_builder", "op_builders",
    promise="The optimizers on these ops obey each option: maximize, scaled gradients of any dtype, outputs.",
    timeout_s=600, once=True,
)  # fmt: skip
def optimizers_obey_their_options(accelerator: Accelerator) -> None:
    usable = usable_builders(accelerator, _CLASSES, f"it has none of {', '.join(_CLASSES)}")
    # Fused optimizers compute on devices without their builder too, which may have an own kernel for the op.
    anywhere = [name for name in _ON_ANY_DEVICE if name not in accelerator.op_builders]
    for name in (*usable, *anywhere):
        kind = pkgutil.resolve_name(f"acclimate.ops:{_CLASSES[name]}")  # as the builder: when it is used
        _, rule, on_device, has_modes = _OPTIMIZERS[name]
        place = accelerator.current_device_name() if on_device else "cpu"
        for options in _OPTIONS:
            if not set(options) & _MODES or has_modes:
                _require_option(kind, rule, place, options)
        if rule is _adagrad_rule:
            _require_option(kind, rule, place, {"lr_decay": 0.5})
            _require_option(kind, rule, place, {"initial_accumulator_value": 0.75})


_CLASSES = {
    "CPUAdamBuilder": "CPUAdam",
    "FusedAdamBuilder": "FusedAdam",
    "CPULionBuilder": "CPULion",
    "FusedLionBuilder": "FusedLion",
    "CPUAdagradBuilder": "CPUAdagrad",
}
"""By builder: the optimizer of ``acclimate.ops`` on it."""
_ON_ANY_DEVICE = ("FusedAdamBuilder", "FusedLionBuilder")
_MODES = {"bias_correction", "adamw"}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"maximize": True},
    {"grad_scale": 0.25},
    {"gradients": torch.bfloat16},
    {"gradients": torch.bfloat16, "grad_scale": 0.25},
    {"gradients": torch.float16, "grad_scale": 2.0, "maximize": True},
    {"bias_correction": False},
    {"adamw": False},
    {"adamw": False, "maximize": True, "grad_scale": 0.5},
    {"outputs": torch.bfloat16},
)


def _require_option(kind: Any, rule: _Rule, place: str, options: dict[str, Any]) -> None:
    """Compares steps with some options with the rule in float64."""
    s = _Settings(bias_correction=options.get("bias_correction", True), decoupled=options.get("adamw", True))
    given: dict[str, Any] = {"lr": s.lr, "weight_decay": s.decay, "maximize": options.get("maximize", False)}
    given |= {"eps": s.eps} if rule is not _lion_rule else {}
    given |= {"betas": (s.beta1, s.beta2)} if rule is not _adagrad_rule else {}
    if rule is _adam_rule:
        mode = "adam_w_mode" if kind.__name__ == "FusedAdam" else "adamw_mode"
        given |= {"bias_correction": s.bias_correction, mode: s.decoupled}
    first = options.get("initial_accumulator_value", 0.0)
    decay = options.get("lr_decay", 0.0)
    given |= {"lr_decay": decay, "initial_accumulator_value": first} if rule is _adagrad_rule else {}
    generator = torch.Generator().manual_seed(11)
    start = [torch.randn(length, generator=generator) for length in _LENGTHS[:3]]
    parameters = [torch.nn.Parameter(p.clone().to(place)) for p in start]
    outputs = (
        [torch.zeros_like(p, dtype=options["outputs"]) for p in parameters] if "outputs" in options else None
    )
    optimizer = kind(parameters, **given)
    wanted = [p.double() for p in start]
    moments = [[torch.full_like(p, first) for p in wanted] for _ in range(2)]
    scale = options.get("grad_scale", 1.0)
    for step in range(1, _STEPS + 1):
        dtype = options.get("gradients", torch.float32)
        gradients = [torch.randn(len(p), generator=generator).to(dtype) for p in start]
        if options:
            optimizer.step(grads=[g.to(place) for g in gradients], outputs=outputs, grad_scale=scale)
        else:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(place)
            optimizer.step()
        settings = replace(s, lr=s.lr / (1 + (step - 1) * decay))
        for index, gradient in enumerate(gradients):
            g = gradient.double() * scale * (-1 if given["maximize"] else 1)
            rule(step, settings, g, wanted[index], moments[0][index], moments[1][index])
    told = ", ".join(f"{key}={value}" for key, value in options.items()) or "no option"
    what = f"after {_STEPS} steps of {kind.__name__} with {told}"
    for index, parameter in enumerate(parameters):
        states = [optimizer.state[parameter][name] for name in kind.state_names]
        pairs = [(parameter, wanted[index]), *zip(states, (m[index] for m in moments), strict=False)]
        for name, (actual, expected) in zip(("parameter", *kind.state_names), pairs, strict=True):
            apart = distance(actual, expected)
            require(apart <= _ROUNDING, f"{name} {index + 1} is off by {apart:.1e} {what}")
        if outputs is not None:
            same = equal(outputs[index], parameter.detach().to(outputs[index].dtype))
            require(same, f"output {index + 1} is not the parameter in {outputs[index].dtype} {what}")
