"""The rule ACC202, for `"cuda" if torch.cuda.is_available() else "cpu"`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, index_of, unsafe_at_import
from acclimate_port.source.tree import string_value
from acclimate_port.source_file import SourceFile


class AvailableChoice(Rule):
    """``"cuda" if torch.cuda.is_available() else "cpu"``."""

    code = "ACC202"
    name = "available-choice"
    summary = '`"cuda" if torch.cuda.is_available() else "cpu"`'
    explanation = """\
The whole expression becomes the accelerator's name, which is `"cpu"` on a CPU-only machine. If the condition tests
something else too, that part stays."""
    examples = (
        Example(
            'import torch\n\n\ndef f():\n    return torch.device("cuda" if torch.cuda.is_available() else "cpu")\n',
            f"{IMPORTS}\ndef f():\n    return torch.device(get_accelerator().device_name())\n",
            f"{WITH_HELPER}def f():\n    return torch.device(accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(no_cuda):\n"
            '    return "cuda:0" if torch.cuda.is_available() and not no_cuda else "cpu"\n',
            f"{IMPORTS}\ndef f(no_cuda):\n"
            '    return get_accelerator().device_name(0) if get_accelerator().device_name() != "cpu" and not no_cuda else "cpu"\n',
            f"{WITH_HELPER}def f(no_cuda):\n"
            '    return f"{accelerator_type()}:0" if torch.accelerator.is_available() and not no_cuda else "cpu"\n',
        ),
    )
    nodes = (cst.IfExp,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.IfExp) or not isinstance(node.test, cst.Call):
            return None
        if (
            file.tree.qualified(node.test.func) != "torch.cuda.is_available"
            or string_value(node.orelse) != "cpu"
        ):
            return None
        if string_value(node.body) not in ("cuda", "cuda:0"):
            return None
        index = index_of(string_value(node.body) or "")
        if index is not None and (file.target.name == "torch"):
            return None
        parts = (file.target.device_type,) if index is None else file.device_at(index)
        unsafe = unsafe_at_import(file, node)
        open_, close = ("(", ")") if node.lpar else ("", "")
        claims = (node.body, node.orelse, node.test, node.test.func)
        return self.becomes(file, node, open_, *parts, close, unsafe=unsafe, claims=claims)
