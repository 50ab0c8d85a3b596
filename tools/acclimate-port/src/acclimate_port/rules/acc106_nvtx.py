"""The rule ACC106, for profiler ranges: `torch.cuda.nvtx`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_read
from acclimate_port.source_file import SourceFile


class Ranges(Rule[cst.Attribute | cst.Name]):
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

    def check(self, file: SourceFile, node: cst.Attribute | cst.Name) -> Finding | None:
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
