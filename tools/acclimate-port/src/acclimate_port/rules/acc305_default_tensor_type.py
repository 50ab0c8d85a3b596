"""The rule ACC305, for `torch.set_default_tensor_type(torch.cuda.FloatTensor)`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.rules.acc304_tensor_type import DTYPES
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, cuda_name, margin_of
from acclimate_port.source.survey import survey
from acclimate_port.source.tree import string_value
from acclimate_port.source_file import SourceFile


class DefaultTensorType(Rule[cst.Call]):
    """``torch.set_default_tensor_type(torch.cuda.FloatTensor)``."""

    code = "ACC305"
    name = "default-tensor-type"
    summary = "`torch.set_default_tensor_type(torch.cuda.FloatTensor)`"
    explanation = """\
The call becomes torch's own replacement: `torch.set_default_device` and `torch.set_default_dtype`. The edit is unsafe,
since a default device also affects functions that the old call did not, such as `torch.randperm` in a data loader.

A default device does not affect `torch.Tensor(n, m)`, which the old call did. The call is left if any ported file
calls `torch.Tensor(…)`, or imports fairscale or apex, whose layers may make their weights with it: a model that is
never moved would have weights on the CPU, on a CUDA machine too. Remove the call by hand, and move the model with
`.to(…)`. Other libraries may also call `torch.Tensor(…)`; the printed reason says so."""
    examples = (
        Example(
            "import torch\n\n\ndef f():\n    torch.set_default_tensor_type(torch.cuda.HalfTensor)\n",
            f"{IMPORTS}\ndef f():\n    torch.set_default_device(get_accelerator().device_name())\n"
            "    torch.set_default_dtype(torch.float16)\n",
            f"{WITH_HELPER}def f():\n    torch.set_default_device(accelerator_type())\n"
            "    torch.set_default_dtype(torch.float16)\n",
        ),
        Example(
            "import torch\nfrom fairscale.nn.model_parallel.layers import ColumnParallelLinear\n\n"
            "torch.set_default_tensor_type(torch.cuda.HalfTensor)\nlayer = ColumnParallelLinear(8, 8)\n",
            None,
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if len(node.args) != 1:
            return None
        if file.tree.qualified(node.func) != "torch.set_default_tensor_type":
            return None
        value = node.args[0].value
        name = cuda_name(file, value) or (string_value(value) or "").removeprefix("torch.cuda.")
        if name not in DTYPES:
            return None
        if file.survey.old_constructor or survey(file.tree.bytes).old_constructor:
            reason = (
                "`torch.Tensor(…)`, and layers that call it, ignore a default device; move the model instead"
            )
            return self.left(file, node, reason, (value,))
        statement = file.tree.parent(node)
        margin = margin_of(file, statement) if isinstance(statement, cst.Expr) else None
        if margin is None:
            return self.left(
                file, node, "the edit needs two statements, and this is not a statement", (value,)
            )
        return self.becomes(
            file,
            node,
            f"{file.torch}.set_default_device({file.target.device_type}){file.tree.newline}{margin}"
            f"{file.torch}.set_default_dtype({file.torch}.{DTYPES[name]})",
            unsafe="a default device also affects functions that the old call did not, but not `torch.Tensor(…)`",
            claims=(value,),
        )
