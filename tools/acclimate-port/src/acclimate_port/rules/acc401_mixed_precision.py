"""The rule ACC401, for `torch.cuda.amp`: `autocast`, `GradScaler`, `custom_fwd`, `custom_bwd`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import (
    WITH_HELPER,
    Example,
    Finding,
    Rule,
    cuda_name,
    is_read,
    unsafe_at_import,
)
from acclimate_port.source.tree import Span, called_name, has_unpacking, positional
from acclimate_port.source_file import SourceFile

_PLAIN = {
    "amp.autocast": "autocast", "amp.autocast_mode.autocast": "autocast",
    "amp.GradScaler": "GradScaler", "amp.grad_scaler.GradScaler": "GradScaler",
    "amp.custom_fwd": "custom_fwd", "amp.custom_bwd": "custom_bwd",
    "amp.autocast_mode.custom_fwd": "custom_fwd", "amp.autocast_mode.custom_bwd": "custom_bwd",
}  # fmt: skip


_ARGUMENTS = {"autocast": ("enabled", "dtype", "cache_enabled")}


_ASKS_FOR_CLASS = {"isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance"}


class MixedPrecision(Rule):
    """``torch.cuda.amp``."""

    code = "ACC401"
    name = "mixed-precision"
    summary = "`torch.cuda.amp`: `autocast`, `GradScaler`, `custom_fwd`, `custom_bwd`"
    explanation = """\
`get_accelerator().amp` has the same classes and decorators with the same arguments. `--to torch` passes the device type
as the first argument of `torch.amp.autocast` and `torch.amp.GradScaler`. Without `dtype` each device uses its default:
float16 on CUDA, as before, and bfloat16 on a CPU, where a GradScaler is not needed.

A decorator in a class runs at import, so its edit makes the program choose the accelerator then, and is unsafe."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x, enabled):\n    with torch.cuda.amp.autocast(enabled, dtype=torch.float16):\n"
            "        return x @ x\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\ndef f(x, enabled):\n"
            "    with get_accelerator().amp.autocast(enabled, dtype=torch.float16):\n        return x @ x\n",
            f"{WITH_HELPER}def f(x, enabled):\n"
            "    with torch.amp.autocast(accelerator_type(), enabled=enabled, dtype=torch.float16):\n"
            "        return x @ x\n",
        ),
        Example(
            "import torch\nfrom torch.cuda.amp import GradScaler\n\n\ndef f():\n    return GradScaler(enabled=True)\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "def f():\n    return get_accelerator().amp.GradScaler(enabled=True)\n",
            f"{WITH_HELPER}def f():\n    return torch.amp.GradScaler(accelerator_type(), enabled=True)\n",
        ),
        Example(
            "import torch\n\n\nclass F(torch.autograd.Function):\n    @staticmethod\n    @torch.cuda.amp.custom_fwd\n"
            "    def forward(ctx, x):\n        return x\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "class F(torch.autograd.Function):\n    @staticmethod\n    @get_accelerator().amp.custom_fwd\n"
            "    def forward(ctx, x):\n        return x\n",
            f"{WITH_HELPER}class F(torch.autograd.Function):\n    @staticmethod\n"
            "    @torch.amp.custom_fwd(device_type=accelerator_type())\n    def forward(ctx, x):\n        return x\n",
        ),
    )
    nodes = (cst.Call, cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        function = node.func if isinstance(node, cst.Call) else node
        name = cuda_name(file, function)
        if name is None or name.partition(".")[0] != "amp" or not is_read(file, function):
            return None
        parent = file.tree.parent(node)
        is_part = isinstance(parent, cst.Attribute) or (isinstance(parent, cst.Call) and parent.func is node)
        if is_part and not isinstance(node, cst.Call):
            return None
        if file.tree.in_annotation(node):
            return None
        plain = _PLAIN.get(name)
        target = file.target
        if plain is None:
            return self.left(file, node, f"torch.cuda.{name} has no equivalent on every device", (function,))
        unsafe = unsafe_at_import(file, node)
        call = file.tree.parent(parent) if isinstance(parent, cst.Arg) else None
        if plain == "GradScaler" and isinstance(call, cst.Call) and called_name(call) in _ASKS_FOR_CLASS:
            # A library's scaler is an instance of torch.amp.GradScaler, the base class of each device's scaler.
            return self.becomes(file, node, f"{file.torch}.amp.GradScaler")
        if isinstance(target, AcclimateTarget) and not target.of_deepspeed:
            edit = replace(file.span(function), f"{target.accelerator}.amp.{plain}")
            return self.convert(file, node, edit, unsafe=unsafe, claims=(function,))
        if isinstance(node, cst.Call):
            return self._call(file, node, plain, unsafe)
        if plain.startswith("custom_") and isinstance(parent, cst.Decorator):
            text = f"{file.torch}.amp.{plain}(device_type={target.device_type})"
            return self.becomes(file, node, text, unsafe=unsafe)
        return self.left(
            file, node, f"torch.amp.{plain} needs the device type as an argument, and this use is not a call"
        )

    def _call(self, file: SourceFile, node: cst.Call, plain: str, unsafe: str) -> Finding:
        function = replace(file.span(node.func), f"{file.torch}.amp.{plain}")
        if has_unpacking(node):
            return self.left(file, node, "no rule converts these arguments", (node.func,))
        word = "device_type=" if plain.startswith("custom_") else ""
        text = f"{word}{file.target.device_type}"
        edits: list[Edit] = [function]
        names = _ARGUMENTS.get(plain, ())
        arguments = positional(node)
        if plain == "autocast":
            if len(arguments) > len(names):
                return self.left(file, node, "no rule converts these arguments", (node.func,))
            edits += [
                insert(file.span(argument.value).start, f"{name}=")
                for argument, name in zip(arguments, names, strict=False)
            ]
        if not node.args:
            rest = Span(file.span(node.func).end, file.span(node).end)
            if file.tree.source(rest).replace(" ", "") != "()":
                return self.left(file, node, "there is a comment inside the call", (node.func,))
            edits.append(replace(rest, f"({text})"))
        elif word:
            edits.append(insert(file.span(node.args[-1].value).end, f", {text}"))
        else:
            edits.insert(1, insert(file.span(node.args[0]).start, f"{text}, "))
        return self.convert(file, node, *edits, unsafe=unsafe, claims=(node.func,))
