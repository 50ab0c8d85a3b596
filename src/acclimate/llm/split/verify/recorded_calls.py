"""Records a model's calls of its blocks while it generates with a cache, in order to repeat them.

An argument that is neither a tensor nor a plain value, such as a cache, is copied in its state before the
block's first call. The repeated calls share this copy, which changes from step to step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.split.tracing.calls import PLAIN, Invocation, copied
from acclimate.llm.split.tracing.trace import Trace

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

    with trace.recording(record), _quiet():
        try:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                run()
        except Exception as error:  # noqa: BLE001 - any code may stand in a model
            logger.debug("%s was not called again: %s", type(trace.model).__name__, error)
            for call in calls.values():
                call.calls.clear()
            return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' messages about generation settings, because the user did not start this run."""
    chatty = logging.getLogger("transformers")
    before = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatty.setLevel(before)
