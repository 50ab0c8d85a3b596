"""Pinned memory behind a question for CUDA: before torch's repair a Mac, which pinned nothing, refuses it."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.branches import controlled_quietly, where_true
from acclimate_port.source.tree import called_name, dotted, keyword
from acclimate_port.source_file import SourceFile, kept

_WORD = "pin_memory"
_LOADERS = {"DataLoader", "StatefulDataLoader"}
_STEPS = 3
"""The most calls between a test and what pins."""


def reason_against_pinning(file: SourceFile, test: cst.CSTNode) -> str:
    """Why a test decides about memory that Apple's GPUs refuse to pin; ``""`` if it decides about none."""
    pinning = _pinning(file)
    if not pinning:
        return ""
    for place in [*controlled_quietly(file, test), *where_true(file, test)]:
        for call in file.calls_within(place):
            if id(call) in pinning:
                line = file.tree.line(file.span(call).start)
                return f"line {line} pins memory if it is true, which torch refuses on some Macs"
    return ""


def only_pins(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether all that a test decides about is pinned memory, so that other devices can do without it."""
    places = controlled_quietly(file, test)
    pinning = [file.span(call) for call in _pinning(file).values()]
    starts = [file.span(call).start for place in places for call in file.calls_within(place)]
    return bool(starts) and all(any(one.start <= at < one.end for one in pinning) for at in starts)


@kept
def _pinning(file: SourceFile) -> dict[int, cst.Call]:
    """The calls that pin memory, by their identity, and those of functions of the file that do."""
    if _WORD not in file.names and f"{_WORD}=" not in file.tree.text.replace(" ", ""):
        return {}
    calls = file.tree.of_type(cst.Call)
    found = {id(call): call for call in calls if _pins(file, call)}
    names: set[str] = set()
    for _ in range(_STEPS if found else 0):
        around = (file.tree.function(call) for call in found.values())
        names |= {one.name.value for one in around if isinstance(one, cst.FunctionDef)}
        found |= {id(call): call for call in calls if called_name(call) in names and _is_own(call)}
    return found


def _pins(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call pins memory: ``x.pin_memory()``, ``torch.empty(n, pin_memory=True)``."""
    given = keyword(call, _WORD)
    if given is not None:
        full = file.tree.qualified(call.func) or ""
        is_loader = called_name(call) in _LOADERS
        return full.startswith("torch.") and dotted(given.value) == "True" and not is_loader
    is_method = isinstance(call.func, cst.Attribute) and call.func.attr.value == _WORD
    is_ported = is_method and len(call.args) == 1  # `get_accelerator().pin_memory(x)` gives it to torch
    return is_method and (not call.args or is_ported) and file.tree.qualified(call.func) is None


def _is_own(call: cst.Call) -> bool:
    """Whether a call may be of a function of the file, or of a method of its own object."""
    is_method = isinstance(call.func, cst.Attribute) and dotted(call.func.value) in ("self", "cls")
    return isinstance(call.func, cst.Name) or is_method
