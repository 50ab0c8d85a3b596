"""Devices with an index, for ``--to torch``: ``torch.load`` and safetensors refuse ``"cpu:0"``."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.sinks import DEVICE_METHODS
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.source_file import SourceFile

_TAKE_ANY_EXPRESSION = (cst.Arg, cst.Assign, cst.AnnAssign, cst.Return, cst.Element, cst.DictElement)


def loadable(
    file: SourceFile, node: cst.CSTNode, *parts: Part, host: str = "{quote}cpu{quote}"
) -> tuple[Part, ...]:
    """The expression for a device with an index; ``"cpu"`` on a CPU-only machine.

    Nearly all of torch accepts ``"cpu:0"``, so an argument that torch uses at once keeps the index there.
    acclimate's name for the CPU has no index, so only ``--to torch`` needs this.
    """
    if isinstance(file.target, AcclimateTarget) or file.is_guarded(node) or is_used_at_once(file, node):
        return parts
    bare = isinstance(file.tree.parent(node), _TAKE_ANY_EXPRESSION)
    open_, close = ("", "") if bare else ("(", ")")
    beside = node if isinstance(node, cst.SimpleString) else file.tree.parent(node) or node
    host = host.replace("{quote}", file.quote(beside))
    return (open_, *parts, f" if {file.target.not_host} else {host}{close}")


def is_used_at_once(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a device is an argument of ``x.to(…)``, or the ``device`` of a function of torch."""
    given = file.tree.given_to(node)
    if given is None:
        return False
    if given.full == "torch.device":
        return is_used_at_once(file, given.call)
    is_method = isinstance(given.call.func, cst.Attribute) and given.name in DEVICE_METHODS
    takes = given.full.startswith("torch.") and given.full not in ("torch.load", "torch.jit.load")
    return given.word in ("", "device", "device_type") and (takes or (not given.full and is_method))


def is_map_location(file: SourceFile, choice: cst.CSTNode) -> bool:
    """Whether a value is a ``map_location``."""
    given = file.tree.given_to(choice)
    if given is None:
        return False
    return given.word == "map_location" or (given.full == "torch.load" and given.index == 1)
