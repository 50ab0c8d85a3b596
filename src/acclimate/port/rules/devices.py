"""Rules for names of devices."""

from __future__ import annotations

import re

import libcst as cst

from acclimate.port.branches import branches, why_it_stays
from acclimate.port.edits import Part, insert, replace
from acclimate.port.helpers import ACCELERATOR_TYPE
from acclimate.port.loading import loadable
from acclimate.port.on_a_host import may_be_yes, no_ends_program, other_kinds
from acclimate.port.on_apple import needs_streams
from acclimate.port.places import TEXT_STAYS, Place, Role, is_device_like, place_of
from acclimate.port.rules.base import Example, Finding, Rule
from acclimate.port.rules.compared import (
    HOST_CHANGES,
    OTHERS,
    and_not_host,
    as_compared,
    is_tensors_device,
    is_type,
)
from acclimate.port.source import SourceFile
from acclimate.port.targets import AcclimateTarget
from acclimate.port.tree import Span, called_name, string_value

_IMPORT = "import torch\nfrom acclimate import get_accelerator\n\n"
_WITH_HELPER = f"import torch\n\n\n{ACCELERATOR_TYPE}\n\n"
_DEVICE = re.compile(r"cuda(?::(\d+))?$")
AT_IMPORT = "it asks for the device when the module is imported"


def _index(text: str) -> str | None:
    found = _DEVICE.match(text)
    return found[1] if found else None


def unsafe_at_import(file: SourceFile, node: cst.CSTNode) -> str:
    """Why an edit of what runs when the module is imported is unsafe; ``""`` where it is not."""
    # torch counts the devices for that, and later changes of CUDA_VISIBLE_DEVICES would have no effect.
    return AT_IMPORT if file.target.name == "torch" and file.runs_at_import(node) else ""


def _report(rule: Rule, file: SourceFile, node: cst.CSTNode, place: Place, *parts: Part) -> Finding | None:
    if place.role is Role.DATA:
        return rule.exempt(file, node, place.reason or "nothing shows that it is a device")
    if place.role is Role.PATTERN:
        return rule.left(file, node, "a pattern of `match` must be a literal; compare with `if`")
    unsafe = place.reason if place.role is Role.LIKELY else unsafe_at_import(file, node)
    return as_compared(file, rule.becomes(file, node, *parts, unsafe=unsafe))


class DeviceString(Rule):
    """``"cuda"`` and ``"cuda:0"`` where a device is meant."""

    code = "ACC201"
    name = "device-string"
    summary = '`"cuda"` or `"cuda:0"` where a device is meant'
    explanation = """\
`"cuda"` becomes `get_accelerator().device_name()`, and `"cuda:1"` becomes `get_accelerator().device_name(1)`. On CUDA
both have the same value as before.

It is an edit where torch takes a device, where a variable, parameter, option or attribute is called a device, or where
the value gets to such a place. Dictionary keys, messages, and arguments such as `impl="cuda"` are data, and stay.

A comparison `device == torch.device("cuda")` gets `!= torch.device("cpu")` behind it and is unsafe: on a host it stays
false, as before.

With `--to torch` a function of three lines is added to the file, since `torch.accelerator` has no name for the host."""
    examples = (
        Example(
            'import torch\n\n\ndef f(n):\n    return torch.empty(n, device="cuda")\n',
            f"{_IMPORT}\ndef f(n):\n    return torch.empty(n, device=get_accelerator().device_name())\n",
            f"{_WITH_HELPER}def f(n):\n    return torch.empty(n, device=accelerator_type())\n",
        ),
        Example(
            'import torch\n\n\ndef f(x):\n    return x.to("cuda:1")\n',
            f"{_IMPORT}\ndef f(x):\n    return x.to(get_accelerator().device_name(1))\n",
            f'{_WITH_HELPER}def f(x):\n    return x.to(f"{{accelerator_type()}}:1")\n',
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
        place = place_of(file, node)
        if place.role is Role.COMPARED:
            return None
        index = _index(text)
        named = (file.target.device_type,) if index is None else file.device_at(index)
        parts = named if index is None else loadable(file, node, *named)
        if index is not None and file.target.name == "torch" and file.in_fstring(node):
            return self.left(file, node, "a string within an f-string cannot be written anew on every Python")
        return _report(self, file, node, place, *parts)


class AvailableChoice(Rule):
    """``"cuda" if torch.cuda.is_available() else "cpu"``."""

    code = "ACC202"
    name = "available-choice"
    summary = '`"cuda" if torch.cuda.is_available() else "cpu"`'
    explanation = """\
Which device there is, the accelerator knows: it is the CPU where there is nothing else. The whole choice becomes its
name. A choice with another condition keeps it."""
    examples = (
        Example(
            'import torch\n\n\ndef f():\n    return torch.device("cuda" if torch.cuda.is_available() else "cpu")\n',
            f"{_IMPORT}\ndef f():\n    return torch.device(get_accelerator().device_name())\n",
            f"{_WITH_HELPER}def f():\n    return torch.device(accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(no_cuda):\n"
            '    return "cuda:0" if torch.cuda.is_available() and not no_cuda else "cpu"\n',
            f"{_IMPORT}\ndef f(no_cuda):\n"
            '    return get_accelerator().device_name(0) if get_accelerator().is_available() and not no_cuda else "cpu"\n',
            f"{_WITH_HELPER}def f(no_cuda):\n"
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
        index = _index(string_value(node.body) or "")
        if index is not None and (file.target.name == "torch"):
            return None
        parts = (file.target.device_type,) if index is None else file.device_at(index)
        place = place_of(file, node)
        unsafe = "" if place.role is Role.DEVICE else unsafe_at_import(file, node)
        unsafe = unsafe or unsafe_at_import(file, node)
        open_, close = ("(", ")") if node.lpar else ("", "")
        claims = (node.body, node.orelse, node.test, node.test.func)
        return self.becomes(file, node, open_, *parts, close, unsafe=unsafe, claims=claims)


class DeviceFormat(Rule):
    """``f"cuda:{i}"`` and the other ways to write it."""

    code = "ACC203"
    name = "device-format"
    summary = 'a device\'s name made from a number: `f"cuda:{i}"`, `%`, `.format`, `+`'
    explanation = """\
`get_accelerator().device_name(i)` is the name of device `i`; on a CPU it is `"cpu"`.

`--to torch` keeps the number, and torch takes `"cpu:0"` for a host nearly everywhere. `torch.load` and safetensors do
not, so a device that gets to a `map_location`, also through a name, is `"cpu"` where there is no accelerator."""
    examples = (
        Example(
            'import torch\n\n\ndef f(x, rank):\n    return x.to(f"cuda:{rank}")\n',
            f"{_IMPORT}\ndef f(x, rank):\n    return x.to(get_accelerator().device_name(rank))\n",
            f'{_WITH_HELPER}def f(x, rank):\n    return x.to(f"{{accelerator_type()}}:{{rank}}")\n',
        ),
        Example(
            "import torch\n\n\ndef f(x, i):\n    return x.to('cuda:%d' % i), x.to('cuda:{}'.format(i)), x.to('cuda:' + str(i))\n",
            f"{_IMPORT}\ndef f(x, i):\n    return x.to(get_accelerator().device_name(i)), "
            "x.to(get_accelerator().device_name(i)), x.to(get_accelerator().device_name(i))\n",
            f"{_WITH_HELPER}def f(x, i):\n    return x.to(accelerator_type() + ':%d' % i), "
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
        place = place_of(file, node)
        if place.role is Role.COMPARED:
            place = Place(Role.LIKELY, "it is compared with a device's name")
        if place.role is Role.DATA and "message" not in place.reason and "key" not in place.reason:
            place = Place(Role.LIKELY, "only its form says that it is a device")
        parts = file.device_at(index) if isinstance(file.target, AcclimateTarget) else torch_parts
        finding = _report(self, file, node, place, *loadable(file, node, *parts))
        if finding is not None:
            finding.claims = (*finding.claims, *literal)
        return finding

    def _parts(
        self, file: SourceFile, node: cst.CSTNode
    ) -> tuple[tuple[cst.CSTNode, ...], Span, tuple[Part, ...]] | None:
        """The literal, the place of the number, and what torch alone writes."""
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


class DeviceComparison(Rule):
    """``device.type == "cuda"``."""

    code = "ACC204"
    name = "device-comparison"
    summary = '`device.type == "cuda"`, `"cuda" in device`, `device.startswith("cuda")`'
    explanation = """\
With acclimate the name of the accelerator takes the place of `"cuda"`, and the test stays false on a CPU
(`!= "cpu"`), so that a program's own way for a host is taken as before: `--to torch` asks for nothing else than whether
the device is something other than `"cpu"`. Where a later branch is for another type of device (`elif device.type ==
"mps":`), the test stays false for that too. It is true on a CPU only where the program would end otherwise
(`assert device.type == "cuda"`), or where it decides about nothing but seeds, waiting, the device, and what moves there.

`if device.type != "cuda":` becomes `if device.type == "cpu":`, unless it ends the program. A text such as `device` may
be `"cuda:1"`, which is not `"cuda"`, so it is compared with the whole name.

A test that leads to a compiled CUDA extension (`_C`, `*_cuda`), to a package for NVIDIA's hardware such as apex or
flash_attn, or to a function of the file that calls one, stays: through a name that holds the answer, a function that
returns it, an `assert`, or a fallback before it that returns. In a file with CUTLASS kernels every such test stays.
So does a test whose branch imports such a package, and `"cuda" in device and not torch.cuda.is_available()`, which
finds a program that is told to use CUDA where there is none.

The edit is unsafe, since the program may do on other devices what only made sense on CUDA. Better is to ask for the
property that the branch is about, such as `get_accelerator().is_fp16_supported()`."""
    examples = (
        Example(
            'import torch\n\n\ndef f(device):\n    return device.type == "cuda"\n',
            f'{_IMPORT}\ndef f(device):\n    return device.type == get_accelerator().device_name() != "cpu"\n',
            'import torch\n\n\ndef f(device):\n    return device.type != "cpu"\n',
        ),
        Example(
            "import torch\n\n\ndef f(device):\n    return 'cuda' in device\n",
            f"{_IMPORT}\ndef f(device):\n    return get_accelerator().device_name() in device != 'cpu'\n",
            "import torch\n\n\ndef f(device):\n    return 'cpu' not in device\n",
        ),
        Example(
            'import torch\n\n\ndef f(device):\n    match device.type:\n        case "cuda":\n            return 1\n'
            "        case _:\n            return 2\n",
            f"{_IMPORT}\ndef f(device):\n    match device.type:\n"
            '        case _ if device.type == get_accelerator().device_name() != "cpu":\n            return 1\n'
            "        case _:\n            return 2\n",
            "import torch\n\n\ndef f(device):\n    match device.type:\n"
            '        case _ if device.type != "cpu":\n            return 1\n        case _:\n            return 2\n',
        ),
        Example(
            'import torch\n\n\ndef f(device):\n    if device.type == "cuda":\n        return 1\n'
            '    elif device.type == "cpu":\n        return 2\n',
            f'{_IMPORT}\ndef f(device):\n    if device.type == get_accelerator().device_name() != "cpu":\n'
            '        return 1\n    elif device.type == "cpu":\n        return 2\n',
            'import torch\n\n\ndef f(device):\n    if device.type != "cpu":\n        return 1\n'
            '    elif device.type == "cpu":\n        return 2\n',
        ),
        Example('ok = "cuda" in rng_state\nfast = impl == "cuda"\n', None, None),
    )
    nodes = (cst.Comparison, cst.Call, cst.MatchCase)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if isinstance(node, cst.Call):
            return self._start(file, node)
        if isinstance(node, cst.MatchCase):
            return self._case(file, node)
        if not isinstance(node, cst.Comparison):
            return None
        if len(node.comparisons) != 1:
            return None
        target = node.comparisons[0]
        operator = target.operator
        literals = [
            each for each in (node.left, target.comparator) if _DEVICE.match(string_value(each) or "")
        ]
        if isinstance(operator, (cst.In, cst.NotIn)) and isinstance(
            target.comparator, (cst.Tuple, cst.List, cst.Set)
        ):
            return self._members(file, node, target.comparator)
        if len(literals) != 1:
            return None
        literal = literals[0]
        other = target.comparator if literal is node.left else node.left
        index = _index(string_value(literal) or "")
        if isinstance(other, cst.Call) and called_name(other) in (
            "device_name",
            "communication_backend_name",
        ):
            return self.exempt(file, literal, "the program asks the accelerator which one it is")
        if not is_device_like(file, other):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if file.text_names_device(node) and not is_tensors_device(other):
            return self.exempt(file, literal, TEXT_STAYS)
        if stays := why_it_stays(file, node):
            return self.exempt(file, literal, stays)
        negated = isinstance(operator, (cst.NotEqual, cst.NotIn))
        is_fallback = negated and index is None and not no_ends_program(file, node)
        is_compiled = index is None and file.torchscript.holds(node)
        if is_compiled and any(isinstance(each, cst.Assert) for each in file.tree.ancestors(node)):
            return self.left(file, node, "TorchScript compiles what this assertion guards", (literal,))
        may_have_index = index is None and not is_compiled and not is_type(other)
        flips = isinstance(operator, (cst.Equal, cst.NotEqual)) and (
            file.target.name == "torch" or is_fallback
        )
        if may_have_index and flips:
            return self._whole_name(file, node, literal, target)
        if file.target.name == "acclimate" and not is_fallback and not is_compiled:
            parts = (file.target.device_type,) if index is None else file.device_at(index)
            edits, unsafe = [replace(file.span(literal), *parts)], HOST_CHANGES
            if not negated and not may_be_yes(file, node):
                end = file.span(target.comparator).end
                edits, unsafe = [*edits, and_not_host(file, literal, end, self._kinds(file, node))], OTHERS
            return self.convert(file, node, *edits, unsafe=unsafe, claims=(literal,))
        flipped = {cst.Equal: "!=", cst.NotEqual: "==", cst.In: "not in", cst.NotIn: "in"}.get(type(operator))
        if flipped is None:
            return self.left(file, node, "this comparison has no opposite", (literal,))
        if index is not None:
            parts = file.device_at(index)
            return self.convert(
                file, node, replace(file.span(literal), *parts), unsafe=HOST_CHANGES, claims=(literal,)
            )
        quote = file.quote(literal)
        left, right = file.span(node.left), file.span(target.comparator)
        host = f"{quote}cpu{quote}"
        kinds = ("mps",) if needs_streams(file, node) else self._kinds(file, node)
        if kinds and flipped in ("!=", "=="):
            host = f"({', '.join((host, *(f'{quote}{each}{quote}' for each in kinds)))})"
            flipped = "not in" if flipped == "!=" else "in"
        edits = [
            replace(file.span(literal), host),
            replace(Span(left.end, right.start), f" {flipped} "),
        ]
        unsafe = OTHERS if is_fallback else HOST_CHANGES
        return self.convert(file, node, *edits, unsafe=unsafe, claims=(literal,))

    @staticmethod
    def _kinds(file: SourceFile, test: cst.CSTNode) -> tuple[str, ...]:
        return () if may_be_yes(file, test) else other_kinds(file, test)

    def _whole_name(
        self, file: SourceFile, node: cst.Comparison, literal: cst.CSTNode, target: cst.ComparisonTarget
    ) -> Finding:
        """A comparison of a text that may be ``"cuda:1"``, which is not ``"cuda"``, and is no host either."""
        left, right = file.span(node.left), file.span(target.comparator)
        edits = [
            replace(file.span(literal), file.target.device_type),
            and_not_host(file, literal, right.end, self._kinds(file, node)),
        ]
        if isinstance(target.operator, cst.NotEqual):
            plain = (cst.If, cst.While, cst.Assert, cst.BooleanOperation, cst.Assign, cst.Return)
            alone = isinstance(file.tree.parent(node), plain) and not node.lpar
            open_, close = ("not (", ")") if alone else ("(not (", "))")
            edits = [
                insert(left.start, open_),
                replace(Span(left.end, right.start), " == "),
                edits[0],
                and_not_host(file, literal, right.end, self._kinds(file, node), close),
            ]
        return self.convert(file, node, *edits, unsafe=OTHERS, claims=(literal,))

    def _case(self, file: SourceFile, node: cst.MatchCase) -> Finding | None:
        """``case "cuda":`` of a ``match`` on a device, which becomes a test, as a pattern must be a literal."""
        match = file.tree.parent(node)
        literal = node.pattern.value if isinstance(node.pattern, cst.MatchValue) else None
        if literal is None or string_value(literal) != "cuda" or not isinstance(match, cst.Match):
            return None
        if not is_device_like(file, match.subject):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if not isinstance(match.subject, (cst.Name, cst.Attribute)):
            return self.left(file, literal, "a test would evaluate what is matched a second time")
        quote, subject = file.quote(literal), file.tree.source(match.subject)
        if file.target.name == "acclimate":
            test = f"{subject} == {file.target.device_type}"
            test += f" != {quote}cpu{quote}"
        else:
            test = f"{subject} != {quote}cpu{quote}"
        edits = [replace(file.span(node.pattern), f"_ if {test}")]
        if node.guard is not None:
            guard = file.span(node.guard)
            between = Span(file.span(node.pattern).end, guard.start)
            edits += [replace(between, " and ("), insert(guard.end, ")")]
        return self.convert(file, literal, *edits, unsafe=HOST_CHANGES)

    def _members(
        self, file: SourceFile, node: cst.Comparison, holder: cst.Tuple | cst.List | cst.Set
    ) -> Finding | None:
        found = [each.value for each in holder.elements if string_value(each.value) == "cuda"]
        if not found:
            return None
        if not is_device_like(file, node.left):
            return self.exempt(file, found[0], "nothing shows that a device is compared", tuple(found))
        edits = [replace(file.span(each), file.target.device_type) for each in found]
        has_host = any(string_value(each.value) == "cpu" for each in holder.elements)
        if has_host or may_be_yes(file, node) or no_ends_program(file, node):
            return self.convert(file, node, *edits, unsafe=HOST_CHANGES, claims=tuple(found))
        left, asked = file.span(node.left), node.comparisons[0]
        host = f"{file.quote(found[0])}cpu{file.quote(found[0])}"
        if isinstance(asked.operator, cst.NotIn):
            edits.append(insert(left.start, f"(not ({host} != "))
            edits.append(replace(file.span(asked.operator), "in"))
            edits.append(insert(file.span(asked).end, "))"))
        else:
            edits.append(insert(left.start, f"{host} != "))
        return self.convert(file, node, *edits, unsafe=OTHERS, claims=tuple(found))

    def _start(self, file: SourceFile, call: cst.Call) -> Finding | None:
        if (
            called_name(call) != "startswith"
            or not isinstance(call.func, cst.Attribute)
            or len(call.args) != 1
        ):
            return None
        literal = call.args[0].value
        if string_value(literal) not in ("cuda", "cuda:"):
            return None
        if not is_device_like(file, call.func.value):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if stays := why_it_stays(file, call):
            return self.exempt(file, literal, stays)
        if any("[5:]" in file.tree.source(place) for place in branches(file, call)):
            return self.left(file, literal, 'the length of "cuda:" is counted on', (literal,))
        if string_value(literal) == "cuda:":
            quote = file.quote(literal)
            edit = replace(file.span(literal), f"{file.target.device_type} + {quote}:{quote}")
            return self.convert(file, call, edit, unsafe=OTHERS, claims=(literal,))
        if file.target.name == "acclimate":
            edit, place = replace(file.span(literal), file.target.device_type), file.span(call)
            if may_be_yes(file, call):
                return self.convert(file, call, edit, unsafe=HOST_CHANGES, claims=(literal,))
            rest = insert(place.end, f" and {file.target.device_type}")
            not_host = and_not_host(file, literal, place.end, self._kinds(file, call), ")")
            around = (insert(place.start, "("), edit, rest, not_host)
            return self.convert(file, call, *around, unsafe=OTHERS, claims=(literal,))
        quote = file.quote(literal)
        place = file.span(call)
        hosts = ", ".join(f"{quote}{each}{quote}" for each in ("cpu", *self._kinds(file, call)))
        edits = (
            insert(place.start, "(not "),
            replace(file.span(literal), f"({hosts})" if "," in hosts else hosts),
            insert(place.end, ")"),
        )
        return self.convert(file, call, *edits, unsafe=HOST_CHANGES, claims=(literal,))
