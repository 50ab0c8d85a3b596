"""The rule ACC205, for `torch.device("cuda", i)`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.map_location import loadable
from acclimate_port.new_code.edits import replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule
from acclimate_port.rules.comparison_edits import adapt_to_comparison
from acclimate_port.source.tree import Span, keyword, positional, string_value
from acclimate_port.source_file import SourceFile


class DeviceObject(Rule[cst.Call]):
    """``torch.device("cuda", i)``."""

    code = "ACC205"
    name = "device-object"
    summary = '`torch.device("cuda", i)`'
    explanation = "The index stays a number: `torch.device(get_accelerator().device_name(i))`."
    examples = (
        Example(
            'import torch\n\n\ndef f(rank):\n    return torch.device("cuda", rank)\n',
            f"{IMPORTS}\ndef f(rank):\n    return torch.device(get_accelerator().device_name(rank))\n",
            f"{WITH_HELPER}def f(rank):\n    return torch.device(accelerator_type(), rank) "
            'if torch.accelerator.is_available() else torch.device("cpu")\n',
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if file.tree.qualified(node.func) != "torch.device":
            return None
        kind = keyword(node, "type")
        arguments = positional(node)
        first = arguments[0].value if arguments else kind.value if kind else None
        number = keyword(node, "index") or (arguments[1] if len(arguments) == 2 else None)
        if first is None or number is None or string_value(first) != "cuda" or len(node.args) != 2:
            return None
        unsafe = ""
        if not isinstance(file.target, AcclimateTarget):
            # Another edit converts the literal inside, so this edit keeps the call's text.
            edit = replace(file.span(first), file.target.device_type)
            host = f"{file.torch}.device({{quote}}cpu{{quote}})"
            parts = loadable(file, node, file.span(node), host=host)
            if len(parts) > 1:
                whole = replace(file.span(node), *parts)
                return adapt_to_comparison(
                    file, self.convert(file, node, whole, edit, unsafe=unsafe, claims=(first,))
                )
            return adapt_to_comparison(file, self.convert(file, node, edit, unsafe=unsafe, claims=(first,)))
        inside = Span(file.span(node.args[0]).start, file.span(node.args[-1]).end)
        edit = replace(inside, *file.device_at(file.span(number.value)))
        return adapt_to_comparison(file, self.convert(file, node, edit, unsafe=unsafe, claims=(first,)))
