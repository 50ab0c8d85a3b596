"""The libraries that get a device's name: torch and what is built on it, or others with their own names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from acclimate_port.dataflow.uses import calls_of, parameter_of, reads_of, uses_of
from acclimate_port.source.known_packages import BUILT_ON_TORCH, FOLLOW_TORCH, KEEP_SETTINGS, OF_OTHERS
from acclimate_port.source.tree import (
    called_name,
    dotted,
    entry_key,
    last_name,
    packages_of,
    string_value,
)
from acclimate_port.source_file import SourceFile, kept

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
"""Packages that give torch a device, but refuse names of accelerators that are not in a list of their own."""
_KEPT_BY = {"click", "typer", "pytest", "pydantic", "attr"}
_KNOWN = {*FOLLOW_TORCH, *sys.stdlib_module_names, *_KEPT_BY}
"""Packages that keep a device's name as it is, or give it to torch."""
_OF_CUDA_ALONE = {
    f"torchvision.io.{module}{name}"
    for module in ("", "image.")
    for name in ("decode_jpeg", "decode_image", "encode_jpeg")
}
"""Functions built on torch that take no other device than CUDA's and the CPU."""
_KEEP_VALUES = (
    *(
        "argparse",
        "optparse",
        "logging",
        "warnings",
        "functools",
        "dataclasses",
        "copy",
        "typing",
        "contextlib",
    ),
    *(
        "collections",
        "itertools",
        "multiprocessing",
        "threading",
        "concurrent",
        "queue",
        "enum",
        "types",
        "abc",
    ),
    *("inspect", "pprint", "operator", "weakref", "traceback", "unittest", "asyncio", "builtins", "sys"),
    *("os.getenv", "os.environ.get", "typing_extensions", "__future__", "re"),
)
"""Modules and functions of Python that give a device's name to nothing but the program, or to a message."""
_HOLDERS = {"dict", "Namespace", "SimpleNamespace", "EasyDict", "Munch", "Box", "create", "Dict"}
"""Classes and functions that make an object with settings of their arguments."""
_COPIES = {"vars", "dict", "asdict", "copy", "deepcopy", "list", "tuple", *_HOLDERS}
"""Functions whose result holds what their argument holds."""

_OWN = ("self", "cls")
_PARSE = ("parse_args", "parse_known_args")
_MOST_HOLDERS = 100
"""The most objects that are looked at for where the settings of one value go."""


@dataclass(frozen=True)
class Receiver:
    """A library that is not known to take the names of torch's devices."""

    text: str
    may_be_torchs: bool


@kept
def foreign_receiver(file: SourceFile, value: cst.CSTNode) -> Receiver | None:
    """The library that gets a value, directly or through names, if it is not torch or built on it.

    Of the libraries that get it in a function of the file, those count that have their own names of devices.
    """
    for use in uses_of(file, value, in_functions=False):
        if found := _receiver(file, use) or _for_lightning(file, use):
            return found
    for use in uses_of(file, value):
        if (found := _receiver(file, use)) and not found.may_be_torchs:
            return found
    for use in uses_of(file, value):
        for held in holders_given(file, use):
            if found := receiver_of_settings(file, held):
                return found
    return None


@kept
def unknown_receiver(file: SourceFile, device: cst.CSTNode) -> str:
    """Why a device, or an object that holds it, may reach code that is not known to take it; or ``""``."""
    for use in uses_of(file, device):
        for held in (use, *holders_given(file, use)):
            given = file.tree.given_to(held)
            full = full_name_of_method(file, given.call.func) if given is not None else ""
            if given is not None and full and not _takes_devices(file, full):
                line = file.tree.line(file.span(given.call).start)
                is_other = full.partition(".")[0] in OF_OTHERS
                why = "has its own names of devices" if is_other else "may do anything with a device's name"
                return f"line {line} gives it to `{full}`, which {why}"
    return ""


def _takes_devices(file: SourceFile, full: str) -> bool:
    """Whether a function is known to give a device to torch, to the program, or to a message."""
    package = full.partition(".")[0]
    is_known = package in FOLLOW_TORCH | KEEP_SETTINGS | _KEPT_BY or package in file.survey.modules
    return is_known or f"{full}.".startswith(tuple(f"{one}." for one in _KEEP_VALUES))


def full_name_of_method(file: SourceFile, function: cst.CSTNode) -> str:
    """The full name of a function, or of a method of an object whose class is known; ``""`` of others."""
    full = next(iter(file.tree.may_be(function)), "")
    if full or not isinstance(function, cst.Attribute):
        return full
    package = package_of_object(file, function)
    return f"{package}.{function.attr.value}" if package else ""


def receiver_of_settings(file: SourceFile, held: cst.CSTNode) -> Receiver | None:
    """The library that gets an object with settings, and may choose a device by them."""
    given = file.tree.given_to(held)
    full = next(iter(file.tree.may_be(given.call.func)), "") if given is not None else ""
    if given is None or full.partition(".")[0] in KEEP_SETTINGS:
        return None
    return _receiver(file, held)


def holders_given(file: SourceFile, value: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The arguments that are an object with a value in it, or that hold this object in turn.

    ``cfg.policy`` and ``cfg`` of ``cfg.policy.device = value``, ``{"device": value}``,
    ``Namespace(device=value)``, and what ``parse_args()`` gives where an option has the value as its default.
    """
    at = file.tree.parent(value)
    wholes: list[cst.CSTNode] = []
    if isinstance(at, (cst.Assign, cst.AnnAssign)):
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
        for target in targets:
            holder = getattr(target, "value", None)
            while isinstance(holder, (cst.Name, cst.Attribute, cst.Subscript)) and dotted(holder) not in _OWN:
                wholes += file.tree.reads(holder)
                holder = getattr(holder, "value", None)
    elif isinstance(at, (cst.DictElement, cst.Element)):
        wholes += [around] if (around := file.tree.parent(at)) is not None else []
    elif isinstance(at, cst.Arg) and at.keyword is not None:
        call = file.tree.parent(at)
        if isinstance(call, cst.Call) and called_name(call) == "add_argument":
            parsed = (one for one in file.tree.of_type(cst.Call) if called_name(one) in _PARSE)
            wholes += parsed if at.keyword.value == "default" else ()
        elif isinstance(call, cst.Call) and (called_name(call) in _HOLDERS or _is_own_class(file, call)):
            wholes.append(call)
    seen = {id(whole) for whole in wholes}
    while wholes and len(seen) < _MOST_HOLDERS:
        whole = wholes.pop()
        following = [*_holding(file, whole)]
        yield from [whole] if isinstance(file.tree.parent(whole), cst.Arg) else []
        wholes += [one for one in following if id(one) not in seen]
        seen |= {id(one) for one in following}


def _holding(file: SourceFile, whole: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What holds an object with settings: the reads of its name, a copy, a parameter that gets it."""
    at = file.tree.parent(whole)
    around = file.tree.parent(at) if at is not None else None
    if isinstance(at, (cst.Assign, cst.AnnAssign)):
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
        firsts = (one.elements[0].value if isinstance(one, cst.Tuple) else one for one in targets)
        yield from (read for target in firsts for read in reads_of(file, target))
    elif isinstance(at, (cst.DictElement, cst.Element)) and around is not None:
        yield around
    elif isinstance(at, cst.Return):
        yield from calls_of(file, file.tree.function(at))
    elif isinstance(at, cst.Arg) and isinstance(around, cst.Call) and called_name(around) in _COPIES:
        yield around
    elif (parameter := parameter_of(file, file.tree.given_to(whole))) is not None:
        yield from file.tree.reads(parameter.name)


@kept
def given_to_others(file: SourceFile) -> list[cst.BaseExpression]:
    """The names, and the objects that hold what they name, that a library gets which may choose a device."""
    names: set[str] = set()
    for statement in file.tree.imports:
        packages = {*packages_of(statement)} - {"", *_KNOWN, *KEEP_SETTINGS}
        if packages and not isinstance(statement.names, cst.ImportStar):
            bound = (one.evaluated_alias or one.evaluated_name.partition(".")[0] for one in statement.names)
            names |= {*bound}
    found = []
    for call in file.tree.of_type(cst.Call) if names else ():
        if dotted(call.func).partition(".")[0] in names:
            for argument in call.args:
                if receiver_of_settings(file, argument.value) is not None:
                    held = argument.value.elements if isinstance(argument.value, cst.Dict) else ()
                    found += [argument.value, *(_without_str(one.value) for one in held)]
    return found


def _without_str(value: cst.BaseExpression) -> cst.BaseExpression:
    is_str = isinstance(value, cst.Call) and called_name(value) == "str" and len(value.args) == 1
    return value.args[0].value if isinstance(value, cst.Call) and is_str else value


def _is_own_class(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call makes an object of a class of the file."""
    bound = file.tree.assignments(call.func) if isinstance(call.func, cst.Name) else ()
    return any(isinstance(one.node, cst.ClassDef) for one in bound)


@kept
def uses_torch(file: SourceFile) -> bool:
    """Whether a file names torch, or imports a package that is built on it."""
    packages = {package for statement in file.tree.imports for package in packages_of(statement)}
    return "torch" in file.names or not BUILT_ON_TORCH.isdisjoint(packages)


def _receiver(file: SourceFile, use: cst.CSTNode) -> Receiver | None:
    given = file.tree.given_to(use)
    if given is None:
        return None
    if given.name == "isinstance" and len(given.call.args) == 2:
        found = library_named(file, given.call.args[1].value)
        return found if found is not None and not found.may_be_torchs else None
    if given.full in _OF_CUDA_ALONE:
        return Receiver(f"`{given.name}` runs on a CPU or with CUDA alone", may_be_torchs=False)
    if package_of_object(file, given.call.func) in OF_OTHERS and given.name not in ("to", "cuda"):
        package = package_of_object(file, given.call.func)
        return Receiver(f"`{package}` has its own names of devices", may_be_torchs=False)
    return None if given.name in ("print", "dict") else library_named(file, given.call.func)


def package_of_object(file: SourceFile, method: cst.CSTNode) -> str:
    """The package whose class made the object that has a method: ``YOLO("x").train``, also through a name."""
    held = method.value if isinstance(method, cst.Attribute) else None
    if isinstance(held, cst.Name):
        values = file.bound_values(held)
        held = values[0] if len(values) == 1 else None
    elif isinstance(held, cst.Attribute) and dotted(held.value) in _OWN:
        given = file.values.given_to_attributes.get(dotted(held), [])
        held = given[0] if len(given) == 1 else None
    if not isinstance(held, cst.Call):
        return ""
    return next(iter(file.tree.may_be(held.func)), "").partition(".")[0]


def _for_lightning(file: SourceFile, use: cst.CSTNode) -> Receiver | None:
    """Lightning, if a value is its `accelerator`: a keyword, an entry, an attribute or an option.

    Trainers get their arguments through functions, classes and settings of the project, so the word counts.
    """
    at, given = file.tree.parent(use), file.tree.given_to(use)
    names = [given.word] if given is not None else []
    if given is not None and given.name == "add_argument" and given.word == "default":
        names = [name for name, calls in file.options.items() if given.call in calls]
    elif given is not None and given.name in ("setdefault", "setattr") and len(given.call.args) > 1:
        names = [string_value(one.value) or "" for one in given.call.args[:-1]]
    if isinstance(at, cst.DictElement) and at.value is use:
        names = [string_value(at.key) or ""]
    elif isinstance(at, (cst.Assign, cst.AnnAssign)):
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
        held = [one for one in targets if isinstance(one, (cst.Attribute, cst.Subscript))]
        names = [entry_key(one) or last_name(one) for one in held]
    if "accelerator" not in names:
        return None
    text = "Lightning knows no accelerators but its own, such as `cuda`"
    return Receiver(text, may_be_torchs=not uses_lightning(file))


@kept
def uses_lightning(file: SourceFile) -> bool:
    """Whether a file of the project imports Lightning."""
    return file.survey.has_lightning or not file.tree.imported_packages.isdisjoint(LIGHTNING)


def library_named(file: SourceFile, named: cst.CSTNode) -> Receiver | None:
    """The library of a function or class, if it is neither torch nor built on it nor of the project."""
    full = next(iter(file.tree.may_be(named)), "")
    package = full.partition(".")[0]
    if not package or package in _KNOWN or (package in file.survey.modules and package not in OF_OTHERS):
        return None
    if package in OF_OTHERS:
        return Receiver(f"`{package}` has its own names of devices", may_be_torchs=False)
    return Receiver(f"nothing shows that `{package}` takes the names of torch's devices", may_be_torchs=True)
