"""Calls that a program makes to find out whether there is CUDA: it catches the error."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.first_use import LEAVE_CUDA_UNUSED
from acclimate_port.conditions.statements import refuses
from acclimate_port.source.tree import dotted
from acclimate_port.source_file import SourceFile, cuda_name

CAUGHT = "the program catches the error of a machine without CUDA, and other machines raise none"
_BROAD = {"Exception", "BaseException", "RuntimeError", "AssertionError"}
"""Exceptions that torch raises without CUDA, and their bases."""
_NEVER_RAISE = LEAVE_CUDA_UNUSED | {
    *("is_available", "device_count", "is_bf16_supported", "get_rng_state_all", "set_rng_state_all"),
    *("current_stream", "default_stream", "device", "stream", "Event", "Stream", "OutOfMemoryError"),
}
"""Names of torch.cuda whose calls raise nothing without CUDA."""
_SHORT = 3
"""The most statements of a ``try`` that is there to find out something, and does no other work."""


def is_probe(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a use of a device raises without CUDA and its function catches that."""
    name = cuda_name(file, node.func if isinstance(node, cst.Call) else node)
    if name in _NEVER_RAISE or (name or "").startswith("amp.") or file.is_guarded(node):
        return False
    below = node
    for around in file.tree.ancestors(node):
        if isinstance(around, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            return False
        if isinstance(around, cst.Try) and below is around.body:
            asks = name or len(around.body.body) <= _SHORT
            if asks and any(map(_goes_on, around.handlers)):
                return True
        below = around
    return False


def _goes_on(handler: cst.ExceptHandler) -> bool:
    """Whether a handler catches what torch raises without CUDA, and the program goes on."""
    kinds = handler.type.elements if isinstance(handler.type, cst.Tuple) else ()
    names = {dotted(kind.value) for kind in kinds} if kinds else {dotted(handler.type)}
    return (handler.type is None or bool(names & _BROAD)) and not refuses(handler.body)
