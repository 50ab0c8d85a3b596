"""What torch lacks for Apple's devices, behind a test of the device."""

from __future__ import annotations

import libcst as cst

from acclimate.port.branches import where_true
from acclimate.port.source import SourceFile
from acclimate.port.targets import TorchTarget

_STREAMS = ("Stream", "stream", "set_stream", "current_stream", "default_stream")


def needs_streams(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether streams are made where a test is true, of which torch has none for Apple's devices.

    Only ``--to torch`` needs to know: acclimate has streams for them.
    """
    if not isinstance(file.target, TorchTarget):
        return False
    found = [
        file.span(each) for name in _STREAMS for each in file.attributes.get(name, []) if _is_cuda(file, each)
    ]
    places = where_true(file, test) if found else []
    return any(place.start <= each.start and each.end <= place.end for place in places for each in found)


def _is_cuda(file: SourceFile, node: cst.Attribute) -> bool:
    return (file.tree.qualified(node) or "").startswith("torch.cuda.")
