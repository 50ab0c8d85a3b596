"""Captures a decoder's program: the operators that transformers' ``generate`` runs, without weights.

A shadow of the model (the same modules, with fake tensors) is called as ``generate`` calls the model, once
for a prompt and once for a step, with symbolic numbers of sequences, tokens and earlier tokens. A dispatch
mode of this thread notes each operator. Nothing in the model is called or changed, and no other thread
notices.

Three things of the shadow stand for what the native step has of its own: attention is one operator
(transformers' attention registry), the cache's keys and values are one each (a cache of our own class), as
are the inputs of convolutions and recurrent states, and so is each linear module, whatever form its weight
has.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.fake_calls import BATCH, LENGTH, FakeTensors, expression, fake_tensors
from acclimate.llm.decode.program import Program, Role
from acclimate.llm.decode.recorder import Recorder, input_value
from acclimate.llm.decode.shadow import Shadow
from acclimate.llm.decode.shadow_operators import (
    KeptStates,
    RecurrentStateError,
    check_functions,
    define_operators,
    shadow_cache,
)
from acclimate.llm.decode.staleness import Snapshot


def capture(model: Any, widths: dict[nn.Module, int], layers: int) -> list[Program]:
    """Returns the programs of a prompt without earlier tokens, and of one token after some.

    A model whose first call adds attributes, which later calls find, has two programs of a prompt. One with a
    recurrent state has none: it reads a prompt in chunks, so its operators depend on the prompt's length.

    Args:
        model: a transformers model, on the CPU or another device.
        widths: the number of columns of linear modules where it is not that of their weight.
        layers: the number of layers of the cache.

    Raises:
        NotRepresentedError: the program depends on the values of its inputs or on their sizes, or changes
            tensors in place.
    """
    before = Snapshot(model, ())
    if before.refusal:
        raise NotRepresentedError(before.refusal)
    define_operators()
    check_functions(model)
    kept = KeptStates()
    try:
        programs = _programs(model, widths, layers, kept, True)
    except RecurrentStateError:
        _note_states(model, widths, layers, kept)
        programs = _programs(model, widths, layers, kept, False)
    if not before.is_current(model):
        raise NotRepresentedError("its code changes variables, classes or attributes")
    if any(program.replaced != programs[0].replaced for program in programs):
        raise NotRepresentedError("a step reads a tensor that a prompt has changed in place")
    return programs


def _programs(
    model: Any, widths: dict[nn.Module, int], layers: int, kept: KeptStates, has_prompt: bool
) -> list[Program]:
    """Returns the programs of a prompt, if it has any, and of a step."""
    with fake_tensors() as fakes:
        shadow = Shadow(fakes, widths)
        programs: list[Program] = []
        calls: tuple[bool, ...] = (True,)
        if has_prompt:
            programs.append(_captured(model, shadow, fakes.sizes, layers, kept, False))
            calls = (False, True) if shadow.keep_new_attributes() else (True,)
            shadow.check_unchanged()
        for is_step in calls:
            programs.append(_captured(model, shadow, fakes.sizes, layers, kept, is_step))
            shadow.check_unchanged()
        limits = [_limit(fakes), *(program.limit for program in programs)]
    limit = min((limit for limit in limits if limit is not None), default=None)
    return [replace(program, limit=limit) for program in programs]


def _note_states(model: Any, widths: dict[nn.Module, int], layers: int, kept: KeptStates) -> None:
    """Notes what layers keep, in a call for a prompt of one size, whose program says nothing of others."""
    with fake_tensors() as fakes:
        shadow = Shadow(fakes, widths)
        program = _captured(model, shadow, (BATCH, LENGTH), layers, kept, False)
    if shadow.keep_new_attributes() or program.replaced:
        raise NotRepresentedError("a step uses what a prompt has left in the model, beside a recurrent state")
    shadow.check_unchanged()


def _captured(
    model: Any,
    shadow: Shadow,
    sizes: Any,
    layers: int,
    kept: KeptStates,
    is_step: bool,
) -> Program:
    """Returns a program, for which not all limits are known."""
    batch, length = sizes
    made: Any = shadow.module(model)
    device = model.get_input_embeddings().weight.device
    recorder = Recorder(shadow.fakes, shadow.origins)
    drawn = random.getstate()
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _unlogged(),
        shadow.fakes.mode,
    ):
        count = 1 if is_step else length
        tokens = torch.zeros((batch, count), dtype=torch.long, device=device)
        positions, mask = (
            torch.zeros_like(tokens),
            torch.ones((batch, length), dtype=torch.long, device=device),
        )
        for tensor, role in ((tokens, Role.TOKENS), (positions, Role.POSITIONS), (mask, Role.MASK)):
            recorder.name(tensor, input_value(tensor, role))
        earlier = length - 1 if is_step else 0
        cache = shadow_cache(layers, earlier, batch, kept)
        with recorder:
            try:
                inputs = made.prepare_inputs_for_generation(
                    tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    is_first_iteration=not is_step,
                )
                found = made(**inputs, return_dict=True).logits
                if recorder.failure is not None:
                    raise recorder.failure
            except NotRepresentedError:
                raise
            except Exception as error:
                raise NotRepresentedError(
                    f"its program cannot be captured: {_first_line(error)}{_place(error)}"
                ) from error
            logits = recorder.value(found)
            states, recurrent = (
                {layer: recorder.value(state) for layer, state in found.items()}
                for found in (cache.states, cache.recurrent)
            )
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise NotRepresentedError("its code draws random numbers")
    symbols = expression(batch), expression(length)
    past = symbols[1] - 1 if is_step else 0
    count = 1 if is_step else symbols[1]
    return Program(
        logits, symbols[0], count, past, shadow.modules, recorder.limit, recorder.constants,
        frozenset(map(id, recorder.replaced)), states, recurrent,
    )  # fmt: skip


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Drops torch's logs of this thread about operators that fake tensors cannot have: the error says it."""
    own = threading.get_ident()
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_anothers)
    try:
        yield
    finally:
        logger.removeFilter(is_anothers)


def _place(error: Exception) -> str:
    """Returns where the model's own code was when an error was raised; empty: nowhere."""
    own = Path(torch.__file__).parent, Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(folder) for folder in own):
            return f" ({path.name}, line {frame.lineno}, in {frame.name})"
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _limit(fakes: FakeTensors) -> int | None:
    """Returns the largest number of tokens for which all guards hold that the capture left.

    Raises:
        NotRepresentedError: the program holds for some numbers of sequences or tokens only, and these are not
            all up to a limit.
    """
    limit: int | None = None
    environment = fakes.environment
    batch, length = map(expression, fakes.sizes)
    for symbol in (batch, length):
        if symbol in environment.replacements or not symbol.is_Symbol:
            raise NotRepresentedError("its program holds for one size only")
    for guard in environment.guards:
        most = _most(guard.expr, length)
        if most is not None:
            limit = most if limit is None else min(limit, most)
    return limit


def _most(relation: Any, length: Any) -> int | None:
    """Returns the largest length for which a guard holds; ``None``: it holds for all lengths.

    Raises:
        NotRepresentedError: it is no upper limit of the length.
    """
    import sympy

    if isinstance(relation, sympy.Ne) and relation.lhs == length and relation.rhs.is_Integer:
        return int(relation.rhs) - 1
    if isinstance(relation, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)):
        is_greater = isinstance(relation, (sympy.Gt, sympy.Ge))
        is_strict = isinstance(relation, (sympy.Gt, sympy.Lt))
        gap = (relation.lhs - relation.rhs) * (-1 if is_greater else 1)
        slope = gap.diff(length)
        if gap.free_symbols == {length} and slope.is_Integer and slope != 0:
            # slope * length + rest <= 0
            rest = gap.subs(length, 0) + (1 if is_strict else 0)
            if slope > 0:
                return int(-rest // slope)  # not a number of sympy, which saved.py would take for a size
            if math.ceil(rest / -slope) <= 1:
                return None
    raise NotRepresentedError(f"its program depends on sizes: {relation}")
