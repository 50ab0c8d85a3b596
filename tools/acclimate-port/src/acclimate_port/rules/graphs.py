"""Rules for the parts of ``torch.cuda`` that other devices have under other names: generators, graphs, NVTX."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.new_code.edits import insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_read
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.tree import has_unpacking, keyword, positional
from acclimate_port.source_file import SourceFile

_HARDWARE = re.compile(r"\bcuda\b")


class DefaultGenerators(Rule):
    """``torch.cuda.default_generators[i]``."""

    code = "ACC104"
    name = "default-generators"
    summary = "`torch.cuda.default_generators[i]`"
    explanation = """\
`get_accelerator().default_generator(i)` returns the default generator of a device. `torch.random.fork_rng` assumes
CUDA devices unless it gets a `device_type`; on a CPU-only machine its list of devices must be empty."""
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

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
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
        given = keyword(call, "devices") or next(iter(positional(call)), None)
        if given is None or has_unpacking(call) or not _HARDWARE.search(file.tree.source(given.value)):
            return None
        end = file.span(call.args[-1].value).end
        condition = host_guard(file, '"')
        devices = insert(file.span(given.value).end, f" if {condition} else []")
        return self.convert(file, call, devices, insert(end, f", device_type={file.target.device_type}"))


class Graphs(Rule):
    """CUDA graphs."""

    code = "ACC105"
    name = "graphs"
    summary = "CUDA graphs: `torch.cuda.CUDAGraph()`, `with torch.cuda.graph(…)`"
    explanation = """\
`get_accelerator().create_graph()` returns a CUDA graph on CUDA. Elsewhere it records the operators and runs them
again. `--to torch` leaves the code: not every torch release from 2.10 on has graphs for every device."""
    examples = (
        Example(
            "import torch\n\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = f(x)\ng.replay()\n",
            "import torch\nfrom acclimate import get_accelerator\n\ng = get_accelerator().create_graph()\n"
            "with get_accelerator().capture_to_graph(g):\n    y = f(x)\ng.replay()\n",
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        name = cuda_name(file, node.func)
        if name not in ("CUDAGraph", "graph"):
            return None
        if not isinstance(file.target, AcclimateTarget):
            return self.left(
                file,
                node,
                "torch has no graph for every device; acclimate has one (--to acclimate)",
                (node.func,),
            )
        known = {"CUDAGraph": set(), "graph": {"pool", "stream"}}[name]
        said = {argument.keyword.value for argument in node.args if argument.keyword is not None}
        limit = 3 if name == "graph" else 0
        if has_unpacking(node) or said - known or len(positional(node)) > limit:
            return self.left(file, node, f"only CUDA has these arguments of torch.cuda.{name}", (node.func,))
        new = "create_graph" if name == "CUDAGraph" else "capture_to_graph"
        edit = replace(file.span(node.func), f"{file.target.accelerator}.{new}")
        return self.convert(file, node, edit, claims=(node.func,))


class Ranges(Rule):
    """NVTX."""

    code = "ACC106"
    name = "nvtx"
    summary = "profiler ranges: `torch.cuda.nvtx`"
    explanation = """\
`get_accelerator()` marks ranges for the vendor's profiler, with NVTX on CUDA. torch has no such call for every
device, so `--to torch` leaves the code."""
    examples = (
        Example(
            'import torch\n\ntorch.cuda.nvtx.range_push("step")\ntorch.cuda.nvtx.range_pop()\n',
            "import torch\nfrom acclimate import get_accelerator\n\n"
            'get_accelerator().range_push("step")\nget_accelerator().range_pop()\n',
            None,
        ),
    )
    nodes = (cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        name = cuda_name(file, node)
        if name is None or not name.startswith("nvtx") or not is_read(file, node):
            return None
        if isinstance(file.tree.parent(node), cst.Attribute) and name == "nvtx":
            return None
        if not isinstance(file.target, AcclimateTarget):
            return self.left(
                file,
                node,
                "torch has no profiler ranges for every device; acclimate has them (--to acclimate)",
            )
        if name in ("nvtx.range_push", "nvtx.range_pop"):
            return self.becomes(file, node, f"{file.target.accelerator}.{name.removeprefix('nvtx.')}")
        if name == "nvtx.range" and not file.target.of_deepspeed:
            return self.becomes(file, node, f"{file.target.accelerator}.nvtx.range")
        return self.left(file, node, f"torch.cuda.{name} is CUDA's own; no other accelerator has it")
