"""The rule ACC402, for the state of CUDA's autocast: `torch.is_autocast_enabled()`, `torch.get_autocast_gpu_dtype()`."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.new_code.edits import insert, replace
from acclimate_port.rules.acc401_mixed_precision import WITHIN_HOSTS, also_an_accelerator
from acclimate_port.rules.base import WITH_HELPER, Example, Finding, Rule
from acclimate_port.source.tree import Span, has_unpacking, string_value
from acclimate_port.source_file import SourceFile

_ASKS_FOR_CUDA = re.compile(r"""[!=]=\s*["']cuda\b|["']cuda["']\s*(?:[!=]=|(?:not\s+)?in\b)""")


class AutocastState(Rule[cst.Call]):
    """``torch.get_autocast_gpu_dtype()``."""

    code = "ACC402"
    name = "autocast-state"
    summary = "the state of CUDA's autocast: `torch.is_autocast_enabled()`, `torch.get_autocast_gpu_dtype()`"
    explanation = """\
Without a device type these functions of torch read and set the autocast state of CUDA. They also take the device
type: `torch.is_autocast_enabled(get_accelerator().device_name())`.

CUDA's autocast does nothing on a CPU-only machine, so `set_autocast_enabled` stays without effect there. The dtype of
the CPU's autocast is bfloat16 and CUDA's is float16, so reading it is unsafe unless the code asks first whether autocast
is on. Each edit is unsafe if the program, or a trainer of another library that it uses, also autocasts on a CPU, whose
state the ported code would read or change; and so is a question whose branch asks whether a device is CUDA's."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x):\n    if torch.is_autocast_enabled():\n"
            "        return x.to(torch.get_autocast_gpu_dtype())\n    return x\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\ndef f(x):\n"
            "    if torch.is_autocast_enabled(get_accelerator().device_name()):\n"
            "        return x.to(torch.get_autocast_dtype(get_accelerator().device_name()))\n    return x\n",
            f"{WITH_HELPER}def f(x):\n    if torch.is_autocast_enabled(accelerator_type()):\n"
            "        return x.to(torch.get_autocast_dtype(accelerator_type()))\n    return x\n",
        ),
        Example(
            "import torch\n\n\ndef f(on):\n    torch.set_autocast_enabled(on)\n"
            "    torch.set_autocast_gpu_dtype(torch.float16)\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\ndef f(on):\n"
            '    torch.set_autocast_enabled(get_accelerator().device_name(), on and get_accelerator().device_name() != "cpu")\n'
            "    torch.set_autocast_dtype(get_accelerator().device_name(), torch.float16)\n",
            f"{WITH_HELPER}def f(on):\n"
            "    torch.set_autocast_enabled(accelerator_type(), on and torch.accelerator.is_available())\n"
            "    torch.set_autocast_dtype(accelerator_type(), torch.float16)\n",
        ),
    )
    nodes = (cst.Call,)

    _NEW = {  # noqa: RUF012 - a constant
        "torch.get_autocast_gpu_dtype": ("get_autocast_dtype", 0),
        "torch.is_autocast_enabled": ("is_autocast_enabled", 0),
        "torch.set_autocast_gpu_dtype": ("set_autocast_dtype", 1),
        "torch.set_autocast_enabled": ("set_autocast_enabled", 1),
    }

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        name = file.tree.qualified(node.func) or ""
        new, arguments = self._NEW.get(name, (name.rpartition(".")[2], 0))
        device, values = file.target.device_type, node.args
        claims: tuple[cst.CSTNode, ...] = ()
        is_named = bool(node.args) and string_value(node.args[0].value) == "cuda"
        if is_named and name in {f"torch.{known}" for known, _ in self._NEW.values()}:
            edits = [replace(file.span(node.args[0].value), device)]
            values, claims = node.args[1:], (node.args[0].value,)
        elif name not in self._NEW or len(node.args) != arguments or has_unpacking(node):
            return None
        elif any(argument.keyword is not None for argument in node.args):
            return self.left(file, node, "no rule converts these arguments")
        else:
            edits = [replace(file.span(node.func), f"{file.torch}.{new}")]
            rest = Span(file.span(node.func).end, file.span(node).end)
            edits.append(
                insert(file.span(node.args[0]).start, f"{device}, ")
                if node.args
                else replace(rest, f"({device})")
            )
        is_guarded = file.is_guarded(node)
        if new == "set_autocast_enabled" and values and not is_guarded:
            edits += also_an_accelerator(file, values[0].value)
        unsafe = ""
        if file.autocasts_on_host and not is_guarded:
            unsafe = WITHIN_HOSTS
        elif new == "is_autocast_enabled" and not is_guarded and _decides_about_cuda(file, node):
            unsafe = "what runs where autocast is on asks whether a device is CUDA's"
        elif new == "get_autocast_dtype" and not is_guarded and not _is_asked_first(file, node):
            unsafe = "on a host it gives bfloat16, the dtype of the CPU's autocast, and not CUDA's float16"
        return self.convert(file, node, *edits, unsafe=unsafe, claims=claims)


def _decides_about_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether the branch of a question has branches of its own for the type of a device."""
    for below, around in file.tree.upwards(node):
        if isinstance(around, cst.If) and below is around.test:
            return _ASKS_FOR_CUDA.search(file.tree.source(around.body)) is not None
    return False


def _is_asked_first(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node runs only where autocast is on: ``if torch.is_autocast_enabled():``."""
    for below, around in file.tree.upwards(node):
        test = around.test if isinstance(around, (cst.If, cst.IfExp)) and below is around.body else None
        if test is not None and "is_autocast_enabled(" in file.tree.source(test):
            return True
    return False
