"""Whether a device index may be ``None``, which torch.cuda takes as the current device."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.source.tree import dotted, keyword
from acclimate_port.source_file import SourceFile


def may_be_none(file: SourceFile, value: cst.CSTNode) -> bool:
    """Whether the file shows that a name or an attribute may be ``None`` where it is used.

    The file compares the name with ``None``, or ``None`` is the default of the parameter or option. A test
    around the use may rule ``None`` out.
    """
    text = dotted(value)
    if not text or text.startswith(".") or _is_ruled_out(file, value, text):
        return False
    last = text.rpartition(".")[2]
    if re.search(rf"\b{re.escape(text)}\s+is\s+(not\s+)?None\b", file.tree.text):
        return True
    if isinstance(value, cst.Name):
        given = [assignment.node for assignment in file.tree.assignments(value)]
        return any(isinstance(origin, cst.Param) and dotted(origin.default) == "None" for origin in given)
    return any(map(_is_without_default, file.options.get(last, [])))


def _is_ruled_out(file: SourceFile, value: cst.CSTNode, text: str) -> bool:
    below = value
    for around in file.tree.ancestors(value):
        if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test:
            test = file.tree.source(around.test)
            is_body = below is around.body
            comparison, weakens = (r"is\s+not", " or ") if is_body else ("is", " and ")
            if weakens not in test and re.search(rf"\b{re.escape(text)}\s+{comparison}\s+None\b", test):
                return True
        if isinstance(around, cst.FunctionDef):
            return False
        below = around
    return False


def _is_without_default(option: cst.Call) -> bool:
    """Whether an option is ``add_argument("--gpu", type=int)``, or has the default ``None``."""
    if keyword(option, "action") is not None or keyword(option, "required") is not None:
        return False
    default = keyword(option, "default")
    return default is None or dotted(default.value) == "None"
