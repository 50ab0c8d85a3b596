"""Rules for methods of tensors and modules."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.false_on_host import must_be_false_on_host
from acclimate_port.conditions.host_answers import may_be_true_on_host, other_kinds
from acclimate_port.conditions.mps_streams import needs_streams
from acclimate_port.dataflow.optional_index import may_be_none
from acclimate_port.dataflow.sinks import holds_device_name
from acclimate_port.new_code.edits import Part, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import (
    IMPORTS,
    WITH_HELPER,
    Example,
    Finding,
    Rule,
    cuda_name,
    is_assigned,
    without_argument,
)
from acclimate_port.rules.comparison_edits import host_guard, host_test
from acclimate_port.rules.devices import unsafe_at_import
from acclimate_port.source.tree import (
    Span,
    called_name,
    has_unpacking,
    keyword,
    positional,
    string_value,
    walk,
)
from acclimate_port.source.values import DEVICE_NAME, Kind, methods
from acclimate_port.source_file import SourceFile

_OWN_OBJECTS = re.compile(
    r"^(self|cls|args|opt|opts|options|cfg|config|conf|hparams|hps|FLAGS|params|flags)$"
)
_OTHER_LIBRARIES = {"paddle", "jittor", "mindspore", "cupy", "mxnet", "oneflow"}
"""Libraries whose arrays have a method ``cuda``, or a method like it."""
_PINNED_FACTORIES = {
    *("torch.empty", "torch.zeros", "torch.ones", "torch.full", "torch.rand", "torch.randn", "torch.randint"),
    *("torch.arange", "torch.tensor", "torch.empty_like", "torch.zeros_like", "torch.ones_like"),
    *("torch.full_like", "torch.rand_like", "torch.randn_like", "torch.empty_strided", "torch.eye"),
    *("torch.linspace", "torch.randperm"),
}


def _is_torch_object(file: SourceFile, node: cst.CSTNode) -> bool:
    return file.values.of(node).kind in (Kind.TENSOR, Kind.MODULE) and file.values.of(node).certain


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
        unsafe = "" if _is_torch_object(file, receiver) else "it may be neither a tensor nor a module"
        unsafe = unsafe or unsafe_at_import(file, node)
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
            for assignment in file.tree.assignments(receiver):
                holder = file.tree.parent(file.tree.parent(assignment.node) or assignment.node)
                if isinstance(holder, cst.Assign):
                    made = holder.value
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
        return self.convert(file, node, method, edit, unsafe=unsafe or reason, claims=(function, value))


class IsCuda(Rule):
    """``x.is_cuda``."""

    code = "ACC302"
    name = "is-cuda"
    summary = "`x.is_cuda`"
    explanation = """\
`x.is_cuda` becomes `get_accelerator().on_accelerator(x)` if the program would otherwise end (`assert x.is_cuda`), or
if the branch only moves tensors. Otherwise, and with `--to torch`, it becomes a comparison of the device type with
`"cpu"`, since it must stay false on a CPU. The edit is safe if the code shows that `x` is a tensor. An attribute
`is_cuda` of `self` or of a program's options is left, and so is a test that guards CUDA kernels, as in
[ACC204](ACC204.md). In code that TorchScript compiles, both targets compare the device type."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    assert x.is_cuda\n",
            f"{IMPORTS}\ndef f(x: torch.Tensor):\n    assert get_accelerator().on_accelerator(x)\n",
            'import torch\n\n\ndef f(x: torch.Tensor):\n    assert (x.device.type != "cpu")\n',
        ),
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if x.is_cuda else x\n",
            'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if (x.device.type != "cpu") else x\n',
            'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if (x.device.type != "cpu") else x\n',
        ),
        Example("def f(args):\n    return args.is_cuda\n", None, None),
    )
    nodes = (cst.Attribute,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Attribute) or node.attr.value != "is_cuda":
            return None
        if file.tree.qualified(node) is not None:
            return None
        parent = file.tree.parent(node)
        own = isinstance(node.value, cst.Name) and _OWN_OBJECTS.match(node.value.value)
        if is_assigned(file, node) or own or (isinstance(parent, cst.Call) and parent.func is node):
            return self.exempt(file, node, "an attribute that the program defines")
        if _is_something_else(file, node):
            return self.left(file, node, "`isinstance` beside it names a class that is not a tensor")
        if isinstance(parent, cst.FormattedStringExpression):
            return self.exempt(file, node, "it is part of a message")
        unsafe = "" if _is_torch_object(file, node.value) else "it may not be a tensor"
        value = file.span(node.value)
        host_has_own = must_be_false_on_host(file, node) or not may_be_true_on_host(file, node)
        may_ask = not host_has_own and not file.torchscript.holds(node)
        if isinstance(file.target, AcclimateTarget) and may_ask:
            parts: tuple[Part, ...] = (f"{file.target.accelerator}.on_accelerator(", value, ")")
        else:
            unsafe = unsafe or "a tensor may also be on a device without memory, such as meta"
            kinds = ("mps",) if needs_streams(file, node) else other_kinds(file, node) if host_has_own else ()
            parts = ("(", value, f".device.type {host_test(file.quote(node), kinds)})")
        if node.lpar:
            parts = ("(", *parts, ")")
        return self.becomes(file, node, *parts, unsafe=unsafe)


class PinMemory(Rule):
    """``x.pin_memory()``."""

    code = "ACC303"
    name = "pin-memory"
    summary = "`x.pin_memory()`"
    explanation = """\
`x.pin_memory()` raises on a CPU-only machine; `get_accelerator().pin_memory(x)` returns `x` there. `--to torch` adds
a test around the call, if it has none and `x` is a plain name. If the same expression creates the tensor, the test
becomes the `pin_memory` argument of that call. `pin_memory=True` also raises, and becomes a test of the device. In a
`DataLoader` it only warns, and stays; `pin_memory_device="cuda"` is removed, as torch pins for the device that it
finds. A branch on the device is edited only together with the pinning inside it."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    return x.pin_memory()\n",
            f"{IMPORTS}\ndef f(x: torch.Tensor):\n    return get_accelerator().pin_memory(x)\n",
            "import torch\n\n\ndef f(x: torch.Tensor):\n"
            "    return (x.pin_memory() if torch.accelerator.is_available() else x)\n",
        ),
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor, device):\n    if device.type == 'cuda':\n"
            "        x = x.pin_memory()\n    return x.to(device)\n",
            f"{IMPORTS}\ndef f(x: torch.Tensor, device):\n    if device.type == get_accelerator().device_name():\n"
            "        x = get_accelerator().pin_memory(x)\n    return x.to(device)\n",
            "import torch\n\n\ndef f(x: torch.Tensor, device):\n    if device.type != 'cpu':\n"
            "        x = x.pin_memory()\n    return x.to(device)\n",
        ),
        Example(
            "import torch\n\n\ndef f(n):\n    return torch.empty(n, pin_memory=True), torch.zeros(n).pin_memory()\n",
            f"{IMPORTS}\ndef f(n):\n    return torch.empty(n, pin_memory=get_accelerator().device_name() != "
            '"cpu"), get_accelerator().pin_memory(torch.zeros(n))\n',
            "import torch\n\n\ndef f(n):\n    return torch.empty(n, pin_memory=torch.accelerator.is_available()), "
            "torch.zeros(n, pin_memory=torch.accelerator.is_available())\n",
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        device = keyword(node, "pin_memory_device")
        if device is not None and (string_value(device.value) or "").startswith("cuda"):
            return self.convert(file, node, without_argument(file, node, device), claims=(device.value,))
        if _pins_new_tensor(file, node):
            return self._argument(file, node)
        if not isinstance(node.func, cst.Attribute):
            return None
        if node.func.attr.value != "pin_memory" or file.tree.qualified(node.func) is not None:
            return None
        receiver = node.func.value
        around = next(
            (ancestor for ancestor in file.tree.ancestors(node) if isinstance(ancestor, cst.ClassDef)), None
        )
        if isinstance(receiver, cst.Call) and called_name(receiver) in ("super", "get_accelerator"):
            return None
        if isinstance(receiver, cst.Name) and receiver.value == "self" and around is not None:
            return None
        if any(
            isinstance(ancestor, cst.FunctionDef) and ancestor.name.value == "pin_memory"
            for ancestor in file.tree.ancestors(node)
        ):
            return None  # a batch class's own method; its caller decides whether to pin
        if node.args:
            return None
        unsafe = "" if file.values.of(receiver).kind is Kind.TENSOR else "it may not be a tensor"
        value = file.span(receiver)
        if isinstance(file.target, AcclimateTarget):
            parts: tuple[Part, ...] = (f"{file.target.accelerator}.pin_memory(", value, ")")
            return self.becomes(file, node, *parts, unsafe=unsafe)
        already = any(isinstance(ancestor, cst.IfExp) for ancestor in file.tree.ancestors(node))
        if file.is_guarded(node) or already:
            return None
        if _makes_tensor(file, receiver) and isinstance(receiver, cst.Call) and receiver.args:
            last = receiver.args[-1]
            text = f", pin_memory={file.target.not_host}"
            keep = insert(file.span(last.value).end, text)
            rest = replace(Span(file.span(receiver).end, file.span(node).end))
            return self.convert(file, node, keep, rest, claims=(node.func,))
        if not isinstance(receiver, cst.Name):
            return self.left(
                file, node, "a test around it would evaluate the tensor expression a second time"
            )
        text = f" if {file.target.not_host} else {receiver.value})"
        return self.becomes(file, node, "(", file.span(node), text, unsafe=unsafe)

    def _argument(self, file: SourceFile, node: cst.Call) -> Finding | None:
        """``torch.empty(n, pin_memory=True)``."""
        given = keyword(node, "pin_memory")
        if given is None or file.is_guarded(node):
            return None
        return self.becomes(file, given.value, host_guard(file, file.quote(node)))


def _is_something_else(file: SourceFile, question: cst.Attribute) -> bool:
    """Whether the code shows that ``x`` is not a tensor: ``isinstance(x, Data) and x.is_cuda``."""
    at = file.tree.parent(question)
    held = file.tree.source(question.value)
    while isinstance(at, cst.BooleanOperation):
        for descendant in walk(at):
            if (
                not isinstance(descendant, cst.Call)
                or called_name(descendant) != "isinstance"
                or len(descendant.args) != 2
            ):
                continue
            if file.tree.source(descendant.args[0].value) == held:
                return (
                    re.search(r"Tensor|Parameter|Storage", file.tree.source(descendant.args[1].value)) is None
                )
        at = file.tree.parent(at)
    return False


def _makes_tensor(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a call is of a torch function that creates a tensor and takes ``pin_memory``."""
    if not isinstance(node, cst.Call) or has_unpacking(node) or keyword(node, "pin_memory") is not None:
        return False
    return file.tree.qualified(node.func) in _PINNED_FACTORIES


def _pins_new_tensor(file: SourceFile, node: cst.Call) -> bool:
    """Whether a call makes a tensor in pinned memory."""
    given = keyword(node, "pin_memory")
    pins = given is not None and isinstance(given.value, cst.Name) and given.value.value == "True"
    return pins and file.tree.qualified(node.func) in _PINNED_FACTORIES
