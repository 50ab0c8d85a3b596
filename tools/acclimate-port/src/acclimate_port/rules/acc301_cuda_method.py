"""The rule ACC301, for `x.cuda()`, on tensors and modules."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.class_tests import is_tested_to_be_torchs
from acclimate_port.dataflow.optional_index import may_be_none
from acclimate_port.dataflow.sinks import holds_device_name
from acclimate_port.new_code.edits import insert, replace
from acclimate_port.rules.base import (
    IMPORTS,
    WITH_HELPER,
    Example,
    Finding,
    Rule,
    cuda_name,
)
from acclimate_port.source.tree import (
    Span,
    called_name,
    has_unpacking,
    keyword,
    positional,
)
from acclimate_port.source.values import DEVICE_NAME, Kind, methods
from acclimate_port.source_file import SourceFile

_OTHER_LIBRARIES = {"paddle", "jittor", "mindspore", "cupy", "mxnet", "oneflow"}
"""Libraries whose arrays have a method ``cuda``, or a method like it."""


def is_torch_object(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether the file shows that a value is a tensor or a module."""
    value = file.values.of(node)
    is_known = value.kind in (Kind.TENSOR, Kind.MODULE) and value.certain
    return is_known or is_tested_to_be_torchs(file, node)


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


class CudaMethod(Rule):
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

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
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
        made = receiver
        if isinstance(receiver, cst.Name):
            for assignment in reversed(file.tree.assignments(receiver)):
                holder = file.tree.parent(file.tree.parent(assignment.node) or assignment.node)
                if isinstance(holder, cst.Assign):
                    made = holder.value
                    break
        if isinstance(made, cst.Call):
            name = called_name(made) or ""
            if name in file.survey.with_own_cuda or (isinstance(made.func, cst.Name) and name in own):
                return f"`{name}` defines its own method `cuda`"
        return ""

    def _call(self, file: SourceFile, node: cst.Call, function: cst.Attribute, unsafe: str) -> Finding:
        method = replace(file.span(function.attr), "to")
        device = keyword(node, "device")
        first = positional(node)[0] if positional(node) else device
        if first is None:
            inside = file.span(node.args[0]).start if node.args else file.span(node).end - 1
            text = file.target.device_type + (", " if node.args else "")
            text = f"device={text}" if _is_storage(file, function.value) else text
            if node.args:
                return self.convert(
                    file, node, method, insert(inside, text), unsafe=unsafe, claims=(function,)
                )
            open_paren = file.span(function).end
            kept = file.tree.source(Span(open_paren, file.span(node).end))
            inner = replace(Span(open_paren, file.span(node).end), kept[: kept.index("(") + 1] + text + ")")
            if "".join(kept.split()) != "()":
                return self.left(file, node, "there is a comment inside the call")
            return self.convert(file, node, method, inner, unsafe=unsafe, claims=(function,))
        value = first.value
        place = file.span(value)
        if cuda_name(file, getattr(value, "func", value)) == "current_device" and isinstance(value, cst.Call):
            return self.convert(file, node, method, unsafe=unsafe, claims=(function,))
        if isinstance(value, cst.Name) and holds_device_name(file, value):
            return self.convert(file, node, method, unsafe=unsafe, claims=(function,))
        kind = file.values.of(value)
        if kind.kind is Kind.NONE:
            edit = replace(place, file.target.device_type)
            return self.convert(file, node, method, edit, unsafe=unsafe, claims=(function,))
        if kind.kind in (Kind.DEVICE, Kind.STRING):
            reason = "" if kind.certain else "only its name suggests a device"
            return self.convert(file, node, method, unsafe=unsafe or reason, claims=(function,))
        is_called_device = isinstance(value, cst.Name) and DEVICE_NAME.search(value.value) is not None
        if isinstance(value, cst.IfExp) or (is_called_device and kind.kind is not Kind.NUMBER):
            return self.convert(
                file, node, method, unsafe=unsafe or "it may not be a device", claims=(function,)
            )
        known = kind.kind is Kind.NUMBER and kind.certain
        reason = "" if known else "nothing shows that its argument is a number"
        index = value.value if isinstance(value, cst.Integer) else place
        if file.target.name == "torch" and not known:
            # A name may hold None, which the code for --to torch does not accept.
            reason = "nothing shows that its argument is a number and not None"
        parts = file.device_at(index)
        if file.target.name == "torch" and may_be_none(file, value):
            parts = (f"{file.target.device_type} if {file.tree.source(value)} is None else ", *parts)
        edit = replace(place, *parts)
        return self.convert(file, node, method, edit, unsafe=unsafe or reason, claims=(function,))
