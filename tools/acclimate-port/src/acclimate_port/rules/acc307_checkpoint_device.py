"""The rule ACC307, for checkpoints that are loaded to the device that they were saved on: `torch.load(path)`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import GlobalScope

from acclimate_port.new_code.edits import insert
from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source.saved_files import SavedFiles, saved_files
from acclimate_port.source.tree import called_name, dotted, entry_key, keyword, last_name, positional
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile, kept

_COPIES = re.compile(
    r"model|module|net(work)?s?(_|$|\d|[A-Z])|encoder|decoder|generator|discriminator|critic|actor|backbone|policy"
    r"|classifier|optim|sched|(^|_)(gen|dis|disc|enc|dec)(_|$)",
    re.IGNORECASE,
)
"""Names of modules, optimizers and schedulers, which copy what they load to the device of their own tensors."""
_KEEPS = re.compile(r"ema|shadow|average|buffer|agent|trainer|runner", re.IGNORECASE)
"""Names of objects of a program's own, which may keep the tensors that they get."""
_NUMBERS = re.compile(
    r"^(epochs?|iter(ation)?s?|(global_)?steps?|arch|args|opts?|config|cfg|hparams|classes)$|_epoch$|_step$|_iter$"
)
"""Keys of a checkpoint that hold numbers and settings."""
_SIZES = {"size", "shape", "ndim", "dtype", "numel"}
_OWN = "a class of the project that is no module has its own `load_state_dict`, and may keep what it gets"
_KEPT = "a module of the project keeps a part of the state that it loads, which may be on another device then"
_MOST = 60
"""The most names and parts of a checkpoint that are followed."""


@dataclass
class _Way:
    """How far a checkpoint was followed."""

    seen: set[int] = field(default_factory=set)
    """The names and parts that were looked at."""
    is_copied: bool = False
    """Whether a module copies any of it."""
    is_module: bool = True
    """Whether the file shows that all that copy it are modules of torch."""


class CheckpointDevice(Rule[cst.Call]):
    """``model.load_state_dict(torch.load(path))``."""

    code = "ACC307"
    name = "checkpoint-device"
    summary = "a checkpoint that is loaded to the device that it was saved on: `torch.load(path)`"
    explanation = """\
`torch.load` without `map_location` brings each tensor back to the device that it was saved on, and fails where that is
CUDA and there is none. Where the checkpoint only goes to `load_state_dict` of modules, optimizers and schedulers, which
copy what they get to the device of their own tensors, it may be loaded to the host on every machine, and the result is
the same. A load whose result goes elsewhere is not edited; it holds the device of its program back, unless a program of
the project that is ported saves such files."""
    examples = (
        Example(
            'import torch\n\n\ndef f(model, path):\n    model.load_state_dict(torch.load(path))\n    return model.to("cpu")\n',
            'import torch\n\n\ndef f(model, path):\n    model.load_state_dict(torch.load(path, map_location="cpu"))\n'
            '    return model.to("cpu")\n',
            'import torch\n\n\ndef f(model, path):\n    model.load_state_dict(torch.load(path, map_location="cpu"))\n'
            '    return model.to("cpu")\n',
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if file.tree.qualified(node.func) != "torch.load" or not is_bare(node) or file.in_fstring(node):
            return None
        way = _way_to_modules(file, node)
        if way is None:
            return None
        text = file.tree.source(node)
        quote = "'" if "'" in text and '"' not in text else '"'
        end = file.span(node.args[-1]).end
        unsafe = _OWN if file.survey.own_loaders and not way.is_module else _beside_one_that_stays(file, node)
        unsafe = unsafe or (_KEPT if file.survey.keeps_state else "")
        return self.convert(file, node, insert(end, f", map_location={quote}cpu{quote}"), unsafe=unsafe)


def _way_to_modules(file: SourceFile, load: cst.Call) -> _Way | None:
    """How a checkpoint comes to modules that copy it; ``None`` if it also goes elsewhere."""
    way = _Way()
    is_one = not _is_chosen(file, load) and _goes_to_modules(file, load, load, way) and way.is_copied
    return way if is_one else None


def _beside_one_that_stays(file: SourceFile, load: cst.Call) -> str:
    """Why a load is half of one: its function loads another checkpoint to where it was saved."""
    function, lines = file.tree.function(load), {line for line, _ in _checkpoints(file).loads}
    for other in file.loads:
        line = file.tree.line(file.span(other).start)
        is_beside = other is not load and file.tree.function(other) is function and line in lines
        if is_beside and is_bare(other) and _way_to_modules(file, other) is None:
            return f"line {line} loads another checkpoint, to the device that it was saved on"
    return ""


@kept
def _checkpoints(file: SourceFile) -> SavedFiles:
    """What the file loads and saves."""
    return saved_files(file.tree.text)


def is_bare(call: cst.Call) -> bool:
    """Whether a call loads a file to the device that it was saved on."""
    is_open = any(one.star for one in call.args)
    return len(positional(call)) == 1 and keyword(call, "map_location") is None and not is_open


def _is_chosen(file: SourceFile, load: cst.Call) -> bool:
    """Whether a test decides between a load and one to a device that the program names.

    Of several that name none, such as those of two models, each is edited.
    """
    for choice in file.tree.ancestors(load):
        if isinstance(choice, (cst.If, cst.IfExp)):
            place = file.span(choice)
            inside = (one for one in file.loads if place.start <= file.span(one).start < place.end)
            if not all(map(is_bare, inside)):
                return True
    return False


def _goes_to_modules(file: SourceFile, load: cst.Call, value: cst.CSTNode, way: _Way) -> bool:
    """Whether what a checkpoint holds goes to ``load_state_dict`` of modules, and nowhere else.

    Args:
        file: the file.
        load: the call that loads the checkpoint.
        value: the checkpoint, or a part of it.
        way: what was looked at, to which more is added.
    """
    at = file.tree.parent(value)
    if id(value) in way.seen or len(way.seen) > _MOST:
        return id(value) in way.seen
    way.seen.add(id(value))
    if isinstance(at, cst.Subscript) and at.value is value:
        key = entry_key(at)
        is_stored = isinstance(file.tree.parent(at), (cst.AssignTarget, cst.Del))
        is_number = key is not None and _NUMBERS.search(key) is not None
        return is_stored or is_number or _goes_to_modules(file, load, at, way)
    if isinstance(at, cst.Attribute) and at.value is value:
        return _is_read_by_method(file, load, at, way)
    if isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        return isinstance(call, cst.Call) and _is_taken(file, load, call, at, way)
    if isinstance(at, cst.Comparison):
        return isinstance(at.comparisons[0].operator, (cst.Is, cst.IsNot))
    if isinstance(at, cst.ComparisonTarget):  # `"state_dict" in saved`
        return isinstance(at.operator, (cst.In, cst.NotIn))
    if isinstance(at, (cst.Del, cst.Expr)):
        return True
    if isinstance(at, cst.IfExp) or (isinstance(at, cst.DictComp) and at.value is value):
        return _goes_to_modules(file, load, at, way)
    if isinstance(at, cst.Assign) and len(at.targets) == 1:
        target = at.targets[0].target
        holder = target.value if isinstance(target, cst.Subscript) else target  # `renamed[key[7:]] = value`
        return isinstance(holder, cst.Name) and _holder_goes(file, load, holder, way)
    return False


def _holder_goes(file: SourceFile, load: cst.Call, name: cst.Name, way: _Way) -> bool:
    """Whether what a name holds, parts of a checkpoint among it, goes to modules alone."""
    held = file.bound_values(name)
    bound = file.tree.assignments(name)
    is_global = (
        bool(bound) and isinstance(bound[0].scope, GlobalScope) and file.tree.function(name) is not None
    )
    if is_global or not all(_is_of(file, one, load, name, way) for one in held):
        return False
    reads = file.tree.reads(name)
    return bool(reads) and all(_goes_to_modules(file, load, read, way) for read in reads)


def _is_read_by_method(file: SourceFile, load: cst.Call, method: cst.Attribute, way: _Way) -> bool:
    """Whether a method or an attribute gives names, sizes, or parts of a checkpoint that go to modules."""
    call, name = file.tree.parent(method), method.attr.value
    if name in _SIZES:
        return True
    if not isinstance(call, cst.Call) or call.func is not method:
        return False
    if name == "keys":
        return True
    if name in ("get", "pop"):
        return _goes_to_modules(file, load, call, way)
    loop = file.tree.parent(call) if name == "items" else None
    target = loop.target if isinstance(loop, (cst.For, cst.CompFor)) and loop.iter is call else None
    part = target.elements[1].value if isinstance(target, cst.Tuple) and len(target.elements) == 2 else None
    if not isinstance(part, cst.Name):
        return name == "update" and isinstance(file.tree.parent(call), cst.Expr)
    return all(_goes_to_modules(file, load, read, way) for read in file.tree.reads(part))


def _is_taken(file: SourceFile, load: cst.Call, call: cst.Call, argument: cst.Arg, way: _Way) -> bool:
    """Whether a call copies a part of a checkpoint to a module, or to a dictionary that a module gets."""
    if _copies(file, call, argument, way):
        way.is_copied = True
        return True
    if dotted(call.func) in ("len", "isinstance"):
        return True
    updated = (
        call.func.value if isinstance(call.func, cst.Attribute) and called_name(call) == "update" else None
    )
    return isinstance(updated, cst.Name) and _holder_goes(file, load, updated, way)


def _is_of(file: SourceFile, value: cst.CSTNode | None, load: cst.Call, name: cst.Name, way: _Way) -> bool:
    """Whether a value is a checkpoint, a part of one, an entry of what a name holds, or a dictionary for a module."""
    while isinstance(value, cst.Subscript):
        value = value.value
    if isinstance(value, cst.Call):
        is_method = isinstance(value.func, cst.Attribute)
        is_made = called_name(value) in ("OrderedDict", "dict") and not value.args
        is_entry = called_name(value) in ("get", "pop") and is_method
        is_state = called_name(value) == "state_dict" and is_method
        return (
            value is load
            or _is_one_more(file, value)
            or is_made
            or is_state
            or (is_entry and _named_in(value, name))
        )
    if isinstance(value, (cst.DictComp, cst.IfExp)):
        return True
    is_empty = isinstance(value, cst.Dict) and not value.elements
    is_part = isinstance(value, cst.Name) and (value.value == name.value or id(value) in way.seen)
    return is_empty or is_part


def _is_one_more(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call is a load that is edited too: a name that holds the one or the other goes one way."""
    return file.tree.qualified(call.func) == "torch.load" and is_bare(call) and not file.in_fstring(call)


def _named_in(call: cst.Call, name: cst.Name) -> bool:
    owner = call.func.value if isinstance(call.func, cst.Attribute) else None
    return isinstance(owner, cst.Name) and owner.value == name.value


def _copies(file: SourceFile, call: cst.Call, argument: cst.Arg, way: _Way) -> bool:
    """Whether a call copies a state to an object's own tensors: ``model.load_state_dict(state)``."""
    if called_name(call) == "copy_" and isinstance(call.func, cst.Attribute):  # `own[key].copy_(value)`
        return len(call.args) == 1
    is_first = bool(call.args) and call.args[0] is argument
    if not is_first or called_name(call) != "load_state_dict" or not isinstance(call.func, cst.Attribute):
        return False
    may_assign = (
        keyword(call, "assign") is not None or len(call.args) > 2 or any(one.star for one in call.args)
    )
    if may_assign or "load_state_dict" in file.methods:
        return False
    receiver = call.func.value
    if isinstance(receiver, cst.Call):
        return False
    name = last_name(receiver)
    held = file.values.of(receiver)
    is_known = held.kind is Kind.MODULE
    way.is_module &= is_known and held.certain
    return (is_known or _COPIES.search(name) is not None) and _KEEPS.search(name) is None
