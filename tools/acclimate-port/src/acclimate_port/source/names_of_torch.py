"""The names by which a module knows torch and its parts, by Python's own parser."""

from __future__ import annotations

import ast

from acclimate_port.source.tree import python_nodes


def names_of_torch(module: ast.Module) -> dict[str, str]:
    """The full names of what a module imports of torch: ``torch.nn.functional`` of ``F``.

    ``torch`` is always torch: ``import torch.nn.functional`` binds no other name, and a cell of a notebook
    may rely on an earlier one.
    """
    found = {"torch": "torch"}
    for node in python_nodes(module):
        if isinstance(node, ast.Import):
            found |= {one.asname: one.name for one in node.names if one.asname and _is_torchs(one.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torchs(node.module or ""):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"
