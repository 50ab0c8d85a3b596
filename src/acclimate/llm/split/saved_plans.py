"""Saves plans in the user's cache, so that the next start with the same model, code and ranks skips planning.

A plan depends on the model's code and configuration, not on its weights. Its cache key is a digest of

- every module's attributes and tensor shapes,
- the *current* code of the classes and their Python files, so that a patched function changes the key,
- the number of ranks and the user's mapping,
- the versions of Python, torch and transformers, and the kind of processor,
- this package's files.

A file whose content does not match its digest is not used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import sys
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.cache.texts import TextCache, source_files
from acclimate.llm.split.plan import Change, Plan, Split

logger = logging.getLogger("acclimate.llm.split")

_PLANS = TextCache("plans", "plan.json", "the plan", "planning again", logger)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property, *_PLAIN)
_OF_MODULES = ("_parameters", "_buffers", "_modules")  # named_modules() has them
# transformers' attributes that hold a model's origin or an object of this process; and a weight's device
_ELSEWHERE = ("_name_or_path", "name_or_path", "_original_object_hash", "_view", "_view_of")
# What transformers adds to nn.Module and to a table of its own with a process's first model of a kind, and
# what the capture of a program (acclimate.llm.decode.capture) adds to transformers' tables
_LEFT_BY_OTHER_MODELS = ("smart_apply", "_CAN_RECORD_REGISTRY", "acclimate_capture")


def load_plan(key: str) -> Plan | None:
    """Returns the plan saved under a key; ``None`` if there is none or its file is damaged."""
    return _PLANS.load(key, lambda text: _decoded(json.loads(text)))


def save_plan(key: str, plan: Plan) -> None:
    """Saves a plan. If the cache is not writable, the next start plans again."""
    _PLANS.save(key, json.dumps(_encoded(plan)))


# -- the file ----------------------------------------------------------------------------------------


def _encoded(plan: Plan) -> dict[str, Any]:
    modules = {name: asdict(change) for name, change in plan.modules.items()}
    for module in modules.values():
        module["arguments"] = list(module["arguments"].items())  # JSON keys cannot be numbers
    splits = [asdict(split) for split in plan.splits.values()]
    return vars(plan) | {"splits": splits, "modules": modules, "partial": sorted(plan.partial)}


def _decoded(read: dict[str, Any]) -> Plan:
    splits = [Split(**_with_tuples(split)) for split in read["splits"]]
    modules = {}
    for name, module in read["modules"].items():
        arguments = {key: _tuples(value) for key, value in module.pop("arguments")}
        attributes = _with_tuples(module.pop("attributes"))
        modules[name] = Change(**_with_tuples(module), attributes=attributes, arguments=arguments)
    known = {"splits": {split.name: split for split in splits}, "modules": modules}
    return Plan(**read | known | {"partial": frozenset(read["partial"])})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in values.items()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# -- what a plan follows from ------------------------------------------------------------------------


def plan_key(
    model: nn.Module, size: int, user: Mapping[str, Any] | None, variables: Sequence[Any] = ()
) -> str:
    """Returns a digest of everything that determines the plan of a model over ``size`` ranks.

    Args:
        model: the model.
        size: the number of ranks.
        user: the user's mapping.
        variables: what else counts.
    """
    said = _Digest()
    said.add(list(variables))
    said.add((size, user, torch.__version__, sys.version, platform.machine()))
    said.add(getattr(sys.modules.get("transformers"), "__version__", None))
    said.add_file("torch.nn.functional")
    for source in source_files(Path(__file__).parent):
        said.add(source)
    tensors: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        said.add(prefix)
        said.add(module)
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                first = None if tensor is None else tensors.setdefault(id(tensor), f"{prefix}.{name}")
                said.add((name, first, tensor))
    return said.content.hexdigest()[:32]


class _Digest:
    """A digest of objects' values and code, not of their addresses, so it is equal in every process."""

    def __init__(self) -> None:
        self.content = hashlib.sha256()
        self._added: dict[int, tuple[int, Any]] = {}  # by id(); the references keep ids from being reused

    def add(self, value: Any) -> None:
        """Adds a value; if the object was added before, adds only its number."""
        self._say(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._say(repr(value))
            return
        if isinstance(value, types.CodeType):
            self._add_code(value)
            return
        if not self._is_new(value):
            return
        if isinstance(value, Tensor):
            self._say(f"{tuple(value.shape)} {value.dtype} {value.requires_grad}")
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._add_function(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, types.BuiltinFunctionType):
            self._say(f"{value.__module__}.{value.__qualname__}")
            self.add(value.__self__)
        elif hasattr(value, "tobytes"):  # NumPy's arrays and numbers
            self._say(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}")
            self.content.update(value.tobytes())
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add((value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, types.ModuleType):
            self._say(value.__name__)
        else:
            self._add_object(value)

    def add_file(self, name: str) -> None:
        """Adds a Python module's current functions and numbers, and the classes that its names refer to.

        Text is left out: transformers.utils.hub has an identifier of the process.
        """
        module = sys.modules.get(name)
        if module is None or not self._is_new(module):
            return
        names = vars(module)
        self._say(name)
        for variable, value in list(names.items()):
            if variable in _LEFT_BY_OTHER_MODELS:
                continue
            if isinstance(value, type):
                self._say(f"{variable} {value.__module__}.{value.__qualname__}")
            elif not variable.startswith("__") and (
                isinstance(value, (types.FunctionType, bool, int, float)) or _is(value, Mapping)
            ):
                self._say(variable)
                self.add(value)

    def _add_class(self, value: type) -> None:
        for base in value.__mro__:
            self._say(f"{base.__module__}.{base.__qualname__}")
            if base is object or not (base is value or self._is_new(base)):
                continue
            for name, member in vars(base).items():
                if name not in _LEFT_BY_OTHER_MODELS and isinstance(member, _OF_CLASSES):
                    self._say(name)
                    self.add(member)
            if not base.__module__.startswith("torch"):
                self.add_file(base.__module__)

    def _add_function(self, function: Any) -> None:
        self._say(function.__qualname__)
        self._add_code(function.__code__)
        self.add((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            content = _content(cell)
            if isinstance(content, (*_PLAIN, types.FunctionType, types.MethodType)):
                self.add(content)

    def _add_code(self, code: types.CodeType) -> None:
        self._say(code.co_code.hex())
        self._say(f"{code.co_names} {code.co_varnames} {code.co_freevars}")
        for value in code.co_consts:
            self.add(value)

    def _add_object(self, value: Any) -> None:
        if _is(value, Mapping):
            self._add_named(value)
        elif _is(value, Set):
            self._say(str(sorted(map(repr, value))))
        elif _is(value, Sequence):
            self._say(str(len(value)))
            for item in value:
                self.add(item)
        elif hasattr(value, "__dict__"):
            is_module = isinstance(value, nn.Module)
            if is_module:
                self.add(type(value))
            else:
                self._say(f"{type(value).__module__}.{type(value).__qualname__}")
            ignored = (*_ELSEWHERE, *(_OF_MODULES if is_module else ()))
            self._add_named({name: var for name, var in vars(value).items() if name not in ignored})
        for name in _slots(type(value)):
            self.add((name, getattr(value, name, None)))

    def _add_named(self, values: Mapping[Any, Any]) -> None:
        """Adds names and values in sorted order, because mappings made from sets vary between processes."""
        for name, value in sorted(values.items(), key=lambda item: _order(item[0])):
            if name not in _LEFT_BY_OTHER_MODELS:
                self.add(name)
                self.add(value)

    def _is_new(self, value: Any) -> bool:
        count = len(self._added)
        number, _ = self._added.setdefault(id(value), (count, value))
        self._say(str(number))
        return number == count

    def _say(self, text: str) -> None:
        self.content.update(text.encode("utf-8", "surrogatepass"))
        self.content.update(b"\0")


def _is(value: Any, kind: type) -> bool:
    """Whether a value is an instance of ``kind``: a mapping, set or sequence.

    A negative ``isinstance`` against an ABC checks all of its subclasses and is slow, so values without a
    length are excluded first.
    """
    return hasattr(type(value), "__len__") and isinstance(value, kind)


def _slots(kind: type) -> list[str]:
    """Returns the names of attributes that instances of a class keep in slots, unless Python defines it."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in sys.stdlib_module_names)
    held = (vars(base).get("__slots__", ()) for base in own)
    names = [name for slots in held for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _order(name: Any) -> tuple[str, str]:
    return type(name).__qualname__, repr(name) if isinstance(name, _PLAIN) else ""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
