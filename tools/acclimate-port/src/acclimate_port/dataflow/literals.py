"""Whether a literal such as ``"cuda"`` is a device, or data that looks like one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import libcst as cst

from acclimate_port.dataflow.callees import may_call
from acclimate_port.dataflow.receivers import foreign_receiver, uses_torch
from acclimate_port.dataflow.sinks import gets_to_device, takes_device
from acclimate_port.dataflow.uses import (
    DEVICE_KEYWORDS,
    KEEP_NAME,
    is_device_of,
    keys_of,
    parameter_of,
    uses_of,
    whole_choice,
)
from acclimate_port.source.outline import REGISTERS, outline
from acclimate_port.source.tree import Binding, Given, called_name, last_name, positional, string_value
from acclimate_port.source.values import DEVICE_NAME, Kind
from acclimate_port.source.vendors import OTHER_KINDS
from acclimate_port.source_file import SourceFile, kept


class Role(Enum):
    """The use of a literal."""

    DEVICE = "device"
    LIKELY = "likely a device"
    DATA = "data"
    COMPARED = "compared"
    PATTERN = "pattern"
    FOREIGN = "for another library"
    KEY = "a key of a table that a device is looked up in"


@dataclass(frozen=True)
class LiteralUse:
    """The role of a literal, and the reason for it."""

    role: Role
    reason: str = ""


DEVICE = LiteralUse(Role.DEVICE)
TEXT_STAYS = "a string in this function names the device, and stays as it is"
WITHOUT_TORCH = "the file names no torch, and nothing in it takes this text as a device"
_TORCH_TAKES_DEVICE_FIRST = re.compile(
    r"torch\.(device|autocast|amp\.(autocast|GradScaler|autocast_mode\.autocast|grad_scaler\.GradScaler)|Generator"
    r"|set_default_device|get_device_module|get_autocast_dtype|set_autocast_dtype|set_autocast_enabled"
    r"|is_autocast_enabled|distributed(\.device_mesh)?\.(init_device_mesh|DeviceMesh)|distributed\._tensor\.DeviceMesh"
    r"|amp\.is_autocast_available|distributed\.get_default_backend_for_device|utils\.set_module_device)$"
)
_SAFE_KEYWORDS = DEVICE_KEYWORDS | {"device_type", "pin_memory_device"}
_DEFAULTS = ("default", "const")
_SETS_DEVICE = re.compile(
    r"^(set|use|select|init|setup|configure|to|move_to|put_on)_(\w+_)?device(_(name|type))?$"
)
"""Functions that make a device the one of an object or of a program."""
_OPTION_TABLE = "only the name of the option beside it suggests a device"
_SEVERAL = re.compile(r"(^|_)dev(ice)?s?$", re.IGNORECASE)
_FEW = 8
_OUTPUT_CALLS = {"print", "info", "debug", "warning", "error", "log", "write", "append_text", "format"}


def classify_literal(file: SourceFile, node: cst.CSTNode) -> LiteralUse:
    """The use of a literal, judged by the code around it."""
    whole = whole_choice(file, node)
    if key := _key(file, whole):
        return LiteralUse(Role.KEY, key)
    found = _place(file, whole, file.tree.parent(whole))
    if found.role in (Role.DEVICE, Role.LIKELY) and (reason := foreign_receiver(file, whole)):
        return LiteralUse(Role.LIKELY if reason.may_be_torchs else Role.FOREIGN, reason.text)
    if found.role is Role.DEVICE and not uses_torch(file) and not _is_received(file, whole):
        return LiteralUse(Role.LIKELY, WITHOUT_TORCH)
    named = ((string_value(one) or "").partition(":")[0] for one in _branches(whole))
    if found.role is Role.DATA and any(kind in ("cpu", *OTHER_KINDS) for kind in named):
        return LiteralUse(Role.LIKELY, 'only the "cpu" beside it suggests a device')
    return found


def _key(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a device's name is a key that stays: on a host, the accelerator's name would be that of the CPU."""
    at = file.tree.parent(node)
    given = file.tree.given_to(node)
    if given is not None and isinstance(file.tree.parent(given.call), cst.Decorator):
        is_own = not given.full.startswith("torch.")
        return f"`{given.name}` registers code for this device" if is_own and registers(file, given) else ""
    target: cst.CSTNode | None = None
    if isinstance(at, cst.DictElement) and at.key is node:
        target = file.tree.holder_of(file.tree.parent(at) or at)
    elif isinstance(at, cst.Index):
        entry = file.tree.parent(file.tree.parent(at) or at)
        is_set = isinstance(entry, cst.Subscript) and isinstance(file.tree.parent(entry), cst.AssignTarget)
        target = entry.value if isinstance(entry, cst.Subscript) and is_set else None
    looked_up = isinstance(target, (cst.Name, cst.Attribute)) and any(
        is_device_of(file, key) for key in keys_of(file, target)
    )
    return "it is a key of a table that looks up the device of a tensor" if looked_up else ""


def registers(file: SourceFile, given: Given) -> bool:
    """Whether a decorator enters what it decorates in a table, by its name or because it fills one."""
    name = given.name
    return REGISTERS.search(name) is not None or name in _that_fill_tables(file)


@kept
def _that_fill_tables(file: SourceFile) -> set[str]:
    return {name for name, _ in outline(file.tree.text).fills}


def _is_received(file: SourceFile, value: cst.CSTNode) -> bool:
    """Whether a call in the file takes a value as its device: ``Net().to(place)``."""
    given = [one for one in (file.tree.given_to(use) for use in uses_of(file, value)) if one is not None]
    return any(_gets_device(file, one) or file.survey.takes_device(one.full, one.index) for one in given)


def _branches(choice: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The values of which a conditional expression gives one."""
    if isinstance(choice, cst.IfExp):
        yield from (*_branches(choice.body), *_branches(choice.orelse))
    elif isinstance(choice, cst.BooleanOperation):
        yield from (*_branches(choice.left), *_branches(choice.right))
    else:
        yield choice


def _place(file: SourceFile, node: cst.CSTNode, at: cst.CSTNode | None) -> LiteralUse:
    if isinstance(at, cst.Arg):
        given = file.tree.given_to(at)
        return _argument(file, given) if given is not None else LiteralUse(Role.DATA)
    if isinstance(at, (cst.ComparisonTarget, cst.Comparison)):
        return LiteralUse(Role.COMPARED)
    if isinstance(at, (cst.Assign, cst.AnnAssign)):
        targets = [target.target for target in at.targets] if isinstance(at, cst.Assign) else [at.target]
        return _assigned(file, targets)
    if isinstance(at, cst.Param):
        return DEVICE if gets_to_device(file, at) else LiteralUse(Role.DATA, "the parameter is no device")
    if isinstance(at, cst.DictElement):
        return _dictionary(file, node, at)
    if isinstance(at, cst.Return):
        return _returned(file, at)
    if isinstance(at, cst.Element):
        return _element(file, at)
    if isinstance(at, cst.MatchValue):
        return LiteralUse(Role.PATTERN)
    if isinstance(at, cst.Index):
        return LiteralUse(Role.DATA, "it is a key of data")
    return LiteralUse(Role.DATA)


def _argument(file: SourceFile, given: Given) -> LiteralUse:
    call, argument, full, word, index = given.call, given.argument, given.full, given.word, given.index
    name, first = given.name, string_value(call.args[0].value)
    if word:
        if word == "device_types":
            return LiteralUse(Role.DATA, "it names the device that an operator is written for")
        if word in _SAFE_KEYWORDS:
            return DEVICE
        if name in ("add_argument", "option", "Option", "DEFINE_string", "add_flag") and word in (
            "default",
            "const",
        ):
            named = any(_is_option(string_value(text.value)) for text in positional(call))
            return DEVICE if named else LiteralUse(Role.DATA, "the option is no device")
        if name == "dict" and word in _DEFAULTS and any(_is_flag(one.value) for one in call.args):
            return LiteralUse(Role.LIKELY, _OPTION_TABLE)
        if DEVICE_NAME.search(word) or word == "device_map":
            return LiteralUse(Role.LIKELY, "only the argument's name suggests a device")
        if word in ("default", "default_factory") and name in ("field", "Field"):
            owner = file.tree.statement(call)
            if isinstance(owner, cst.AnnAssign):
                return _assigned(file, [owner.target])
        return DEVICE if _is_of_device(file, given) else LiteralUse(Role.DATA, f"`{word}` is no device")
    if _gets_device(file, given):
        return DEVICE
    if index == 1 and full.endswith(("DeviceMesh.from_group", "torch.jit.load")):
        return DEVICE
    partial = file.tree.qualified(call.args[0].value) if index == 1 and full == "functools.partial" else None
    if _TORCH_TAKES_DEVICE_FIRST.match(partial or ""):
        return DEVICE
    if full.startswith("torch.cuda."):
        return DEVICE
    if name in ("get", "getattr", "pop", "setdefault", "getenv", "DEFINE_string"):
        key = call.args[1 if name == "getattr" else 0].value if len(call.args) > 1 else None
        if DEVICE_NAME.search(string_value(key) or ""):
            return DEVICE
    if index is not None and (index > 0 or name in ("str",)) and name in _OUTPUT_CALLS | {"str"}:
        return LiteralUse(Role.DATA, "it is part of a message")
    if name in _OUTPUT_CALLS:
        return LiteralUse(Role.DATA, "it is part of a message")
    if name in ("startswith", "split", "find", "endswith", "replace", "count", "index"):
        return LiteralUse(Role.COMPARED)
    if full == "pytest.param":
        return LiteralUse(Role.LIKELY, "it is a parameter of a test")
    if name == "parametrize" and DEVICE_NAME.search(first or ""):
        return LiteralUse(Role.LIKELY, "it is a parameter of a test")
    if _is_of_device(file, given) or file.survey.takes_device(full, index):
        return DEVICE
    receiver = last_name(call.func.value) if isinstance(call.func, cst.Attribute) else None
    if name in ("append", "add", "insert") and _SEVERAL.search(receiver or ""):
        return LiteralUse(Role.LIKELY, "it is one of several devices to choose from")
    if index == 0 and name in ("init_device_mesh", "autocast", "device", "Generator", "GradScaler"):
        return LiteralUse(Role.LIKELY, f"`{name}` is not known to be torch's")
    if _starts_with_index(argument.value):
        return LiteralUse(Role.LIKELY, "only its form suggests a device")
    if index == 0 and _SETS_DEVICE.search(name):
        return LiteralUse(Role.LIKELY, f"only its name suggests that `{name}` takes a device")
    return LiteralUse(Role.DATA, f"nothing shows that `{name}` takes a device")


def _is_of_device(file: SourceFile, given: Given) -> bool:
    """Whether the parameter of a function of the file, which gets an argument, is a device."""
    parameter = parameter_of(file, given)
    return parameter is not None and gets_to_device(file, parameter)


def _assigned(file: SourceFile, targets: Sequence[cst.CSTNode]) -> LiteralUse:
    for target in targets:
        if DEVICE_NAME.search(last_name(target)):
            return DEVICE
        if isinstance(target, cst.Name) and _some_use_is_given_as_device(file, file.tree.binding(target)):
            return DEVICE
    return LiteralUse(Role.DATA, f"nothing shows that `{file.tree.source(targets[0])[:40]}` is a device")


def _dictionary(file: SourceFile, node: cst.CSTNode, at: cst.DictElement) -> LiteralUse:
    holder = file.tree.parent(file.tree.parent(at) or at)
    if at.key is node and isinstance(holder, cst.Arg):
        return LiteralUse(
            Role.DATA, "a key of such a dictionary (map_location) is the device that the data was saved from"
        )
    word = holder.keyword.value if isinstance(holder, cst.Arg) and holder.keyword is not None else ""
    if isinstance(holder, (cst.Assign, cst.AnnAssign)):
        word = last_name(holder.targets[0].target if isinstance(holder, cst.Assign) else holder.target)
    if at.key is not node and word in ("map_location", "device_map"):
        return LiteralUse(Role.LIKELY, f"it is a {word} value")
    if at.key is node:
        return LiteralUse(Role.DATA, "it is a key of data")
    key = string_value(at.key)
    if file.text_names_device(at):
        return LiteralUse(Role.DATA, TEXT_STAYS)
    if key in _DEFAULTS and _describes_option(file, at):
        return LiteralUse(Role.LIKELY, _OPTION_TABLE)
    if key is not None and DEVICE_NAME.search(key):
        return LiteralUse(Role.LIKELY, "only the key beside it suggests a device")
    return LiteralUse(Role.DATA, "it is a value of data")


def _describes_option(file: SourceFile, at: cst.DictElement) -> bool:
    """Whether a dictionary has the name of an option for a device, or is an entry under such a name."""
    holder = file.tree.parent(at)
    entries = holder.elements if isinstance(holder, cst.Dict) else ()
    around = file.tree.parent(holder) if holder is not None else None
    named = [around.key] if isinstance(around, cst.DictElement) else []
    return any(_is_flag(one) for one in (*named, *(entry.value for entry in entries)))


def _is_flag(node: cst.CSTNode) -> bool:
    """Whether a text, or one of a list of them, is the name of an option for a device: ``--rl_device``."""
    if isinstance(node, (cst.List, cst.Tuple)):
        return any(_is_flag(one.value) for one in node.elements)
    text = string_value(node) or ""
    return text.startswith("-") and _is_option(text)


def _is_option(text: str | None) -> bool:
    return DEVICE_NAME.search((text or "").lstrip("-").replace("-", "_")) is not None


def _returned(file: SourceFile, at: cst.Return) -> LiteralUse:
    function = file.tree.function(at)
    if isinstance(function, cst.FunctionDef) and re.search(r"device", function.name.value, re.IGNORECASE):
        return DEVICE
    return LiteralUse(Role.DATA, "nothing shows that the return value is a device")


def _element(file: SourceFile, at: cst.Element) -> LiteralUse:
    holder = file.tree.parent(at)
    around = file.tree.parent(holder) if holder is not None else None
    if isinstance(around, cst.ComparisonTarget):
        return LiteralUse(Role.COMPARED)
    while isinstance(around, (cst.BinaryOperation, cst.BooleanOperation, cst.IfExp)):
        around = file.tree.parent(around)
    if isinstance(holder, cst.Tuple) and holder.elements[0] is not at and _is_flag(holder.elements[0].value):
        return LiteralUse(Role.LIKELY, _OPTION_TABLE)
    if isinstance(around, (cst.For, cst.CompFor)) and DEVICE_NAME.search(last_name(around.target)):
        return LiteralUse(Role.LIKELY, "only the loop variable's name suggests a device")
    if isinstance(around, cst.Arg):
        call = file.tree.parent(around)
        first = string_value(call.args[0].value) if isinstance(call, cst.Call) and call.args else None
        if isinstance(call, cst.Call) and DEVICE_NAME.search((first or "").lstrip("-").replace("-", "_")):
            return LiteralUse(Role.LIKELY, "it is one of several devices to choose from")
    if isinstance(around, (cst.Assign, cst.AugAssign)):
        target = around.target if isinstance(around, cst.AugAssign) else around.targets[0].target
        name = last_name(target)
        if _SEVERAL.search(name):
            return LiteralUse(Role.LIKELY, "it is one of several devices to choose from")
    return LiteralUse(Role.DATA, "it is an element of data")


def _starts_with_index(node: cst.CSTNode) -> bool:
    return bool(re.match(r"cuda:\d*$", string_value(node) or ""))


@kept
def is_compared_device(file: SourceFile, node: cst.CSTNode, depth: int = 4) -> bool:
    """Whether a value that is compared with a device's name is a device, or a text that begins with one."""
    if isinstance(node, cst.Attribute):
        return node.attr.value == "type" or bool(DEVICE_NAME.search(node.attr.value))
    if isinstance(node, cst.Call):
        if isinstance(node.func, cst.Name) and node.func.value == "str" and node.args:
            return is_compared_device(file, node.args[0].value, depth)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in KEEP_NAME:
            return is_compared_device(file, node.func.value, depth)
        if re.search(r"device", called_name(node) or "", re.IGNORECASE):
            return True
        results = [_compared(file, one.value, depth) for one in file.returns(node)[:_FEW]]
        return any(results) and None not in results
    if isinstance(node, cst.Name):
        if DEVICE_NAME.search(node.value) or file.values.of(node).kind is Kind.DEVICE:
            return True
        given = [assignment.node for assignment in file.tree.assignments(node)]
        if any(isinstance(origin, cst.Param) and gets_to_device(file, origin) for origin in given):
            return True
        values = [_compared(file, value, depth) for value in file.bound_values(node)[:_FEW]]
        is_one = any(values) or any(_is_given_as_device(file, use) for use in file.tree.reads(node)[:_FEW])
        return is_one and None not in values
    if isinstance(node, cst.Subscript):
        return bool(DEVICE_NAME.search(last_name(node))) or is_compared_device(file, node.value, depth)
    return False


@kept
def _some_use_is_given_as_device(file: SourceFile, binding: Binding) -> bool:
    return any(_is_given_as_device(file, use) for use in binding.reads)


def _is_given_as_device(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether something gets a value as its device: ``torch.ones(1, device=where)``."""
    given = file.tree.given_to(use)
    return given is not None and _gets_device(file, given)


def _gets_device(file: SourceFile, given: Given) -> bool:
    if takes_device(given):
        return True
    return given.index == 0 and any(map(_TORCH_TAKES_DEVICE_FIRST.match, may_call(file, given)))


def _compared(file: SourceFile, value: cst.CSTNode | None, depth: int) -> bool | None:
    """Whether a value that a name may hold is a device; ``None`` if it is something else.

    A literal may be a device; it says nothing beside values that are none. Of ``kind or resolve_device()``
    the last value tells it.
    """
    if isinstance(value, cst.BooleanOperation):
        return _compared(file, value.right, depth)
    if isinstance(value, cst.IfExp):
        sides = [_compared(file, side, depth) for side in (value.body, value.orelse)]
        return None if None in sides else any(sides)
    if string_value(value) is not None:
        return False
    is_device = value is not None and depth > 0 and is_compared_device(file, value, depth - 1)
    return True if is_device else None
