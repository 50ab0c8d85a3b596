"""The rule ACC206, for a number as a device: `x.to(rank)`, `device=rank`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.map_location import loadable
from acclimate_port.dataflow.sinks import DEVICE_METHODS, holds_device_name
from acclimate_port.new_code.edits import replace
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule
from acclimate_port.source.tree import called_name, keyword, positional
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile


class IntegerDevice(Rule[cst.Call]):
    """``x.to(rank)``, where a number means a CUDA device."""

    code = "ACC206"
    name = "integer-device"
    summary = "a number as a device: `x.to(rank)`, `device=rank`"
    explanation = """\
torch takes a number as a device of the accelerator, and raises on a CPU-only machine. The number becomes a device's
name. The edit is safe if the code shows that the value is a number, and unsafe if only a name such as `rank`
suggests it."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x):\n    return x.to(0)\n",
            f"{IMPORTS}\ndef f(x):\n    return x.to(get_accelerator().device_name(0))\n",
            f'{WITH_HELPER}def f(x):\n    return x.to(f"{{accelerator_type()}}:0")\n',
        ),
        Example(
            "import os\n\nimport torch\n\n\ndef f(x):\n"
            '    rank = int(os.environ["LOCAL_RANK"])\n    return torch.ones_like(x, device=rank)\n',
            "import os\n\nimport torch\nfrom acclimate import get_accelerator\n\n\ndef f(x):\n"
            '    rank = int(os.environ["LOCAL_RANK"])\n'
            "    return torch.ones_like(x, device=get_accelerator().device_name(rank))\n",
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        qualified = file.tree.qualified(node.func) or ""
        device = keyword(node, "device")
        arguments = positional(node)
        is_method = isinstance(node.func, cst.Attribute) and called_name(node) in DEVICE_METHODS - {"cuda"}
        if is_method and not qualified:
            device = device or (arguments[0] if arguments else None)
        elif qualified == "torch.device":
            device = arguments[0] if len(arguments) == 1 and len(node.args) == 1 else None
        elif not qualified.startswith("torch.") or qualified.startswith("torch.cuda."):
            return None
        if device is None or device.star:
            return None
        if not isinstance(
            device.value, (cst.Integer, cst.Name, cst.Attribute, cst.BinaryOperation, cst.Subscript)
        ):
            return None
        value = file.values.of(device.value)
        if isinstance(device.value, cst.Name) and holds_device_name(file, device.value):
            return None
        if value.kind is not Kind.NUMBER or (file.target.name == "torch" and file.in_fstring(node)):
            return None
        if (
            isinstance(device.value, cst.Integer) is False
            and not value.certain
            and is_method
            and "torch" not in file.names
        ):
            return None
        said = device.value.attr if isinstance(device.value, cst.Attribute) else device.value
        if not value.certain and isinstance(said, cst.Name) and said.value in file.survey.device_names:
            return self.left(file, device.value, f"`{said.value}` is a device's name elsewhere")
        place = file.span(device.value)
        parts = file.device_at(device.value.value if isinstance(device.value, cst.Integer) else place)
        parts = loadable(file, device.value, *parts)
        unsafe = "" if value.certain else "only its name suggests a number"
        edit = replace(place, *parts)
        return self.convert(file, device.value, edit, unsafe=unsafe)
