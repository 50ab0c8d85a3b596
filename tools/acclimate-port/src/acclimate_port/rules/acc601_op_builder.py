"""The rule ACC601, for DeepSpeed's op builders: `CPUAdamBuilder().load()`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source.tree import called_name, modules_of
from acclimate_port.source_file import SourceFile

ON_EVERY_ACCELERATOR = {
    *("AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder"),
}
"""The builders that each accelerator of acclimate has, and whose modules have DeepSpeed's functions."""
_HOMES = ("deepspeed.ops.op_builder.", "op_builder.")
_WITHOUT_OPS = ("deepspeed.ops.op_builder.", "deepspeed.accelerator.")
"""What of DeepSpeed a program may import that runs none of DeepSpeed's own ops."""


class OpBuilders(Rule[cst.Call]):
    """``CPUAdamBuilder().load()``."""

    code = "ACC601"
    name = "op-builder"
    summary = "DeepSpeed's op builders: `CPUAdamBuilder().load()`"
    explanation = """\
`get_accelerator().create_op_builder("CPUAdamBuilder")` returns the accelerator's builder, or `None` if it has no
such op. The rule converts the builders that each accelerator has. The others stay, and so do those of a program that
uses DeepSpeed itself, since DeepSpeed needs its own op. torch has no op builders, so `--to torch` leaves the code."""
    examples = (
        Example(
            "from deepspeed.ops.op_builder import CPUAdamBuilder\n\n\ndef f():\n    return CPUAdamBuilder().load()\n",
            "from acclimate import get_accelerator\nfrom deepspeed.ops.op_builder import CPUAdamBuilder\n\n\n"
            'def f():\n    return get_accelerator().create_op_builder("CPUAdamBuilder").load()\n',
            None,
        ),
        Example(
            "from deepspeed.ops.op_builder import GDSBuilder\n\n\ndef f():\n    return GDSBuilder().load()\n",
            None,
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if node.args:
            return None
        home, _, name = (file.tree.qualified(node.func) or "").rpartition(".")
        if not f"{home}.".startswith(_HOMES) or not name.endswith("Builder"):
            return None
        if stays := _reason_to_keep(file, node, name):
            return self.left(file, node, stays, (node.func,))
        quote = file.quote(node)
        text = f"{file.accelerator}().create_op_builder({quote}{name}{quote})"
        return self.convert(file, node, replace(file.span(node), text), claims=(node.func,))


def _reason_to_keep(file: SourceFile, call: cst.Call, name: str) -> str:
    """Why a builder stays DeepSpeed's; ``""`` if the accelerator's can replace it."""
    target = file.target
    if not isinstance(target, AcclimateTarget):
        return "torch has no op builders; acclimate has some (--to acclimate)"
    if target.of_deepspeed:
        return ""  # DeepSpeed's own accelerator gives DeepSpeed's own builder
    if name not in ON_EVERY_ACCELERATOR:
        return f"not every accelerator has an op builder `{name}`"
    if _is_built_for_deepspeed(file, call) or _uses_deepspeed(file):
        return "the program uses DeepSpeed, which needs its own op"
    return ""


def _uses_deepspeed(file: SourceFile) -> bool:
    """Whether a file imports more of DeepSpeed than its op builders and its accelerator."""
    for statement in file.tree.imports:
        names = [f"{name}." for name in modules_of(statement)]
        if isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
            names = [f"{names[0]}{alias.evaluated_name}." for alias in statement.names]
        if any(name.startswith("deepspeed.") and not name.startswith(_WITHOUT_OPS) for name in names):
            return True
    return False


def _is_built_for_deepspeed(file: SourceFile, call: cst.Call) -> bool:
    """Whether a program builds an op and does not use it: ``CPUAdamBuilder().load()`` as a statement."""
    load = file.tree.parent(call)
    loaded = file.tree.parent(load) if load is not None else None
    is_load = isinstance(loaded, cst.Call) and called_name(loaded) in ("load", "jit_load")
    return is_load and loaded is not None and isinstance(file.tree.parent(loaded), cst.Expr)
