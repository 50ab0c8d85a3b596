"""The rule ACC202, for `"cuda" if torch.cuda.is_available() else "cpu"`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.map_location import is_map_location
from acclimate_port.dataflow.receivers import foreign_receiver
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, index_of
from acclimate_port.source.tree import string_value
from acclimate_port.source_file import SourceFile


class AvailableChoice(Rule[cst.IfExp]):
    """``"cuda" if torch.cuda.is_available() else "cpu"``."""

    code = "ACC202"
    name = "available-choice"
    summary = '`"cuda" if torch.cuda.is_available() else "cpu"`'
    explanation = """\
The whole expression becomes the accelerator's name, which is `"cpu"` on a CPU-only machine. If the condition tests
something else too, that part stays. `map_location=None if torch.cuda.is_available() else "cpu"` becomes
`None if get_accelerator().device_name() == "cuda" else get_accelerator().device_name()`: a checkpoint of CUDA can go back
only there."""
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

    def check(self, file: SourceFile, node: cst.IfExp) -> Finding | None:
        if isinstance(node, cst.IfExp) and is_map_location(file, node):
            return self._location(file, node)
        if not isinstance(node.test, cst.Call):
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
        claims = (node.body, node.orelse, node.test, node.test.func)
        receiver = foreign_receiver(file, node)
        if receiver is not None and not receiver.may_be_torchs:
            return self.left(file, node, receiver.text, claims, stands_alone=True)
        unsafe = receiver.text if receiver is not None else ""
        return self.becomes(file, node, *parts, unsafe=unsafe, claims=claims)

    def _location(self, file: SourceFile, node: cst.IfExp) -> Finding | None:
        """``None if torch.cuda.is_available() else "cpu"``: ``None`` sends a checkpoint back to CUDA."""
        test, sides = node.test, (node.body, node.orelse)
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            test, sides = test.expression, (node.orelse, node.body)
        if not isinstance(test, cst.Call) or file.tree.qualified(test.func) != "torch.cuda.is_available":
            return None
        saved, host = sides
        is_device = isinstance(host, cst.Call) and file.tree.qualified(host.func) == "torch.device"
        named = host.args[0].value if isinstance(host, cst.Call) and is_device and host.args else host
        if not isinstance(saved, cst.Name) or saved.value != "None" or string_value(named) != "cpu":
            return None
        kind, quote = file.target.device_type, file.quote(named)
        device = f"{file.torch}.device({kind})" if is_device else kind
        text = f"None if {kind} == {quote}cuda{quote} else {device}"
        open_, close = ("(", ")") if node.lpar else ("", "")
        unsafe = ""
        claims = (test, test.func, named)
        return self.becomes(file, node, open_, text, close, unsafe=unsafe, claims=claims)
