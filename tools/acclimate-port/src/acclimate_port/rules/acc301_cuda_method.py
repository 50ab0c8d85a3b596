"""The rule ACC301, for `x.cuda()`, on tensors and modules."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from acclimate_port.conditions.class_tests import is_tested_to_be_torchs
from acclimate_port.dataflow.sinks import holds_device_name
from acclimate_port.new_code.edits import Edit, insert, replace
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, cuda_name
from acclimate_port.source.tree import (
    Span,
    argument_of,
    called_name,
    dotted,
    has_unpacking,
    keyword,
    positional,
)
from acclimate_port.source.values import (
    DEVICE_NAME,
    METHODS_OF_TENSORS,
    METHODS_OF_TORCH,
    Kind,
    methods,
)
from acclimate_port.source_file import SourceFile, kept

_OTHER_LIBRARIES = {"paddle", "jittor", "mindspore", "cupy", "mxnet", "oneflow"}
"""Libraries whose arrays have a method ``cuda``, or a method like it."""


def is_torch_object(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether the file shows that a value is a tensor or a module."""
    call = file.tree.parent(file.tree.parent(node) or node)
    given = file.tree.given_to(call) if call is not None else None
    if given is not None and given.full == "torch.autograd.Variable" and given.index == 0:
        return True  # it takes nothing but a tensor
    if call is not None and file.values.is_wrapped(call):
        return True
    value = file.values.of(node)
    is_known = value.kind in (Kind.TENSOR, Kind.MODULE) and value.certain
    return is_known or _has_methods_of_torch(file, node) or is_tested_to_be_torchs(file, node)


def _has_methods_of_torch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether what is moved comes from a method of tensors or modules, or the file calls one of it.

    Arrays of other libraries have such methods too, but none that has also a method ``cuda``.
    """
    if file.survey.with_own_cuda or file.values.classes_with_own_cuda:
        return False
    while isinstance(node, cst.Subscript):
        node = node.value
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name, given = node.func.attr.value, [file.tree.qualified(one.value) for one in node.args]
        if name == "type":
            return len(given) == 1 and (given[0] or "").startswith("torch.")
        return name in METHODS_OF_TORCH
    if not isinstance(node, (cst.Name, cst.Attribute)):
        return False
    return _calls_method_of_tensors(file, file.tree.alike(node))


@kept
def _calls_method_of_tensors(file: SourceFile, reads: Sequence[cst.CSTNode]) -> bool:
    """Whether the file calls a method of tensors where it reads a name."""
    methods_read = (file.tree.parent(read) for read in reads)
    return any(
        isinstance(method, cst.Attribute)
        and method.attr.value in METHODS_OF_TENSORS
        and isinstance(call := file.tree.parent(method), cst.Call)
        and call.func is method
        for method in methods_read
    )


def _is_storage(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a value is a storage, whose ``to`` takes the device only by keyword.

    ``map_location`` functions get a storage: ``torch.load(f, map_location=lambda storage, loc: storage.cuda())``.
    """
    if not isinstance(node, cst.Name):
        return False
    around = file.tree.function(node)
    holder = file.tree.parent(around) if around is not None else None
    if isinstance(around, cst.Lambda) and isinstance(holder, cst.Arg):
        given = [parameter.name.value for parameter in around.params.params]
        is_location = holder.keyword is not None and holder.keyword.value == "map_location"
        call = file.tree.parent(holder)
        is_load = isinstance(call, cst.Call) and file.tree.qualified(call.func) == "torch.load"
        if (is_location or is_load) and given[:1] == [node.value]:
            return True
    return node.value in ("storage", "untyped_storage")


class CudaMethod(Rule[cst.Call | cst.FunctionDef]):
    """``x.cuda()``."""

    code = "ACC301"
    name = "cuda-method"
    summary = "`x.cuda()`, on tensors and modules"
    explanation = """\
`x.cuda()` becomes `x.to(get_accelerator().device_name())`. The edit is safe if the code shows that `x` is a tensor or a
module, and unsafe otherwise: another class may have a method `cuda` and no method `to`.

A class that defines a method `cuda` keeps it. Calls of that method stay too, on its objects and in other files."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    return x.cuda()\n",
            f"{IMPORTS}\ndef f(x: torch.Tensor):\n    return x.to(get_accelerator().device_name())\n",
            f"{WITH_HELPER}def f(x: torch.Tensor):\n    return x.to(accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(model: torch.nn.Module, gpu: int):\n"
            "    return model.cuda(gpu), torch.ones(1).cuda(non_blocking=True)\n",
            f"{IMPORTS}\ndef f(model: torch.nn.Module, gpu: int):\n"
            "    return model.to(get_accelerator().device_name(gpu)), "
            "torch.ones(1).to(get_accelerator().device_name(), non_blocking=True)\n",
            f"{WITH_HELPER}def f(model: torch.nn.Module, gpu: int):\n"
            '    return model.to(f"{accelerator_type()}:{gpu}"), '
            "torch.ones(1).to(accelerator_type(), non_blocking=True)\n",
        ),
        Example(
            "class Batch:\n    def cuda(self):\n        return self\n\n\nb = Batch().cuda()\n", None, None
        ),
    )
    nodes = (cst.Call, cst.FunctionDef)

    def check(self, file: SourceFile, node: cst.Call | cst.FunctionDef) -> Finding | None:
        if isinstance(node, cst.FunctionDef):
            return self._definition(file, node)
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return None
        if node.func.attr.value != "cuda":
            return None
        receiver = node.func.value
        if file.tree.qualified(receiver) is not None:  # a function `cuda` of some module
            return self.exempt(file, node, "it is a function of a module")
        own = self._own_method(file, node, receiver)
        if file.needs_torch_import and (library := _OTHER_LIBRARIES & file.tree.imported_packages):
            own = f"the file's tensors come from {min(library)}"
        if own:
            return self.exempt(file, node, own)
        if has_unpacking(node) or (node.args and any(argument.comma is None for argument in node.args)):
            return self.left(file, node, "no rule converts these arguments")
        unsafe = "" if is_torch_object(file, receiver) else "it may be neither a tensor nor a module"
        finding = self._call(file, node, node.func, unsafe)
        if finding.edits and positional(node) and _is_storage(file, receiver):
            name = insert(file.span(node.args[0]).start, "device=")
            finding.edits = (*finding.edits, name)
        return finding

    def _definition(self, file: SourceFile, node: cst.FunctionDef) -> Finding | None:
        function = file.tree.parent(file.tree.parent(node) or node)
        if node.name.value != "cuda" or not isinstance(function, cst.ClassDef):
            return None
        return self.exempt(file, node.name, "the class defines this method for its users")

    def _own_method(self, file: SourceFile, node: cst.Call, receiver: cst.CSTNode) -> str:
        own = file.values.classes_with_own_cuda
        around = [ancestor for ancestor in file.tree.ancestors(node) if isinstance(ancestor, cst.ClassDef)]
        is_self = isinstance(receiver, cst.Name) and receiver.value in ("self", "cls")
        is_super = isinstance(receiver, cst.Call) and called_name(receiver) == "super"
        has_own = bool(around) and (around[0].name.value in own or "cuda" in methods(around[0]))
        if has_own and (is_self or is_super):
            return "the class defines its own method `cuda`"
        if isinstance(receiver, cst.Name) and receiver.value in own:
            return f"`{receiver.value}` defines its own method `cuda`"
        made = receiver
        if isinstance(receiver, cst.Name):
            for assignment in reversed(file.tree.assignments(receiver)):
                if (value := file.tree.value_of(assignment.node)) is not None:
                    made = value
                    break
        if isinstance(made, cst.Call):
            name = called_name(made) or ""
            if name in file.survey.with_own_cuda or (isinstance(made.func, cst.Name) and name in own):
                return f"`{name}` defines its own method `cuda`"
        return ""

    def _call(self, file: SourceFile, node: cst.Call, function: cst.Attribute, unsafe: str) -> Finding:
        device = self._device(file, node, function)
        if device is None:
            return self.left(file, node, "there is a comment inside the call")
        edits, reason = device
        method = replace(file.span(function.attr), "to")
        return self.convert(file, node, method, *edits, unsafe=unsafe or reason, claims=(function,))

    @staticmethod
    def _device(file: SourceFile, node: cst.Call, function: cst.Attribute) -> tuple[list[Edit], str] | None:
        """Edits that make a device of the arguments, and why they are unsafe; ``None``: it has a comment."""
        first = argument_of(node, "device", 0)
        if first is None:
            text = f"{'device=' if _is_storage(file, function.value) else ''}{file.target.device_type}"
            if node.args:
                return [insert(file.span(node.args[0]).start, f"{text}, ")], ""
            inside = Span(file.span(function).end, file.span(node).end)
            kept = file.tree.source(inside)
            edit = replace(inside, kept[: kept.index("(") + 1] + text + ")")
            return ([edit], "") if "".join(kept.split()) == "()" else None
        value, place = first.value, file.span(first.value)
        is_ported = isinstance(value, cst.Call) and cuda_name(file, value.func) == "current_device"
        if is_ported or (isinstance(value, cst.Name) and holds_device_name(file, value)):
            return [], ""
        kind = file.values.of(value)
        if kind.kind is Kind.NONE:
            return [replace(place, file.target.device_type)], ""
        if kind.kind in (Kind.DEVICE, Kind.STRING):
            return [], "" if kind.certain else "only its name suggests a device"
        is_called_device = isinstance(value, cst.Name) and DEVICE_NAME.search(value.value) is not None
        if isinstance(value, cst.IfExp) or (is_called_device and kind.kind is not Kind.NUMBER):
            return [], "it may not be a device"
        reason = "nothing shows that its argument is a number"
        if file.target.name == "torch":
            # A name may hold None, which the code for --to torch does not accept.
            reason += " and not None"
        parts = file.device_at(value.value if isinstance(value, cst.Integer) else place)
        if file.target.name == "torch" and _may_be_none(file, value):
            parts = (f"{file.target.device_type} if {file.tree.source(value)} is None else ", *parts)
        return [replace(place, *parts)], "" if kind.kind is Kind.NUMBER and kind.certain else reason


def _may_be_none(file: SourceFile, value: cst.CSTNode) -> bool:
    """Whether the file shows that a device index may be ``None``, which torch.cuda takes as the current device.

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
    for below, around in file.tree.upwards(value):
        if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test:
            test = file.tree.source(around.test)
            is_body = below is around.body
            comparison, weakens = (r"is\s+not", " or ") if is_body else ("is", " and ")
            if weakens not in test and re.search(rf"\b{re.escape(text)}\s+{comparison}\s+None\b", test):
                return True
        if isinstance(around, cst.FunctionDef):
            return False
    return False


def _is_without_default(option: cst.Call) -> bool:
    """Whether an option is ``add_argument("--gpu", type=int)``, or has the default ``None``."""
    if keyword(option, "action") is not None or keyword(option, "required") is not None:
        return False
    default = keyword(option, "default")
    return default is None or dotted(default.value) == "None"
