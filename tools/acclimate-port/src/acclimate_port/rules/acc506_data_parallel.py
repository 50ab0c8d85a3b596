"""The rule ACC506, for `torch.nn.DataParallel(model)`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.sinks import DEVICE_METHODS
from acclimate_port.new_code.added_functions import ON_ANY_DEVICE
from acclimate_port.new_code.edits import insert
from acclimate_port.rules.base import WITH_HELPER, Example, Finding, Rule
from acclimate_port.source.tree import called_name, dotted
from acclimate_port.source.values import methods
from acclimate_port.source_file import SourceFile, kept

_DATA_PARALLEL = {
    *("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
    "torch.nn.parallel.data_parallel.DataParallel",
}
_OF_OTHERS = {
    *("torch_geometric.nn.DataParallel", "torch_geometric.nn.data_parallel.DataParallel"),
    *("torch_geometric.nn.data_parallel", "torch_geometric.nn.data_parallel.data_parallel"),
}
_STEPS = {
    *("torch.nn.parallel.data_parallel", "torch.nn.parallel.data_parallel.data_parallel"),
    *(f"torch.nn.parallel.{name}" for name in ("scatter", "gather", "replicate")),
    *("torch.nn.parallel.scatter_gather.scatter", "torch.nn.parallel.scatter_gather.scatter_kwargs"),
    *("torch.nn.parallel.scatter_gather.gather", "torch.nn.parallel.replicate.replicate"),
}
_SET_DEFAULT = {"set_default_tensor_type", "set_default_device"}
"""Functions by which a model is on the device from the beginning."""
_STEPS_OF_A_CLASS = {"forward", "scatter", "gather", "replicate", "parallel_apply"}


_SPLITS_ITSELF = "its class splits a batch itself, and torch does that over CUDA devices only"


class DataParallel(Rule[cst.Call]):
    """``torch.nn.DataParallel(model)``."""

    code = "ACC506"
    name = "data-parallel"
    summary = "`torch.nn.DataParallel(model)`"
    explanation = """\
torch splits a batch over CUDA devices only; on another accelerator the first step fails, even with one device. The edit
keeps torch's object, and on CUDA and on a host nothing changes. Elsewhere the device of the model's parameters gets the
whole batch, and the inputs are moved there, as torch does on CUDA. The edit is unsafe where a file of the program reads
`device_ids` of a model, and where nothing else moves the model: torch moves it to one CUDA device. To use several devices other than CUDA, a program needs `DistributedDataParallel`.

A subclass with its own `scatter`, `gather` or `forward` is left, and so are a class of another file whose name has
`DataParallel` in it, `torch.nn.parallel.data_parallel` and
the functions that it calls: without CUDA a program should call the module directly."""
    examples = (
        Example(
            "import torch\n\n\ndef f(model):\n    return torch.nn.DataParallel(model).cuda()\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            + ON_ANY_DEVICE.replace("{device_type}", "get_accelerator().device_name()")
            + "\n\ndef f(model):\n    return on_any_device(torch.nn.DataParallel(model))"
            ".to(get_accelerator().device_name())\n",
            WITH_HELPER
            + ON_ANY_DEVICE.replace("{device_type}", "accelerator_type()")
            + "\n\ndef f(model):\n    return on_any_device(torch.nn.DataParallel(model)).to(accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(model, x):\n    return torch.nn.parallel.data_parallel(model, x)\n",
            None,
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        name = file.tree.qualified(node.func)
        if name in _STEPS:
            reason = "torch splits a batch over CUDA devices only; elsewhere call the module directly"
            return self.left(file, node, reason, (node.func,))
        if name in _OF_OTHERS:
            reason = "torch_geometric splits a list over CUDA devices only, and takes no list without them"
            return self.left(file, node, reason, (node.func,))
        definitions = _own_data_parallel(file, node.func)
        if name not in _DATA_PARALLEL and not definitions:
            return self.left(file, node, _SPLITS_ITSELF, (node.func,)) if _is_imported(file, node) else None
        given = file.tree.given_to(node)
        if given is not None and given.name == file.on_any_device:
            return None
        if any(methods(definition) & _STEPS_OF_A_CLASS for definition in definitions):
            return self.left(file, node, _SPLITS_ITSELF)
        place = file.span(node)
        edits = insert(place.start, f"{file.on_any_device}("), insert(place.end, ")")
        unsafe = ""
        if file.attributes["device_ids"]:
            unsafe = "the file reads `device_ids`, which is empty on other accelerators"
        elif _alone_moves(file, node):
            unsafe = "nothing else moves the model, so that it would stay on the host on other accelerators"
        finding = self.convert(file, node, *edits, unsafe=unsafe)
        finding.claims = ()
        return finding


def _is_imported(file: SourceFile, node: cst.Call) -> bool:
    """Whether a class of another file is called that is named after ``DataParallel``, and so derived from it."""
    name = file.tree.qualified(node.func) or ""
    word = name.rpartition(".")[2]
    is_class = "DataParallel" in word and word[:1].isupper() and "Distributed" not in word
    return is_class and "." in name and not name.startswith("torch.")


def _alone_moves(file: SourceFile, wrapped: cst.Call) -> bool:
    """Whether a name alone holds a model, which is made for it and which nothing else moves.

    torch moves it there if there is one CUDA device.
    """
    assign = file.tree.parent(wrapped)
    name = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    if not isinstance(name, cst.Name) or file.names & _SET_DEFAULT or not wrapped.args:
        return False
    made = [one for one in file.bound_values(name) if one is not wrapped and not _is_unwrapped(one, name)]
    given = wrapped.args[0].value
    made += [] if isinstance(given, cst.Name) and given.value == name.value else [given]
    if not made or not all(
        isinstance(one, cst.Call) and (called_name(one) or "")[:1].isupper() for one in made
    ):
        return False
    used = [(read, file.tree.parent(read)) for read in file.tree.reads(name) if read is not given]
    is_moved = any(isinstance(at, cst.Attribute) and at.attr.value in DEVICE_METHODS for _, at in used)
    is_own = all(
        isinstance(at, cst.Attribute) or (isinstance(at, cst.Call) and at.func is one) for one, at in used
    )
    return is_own and not is_moved


def _is_unwrapped(value: cst.CSTNode | None, name: cst.Name) -> bool:
    """Whether a value is what a wrapper holds: ``model.module`` for ``model``."""
    return isinstance(value, cst.Attribute) and dotted(value) == f"{name.value}.module"


def _own_data_parallel(file: SourceFile, name: cst.BaseExpression) -> list[cst.ClassDef]:
    """The classes of the file that a name may be, if each is a subclass of torch's ``DataParallel``."""
    if not isinstance(name, cst.Name) or name.value not in _own_names(file):
        return []
    bound = [assignment.node for assignment in file.tree.assignments(name)]
    own = [
        definition
        for definition in bound
        if isinstance(definition, cst.ClassDef) and _is_data_parallel(file, definition)
    ]
    return own if len(own) == len(bound) else []


@kept
def _own_names(file: SourceFile) -> set[str]:
    """The names of the file's classes that are subclasses of torch's ``DataParallel``."""
    return {one.name.value for one in file.tree.of_type(cst.ClassDef) if _is_data_parallel(file, one)}


def _is_data_parallel(file: SourceFile, definition: cst.ClassDef) -> bool:
    return any(file.tree.qualified(base.value) in _DATA_PARALLEL for base in definition.bases)
