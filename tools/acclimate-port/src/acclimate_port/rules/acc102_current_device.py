"""The rule ACC102, for `torch.cuda.current_device()`, as a device or as a number."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.dataflow.sinks import Sink, sink_of
from acclimate_port.new_code.targets import Missing
from acclimate_port.rules.acc101_runtime_call import guarded
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name
from acclimate_port.source.tree import Span, called_name
from acclimate_port.source_file import SourceFile

_SPLITS = re.compile(r"(scatter|replicate|gather)(_kwargs)?$")
"""Names of torch's functions that split a batch over devices, and of the methods that call them."""


class CurrentDevice(Rule[cst.Call]):
    """``torch.cuda.current_device()``, used as a device or as a number."""

    code = "ACC102"
    name = "current-device"
    summary = "`torch.cuda.current_device()`, as a device or as a number"
    explanation = """\
`torch.cuda.current_device()` returns a number. In `device=`, `.to(…)` and `.cuda(…)` torch takes that number as a
CUDA device, so a ported program must pass the device's name there. The rule follows the value inside its function,
through choices (`device or …`), unpacked dictionaries (`**options`) and attributes. If each use is a device, the
call becomes `current_device_name()`, otherwise `current_device()`. A value whose name suggests a number, such as
`gpu` or `device_index`, stays a number."""
    examples = (
        Example(
            "import torch\n\n\ndef f(n):\n    return torch.empty(n, device=torch.cuda.current_device())\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "def f(n):\n    return torch.empty(n, device=get_accelerator().current_device_name())\n",
            "import torch\n\n\ndef accelerator_type() -> str:\n"
            '    """The type of the device to use: the accelerator\'s, or "cpu"."""\n'
            "    accelerator = torch.accelerator.current_accelerator(check_available=True)\n"
            '    return "cpu" if accelerator is None else accelerator.type\n\n\n'
            "def f(n):\n    return torch.empty(n, device=accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(x):\n    where = torch.cuda.current_device()\n    return x.to(where)\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "def f(x):\n    where = get_accelerator().current_device_name()\n    return x.to(where)\n",
            None,
        ),
        Example(
            'import torch\n\nprint(f"rank on {torch.cuda.current_device()}")\n',
            "import torch\nfrom acclimate import get_accelerator\n\n"
            'print(f"rank on {get_accelerator().current_device()}")\n',
            "import torch\n\nprint("
            'f"rank on {(torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0)}")\n',
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if cuda_name(file, node.func) != "current_device":
            return None
        if _is_split_over(file, node):
            return self.left(file, node, "torch splits a batch over CUDA devices only", (node.func,))
        if sink_of(file, node) is Sink.DEVICE:
            # torch's own device has no index: kept, it is another one once `set_device` has been called.
            is_kept = file.target.name == "torch" and not isinstance(file.tree.parent(node), cst.Arg)
            unsafe = (
                "it is kept, and after set_device the device without an index is another one"
                if is_kept
                else ""
            )
            name = file.target.current_device_name
            return self.becomes(file, node, name, unsafe=unsafe, claims=(node.func,))
        spelling = file.target.runtime("current_device")
        if isinstance(spelling, Missing):
            return self.left(file, node, spelling.reason, (node.func,))
        rest = Span(file.span(node.func).end, file.span(node).end)
        return self.becomes(
            file, node, *guarded(file, node, spelling, spelling.text, rest), claims=(node.func,)
        )


def _is_split_over(file: SourceFile, number: cst.Call) -> bool:
    """Whether a function that splits or gathers a batch gets a number in a list: ``scatter(x, [number])``."""
    element = file.tree.parent(number)
    held = file.tree.parent(element) if isinstance(element, cst.Element) else None
    given = file.tree.parent(held) if isinstance(held, (cst.List, cst.Tuple)) else None
    call = file.tree.parent(given) if isinstance(given, cst.Arg) else None
    return isinstance(call, cst.Call) and _SPLITS.match(called_name(call) or "") is not None
