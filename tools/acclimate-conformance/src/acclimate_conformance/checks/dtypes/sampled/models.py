"""The modules and optimizers of torch, as torch's own tests make them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import short
from acclimate_conformance.checks.dtypes.sampled.comparing import (
    Findings,
    Run,
    difference,
    difference_of_values,
)
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in
from acclimate_conformance.checks.dtypes.sampled.samples import reset, spread

_INPUTS = 10
_STEPS = 4


def modules_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    from torch.testing._internal.common_modules import module_db

    dtypes = [d for d in (torch.float32, torch.bfloat16) if d in accelerator.supported_dtypes()]
    _compare_transformers(found)
    for info in module_db:
        if info.is_lazy:
            continue
        for dtype in dtypes:
            for training in (True, False) if dtype is torch.float32 else (True,):
                for number, (made, given) in enumerate(_inputs(info, dtype, training)):
                    name = f"torch.nn.{info.module_cls.__name__}"
                    told = ", ".join([*map(repr, made.args), *(f"{k}={v!r}" for k, v in made.kwargs.items())])
                    mode = "in training" if training else "in evaluation"
                    what = f"{name}({told[:120]}), input {number + 1}, {mode}, in {short(dtype)}"
                    run = _module(info.module_cls, made, given, training, dtype)
                    found.compare(name, what, run(training))
                    if not training and not _leaves_out_padding(given):
                        # torch has kernels of whole layers of transformers, for models that are not trained.
                        found.compare(
                            f"{name} without gradients", f"{what}, without gradients", _untrained(run(False))
                        )
                    if not training:  # cuDNN has no gradients of recurrent layers in evaluation
                        found.compare(
                            f"gradients of {name} in evaluation", f"{what}: its gradients", run(True)
                        )
        if found.enough:
            return


def _inputs(info: Any, dtype: torch.dtype, training: bool) -> list[tuple[Any, Any]]:
    if dtype not in info.dtypes:
        return []
    reset()
    with suppress(Exception):  # torch's own lists fail for some dtypes
        found = info.module_inputs_func(
            info, device=HOST, dtype=dtype, requires_grad=dtype is torch.float32, training=training
        )
        usable = [(i.constructor_input, i.forward_input) for i in found if i.forward_input is not None]
        return list(spread(usable, _INPUTS if dtype is torch.float32 else 2))
    return []


def _leaves_out_padding(given: Any) -> bool:
    """Whether results at some places depend on the kernels: on some devices torch computes no padding."""
    masks = (value for name, value in given.kwargs.items() if name.endswith("key_padding_mask"))
    return any(mask is not None for mask in masks)


def _compare_transformers(found: Findings) -> None:
    """Compares layers of transformers that are not trained, for which torch has kernels of their own."""
    mask = torch.ones(5, 5).tril().bool().logical_not()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for norm_first, activation, masked, padded in itertools.product(
        (False, True), ("relu", "gelu"), (False, True), (False, True)
    ):

        def encoded(
            place: Place, options: Any = (norm_first, activation), masks: Any = (masked, padded)
        ) -> Any:
            reset()
            layer = torch.nn.TransformerEncoderLayer(
                8, 2, 12, 0.0, options[1], batch_first=True, norm_first=options[0]
            )
            _ = [torch.nn.init.normal_(p, std=0.4) for p in layer.parameters()]
            given = place.put(torch.randn(2, 5, 8))
            layer = layer.to(place.device, given.dtype).eval()
            attention = layer.self_attn
            kinds = {
                "src_mask": mask if masks[0] else None,
                "src_key_padding_mask": padding if masks[1] else None,
            }
            found = layer(given, **place.put(kinds))
            seen, weights = attention(
                given, given, given, attn_mask=place.put(kinds["src_mask"]),
                key_padding_mask=place.put(kinds["src_key_padding_mask"]), average_attn_weights=False,
            )  # fmt: skip
            alone, _ = attention(
                given, given, given, need_weights=False, attn_mask=place.put(kinds["src_mask"])
            )
            return [found, seen, weights, alone]

        what = (
            f"torch.nn.TransformerEncoderLayer(8, 2, 12, activation={activation!r}, norm_first={norm_first}) "
            f"with {'a' if masked else 'no'} mask and {'' if padded else 'no '}padding, not trained"
        )
        found.compare("torch.nn.TransformerEncoderLayer not trained", what, _untrained(encoded))


def _untrained(run: Run) -> Run:
    def called(place: Place) -> Any:
        with torch.no_grad():
            return run(place)

    return called


def _module(
    kind: type[torch.nn.Module], made: Any, given: Any, training: bool, dtype: torch.dtype
) -> Callable[[bool], Run]:
    """A call of a module, with its gradients or without."""

    def called(place: Place, differentiates: bool) -> Any:
        reset()
        module = kind(*made.args, **made.kwargs).to(place.device, place.dtype(dtype)).train(training)
        args, kwargs = place.put((given.args, given.kwargs))
        result = module(*args, **kwargs)
        leaves = [t for t in tensors_in((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves += list(module.parameters())
        outputs = [t for t in tensors_in(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        gradients: Any = []
        if differentiates and outputs and leaves:
            weights = [torch.full_like(t, 0.5) for t in outputs]
            for number in range(
                len(outputs) if len(outputs) > 1 else 0
            ):  # of one result alone, as a loss has
                gradients += torch.autograd.grad(
                    outputs[number], leaves, weights[number], retain_graph=True, allow_unused=True
                )
            gradients += torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
        return [result, gradients, dict(module.state_dict())]

    return lambda differentiates: lambda place: called(place, differentiates)


# -- optimizers ----------------------------------------------------------------------------------

_SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (33, 3), (1, 129), (17, 1))
_LONG = (1, 70_001)
"""More elements than a kernel for several tensors may take at once."""


def optimizers_as_on_the_host(accelerator: Accelerator, found: Findings) -> None:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        if info.only_supports_sparse_grads:
            continue
        name = f"torch.optim.{_class_of(info).__name__}"
        for number, kwargs in enumerate(_options(info)):
            for how in _ways(info, found.device):
                if how is not None and (how in kwargs or (how == "foreach" and _is_tensor(kwargs, "lr"))):
                    continue
                if how == "capturable" and (number > 3 or {"foreach", "fused"} & set(kwargs)):
                    continue
                told = ", ".join(f"{k}={v!r}" for k, v in kwargs.items())
                of = f"{name} {how}" if how else name
                what = f"{name}({told}){f' with {how}=True' if how else ''}: parameters after {_STEPS} steps"
                # Muon takes matrices only.
                shapes = _SHAPES if name.endswith("Muon") else (*_SHAPES, ())
                shapes = (*shapes, _LONG) if number == 0 else shapes
                run = _optimized(_class_of(info), kwargs, how, found.device, shapes)
                # Muon multiplies its matrices in bfloat16.
                near = difference if name.endswith("Muon") else _nearly_the_same
                found.compare(of, what, run, near=near)
        if found.enough:
            return


def _ways(info: Any, device: str) -> tuple[str | None, ...]:
    """None, and the names of what an optimizer has for this device, such as steps counted there."""
    from torch.optim.optimizer import _get_capturable_supported_devices

    offered = [name for name in ("foreach", "fused") if name in info.supported_impls]
    has_capturable = "capturable" in inspect.signature(_class_of(info)).parameters
    if has_capturable and torch.device(device).type in _get_capturable_supported_devices():
        offered.append("capturable")
    return (None, *offered)


def _is_tensor(kwargs: dict[str, Any], name: str) -> bool:
    return isinstance(kwargs.get(name), torch.Tensor)


def _class_of(info: Any) -> type[torch.optim.Optimizer]:
    return cast("type[torch.optim.Optimizer]", info.optim_cls)


def _options(info: Any) -> Iterator[dict[str, Any]]:
    reset()
    for given in info.optim_inputs_func(device=HOST):
        if not {"capturable", "differentiable"} & set(given.kwargs):
            yield given.kwargs
    if "fused" in info.supported_impls:
        yield {"lr": torch.tensor(0.01)}
        yield {"lr": torch.tensor(0.01), "weight_decay": 0.1, "maximize": True}


def _optimized(
    kind: Any, kwargs: dict[str, Any], how: str | None, device: str, shapes: tuple[tuple[int, ...], ...]
) -> Any:
    def run(place: Place) -> Any:
        generator = torch.Generator().manual_seed(29)
        start = [torch.randn(shape, generator=generator) for shape in shapes]
        weights = [torch.nn.Parameter(place.whole(t)) for t in start]
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        alone = {"foreach": False} if how == "capturable" else {}
        options = {**own, **alone, how: True} if how and place.device == device else {"foreach": False, **own}
        try:
            optimizer = kind(weights, **options)
        except TypeError:  # without foreach
            optimizer = kind(weights, **own)
        for step in range(_STEPS):
            for group in optimizer.param_groups if step else ():  # as a schedule does
                group["lr"] = group["lr"].mul_(0.5) if _is_tensor(group, "lr") else group["lr"] * 0.5
            for number, weight in enumerate(weights):
                gradient = place.whole(torch.randn(weight.shape, generator=generator))
                # A gradient need not lie in memory as its parameter does, but for torch's fused kernels.
                lies_otherwise = number == 1 and how != "fused"
                weight.grad = gradient.t().contiguous().t() if lies_otherwise else gradient
                if (step, number) == (1, 3):  # a parameter that a step leaves out
                    weight.grad = None
            optimizer.step(lambda: torch.ones(()))
        # The changes: a step of 0.001 must not disappear beside the parameters.
        changes = [weight.detach().cpu() - first for weight, first in zip(weights, start, strict=True)]
        states = [optimizer.state[weight] for weight in weights]
        return [changes, [[s[name] for name in sorted(s)] for s in states if isinstance(s, dict)]]

    return run


def _nearly_the_same(found: Any, wanted: Any) -> str:
    """As of other results, but with the precision of float32 by element."""
    reason = difference(found, wanted)
    if reason:
        return reason
    for actual, expected in zip(tensors_in(found), tensors_in(wanted), strict=True):
        if isinstance(expected, torch.Tensor) and expected.is_floating_point() and expected.numel():
            ours, theirs = actual.detach().cpu().double(), expected.detach().double()
            if float((ours - theirs).abs().max()) > 3e-4 * float(theirs.abs().max()) + 1e-7:
                return difference_of_values(ours, theirs) or "it is off by more than the precision of float32"
    return ""


def gradients_are_clipped(accelerator: Accelerator, found: Findings) -> None:
    dtypes = dict.fromkeys((torch.float32, *accelerator.supported_dtypes()))
    # torch clips the gradients of each dtype together.
    kinds = [[torch.float32], *([dtype] for dtype in dtypes if dtype is not torch.float32), list(dtypes)]
    for given in kinds:
        of = "" if given == [torch.float32] else f" of {' and '.join(map(short, given))}"
        near = _nearly_the_same if given == [torch.float32] else difference
        for norm in (2.0, 1.0, float("inf"), 3.0) if len(given) == 1 else (2.0,):
            for most in (0.5, 1e6):
                for foreach in (None, True, False):

                    def run(
                        place: Place, norm: float = norm, most: float = most,
                        foreach: bool | None = foreach, given: list[torch.dtype] = given,
                    ) -> Any:  # fmt: skip
                        weights = _with_gradients(place, given)
                        total = torch.nn.utils.clip_grad_norm_(weights, most, norm, foreach=foreach)
                        return [total, [weight.grad for weight in weights]]

                    name = "torch.nn.utils.clip_grad_norm_"
                    what = f"{name}({most}, {norm}, foreach={foreach}){of}"
                    found.compare(name, what, run, near=near)

        def by_value(place: Place, given: list[torch.dtype] = given) -> Any:
            weights = _with_gradients(place, given)
            torch.nn.utils.clip_grad_value_(weights, 0.25)
            return [weight.grad for weight in weights]

        name = "torch.nn.utils.clip_grad_value_"
        found.compare(name, f"{name}(0.25){of}", by_value)


def _with_gradients(place: Place, dtypes: list[torch.dtype]) -> list[torch.nn.Parameter]:
    """Parameters with gradients of several shapes, which have each of the dtypes in turn."""
    generator = torch.Generator().manual_seed(31)
    weights = []
    for number, shape in enumerate((*_SHAPES, (), (1003,), _LONG)):
        dtype = dtypes[number % len(dtypes)]
        weight = torch.nn.Parameter(place.whole(torch.zeros(shape, dtype=dtype)))
        weight.grad = place.whole(torch.randn(shape, generator=generator).to(dtype))
        if shape == _SHAPES[0]:  # a gradient need not lie in memory as its parameter does
            weight.grad = weight.grad.t().contiguous().t()
        if shape == _LONG:  # and its largest number may be the last
            weight.grad *= 1e-3
            weight.grad[0, -1] = 5.0
        weights.append(weight)
    return weights
