"""Streams in a branch that a ported test would also take on MPS, where torch has none."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.new_code.targets import TorchTarget
from acclimate_port.source_file import SourceFile

_STREAMS = ("Stream", "stream", "set_stream", "current_stream", "default_stream")


def needs_streams(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether code that runs where a test is true makes streams, which torch lacks on MPS.

    This matters for ``--to torch`` only: acclimate has streams for MPS.
    """
    if not isinstance(file.target, TorchTarget):
        return False
    found = [
        file.span(attribute)
        for name in _STREAMS
        for attribute in file.attributes.get(name, [])
        if _is_cuda(file, attribute)
    ]
    places = where_true(file, test) if found else []
    return any(place.start <= span.start and span.end <= place.end for place in places for span in found)


def _is_cuda(file: SourceFile, node: cst.Attribute) -> bool:
    return (file.tree.qualified(node) or "").startswith("torch.cuda.")
