"""Lists an accelerator's ops: which are built, which can be built, and why others cannot."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.errors import AcceleratorUnavailableError, AcclimateError, UnknownOpError, excerpt
from acclimate.imports import describe
from acclimate.ops.build import store
from acclimate.ops.build.builder import OpBuilder
from acclimate.selection import find_backends, get_accelerator, load_by_name

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

BUILT = "built"
BUILDABLE = "can be built"
IMPOSSIBLE = "cannot be built"
PURE = "needs no building"


@dataclass(frozen=True)
class OpState:
    """One op of an accelerator."""

    builder_name: str
    """The argument of ``create_op_builder()``."""
    op: str
    """The op's own name; empty if its builder could not be imported."""
    state: str
    """One of :data:`BUILT`, :data:`BUILDABLE`, :data:`IMPOSSIBLE`, :data:`PURE`."""
    reason: str | None = None
    """Why it cannot be built here; it may still have been built elsewhere."""
    library: Path | None = None
    """The library, if it is built."""
    builder: OpBuilder | None = None


def accelerator_to_build_for(name: str | None) -> Accelerator:
    """Returns the named accelerator, whether or not this machine has one; ``None``: this process's.

    Raises:
        UnknownAcceleratorError: no accelerator has that name.
        AcceleratorUnavailableError: its module cannot be imported here.
    """
    if name is None:
        return get_accelerator()
    records, _ = find_backends()
    named = [record for record in records if record.name == name]
    if not named:
        return load_by_name(name, "--accelerator")
    try:
        return named[0].load()  # not probed: a device is not needed
    except Exception as error:
        raise AcceleratorUnavailableError(
            f'--accelerator is "{name}", which cannot be imported here: {describe(error)}'
        ) from error


def survey(accelerator: Accelerator) -> list[OpState]:
    """Returns every op of the accelerator, in alphabetical order."""
    return [_state(accelerator, name) for name in sorted(accelerator.op_builders)]


def select(states: Sequence[OpState], names: Sequence[str], accelerator_name: str) -> list[OpState]:
    """Returns the ops with the given names, ``CPUAdamBuilder`` or ``cpu_adam``, or all if there are no names.

    Raises:
        UnknownOpError: there is no such op.
    """
    if not names:
        return list(states)
    known: dict[str, OpState] = {}
    for state in states:
        known[state.builder_name] = state
        if state.op:
            known.setdefault(state.op, state)  # two builders can share one library
    chosen: dict[str, OpState] = {}
    for name in names:
        if name not in known:
            raise UnknownOpError(_unknown(name, list(known), accelerator_name))
        chosen[known[name].builder_name] = known[name]
    return list(chosen.values())


def _unknown(name: str, known: list[str], accelerator_name: str) -> str:
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    hint = f'; did you mean "{folded[close[0]]}"?' if close else ". `acclimate ops` lists them."
    return f'The {accelerator_name} accelerator has no op "{excerpt(name)}"{hint}'


def _state(accelerator: Accelerator, name: str) -> OpState:
    try:
        builder = accelerator.create_op_builder(name)
    except Exception as error:  # noqa: BLE001 - one broken builder must not hide the others
        return OpState(name, "", IMPOSSIBLE, f"its builder failed: {describe(error)}")
    if not isinstance(builder, OpBuilder):
        return OpState(name, "", IMPOSSIBLE, f"{type(builder).__name__} is not an acclimate OpBuilder")
    if not builder.sources():
        return OpState(name, builder.name, PURE, builder=builder)
    try:
        reason = builder.incompatibility() or store.unloadable_reason()
        library = builder.built_library()
    except AcclimateError as error:
        return OpState(name, builder.name, IMPOSSIBLE, str(error), builder=builder)
    if library is not None:
        return OpState(name, builder.name, BUILT, reason, library, builder)
    state = BUILDABLE if reason is None else IMPOSSIBLE
    return OpState(name, builder.name, state, reason, builder=builder)
