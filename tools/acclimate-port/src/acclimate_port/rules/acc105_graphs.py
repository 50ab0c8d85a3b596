"""The rule ACC105, for CUDA graphs: `torch.cuda.CUDAGraph()`, `with torch.cuda.graph(…)`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name
from acclimate_port.source.tree import has_unpacking, positional
from acclimate_port.source_file import SourceFile

_OF_CUDA = {"capture_begin", "capture_end", "raw_cuda_graph", "register_generator_state"}


class Graphs(Rule[cst.Call]):
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

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
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
        if used := sorted(_OF_CUDA & file.attributes.keys()):
            return self.left(file, node, f"only CUDA's graphs have `{used[0]}`", (node.func,))
        known = {"CUDAGraph": set(), "graph": {"pool", "stream"}}[name]
        said = {argument.keyword.value for argument in node.args if argument.keyword is not None}
        limit = 3 if name == "graph" else 0
        if has_unpacking(node) or said - known or len(positional(node)) > limit:
            return self.left(file, node, f"only CUDA has these arguments of torch.cuda.{name}", (node.func,))
        new = "create_graph" if name == "CUDAGraph" else "capture_to_graph"
        edit = replace(file.span(node.func), f"{file.target.accelerator}.{new}")
        return self.convert(file, node, edit, claims=(node.func,))
