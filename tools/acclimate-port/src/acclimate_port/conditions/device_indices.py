"""An index in a device's name that only CUDA may have: ``f"cuda:{properties.get('gpu_id')}"``."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import called_name, positional, string_value, walk
from acclimate_port.source_file import SourceFile

_OF_GPU = re.compile(r"gpu|cuda", re.IGNORECASE)
_TEXTS = (cst.FormattedString, cst.BinaryOperation)


def index_may_be_none(file: SourceFile, device: cst.CSTNode) -> str:
    """Why the index that follows a device may be ``None`` without CUDA; ``""`` if it may not.

    Args:
        file: the file.
        device: a device, or a device's name with its index.
    """
    for use in uses_of(file, device):
        for part in walk(_text_around(file, use)):
            for value in (part, *(file.bound_values(part) if isinstance(part, cst.Name) else ())):
                if isinstance(value, cst.Call) and (key := _number_of_gpu(value)):
                    return f"`{key}` is CUDA's number of a device, and may be None where there is no CUDA"
    return ""


def _text_around(file: SourceFile, use: cst.CSTNode) -> cst.CSTNode:
    """The whole text that a device is a part of: ``device + ":" + str(i)``; else the device itself."""
    whole = use
    for around in file.tree.ancestors(use):
        if isinstance(around, _TEXTS):
            whole = around
        elif not isinstance(around, cst.FormattedStringExpression):
            return whole
    return whole


def _number_of_gpu(call: cst.Call) -> str:
    """The key by which a call looks up the number of a GPU, without a default; ``""`` if it does not."""
    given = positional(call)
    if called_name(call) != "get" or len(call.args) != 1 or not given:
        return ""
    key = string_value(given[0].value) or ""
    return key if _OF_GPU.search(key) else ""
