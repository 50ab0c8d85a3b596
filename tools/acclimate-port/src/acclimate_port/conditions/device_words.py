"""A device's name that a program uses as a word: a key or a value that it expects, or a part of a command."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.given_away import line_of_file, text_with
from acclimate_port.conditions.placements import outermost_function
from acclimate_port.dataflow.caches import is_cache
from acclimate_port.dataflow.literals import is_compared_device
from acclimate_port.dataflow.receivers import unknown_receiver
from acclimate_port.dataflow.uses import LOOK_UP, uses_of
from acclimate_port.source.calls_by_text import NAMED_AT, STARTING
from acclimate_port.source.tree import called_name, dotted, string_value
from acclimate_port.source_file import SourceFile, kept

_OPTION = re.compile(r"(^|[\s\"'])-{1,2}[A-Za-z][\w-]*[=\s]+[\"']?$")
"""The end of a text before the value of an option: ``python run.py --device``."""
_OPTION_WITH_VALUE = re.compile(r"(^|[\s\"'])-{1,2}[A-Za-z][\w-]*[=\s]+[\"']?(\{|%s)")
_READS = re.compile(
    r"^(load|read|download|open|exists|is_?file|from_pretrained|urlopen|urlretrieve)(_|$)|_from_url$"
)
_IN_COMMAND = "it is part of a command line, which another program or machine reads"

_IN_ENVIRONMENT = "it becomes a variable of the environment, which other libraries may read"
_STARTS = re.compile(rf"(?:{STARTING})$")
_FILE = re.compile(
    r"\.(pth?|bin|ckpt|safetensors|engine|trt|onnx|json|ya?ml|toml|pkl|pickle|np[yz]|so|txt|csv)['\"]*$"
)


def used_as_word(file: SourceFile, device: cst.CSTNode) -> str:
    """Why the name of a device is unsafe: it is a key, is expected, or part of a command; ``""`` if not."""
    if (line := _line_of_word(file, device)) is not None:
        return f"line {line} has the same name as a key or as what it expects, which stays"
    if any(_is_in_command(file, use) for use in uses_of(file, device)):
        return _IN_COMMAND
    if any(_is_in_environment(file, use) for use in uses_of(file, device)):
        return _IN_ENVIRONMENT
    if line := next(filter(None, (line_of_file(file, use) for use in uses_of(file, device))), 0):
        return f"line {line} writes it to a file, which another program may read"
    if reason := unknown_receiver(file, device):
        return reason
    for use in uses_of(file, device):
        if line := _line_of_attribute(file, use):
            return f"line {line} looks for a name, or runs a command, with the device in it"
        text = text_with(file, use)
        if text is not None and (line := _line_of_text(file, text)):
            return f"line {line} writes it to a file, which another program may read"
        if text is not None and (line := _line_of_load(file, text)):
            return f"line {line} reads a file that has the device in its name"
        if text is not None and (line := _line_of_name(file, text)):
            return f"line {line} looks for a name, or runs a command, with the device in it"
    return ""


def _line_of_name(file: SourceFile, text: cst.CSTNode) -> int:
    """The line in which a text is a name of code, or a command: ``getattr(net, f"run_{device}")``; or 0."""
    for use in uses_of(file, text, computed=True):
        given = file.tree.given_to(use)
        if isinstance(at := file.tree.parent(use), cst.Index):  # `globals()[f"run_{device}"]`
            entry = file.tree.parent(file.tree.parent(at) or at)
            table = entry.value if isinstance(entry, cst.Subscript) else None
            if isinstance(table, cst.Call) and dotted(table.func) in ("globals", "locals", "vars"):
                return file.tree.line(file.span(table).start)
        if given is not None and (given.index == NAMED_AT.get(given.name) or _runs(given.full, given.index)):
            return file.tree.line(file.span(given.call).start)
    return 0


def _line_of_text(file: SourceFile, text: cst.CSTNode) -> int:
    """The line in which a text is written to a file; 0 if it is not, or to the terminal."""
    return next(filter(None, (line_of_file(file, use) for use in uses_of(file, text, computed=True))), 0)


def _line_of_attribute(file: SourceFile, use: cst.CSTNode) -> int:
    """The line in which a device is the name of code: ``getattr(kernels, device)``; 0 for a name of torch."""
    given = file.tree.given_to(use)
    if given is None or given.index is None or given.index != NAMED_AT.get(given.name):
        return 0
    is_torchs = given.index > 0 and file.tree.qualified(given.call.args[0].value) == "torch"
    return 0 if is_torchs else file.tree.line(file.span(given.call).start)


def _runs(function: str, index: int | None) -> bool:
    return index == 0 and _STARTS.match(function) is not None


def file_names(file: SourceFile) -> Iterator[cst.CSTNode]:
    """The parts of texts that name a file or code: ``device`` of ``f"weights_{device}.pt"``."""
    if "device" not in file.tree.text:
        return
    for text in file.tree.of_type(cst.FormattedString):
        given = file.tree.given_to(text)
        is_name = given is not None and given.index == NAMED_AT.get(given.name, -1)
        if is_name or _FILE.search(file.tree.source(text)):
            yield from (
                part.expression for part in text.parts if isinstance(part, cst.FormattedStringExpression)
            )
    for whole in file.tree.of_type(cst.BinaryOperation):
        end = string_value(whole.right)
        if isinstance(whole.operator, cst.Add) and end is not None and _FILE.search(end):
            yield whole.left.right if isinstance(whole.left, cst.BinaryOperation) else whole.left


def _line_of_load(file: SourceFile, text: cst.CSTNode) -> int:
    """The line in which a text is the name of a file that is read; 0 if it is none."""
    for use in uses_of(file, text, computed=True):
        given = file.tree.given_to(use)
        if given is not None and given.index == 0 and _READS.search(given.name):
            return file.tree.line(file.span(given.call).start)
    return 0


# -- keys and expected values ------------------------------------------------------------------------


def _line_of_word(file: SourceFile, device: cst.CSTNode) -> int | None:
    """The line of a word with the name of a device: the value itself as a key, or the same text near it."""
    words = [use for use in uses_of(file, device) if _is_looked_up(file, use)]
    if not words and isinstance(device, cst.SimpleString):
        around = file.tree.around(device, cst.ClassDef) or outermost_function(file, device)
        function = outermost_function(file, device)
        words = [
            *_words(file).get((string_value(device), id(around)), ()),
            *_words(file).get((string_value(device), id(function), "expected"), ()),
        ]
    words = [word for word in words if word is not device]
    return file.tree.line(file.span(words[0]).start) if words else None


def _is_looked_up(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether a value is a key, and not of a cache: of ``TABLE[device]`` or of ``TABLE.get(device)``."""
    given, at = file.tree.given_to(use), file.tree.parent(use)
    if isinstance(at, cst.Index):
        entry = file.tree.parent(file.tree.parent(at) or at)
        return not (isinstance(entry, cst.Subscript) and is_cache(file, entry.value))
    if given is None or given.index != 0 or given.full.startswith("torch."):
        return False
    is_look_up = isinstance(given.call.func, cst.Attribute) and given.name in LOOK_UP
    return is_look_up and not is_cache(file, getattr(given.call.func, "value", use))


@kept
def _words(file: SourceFile) -> dict[tuple[object, ...], list[cst.CSTNode]]:
    """The words that are names of devices, by their text and the class or function around them.

    They are keys of entries, by the class or function, and what an assertion expects, by the function.
    """
    found: dict[tuple[object, ...], list[cst.CSTNode]] = defaultdict(list)
    for text in file.tree.of_type(cst.SimpleString):
        if not (string_value(text) or "").startswith("cuda"):
            continue
        if _is_key(file, text):
            around = file.tree.around(text, cst.ClassDef) or outermost_function(file, text)
            found[string_value(text), id(around)].append(text)
        elif _is_expected(file, text):
            found[string_value(text), id(outermost_function(file, text)), "expected"].append(text)
    return found


def _is_expected(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether an assertion compares something with a text or with data that holds it, and the text stays."""
    compared, is_direct = text, True
    for below, around in file.tree.upwards(text):
        if isinstance(around, (cst.Element, cst.DictElement, cst.List, cst.Tuple, cst.Set, cst.Dict)):
            is_direct = False
        elif isinstance(around, cst.Comparison):
            operators = [one.operator for one in around.comparisons]
            is_member = isinstance(operators[0], (cst.In, cst.NotIn))
            if is_direct or is_member:
                other = around.left if below is not around.left else around.comparisons[0].comparator
                return not is_compared_device(file, other) and isinstance(
                    file.tree.statement(text), cst.Assert
                )
            compared = around
        elif isinstance(around, cst.Assert):
            return isinstance(compared, cst.Comparison) and below is around.test
        elif not isinstance(around, (cst.ComparisonTarget, cst.BooleanOperation)):
            return False
    return False


def _is_key(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether a text is the key of an entry, and not of a ``map_location``."""
    at = file.tree.parent(text)
    if isinstance(at, cst.DictElement):
        holder = file.tree.parent(at)
        return at.key is text and not isinstance(file.tree.parent(holder or at), cst.Arg)
    return isinstance(at, cst.Index)


def _is_in_environment(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether a value is given to the environment: ``os.environ["JAX_PLATFORMS"] = device``."""
    at, given = file.tree.parent(use), file.tree.given_to(use)
    if isinstance(at, cst.Assign):
        targets = [one.target for one in at.targets]
        return any(isinstance(one, cst.Subscript) and _is_environ(one.value) for one in targets)
    if given is None or given.name not in ("setdefault", "putenv"):
        return False
    return given.name == "putenv" or _is_environ(getattr(given.call.func, "value", given.call))


def _is_environ(node: cst.CSTNode) -> bool:
    return dotted(node).rpartition(".")[2] == "environ"


# -- command lines -----------------------------------------------------------------------------------


def _is_in_command(file: SourceFile, use: cst.CSTNode) -> bool:
    at = file.tree.parent(use)
    if isinstance(at, cst.FormattedStringExpression):
        return any(_OPTION.search(text) for text in _texts_before(file, at))
    if isinstance(at, cst.BinaryOperation) and at.right is use:
        return (
            _ends_with_option(file, at.left)
            or _OPTION_WITH_VALUE.search(file.tree.source(at.left)) is not None
        )
    if isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        is_format = called_name(call) == "format"
        return is_format and _OPTION_WITH_VALUE.search(file.tree.source(call.func)) is not None
    if isinstance(at, cst.Element):
        holder = file.tree.parent(at)
        listed = [*holder.elements] if isinstance(holder, (cst.List, cst.Tuple)) else []
        before = listed[listed.index(at) - 1].value if at in listed[1:] else None
        return re.match(r"-{1,2}[A-Za-z]", string_value(before) or "") is not None
    return False


def _texts_before(file: SourceFile, part: cst.CSTNode) -> Iterator[str]:
    """The text before a part of an f-string."""
    around = file.tree.parent(part)
    parts = [*around.parts] if isinstance(around, cst.FormattedString) else []
    before = parts[parts.index(part) - 1] if part in parts[1:] else None  # type: ignore[arg-type]
    if isinstance(before, cst.FormattedStringText):
        yield before.value


def _ends_with_option(file: SourceFile, left: cst.BaseExpression) -> bool:
    """Whether the text that a device is appended to ends with an option."""
    last = left.right if isinstance(left, cst.BinaryOperation) else left
    return _OPTION.search(string_value(last) or "") is not None
