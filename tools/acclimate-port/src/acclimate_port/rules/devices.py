"""Rules for names of devices."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.dataflow.literals import LiteralUse, Role, classify_literal
from acclimate_port.dataflow.map_location import loadable
from acclimate_port.new_code.added_functions import ACCELERATOR_TYPE
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule
from acclimate_port.rules.comparison_edits import adapt_to_comparison
from acclimate_port.source.tree import Span, called_name, string_value
from acclimate_port.source_file import SourceFile

_DEVICE = re.compile(r"cuda(?::(\d+))?$")
AT_IMPORT = "it looks up the accelerator when the module is imported"


def is_device(text: str) -> bool:
    """Whether a string is the name of a CUDA device."""
    return _DEVICE.match(text) is not None


def index_of(text: str) -> str | None:
    """The index in the name of a device."""
    found = _DEVICE.match(text)
    return found[1] if found else None


def unsafe_at_import(file: SourceFile, node: cst.CSTNode) -> str:
    """Why an edit of code that runs at import is unsafe; ``""`` for other code."""
    # The lookup makes torch count the devices, and later changes of CUDA_VISIBLE_DEVICES would have no effect.
    return AT_IMPORT if file.target.name == "torch" and file.runs_at_import(node) else ""


def _report(
    rule: Rule, file: SourceFile, node: cst.CSTNode, place: LiteralUse, *parts: Part
) -> Finding | None:
    if place.role is Role.DATA:
        return rule.exempt(file, node, place.reason or "nothing shows that it is a device")
    if place.role is Role.PATTERN:
        return rule.left(file, node, "a pattern of `match` must be a literal; compare with `if`")
    unsafe = place.reason if place.role is Role.LIKELY else unsafe_at_import(file, node)
    return adapt_to_comparison(file, rule.becomes(file, node, *parts, unsafe=unsafe))


class DeviceString(Rule):
    """``"cuda"`` and ``"cuda:0"`` as a device."""

    code = "ACC201"
    name = "device-string"
    summary = '`"cuda"` or `"cuda:0"` as a device'
    explanation = """\
`"cuda"` becomes `get_accelerator().device_name()`, and `"cuda:1"` becomes `get_accelerator().device_name(1)`. On CUDA
both have the same value as before.

The rule edits a literal if torch takes it as a device, if the name of its variable, parameter, option or attribute
suggests a device, or if the value reaches one of these. Dictionary keys, messages, and arguments such as `impl="cuda"`
are data, and stay.

`device == torch.device("cuda")` gets `!= torch.device("cpu")` appended, so that it stays false on a CPU, as before.
This edit is unsafe.

`--to torch` adds a function of three lines to the file, since `torch.accelerator` has no name for the CPU."""
    examples = (
        Example(
            'import torch\n\n\ndef f(n):\n    return torch.empty(n, device="cuda")\n',
            f"{IMPORTS}\ndef f(n):\n    return torch.empty(n, device=get_accelerator().device_name())\n",
            f"{WITH_HELPER}def f(n):\n    return torch.empty(n, device=accelerator_type())\n",
        ),
        Example(
            'import torch\n\n\ndef f(x):\n    return x.to("cuda:1")\n',
            f"{IMPORTS}\ndef f(x):\n    return x.to(get_accelerator().device_name(1))\n",
            f'{WITH_HELPER}def f(x):\n    return x.to(f"{{accelerator_type()}}:1")\n',
        ),
        Example(
            'import argparse\n\np = argparse.ArgumentParser()\np.add_argument("--device", default="cuda")\n',
            "import argparse\n\nfrom acclimate import get_accelerator\n\np = argparse.ArgumentParser()\n"
            'p.add_argument("--device", default=get_accelerator().device_name())\n',
            "import argparse\n\nimport torch\n\n\n" + ACCELERATOR_TYPE + "\n\n"
            'p = argparse.ArgumentParser()\np.add_argument("--device", default=accelerator_type())\n',
        ),
        Example('state = {"cuda": 1}\nprint(state["cuda"])\n', None, None),
        Example('model = build(impl="cuda")\n', None, None),
    )
    nodes = (cst.SimpleString, cst.FormattedString)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        text = string_value(node)
        if text is None:
            return None
        if text.startswith("torch.cuda."):
            return self.exempt(
                file, node, "a name in a string, such as the target of a mock, is not followed"
            )
        if not _DEVICE.match(text) or isinstance(file.tree.parent(node), (cst.Expr, cst.ConcatenatedString)):
            return None
        place = classify_literal(file, node)
        if place.role is Role.COMPARED:
            return None
        index = index_of(text)
        named = (file.target.device_type,) if index is None else file.device_at(index)
        parts = named if index is None else loadable(file, node, *named)
        if index is not None and file.target.name == "torch" and file.in_fstring(node):
            return self.left(
                file,
                node,
                "a string inside an f-string cannot be replaced by code that every Python version parses",
            )
        return _report(self, file, node, place, *parts)


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
            '    return get_accelerator().device_name(0) if get_accelerator().is_available() and not no_cuda else "cpu"\n',
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
        place = classify_literal(file, node)
        unsafe = "" if place.role is Role.DEVICE else unsafe_at_import(file, node)
        unsafe = unsafe or unsafe_at_import(file, node)
        open_, close = ("(", ")") if node.lpar else ("", "")
        claims = (node.body, node.orelse, node.test, node.test.func)
        return self.becomes(file, node, open_, *parts, close, unsafe=unsafe, claims=claims)


class DeviceFormat(Rule):
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

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
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
        finding = _report(self, file, node, place, *loadable(file, node, *parts))
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
        open_, close = self._parentheses(file, node)
        number: cst.BaseExpression
        if isinstance(node, cst.BinaryOperation):
            left = string_value(node.left)
            if isinstance(node.operator, cst.Modulo) and left in ("cuda:%d", "cuda:%s", "cuda:%i"):
                number = node.right
                if isinstance(number, cst.Tuple):
                    if len(number.elements) != 1 or not isinstance(number.elements[0], cst.Element):
                        return None
                    number = number.elements[0].value
            elif isinstance(node.operator, cst.Add) and left == "cuda:":
                number = node.right
                if isinstance(number, cst.Call) and called_name(number) == "str" and len(number.args) == 1:
                    number = number.args[0].value
            else:
                return None
            return (node.left,), tree.span(number), self._concatenated(file, node.left, whole, open_, close)
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and called_name(node) == "format"
        ):
            if string_value(node.func.value) not in ("cuda:{}", "cuda:{0}", "cuda:{:d}"):
                return None
            if len(node.args) != 1 or node.args[0].keyword is not None or node.args[0].star:
                return None
            literal = node.func.value
            number = node.args[0].value
            return (literal,), tree.span(number), self._concatenated(file, literal, whole, open_, close)
        return None

    @staticmethod
    def _parentheses(file: SourceFile, node: cst.CSTNode) -> tuple[str, str]:
        parent = file.tree.parent(node)
        bare = not isinstance(
            parent, (cst.Arg, cst.AssignTarget, cst.Assign, cst.AnnAssign, cst.Return, cst.Element)
        )
        return ("(", ")") if bare else ("", "")

    @staticmethod
    def _concatenated(
        file: SourceFile, literal: cst.CSTNode, whole: Span, open_: str, close: str
    ) -> tuple[Part, ...]:
        place = file.span(literal)
        prefix, quote = "", '"'
        if isinstance(literal, (cst.SimpleString, cst.FormattedString)):
            prefix, quote = literal.prefix, literal.quote
        start = place.start + len(prefix) + len(quote) + len("cuda")
        text = f"{open_}{file.target.device_type} + {prefix}{quote}"
        return (Span(whole.start, place.start), text, Span(start, whole.end), close)
