"""Tensors that the file shows to be in the host's memory."""

from __future__ import annotations

import libcst as cst

from acclimate_port.source.tree import called_name, has_unpacking, keyword
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile

_MAKE = {
    *("from_numpy", "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm"),
    *("arange", "linspace", "eye", "Tensor", "FloatTensor", "LongTensor", "IntTensor", "ByteTensor"),
}
"""Functions of torch that make a tensor on the host, or on the default device."""
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "Variable"}
"""Functions of torch whose tensor is where their first argument is."""
_KEEP_DEVICE = {
    *("float", "half", "double", "long", "int", "bool", "byte", "contiguous", "clone", "detach", "view"),
    *("reshape", "unsqueeze", "squeeze", "expand", "repeat", "flatten", "fill_", "zero_", "normal_"),
}
_LOOPS = {"enumerate", "tqdm", "iter"}
_DEPTH = 4


def is_on_host(file: SourceFile, node: cst.CSTNode, depth: int = _DEPTH) -> bool:
    """Whether the file shows that a tensor is on the host: made there, or given by a ``DataLoader``."""
    if not depth:
        return False
    if isinstance(node, cst.Name):
        values = file.bound_values(node)
        loops = [file.tree.around(one.node, cst.For) for one in file.tree.assignments(node)]
        return bool(values) and all(
            is_on_host(file, value, depth - 1) if value is not None else _gives_batches(file, loop, node)
            for value, loop in zip(values, loops, strict=True)
        )
    if not isinstance(node, cst.Call) or has_unpacking(node) or keyword(node, "device") is not None:
        return False
    name, full = called_name(node), file.tree.qualified(node.func) or ""
    if full.startswith("torch."):
        if full.startswith("torch.cuda.") or name not in (*_MAKE, *_LIKE):
            return False
        return name in _MAKE or (bool(node.args) and is_on_host(file, node.args[0].value, depth - 1))
    if name == "cpu" and isinstance(node.func, cst.Attribute):
        return True
    is_method = isinstance(node.func, cst.Attribute) and name in _KEEP_DEVICE
    return is_method and isinstance(node.func, cst.Attribute) and is_on_host(file, node.func.value, depth - 1)


def _gives_batches(file: SourceFile, loop: cst.For | None, name: cst.Name) -> bool:
    """Whether a loop binds a name to what a ``DataLoader`` gives."""
    if loop is None or not any(one.value == name.value for one in _names(loop.target)):
        return False
    iterated = loop.iter
    while isinstance(iterated, cst.Call) and called_name(iterated) in _LOOPS and iterated.args:
        iterated = iterated.args[0].value
    return file.values.of(iterated).kind is Kind.LOADER


def _names(target: cst.CSTNode) -> list[cst.Name]:
    parts = [one.value for one in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
    nested = [name for part in parts if part is not target for name in _names(part)]
    return [*nested, *(part for part in parts if isinstance(part, cst.Name))]
