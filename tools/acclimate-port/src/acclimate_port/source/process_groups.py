"""Where a program gives tensors of its device to torch's process groups, which take those of few devices."""

from __future__ import annotations

import ast
import re

from acclimate_port.source.tree import last_python_name, module_of, python_nodes, text_of

MODULE = "<module>"
_WRAPPERS = {
    *("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard"),
    *("Distributed", "DistributedOptimizer"),  # optimizers of cherry and others
}
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast"),
    *("gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    "send",
}
"""Functions of torch.distributed that are given tensors, which are on the device of the backend."""
_OWNERS = {"dist", "distributed", "tdist", "torch_dist", "c10d"}
"""Names under which programs import torch.distributed."""
_USES = re.compile(r"\b(?:" + "|".join(sorted(_WRAPPERS)) + r")\(|\b(?:dist|distributed|c10d)\.\w+\(")


def on_groups(source: str | bytes) -> dict[str, int]:
    """The functions and classes whose code exchanges a model or tensors, and the first line that does.

    ``<module>`` stands for code of the module; nothing if this Python cannot parse it.
    """
    text = text_of(source)
    module = module_of(source) if _USES.search(text) else None
    found: dict[str, int] = {}
    for statement in module.body if module is not None else ():
        is_home = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        home = getattr(statement, "name", MODULE) if is_home else MODULE
        lines = [one.lineno for one in python_nodes(statement) if isinstance(one, ast.Call) and _is_one(one)]
        if lines:
            found.setdefault(home, min(lines))
    return found


def _is_one(call: ast.Call) -> bool:
    name = last_python_name(call.func)
    owner = last_python_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return name in _WRAPPERS or (name in COLLECTIVES and owner in _OWNERS)
