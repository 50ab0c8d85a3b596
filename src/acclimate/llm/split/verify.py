"""Runs a block of each kind in a plan whole and split, on random numbers, and compares the results.

The ranks are threads of this process, so the check needs no other process and no weights. Blocks are also
compared in calls that the model makes while it generates with a cache, which are recorded and repeated. An
argument that is neither a tensor nor a plain value, such as a cache, is copied in its state before the
block's first call. The repeated calls share this copy, which changes from step to step.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.errors import BlockError
from acclimate.llm.quiet import quiet_transformers
from acclimate.llm.split.apply import apply_plan
from acclimate.llm.split.collectives import on_threads
from acclimate.llm.split.plan import Plan
from acclimate.llm.split.tracing.calls import PLAIN, Invocation, copied
from acclimate.llm.split.tracing.trace import Trace

TOLERANCE = 1e-4


def verify_plan(trace: Trace, plan: Plan) -> None:
    """Compares each kind of repeated block of a traced model, whole and split.

    Raises:
        BlockError: a block gives another result when it is split.
    """
    kinds = kinds_of_blocks(trace, plan)
    names = [name for name, _ in kinds]
    calls = {"": {name: first_call(trace, name) for name in names}}
    calls |= calls_of_other_shapes(trace, names)
    calls[" while it generates"] = generation_steps(trace, names)
    for name, inner in kinds:
        block = trace.modules[name]
        whole = _with_random_weights(trace, block)
        for when, steps in ((when, call[name]) for when, call in calls.items() if name in call):
            error = difference(whole, name, inner, steps, when)
            if not error <= TOLERANCE and not _is_same_in_double(whole, name, inner, steps):
                raise BlockError(
                    name,
                    f"{name} ({type(block).__name__}) gives other results on {plan.size} ranks than whole"
                    f"{when}: the largest relative difference is {error:.1e}. {_advice(name)}",
                )


def _is_same_in_double(whole: nn.Module, name: str, plan: Plan, steps: Steps) -> bool:
    """Whether a difference came from rounding, as when a router's choice depends on the last bit.

    Rounding differences disappear in float64; those of a wrong split do not.
    """
    # Some operators do not support float64.
    with contextlib.suppress(Exception):
        return difference(whole, name, plan, steps, dtype=torch.float64) <= TOLERANCE
    return False


def _advice(name: str) -> str:
    return f'Keep it whole with the mapping {{"{name}.*": "replicated"}}, or use one rank.'


def difference(
    whole: nn.Module, name: str, plan: Plan, steps: Steps, when: str = "", dtype: torch.dtype = torch.float32
) -> float:
    """Returns the largest difference of a block's results on the ranks, relative to their largest value."""
    if dtype != torch.float32:
        whole = copy.deepcopy(whole).to(dtype)

    try:
        expected = _results(copy.deepcopy(whole), steps, dtype)
    except Exception as error:
        raise BlockError(
            name,
            f"{name} ({type(whole).__name__}) cannot be compared whole and split{when}, because it does not "
            f"run by itself: {type(error).__name__}: {error}. {_advice(name)}",
        ) from error
    try:
        found = on_threads(
            plan.size,
            lambda ranks: _results(apply_plan(copy.deepcopy(whole), plan, ranks), steps, dtype),
        )
    except Exception as error:
        raise BlockError(
            name,
            f"{name} ({type(whole).__name__}) does not run on {plan.size} ranks{when}: "
            f"{type(error).__name__}: {error}. {_advice(name)}",
        ) from error
    return max(_gap(outputs, expected) for outputs in found)


def _results(block: nn.Module, steps: Steps, dtype: torch.dtype) -> list[Tensor]:
    """Returns what a block computes in a model's calls."""
    found = []
    with torch.no_grad():
        for call in steps.again(dtype):
            given = pytree.tree_leaves((call.args, call.kwargs))
            shape = next(tensor.shape for tensor in given if isinstance(tensor, Tensor))
            leaves = pytree.tree_leaves(block(*call.args, **call.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # Not per-head results such as attention weights, because a rank has only its own heads.
            found += [tensor for tensor in tensors if tensor.shape == shape] or tensors[:1]
    return found


def _gap(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of results, relative to their largest value."""
    if [one.shape for one in outputs] != [one.shape for one in expected]:
        return math.inf
    worst = 0.0
    for one, other in zip(outputs, expected, strict=True):
        # Where the whole block returns NaN, as if a mask leaves nothing to attend to, ranks must too.
        known = ~(one.isnan() & other.isnan())
        if known.any():
            gap = (one - other)[known].abs().max() / other[known].abs().max().clamp(min=1.0)
            worst = max(worst, math.inf if gap.isnan() else float(gap))
    return worst


def _with_random_weights(trace: Trace, block: nn.Module) -> nn.Module:
    """Returns a float32 copy of a block with random weights, without stand-ins."""
    new = {
        id(p): nn.Parameter(torch.randn(p.shape, generator=trace.random).div_(max(1, p.shape[-1]) ** 0.5))
        for p in block.parameters()
        if p.is_meta and p.is_floating_point()
    }
    stand_ins = {id(stand_in) for stand_in in trace.stand_ins.modules}
    hooks = [
        (
            module,
            module._forward_pre_hooks,
            module.__dict__.pop("forward", None) if id(module) in stand_ins else None,
        )
        for module in block.modules()
    ]
    try:
        for module, before, _ in hooks:
            own = ((key, hook) for key, hook in before.items() if key not in trace.stand_ins.hooks)
            module._forward_pre_hooks = type(before)(own)
        return copy.deepcopy(block, dict(new)).float()
    finally:
        for module, before, forward in hooks:
            module._forward_pre_hooks = before
            if forward is not None:
                module.forward = forward


def kinds_of_blocks(trace: Trace, plan: Plan) -> list[tuple[str, Plan]]:
    """Returns one block of each kind with its part of the plan."""
    seen: set[object] = set()
    found = []
    for name in _blocks_of(trace, plan):
        inner = _part_of_plan(plan, name)
        splits = tuple((n, s.shape, s.parts) for n, s in inner.splits.items())
        kind = (type(trace.modules[name]), splits, str(inner.modules))
        if inner.modules and kind not in seen:
            seen.add(kind)
            found.append((name, inner))
    return found


def _blocks_of(trace: Trace, plan: Plan) -> list[str]:
    """Returns the layers (outermost modules in lists), and the other modules that hold changes."""
    found: list[str] = []
    for name, module in trace.modules.items():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            found += [
                f"{name}.{key}" for key, _ in module.named_children() if f"{name}.{key}" in trace.blocks
            ]
    ends = {*trace.vocabulary, trace.head}
    members: dict[str, list[str]] = {}
    for name, change in plan.modules.items():
        members.setdefault(change.region or name, []).append(name)
    for name, change in plan.modules.items():
        if name in ends or any(name.startswith(f"{block}.") for block in found):
            continue
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts))]
        lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        holders = [
            ancestor
            for ancestor in above
            if ancestor in trace.blocks
            and not isinstance(trace.modules[ancestor], lists)
            and all(other.startswith(f"{ancestor}.") for other in members[change.region or name])
        ]
        # Embeddings are not compared: they would need valid tokens as input.
        small = [h for h in holders if not any(str(end).startswith(f"{h}.") for end in ends)]
        found += (small or holders)[:1]
    return found


def _part_of_plan(plan: Plan, block: str) -> Plan:
    """Returns the plan of one block, with names relative to it."""

    def inside(name: str) -> bool:
        return name.startswith(f"{block}.") or name == block

    at = len(block) + 1
    return Plan(
        plan.size,
        {n[at:]: s for n, s in plan.splits.items() if inside(n)},
        {n[at:]: s for n, s in plan.source.items() if inside(n)},
        {n[at:]: replace(c, region=c.region[at:]) for n, c in plan.modules.items() if inside(n)},
        {n[at:]: o[at:] for n, o in plan.shared.items() if inside(n)},
        frozenset(n[at:] for n in plan.partial if inside(n)),
    )


NEW_TOKENS = 3
_OTHER_SHAPES = ((1, 1), (1, 33))

logger = logging.getLogger("acclimate.llm.split")


@dataclass(frozen=True)
class _Kept:
    """A placeholder for an object that changes from call to call."""

    key: int


@dataclass
class Steps:
    """The calls of one block, in their order."""

    calls: list[Invocation] = field(default_factory=list)
    _before: dict[int, Any] = field(default_factory=dict)
    _originals: list[Any] = field(default_factory=list)
    """References that keep ``id`` values from being reused."""

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records a call before it is made."""
        self.calls.append(Invocation(self._kept(args), self._kept(kwargs)))

    def again(self, dtype: torch.dtype = torch.float32) -> Iterator[Invocation]:
        """Yields the recorded calls, to be repeated in order by one block."""
        made: dict[int, Any] = {}
        for call in self.calls:
            yield Invocation(self._given(call.args, made, dtype), self._given(call.kwargs, made, dtype))

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, PLAIN) or callable(value):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._kept(item) for item in value)
        if type(value) is dict:
            return {key: self._kept(item) for key, item in value.items()}
        if id(value) not in self._before:
            self._originals.append(value)
            self._before[id(value)] = copied(value)
        return _Kept(id(value))

    def _given(self, value: Any, made: dict[int, Any], dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            value = value.to(dtype) if value.dtype == torch.float64 else value
            return value.clone()
        if type(value) in (tuple, list):
            return type(value)(self._given(item, made, dtype) for item in value)
        if type(value) is dict:
            return {key: self._given(item, made, dtype) for key, item in value.items()}
        if isinstance(value, _Kept):
            if value.key not in made:
                made[value.key] = copied(self._before[value.key], dtype)
            return made[value.key]
        return value


def first_call(trace: Trace, block: str) -> Steps:
    """Returns the first call of a block in the traced run."""
    steps = Steps()
    steps.add(trace.blocks[block][0].args, trace.blocks[block][0].kwargs)
    return steps


def calls_of_other_shapes(trace: Trace, blocks: Collection[str]) -> dict[str, dict[str, Steps]]:
    """Returns calls of blocks with one and with many tokens, by shape, because code may branch on shapes."""
    found: dict[str, dict[str, Steps]] = {}
    if trace.tokens is None:
        return found
    count = int(trace.tokens.max() + 1)
    for given in filter(None, (trace.inputs, trace.text_inputs)) if trace.inputs else ({},):
        for batch, length in _OTHER_SHAPES:
            tokens = torch.arange(batch * length).view(batch, length) % count
            inputs = {
                name: tokens
                if "input_ids" in name
                else tensor[:batch]
                if isinstance(tensor, Tensor)
                else tensor
                for name, tensor in given.items()
            }
            if given and not any("input_ids" in name for name in inputs):
                continue
            shape = f" for {length} token{'s'[: length != 1]} of {batch} text"
            calls: dict[str, Steps] = {name: Steps() for name in blocks}
            if _recorded(trace, calls, partial(trace.call, inputs, tokens)):
                shape += " only" if given is trace.text_inputs else ""
                found[shape] = {name: call for name, call in calls.items() if call.calls}
    return found


def generation_steps(trace: Trace, blocks: Collection[str]) -> dict[str, Steps]:
    """Returns the calls of blocks while the model generates a few tokens with a cache.

    Empty if the model cannot generate, or cannot generate without its weights.
    """
    model: Any = trace.model
    can_generate: Callable[[], bool] | None = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate() or trace.tokens is None:
        return {}
    for given in filter(None, (trace.inputs, trace.text_inputs)) if trace.inputs else ({},):
        found: dict[str, Steps] = {name: Steps() for name in blocks}
        inputs = {
            name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in given.items()
        }
        inputs |= {"use_cache": True, "do_sample": False, "pad_token_id": 0}
        inputs |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        if _recorded(trace, found, partial(model.generate, **inputs)):
            return {name: recorded for name, recorded in found.items() if len(recorded.calls) > 1}
    return {}


def _recorded(trace: Trace, calls: dict[str, Steps], run: Callable[[], object]) -> bool:
    """Records a run's calls of blocks; returns whether the run succeeded."""

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in calls:
            calls[name].add(args, kwargs)

    # It would speak of settings of a run that the user did not start.
    silent = quiet_transformers() if "transformers" in sys.modules else contextlib.nullcontext()
    with trace.recording(record), silent:
        try:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                run()
        except Exception as error:  # noqa: BLE001 - any code may stand in a model
            logger.debug("%s was not called again: %s", type(trace.model).__name__, error)
            for call in calls.values():
                call.calls.clear()
            return False
    return True
