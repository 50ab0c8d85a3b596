"""The rule ACC601, for DeepSpeed's op builders: `CPUAdamBuilder().load()`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import replace
from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source_file import SourceFile


class OpBuilders(Rule[cst.Call]):
    """``CPUAdamBuilder().load()``."""

    code = "ACC601"
    name = "op-builder"
    summary = "DeepSpeed's op builders: `CPUAdamBuilder().load()`"
    explanation = """\
`get_accelerator().create_op_builder("CPUAdamBuilder")` returns the accelerator's builder, or `None` if it has no
such op. torch has no op builders, so `--to torch` leaves the code."""
    examples = (
        Example(
            "from deepspeed.ops.op_builder import CPUAdamBuilder\n\n\ndef f():\n    return CPUAdamBuilder().load()\n",
            "from acclimate import get_accelerator\nfrom deepspeed.ops.op_builder import CPUAdamBuilder\n\n\n"
            'def f():\n    return get_accelerator().create_op_builder("CPUAdamBuilder").load()\n',
            None,
        ),
    )
    nodes = (cst.Call,)
    targets = ("acclimate",)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if node.args:
            return None
        name = file.tree.qualified(node.func) or ""
        last = name.rpartition(".")[2]
        if not name.startswith(("deepspeed.ops.op_builder.", "op_builder.")) or not last.endswith("Builder"):
            return None
        quote = file.quote(node)
        text = f"{file.accelerator}().create_op_builder({quote}{last}{quote})"
        return self.convert(file, node, replace(file.span(node), text), claims=(node.func,))
