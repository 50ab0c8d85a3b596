"""The rule ACC402, for the state of CUDA's autocast: `torch.is_autocast_enabled()`, `torch.get_autocast_gpu_dtype()`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import insert, replace
from acclimate_port.rules.base import (
    WITH_HELPER,
    Example,
    Finding,
    Rule,
    unsafe_at_import,
)
from acclimate_port.source.tree import Span, has_unpacking
from acclimate_port.source_file import SourceFile


class AutocastState(Rule):
    """``torch.get_autocast_gpu_dtype()``."""

    code = "ACC402"
    name = "autocast-state"
    summary = "the state of CUDA's autocast: `torch.is_autocast_enabled()`, `torch.get_autocast_gpu_dtype()`"
    explanation = """\
Without a device type these functions of torch read and set the autocast state of CUDA. They also take the device
type: `torch.is_autocast_enabled(get_accelerator().device_name())`."""
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
            "    torch.set_autocast_enabled(get_accelerator().device_name(), on)\n"
            "    torch.set_autocast_dtype(get_accelerator().device_name(), torch.float16)\n",
            f"{WITH_HELPER}def f(on):\n    torch.set_autocast_enabled(accelerator_type(), on)\n"
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

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        new, arguments = self._NEW.get(file.tree.qualified(node.func) or "", ("", 0))
        if not new or len(node.args) != arguments or has_unpacking(node):
            return None
        if any(argument.keyword is not None for argument in node.args):
            return self.left(file, node, "no rule converts these arguments")
        device, unsafe = file.target.device_type, unsafe_at_import(file, node)
        rename = replace(file.span(node.func), f"{file.torch}.{new}")
        if node.args:
            add = insert(file.span(node.args[0]).start, f"{device}, ")
            return self.convert(file, node, rename, add, unsafe=unsafe)
        rest = Span(file.span(node.func).end, file.span(node).end)
        return self.convert(file, node, rename, replace(rest, f"({device})"), unsafe=unsafe)
