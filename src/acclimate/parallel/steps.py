"""Records how a model calls its blocks while it generates with a cache, so that they can be called so again.

A cache, or whatever else a block gets that is neither a tensor nor a plain value, is copied as it was before
the block's first call. Calls that are made again share such a copy, which then changes from step to step.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.parallel.trace import Invocation, Trace

NEW_TOKENS = 3
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)

logger = logging.getLogger("acclimate.parallel")


@dataclass(frozen=True)
class _Kept:
    """Stands for an object that changes from call to call."""

    key: int


@dataclass
class Steps:
    """The calls of one block, in their order."""

    calls: list[Invocation] = field(default_factory=list)
    _before: dict[int, Any] = field(default_factory=dict)
    _originals: list[Any] = field(default_factory=list)
    """So that no other object gets the same number."""

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records a call that is about to be made."""
        self.calls.append(Invocation(self._kept(args), self._kept(kwargs)))

    def again(self) -> Iterator[Invocation]:
        """Yields calls to be made one after the other, by the same block; in 32 bits."""
        made: dict[int, Any] = {}
        for call in self.calls:
            yield Invocation(self._given(call.args, made), self._given(call.kwargs, made))

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, _PLAIN) or callable(value):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._kept(each) for each in value)
        if type(value) is dict:
            return {key: self._kept(each) for key, each in value.items()}
        if id(value) not in self._before:
            self._originals.append(value)
            self._before[id(value)] = copy.deepcopy(value)
        return _Kept(id(value))

    def _given(self, value: Any, made: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            value = value.float() if value.dtype == torch.float64 else value
            return value.clone()
        if type(value) in (tuple, list):
            return type(value)(self._given(each, made) for each in value)
        if type(value) is dict:
            return {key: self._given(each, made) for key, each in value.items()}
        if isinstance(value, _Kept):
            if value.key not in made:
                made[value.key] = copy.deepcopy(self._before[value.key])
            return made[value.key]
        return value


def first_call(trace: Trace, block: str) -> Steps:
    """Returns the first call of a block in the traced run."""
    steps = Steps()
    steps.add(trace.blocks[block][0].args, trace.blocks[block][0].kwargs)
    return steps


def generation_steps(trace: Trace, blocks: Collection[str]) -> dict[str, Steps]:
    """Returns the calls of some blocks while the model generates a few tokens with a cache.

    Empty for a model that does not generate, or not without its weights.
    """
    model: Any = trace.model
    can_generate: Callable[[], bool] | None = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate() or not trace.inputs:
        return {}
    found: dict[str, Steps] = {name: Steps() for name in blocks}

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in found:
            found[name].add(args, kwargs)

    inputs = {
        name: each.detach() if isinstance(each, Tensor) else each for name, each in trace.inputs.items()
    }
    inputs |= {"use_cache": True, "do_sample": False, "pad_token_id": 0}
    inputs |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    with trace.recording(record), _quiet():
        try:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                model.generate(**inputs)
        except Exception as error:  # noqa: BLE001 - any code may stand in a model
            logger.debug("%s does not generate without its weights: %s", type(model).__name__, error)
            return {}
    return {name: each for name, each in found.items() if len(each.calls) > 1}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from telling the user about settings of a generation that is none of theirs."""
    chatty = logging.getLogger("transformers")
    before = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatty.setLevel(before)
