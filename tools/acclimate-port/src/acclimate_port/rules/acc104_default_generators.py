"""The rule ACC104, for `torch.cuda.default_generators[i]`."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.new_code.edits import insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.tree import argument_of, has_unpacking, keyword, walk
from acclimate_port.source_file import SourceFile

_HARDWARE = re.compile(r"\bcuda\b")
_STEPS = 4
"""How many names are followed to what gives a list of devices."""


class DefaultGenerators(Rule[cst.Subscript | cst.Attribute | cst.Call]):
    """``torch.cuda.default_generators[i]``."""

    code = "ACC104"
    name = "default-generators"
    summary = "`torch.cuda.default_generators[i]`"
    explanation = """\
`get_accelerator().default_generator(i)` returns the default generator of a device. `torch.random.fork_rng` assumes
CUDA devices unless it gets a `device_type`; on a CPU-only machine its list of devices must be empty. Names that
hold the devices are followed. Seeds inside it are
ported with its devices. A generator beside torch.cuda's `_lazy_call` stays."""
    examples = (
        Example(
            "import torch\n\ng = torch.cuda.default_generators[i]\n",
            "import torch\nfrom acclimate import get_accelerator\n\ng = get_accelerator().default_generator(i)\n",
            None,
        ),
        Example(
            "import torch\n\n\ndef f():\n    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):\n        pass\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "def f():\n    with torch.random.fork_rng(devices=[get_accelerator().current_device()] "
            'if get_accelerator().device_name() != "cpu" else [], device_type=get_accelerator().device_name()):\n        pass\n',
            "import torch\n\n\ndef accelerator_type() -> str:\n"
            '    """The type of the device to use: the accelerator\'s, or "cpu"."""\n'
            "    accelerator = torch.accelerator.current_accelerator(check_available=True)\n"
            '    return "cpu" if accelerator is None else accelerator.type\n\n\n'
            "def f():\n    with torch.random.fork_rng(devices=[(torch.accelerator.current_device_index() "
            "if torch.accelerator.is_available() else 0)] if torch.accelerator.is_available() else [], "
            "device_type=accelerator_type()):\n        pass\n",
        ),
    )
    nodes = (cst.Subscript, cst.Attribute, cst.Call)

    def check(self, file: SourceFile, node: cst.Subscript | cst.Attribute | cst.Call) -> Finding | None:
        if isinstance(node, cst.Call):
            return self._fork(file, node)
        if isinstance(node, cst.Attribute):
            if cuda_name(file, node) != "default_generators":
                return None
            return self.left(
                file,
                node,
                "other accelerators have no sequence of generators, only a function that returns one by index",
            )
        if not isinstance(node, cst.Subscript) or cuda_name(file, node.value) != "default_generators":
            return None
        if "_lazy_call" in file.names:
            reason = "it must match torch.cuda's `_lazy_call`, which no rule converts"
            return self.left(file, node, reason, (node.value,))
        element = node.slice[0].slice
        if not isinstance(element, cst.Index) or len(node.slice) != 1:
            return None
        if not isinstance(file.target, AcclimateTarget):
            text = f"{file.torch}.get_device_module({file.target.device_type}).default_generators"
            return self.convert(file, node, replace(file.span(node.value), text), claims=(node.value,))
        inside = file.span(element.value)
        return self.becomes(
            file, node, f"{file.target.accelerator}.default_generator(", inside, ")", claims=(node.value,)
        )

    def _fork(self, file: SourceFile, call: cst.Call) -> Finding | None:
        """``torch.random.fork_rng(devices=[torch.cuda.current_device()])``."""
        if file.tree.qualified(call.func) != "torch.random.fork_rng" or keyword(call, "device_type"):
            return None
        given = argument_of(call, "devices", 0)
        if given is None or has_unpacking(call) or not self._is_for_cuda(file, given.value, _STEPS):
            return None
        end = file.span(call.args[-1].value).end
        condition = host_guard(file, '"')
        devices = insert(file.span(given.value).end, f" if {condition} else []")
        return self.convert(file, call, devices, insert(end, f", device_type={file.target.device_type}"))

    def _is_for_cuda(self, file: SourceFile, devices: cst.BaseExpression, steps: int) -> bool:
        """Whether code that gives the devices names CUDA; the names in it are followed to their values."""
        if _HARDWARE.search(file.tree.source(devices)):
            return True
        names = [one for one in walk(devices) if isinstance(one, cst.Name)] if steps else []
        values = (value for name in names for value in file.bound_values(name) if value is not None)
        return any(self._is_for_cuda(file, value, steps - 1) for value in values)
