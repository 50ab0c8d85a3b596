"""The rule ACC203, for a device's name made from an index: `f"cuda:{i}"`, `%`, `.format`, `+`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.literals import LiteralUse, Role, classify_literal
from acclimate_port.dataflow.map_location import loadable
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.acc201_device_string import report_device
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule
from acclimate_port.source.tree import Span, called_name, string_value
from acclimate_port.source_file import SourceFile


class DeviceFormat(Rule[cst.FormattedString | cst.BinaryOperation | cst.Call]):
    """``f"cuda:{i}"``, and the same with ``%``, ``format`` and ``+``."""

    code = "ACC203"
    name = "device-format"
    summary = 'a device\'s name made from an index: `f"cuda:{i}"`, `%`, `.format`, `+`'
    explanation = """\
`get_accelerator().device_name(i)` is the name of device `i`; on a CPU it is `"cpu"`.

`--to torch` keeps the index: nearly all of torch accepts `"cpu:0"`. `torch.load` and safetensors do not, so a device
that reaches a `map_location`, directly or through a name, is `"cpu"` on a CPU-only machine."""
    examples = (
        Example(
            'import torch\n\n\ndef f(x, rank):\n    return x.to(f"cuda:{rank}")\n',
            f"{IMPORTS}\ndef f(x, rank):\n    return x.to(get_accelerator().device_name(rank))\n",
            f'{WITH_HELPER}def f(x, rank):\n    return x.to(f"{{accelerator_type()}}:{{rank}}")\n',
        ),
        Example(
            "import torch\n\n\ndef f(x, i):\n    return x.to('cuda:%d' % i), x.to('cuda:{}'.format(i)), x.to('cuda:' + str(i))\n",
            f"{IMPORTS}\ndef f(x, i):\n    return x.to(get_accelerator().device_name(i)), "
            "x.to(get_accelerator().device_name(i)), x.to(get_accelerator().device_name(i))\n",
            f"{WITH_HELPER}def f(x, i):\n    return x.to(accelerator_type() + ':%d' % i), "
            "x.to(accelerator_type() + ':{}'.format(i)), x.to(accelerator_type() + ':' + str(i))\n",
        ),
    )
    nodes = (cst.FormattedString, cst.BinaryOperation, cst.Call)

    def check(
        self, file: SourceFile, node: cst.FormattedString | cst.BinaryOperation | cst.Call
    ) -> Finding | None:
        found = self._parts(file, node)
        if found is None:
            return None
        literal, index, torch_parts = found
        if isinstance(file.tree.parent(node), cst.ConcatenatedString):
            return None
        place = classify_literal(file, node)
        if place.role is Role.COMPARED:
            place = LiteralUse(Role.LIKELY, "it is compared with a device's name")
        if place.role is Role.DATA and "message" not in place.reason and "key" not in place.reason:
            place = LiteralUse(Role.LIKELY, "only its form says that it is a device")
        parts = file.device_at(index) if isinstance(file.target, AcclimateTarget) else torch_parts
        finding = report_device(self, file, node, place, *loadable(file, node, *parts))
        if finding is not None:
            finding.claims = (*finding.claims, *literal)
        return finding

    def _parts(
        self, file: SourceFile, node: cst.CSTNode
    ) -> tuple[tuple[cst.CSTNode, ...], Span, tuple[Part, ...]] | None:
        """The literal, the range of the index, and the code for ``--to torch``."""
        whole, tree = file.span(node), file.tree
        helper = file.target.device_type
        if isinstance(node, cst.FormattedString):
            if len(node.parts) != 2 or not isinstance(node.parts[0], cst.FormattedStringText):
                return None
            text, shown = node.parts[0], node.parts[1]
            if not isinstance(shown, cst.FormattedStringExpression) or text.value != "cuda:":
                return None
            if shown.format_spec is not None or shown.conversion or shown.equal is not None:
                return None
            place = tree.span(text)
            rest = Span(place.start + len("cuda"), whole.end)
            return (text,), tree.span(shown.expression), (
                Span(whole.start, place.start), "{" + helper + "}", rest,
            )  # fmt: skip
        formatted = _formatted(node)
        if formatted is None:
            return None
        literal, number = formatted
        return (literal,), tree.span(number), self._concatenated(file, node, literal)

    @staticmethod
    def _concatenated(file: SourceFile, node: cst.CSTNode, literal: cst.CSTNode) -> tuple[Part, ...]:
        bare = (cst.Arg, cst.AssignTarget, cst.Assign, cst.AnnAssign, cst.Return, cst.Element)
        open_, close = ("", "") if isinstance(file.tree.parent(node), bare) else ("(", ")")
        place, whole = file.span(literal), file.span(node)
        prefix, quote = "", '"'
        if isinstance(literal, (cst.SimpleString, cst.FormattedString)):
            prefix, quote = literal.prefix, literal.quote
        start = place.start + len(prefix) + len(quote) + len("cuda")
        text = f"{open_}{file.target.device_type} + {prefix}{quote}"
        return (Span(whole.start, place.start), text, Span(start, whole.end), close)


def _formatted(node: cst.CSTNode) -> tuple[cst.CSTNode, cst.CSTNode] | None:
    """The text and the index of ``"cuda:%d" % i``, ``"cuda:" + str(i)`` and ``"cuda:{}".format(i)``."""
    if isinstance(node, cst.BinaryOperation):
        left, number = string_value(node.left), node.right
        if isinstance(node.operator, cst.Add) and left == "cuda:":
            is_text = isinstance(number, cst.Call) and called_name(number) == "str" and len(number.args) == 1
            return node.left, number.args[0].value if is_text and isinstance(number, cst.Call) else number
        if not isinstance(node.operator, cst.Modulo) or left not in ("cuda:%d", "cuda:%s", "cuda:%i"):
            return None
        if isinstance(number, cst.Tuple):
            only = number.elements[0] if len(number.elements) == 1 else None
            return (node.left, only.value) if isinstance(only, cst.Element) else None
        return node.left, number
    if (
        not isinstance(node, cst.Call)
        or not isinstance(node.func, cst.Attribute)
        or called_name(node) != "format"
    ):
        return None
    is_device = string_value(node.func.value) in ("cuda:{}", "cuda:{0}", "cuda:{:d}")
    is_plain = len(node.args) == 1 and node.args[0].keyword is None and not node.args[0].star
    return (node.func.value, node.args[0].value) if is_device and is_plain else None
