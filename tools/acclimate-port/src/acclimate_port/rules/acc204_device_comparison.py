"""The rule ACC204, for `device.type == "cuda"`, `"cuda" in device`, `device.startswith("cuda")`."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.branches import branches
from acclimate_port.conditions.cuda_only import chooses_for_library, reason_to_keep
from acclimate_port.conditions.device_counts import ends_without
from acclimate_port.conditions.host_answers import (
    ends_program_if_false,
    is_for_cuda_alone,
    kinds_apart,
    other_kinds,
)
from acclimate_port.dataflow.literals import TEXT_STAYS, is_compared_device
from acclimate_port.new_code.edits import insert, replace
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, index_of, is_device
from acclimate_port.rules.comparison_edits import (
    FOR_EACH,
    HOST_CHANGES,
    OTHERS,
    false_on_host,
    host_names,
    host_test,
    is_tensors_device,
)
from acclimate_port.source.tree import Span, called_name, string_value
from acclimate_port.source_file import SourceFile


class DeviceComparison(Rule[cst.Comparison | cst.Call | cst.MatchCase]):
    """``device.type == "cuda"``."""

    code = "ACC204"
    name = "device-comparison"
    summary = '`device.type == "cuda"`, `"cuda" in device`, `device.startswith("cuda")`'
    explanation = """\
A value is a device if its name says so, or if the file shows where it is from: `x.device.type`, a part of a device's name, or
a function that returns one. The accelerator's name replaces `"cuda"`, and the test stays false on a CPU: `device == get_accelerator().device_name()
and get_accelerator().device_name() != "cpu"`. If the program has code for another device type (`elif device.type ==
"mps":`), the ported test stays false for that type too. It becomes true on a CPU only if the program would otherwise
end (`assert device.type == "cuda"`). `--to torch` compares the type of a device object with `"cpu"` instead, and so does
`if device.type != "cuda":`, which becomes `if device.type == "cpu":`.

A test is left if it guards a call of a compiled CUDA extension (`_C`, `*_cuda`), of a package for NVIDIA GPUs such as
apex or flash_attn, or of a function of the file that calls one. It may guard the call through a name that holds its
result, a function that returns the result, an `assert`, or an earlier fallback that returns. All tests in a file with
CUTLASS kernels are left, and so is a test whose branch imports such a package. `"cuda" in device and not
torch.cuda.is_available()` is left too: it detects that the program was told to use CUDA on a machine without CUDA.

The edit is unsafe, because other devices may then run code that only made sense on CUDA, unless the test only tells a
`DataLoader` to pin memory. It is better to test the property that the branch needs, such as
`get_accelerator().is_fp16_supported()`."""
    examples = (
        Example(
            'import torch\n\n\ndef f(device):\n    return device.type == "cuda"\n',
            f"{IMPORTS}\ndef f(device):\n    return device.type == get_accelerator().device_name() "
            'and get_accelerator().device_name() != "cpu"\n',
            'import torch\n\n\ndef f(device):\n    return device.type != "cpu"\n',
        ),
        Example(
            "import torch\n\n\ndef f(device):\n    return 'cuda' in device\n",
            f"{IMPORTS}\ndef f(device):\n    return get_accelerator().device_name() in device "
            "and get_accelerator().device_name() != 'cpu'\n",
            f"{WITH_HELPER}def f(device):\n    return accelerator_type() in device and accelerator_type() != 'cpu'\n",
        ),
        Example(
            'import torch\n\n\ndef f(device):\n    match device.type:\n        case "cuda":\n            return 1\n'
            "        case _:\n            return 2\n",
            f"{IMPORTS}\ndef f(device):\n    match device.type:\n"
            '        case _ if device.type == get_accelerator().device_name() and get_accelerator().device_name() != "cpu":\n'
            "            return 1\n"
            "        case _:\n            return 2\n",
            "import torch\n\n\ndef f(device):\n    match device.type:\n"
            '        case _ if device.type != "cpu":\n            return 1\n        case _:\n            return 2\n',
        ),
        Example(
            'import torch\n\n\ndef f(device):\n    if device.type == "cuda":\n        return 1\n'
            '    elif device.type == "cpu":\n        return 2\n',
            f"{IMPORTS}\ndef f(device):\n"
            '    if device.type == get_accelerator().device_name() and get_accelerator().device_name() != "cpu":\n'
            '        return 1\n    elif device.type == "cpu":\n        return 2\n',
            'import torch\n\n\ndef f(device):\n    if device.type != "cpu":\n        return 1\n'
            '    elif device.type == "cpu":\n        return 2\n',
        ),
        Example('ok = "cuda" in rng_state\nfast = impl == "cuda"\n', None, None),
    )
    nodes = (cst.Comparison, cst.Call, cst.MatchCase)

    def check(self, file: SourceFile, node: cst.Comparison | cst.Call | cst.MatchCase) -> Finding | None:
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
        literals = [side for side in (node.left, target.comparator) if is_device(string_value(side) or "")]
        if isinstance(operator, (cst.In, cst.NotIn)) and isinstance(
            target.comparator, (cst.Tuple, cst.List, cst.Set)
        ):
            return self._members(file, node, target.comparator)
        if (several := _several(node)) is not None:
            return self.left(
                file, several, "it compares a list of devices, which no rule converts", (several,)
            )
        if len(literals) != 1:
            return None
        literal = literals[0]
        other = target.comparator if literal is node.left else node.left
        index = index_of(string_value(literal) or "")
        if _is_accelerators_name(file, other):
            return self.exempt(file, literal, "the program compares the accelerator's own name")
        if not is_compared_device(file, other):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if file.text_names_device(node) and not is_tensors_device(other):
            return self.exempt(file, literal, TEXT_STAYS)
        if stays := reason_to_keep(file, node):
            return self.left(file, node, stays, (literal,))
        if (library := chooses_for_library(file, node)) is not None:
            return self.left(file, node, library, (literal,))
        if is_for_cuda_alone(file, node):
            return self.left(file, node, FOR_EACH, (literal,), stands_alone=True)
        negated = isinstance(operator, (cst.NotEqual, cst.NotIn))
        is_compiled = index is None and file.torchscript.holds(node)
        if is_compiled and any(isinstance(ancestor, cst.Assert) for ancestor in file.tree.ancestors(node)):
            return self.left(file, node, "TorchScript compiles what this assertion guards", (literal,))
        name = (file.target.device_type,) if index is None else file.device_at(index)
        edits = [replace(file.span(literal), *name)]
        refuses = ends_program_if_false(file, node) if negated else ends_without(file, node)
        if refuses and not is_compiled:
            return self.convert(file, node, *edits, unsafe=HOST_CHANGES, claims=(literal,))
        kinds = kinds_apart(file, node)
        is_fallback = negated or file.target.name == "torch"
        if is_compiled or (is_fallback and index is None and is_tensors_device(other)):
            return self._host_instead(file, node, literal, kinds)
        edits += false_on_host(file, node, file.quote(literal), kinds, negated=negated)
        unsafe = "" if _only_pins_batches(file, node) else OTHERS
        return self.convert(file, node, *edits, unsafe=unsafe, claims=(literal,))

    def _host_instead(
        self, file: SourceFile, node: cst.Comparison, literal: cst.CSTNode, kinds: tuple[str, ...]
    ) -> Finding:
        """A comparison of a device's type, compared with the CPU's instead: ``device.type != "cpu"``."""
        target = node.comparisons[0]
        flipped = {cst.Equal: "!=", cst.NotEqual: "==", cst.In: "not in", cst.NotIn: "in"}.get(
            type(target.operator)
        )
        if flipped is None:
            return self.left(file, node, "this comparison has no opposite", (literal,))
        left, right = file.span(node.left), file.span(target.comparator)
        other = target.comparator if literal is node.left else node.left
        kinds = kinds if isinstance(target.operator, (cst.Equal, cst.NotEqual)) else ()
        hosts = host_names(file.quote(literal), kinds)
        edits = [replace(file.span(literal), hosts)]
        if kinds:
            flipped = "not in" if flipped == "!=" else "in"
            # The left operand of `in` is the name.
            edits = [replace(left, file.span(other)), replace(right, hosts)]
        edits.append(replace(Span(left.end, right.start), f" {flipped} "))
        return self.convert(file, node, *edits, unsafe=OTHERS, claims=(literal,))

    def _case(self, file: SourceFile, node: cst.MatchCase) -> Finding | None:
        """``case "cuda":`` of a ``match`` on a device. It becomes a guard, as a pattern must be a literal."""
        match = file.tree.parent(node)
        literal = node.pattern.value if isinstance(node.pattern, cst.MatchValue) else None
        if literal is None or string_value(literal) != "cuda" or not isinstance(match, cst.Match):
            return None
        if not is_compared_device(file, match.subject):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if not isinstance(match.subject, (cst.Name, cst.Attribute)):
            return self.left(file, literal, "a guard would evaluate the subject of `match` a second time")
        quote, subject = file.quote(literal), file.tree.source(match.subject)
        kinds = kinds_apart(file, node)
        test = f"{subject} {host_test(quote, kinds)}"
        if file.target.name == "acclimate" or not is_tensors_device(match.subject):
            kind = file.target.device_type
            test = f"{subject} == {kind} and {kind} {host_test(quote, kinds)}"
        edits = [replace(file.span(node.pattern), f"_ if {test}")]
        if node.guard is not None:
            guard = file.span(node.guard)
            between = Span(file.span(node.pattern).end, guard.start)
            edits += [replace(between, " and ("), insert(guard.end, ")")]
        return self.convert(file, literal, *edits, unsafe=HOST_CHANGES)

    def _members(
        self, file: SourceFile, node: cst.Comparison, holder: cst.Tuple | cst.List | cst.Set
    ) -> Finding | None:
        found = [element.value for element in holder.elements if is_device(string_value(element.value) or "")]
        if not found:
            return None
        if not is_compared_device(file, node.left):
            return self.exempt(file, found[0], "nothing shows that a device is compared", tuple(found))
        edits = [
            replace(file.span(literal), *(file.device_at(index) if index else (file.target.device_type,)))
            for literal in found
            for index in [index_of(string_value(literal) or "")]
        ]
        listed = {string_value(element.value) for element in holder.elements}
        negated = isinstance(node.comparisons[0].operator, cst.NotIn)
        refuses = ends_program_if_false(file, node) if negated else ends_without(file, node)
        beside = [kind for kind in other_kinds(file, node) if kind not in listed]
        if beside and not refuses:
            return self.left(file, node, f"the program has its own code for {beside[0]}", tuple(found))
        if "cpu" not in listed and not refuses:
            edits += false_on_host(file, node, file.quote(found[0]), negated=negated)
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
        if not is_compared_device(file, call.func.value):
            return self.exempt(file, literal, "nothing shows that a device is compared")
        if stays := reason_to_keep(file, call):
            return self.left(file, call, stays, (literal,))
        if any("[5:]" in file.tree.source(place) for place in branches(file, call)):
            return self.left(file, literal, 'the code relies on the length of "cuda:"', (literal,))
        if string_value(literal) == "cuda:":
            quote = file.quote(literal)
            edit = replace(file.span(literal), f"{file.target.device_type} + {quote}:{quote}")
            return self.convert(file, call, edit, unsafe=OTHERS, claims=(literal,))
        edits = [replace(file.span(literal), file.target.device_type)]
        if not ends_without(file, call):
            edits += false_on_host(file, call, file.quote(literal), kinds_apart(file, call))
        return self.convert(file, call, *edits, unsafe=OTHERS, claims=(literal,))


def _several(node: cst.Comparison) -> cst.CSTNode | None:
    """The list of CUDA devices that is compared with a name for several: ``devices == {"cuda"}``."""
    sides = (node.left, node.comparisons[0].comparator)
    for holder, other in (sides, sides[::-1]):
        listed = holder.elements if isinstance(holder, (cst.Tuple, cst.List, cst.Set)) else ()
        are_devices = bool(listed) and all(is_device(string_value(one.value) or "") for one in listed)
        name = (
            other.value
            if isinstance(other, cst.Name)
            else other.attr.value
            if isinstance(other, cst.Attribute)
            else ""
        )
        if are_devices and re.search(r"(^|_)dev(ice)?(_?types?)?s?$", name, re.IGNORECASE):
            return holder
    return None


def _only_pins_batches(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test only tells a ``DataLoader`` to pin memory, which works with any accelerator."""
    given = file.tree.given_to(node)
    return given is not None and given.word == "pin_memory" and given.name == "DataLoader"


def _is_accelerators_name(file: SourceFile, node: cst.BaseExpression) -> bool:
    """Whether a value is the name of the accelerator that ported code asks for, directly or through a name."""
    if isinstance(node, cst.Name):
        bound = file.bound_values(node)
        return bool(bound) and all(
            value is not None and _is_accelerators_name(file, value) for value in bound
        )
    asked = called_name(node) if isinstance(node, cst.Call) else None
    return asked in ("device_name", "communication_backend_name", file.helper)
