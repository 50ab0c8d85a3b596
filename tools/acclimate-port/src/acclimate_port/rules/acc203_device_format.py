"""The rule ACC203, for a device's name made from an index: `f"cuda:{i}"`, `%`, `.format`, `+`."""

from __future__ import annotations

from string import Formatter

import libcst as cst

from acclimate_port.dataflow.literals import LiteralUse, Role, classify_literal
from acclimate_port.dataflow.map_location import loadable
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.acc201_device_string import report_device
from acclimate_port.rules.base import DEVICE_FORM, IMPORTS, WITH_HELPER, Example, Finding, Rule
from acclimate_port.source.tree import Span, called_name, dotted, keyword, string_value
from acclimate_port.source_file import SourceFile


class DeviceFormat(Rule[cst.FormattedString | cst.BinaryOperation | cst.Call]):
    """``f"cuda:{i}"``, and the same with ``%``, ``format`` and ``+``."""

    code = "ACC203"
    name = "device-format"
    summary = 'a device\'s name made from an index: `f"cuda:{i}"`, `%`, `.format`, `+`'
    explanation = """\
`get_accelerator().device_name(i)` is the name of device `i`; on a CPU it is `"cpu"`.

A field shows the number as `str` does (`{}`, `{:}`, `{0}`, `{:d}`, `{gpu}`, `{!s}`). Another form of a device's name, such as
`"cuda:{!r}".format(i)`, is left, and so is what decides about it; a form that the code keeps in a name (`FORM = "cuda:{}"`)
or puts together in another way is not listed, and leaves what decides about it too.

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
        Example(
            'import torch\n\n\ndef f(x, i):\n    return x.to("cuda:{:}".format(i)), x.to("cuda:{n}".format(n=i)), x.to(f"cuda:{i:d}")\n',
            f"{IMPORTS}\ndef f(x, i):\n    return x.to(get_accelerator().device_name(i)), "
            "x.to(get_accelerator().device_name(i)), x.to(get_accelerator().device_name(i))\n",
            WITH_HELPER + 'def f(x, i):\n    return x.to(accelerator_type() + ":{:}".format(i)), '
            'x.to(accelerator_type() + ":{n}".format(n=i)), x.to(f"{accelerator_type()}:{i:d}")\n',
        ),
        Example('import torch\n\n\ndef f(x, i):\n    return x.to("cuda:{!r}".format(i))\n', None, None),
    )
    nodes = (cst.FormattedString, cst.BinaryOperation, cst.Call)

    def check(
        self, file: SourceFile, node: cst.FormattedString | cst.BinaryOperation | cst.Call
    ) -> Finding | None:
        found = self._parts(file, node)
        if isinstance(file.tree.parent(node), cst.ConcatenatedString) or not (found or _is_form(node)):
            return None
        place = classify_literal(file, node)
        if found is None:
            is_device = place.role is Role.DEVICE
            return (
                self.left(file, node, "no rule converts this form of a device's name") if is_device else None
            )
        literal, index, torch_parts = found
        if place.role is Role.COMPARED:
            place = LiteralUse(Role.LIKELY, "it is compared with a device's name")
        if place.role is Role.DATA and "message" not in place.reason and "key" not in place.reason:
            place = LiteralUse(Role.LIKELY, "only its form says that it is a device")
        parts = file.device_at(index) if isinstance(file.target, AcclimateTarget) else torch_parts
        finding = report_device(self, file, node, place, *loadable(file, node, *parts))
        if finding is not None:
            finding.claims = (*finding.claims, *literal)
            if finding.safe and file.is_guarded(node) and _is_of_later_device(file, index):
                finding.safe, finding.reason = (
                    False,
                    "its default is the number of a device that may not be there",
                )
        return finding

    def _parts(
        self, file: SourceFile, node: cst.CSTNode
    ) -> tuple[tuple[cst.CSTNode, ...], Span, tuple[Part, ...]] | None:
        """The literal, the range of the index, and the code for ``--to torch``."""
        tree, helper = file.tree, file.target.device_type
        if isinstance(node, cst.FormattedString):
            if len(node.parts) != 2 or not isinstance(node.parts[0], cst.FormattedStringText):
                return None
            text, shown = node.parts[0], node.parts[1]
            if not isinstance(shown, cst.FormattedStringExpression) or text.value != "cuda:":
                return None
            spec = None if shown.format_spec is None else "".join(map(tree.source, shown.format_spec))
            if not _shows_number(spec, shown.conversion) or shown.equal is not None:
                return None
            whole, place = file.span(node), tree.span(text)
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


def _is_of_later_device(file: SourceFile, index: Span) -> bool:
    """Whether the number of a device is an option whose default is not the first device: ``default=6``."""
    name = file.tree.source(index).strip().rpartition(".")[2]
    defaults = (keyword(call, "default") for call in file.options.get(name, ()))
    values = (one.value for one in defaults if one is not None)
    return any(
        (dotted(one) or file.tree.source(one)).strip("\"'") not in ("0", "None", "-1") for one in values
    )


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
    given = node.args[0] if len(node.args) == 1 else None
    if given is None or given.star or not _gets(string_value(node.func.value) or "", given):
        return None
    return node.func.value, given.value


def _is_form(node: cst.CSTNode) -> bool:
    """Whether code makes a device's name in a way that may be none of those above: ``f"cuda:{i!r}"``."""
    if isinstance(node, cst.FormattedString):
        first = node.parts[0] if len(node.parts) > 1 else None
        return isinstance(first, cst.FormattedStringText) and DEVICE_FORM.match(first.value) is not None
    text = node.left if isinstance(node, cst.BinaryOperation) else None
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        text = node.func.value if node.func.attr.value.startswith("format") else None
    return DEVICE_FORM.match(string_value(text) or "") is not None


def _gets(text: str, given: cst.Arg) -> bool:
    """Whether a text is ``"cuda:{}"`` with the number that a call of ``format`` gets, by its place or name."""
    try:
        fields = [*Formatter().parse(text)]
    except ValueError:
        return False
    before, name, spec, conversion = fields[0] if len(fields) == 1 else ("", None, None, None)
    names = ("", "0") if given.keyword is None else (given.keyword.value,)
    return before == "cuda:" and name in names and _shows_number(spec, conversion)


def _shows_number(spec: str | None, conversion: str | None) -> bool:
    """Whether a field shows a number as ``str`` does: ``{:}``, ``{:d}``, ``{!s}``."""
    return spec in (None, "", "d") and conversion in (None, "", "s")
