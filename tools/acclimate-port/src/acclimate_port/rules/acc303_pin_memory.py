"""The rule ACC303, for `x.pin_memory()`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.class_tests import is_tested_to_be_torchs
from acclimate_port.new_code.edits import Part, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import IMPORTS, Example, Finding, Rule, without_argument
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.tree import Span, called_name, has_unpacking, keyword, string_value
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile

_PINNED_FACTORIES = {
    *("torch.empty", "torch.zeros", "torch.ones", "torch.full", "torch.rand", "torch.randn", "torch.randint"),
    *("torch.arange", "torch.tensor", "torch.empty_like", "torch.zeros_like", "torch.ones_like"),
    *("torch.full_like", "torch.rand_like", "torch.randn_like", "torch.empty_strided", "torch.eye"),
    *("torch.linspace", "torch.randperm"),
}


class PinMemory(Rule[cst.Call]):
    """``x.pin_memory()``."""

    code = "ACC303"
    name = "pin-memory"
    summary = "`x.pin_memory()`"
    explanation = """\
`x.pin_memory()` raises on a CPU-only machine; `get_accelerator().pin_memory(x)` returns `x` there. `--to torch` adds
a test around the call, if it has none and `x` is a plain name. If the same expression creates the tensor, the test
becomes the `pin_memory` argument of that call. `pin_memory=True` also raises, and becomes a test of the device. In a
`DataLoader` it only warns, and stays; `pin_memory_device="cuda"` is removed, as torch pins for the device that it
finds. A branch on the device is edited only together with the pinning inside it. A test by which the file itself pins
memory is unsafe: some releases of torch refuse to pin on Macs, where such a program pinned nothing."""
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
            f"{IMPORTS}\ndef f(x: torch.Tensor, device):\n    if device.type == get_accelerator().device_name() "
            "and get_accelerator().device_name() != 'cpu':\n"
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

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
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
        if isinstance(receiver, cst.Call) and called_name(receiver) in ("super", "get_accelerator"):
            return None
        is_own = isinstance(receiver, cst.Name) and receiver.value == "self"
        if (
            node.args or (is_own and file.tree.around(node, cst.ClassDef))
        ) and node.func.attr.value in file.methods:
            return self.left(
                file, node, "it is a method of the program's own class, which pins as torch does"
            )
        if is_own and file.tree.around(node, cst.ClassDef):
            return None
        around = [one for one in file.tree.ancestors(node) if isinstance(one, (cst.FunctionDef, cst.IfExp))]
        if any(isinstance(one, cst.FunctionDef) and one.name.value == "pin_memory" for one in around):
            return self.left(file, node, "a class's own method pins it, whose caller decides whether to pin")
        if node.args:
            return None
        is_tensor = file.values.of(receiver).kind is Kind.TENSOR or is_tested_to_be_torchs(file, receiver)
        unsafe = "" if is_tensor else "it may not be a tensor"
        value = file.span(receiver)
        if isinstance(file.target, AcclimateTarget):
            parts: tuple[Part, ...] = (f"{file.target.accelerator}.pin_memory(", value, ")")
            return self.becomes(file, node, *parts, unsafe=unsafe)
        if file.is_guarded(node) or any(isinstance(one, cst.IfExp) for one in around):
            return None
        if (
            isinstance(receiver, cst.Call)
            and _makes_tensor(file, receiver)
            and receiver.args
            and not receiver.lpar
        ):
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
