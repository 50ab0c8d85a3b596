"""Questions for CUDA and numbers of devices whose answer other code gets that means CUDA by it.

A library with devices of its own gets a flag (``Reader(gpu=torch.cuda.is_available())``), another process a
number in its command, or a text says what was found: on another accelerator they would be told of CUDA.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import branches_of_result, controlled_quietly
from acclimate_port.conditions.statements import decided_by, whole_condition
from acclimate_port.dataflow.receivers import (
    holders_given,
    package_of_object,
    uses_lightning,
)
from acclimate_port.dataflow.uses import uses_of, whole_choice
from acclimate_port.source.calls_by_text import STARTING
from acclimate_port.source.known_packages import FOR_ANY, KEEP_SETTINGS, OF_OTHERS
from acclimate_port.source.tree import Span, called_name, dotted, entry_key, last_name, string_value, walk
from acclimate_port.source_file import SourceFile, kept

_WORD = re.compile(r"(?<![A-Za-z])(gpus?|cuda|nvenc|nvdec|cuvid|nvidia)(?![a-z])", re.IGNORECASE)
_LONGEST_WORD = 60
_DEVICE = re.compile(r"cuda(:\d*)?$")
_FILE = re.compile(r"\.\w{2,5}$")
_DEVICE_TEXT = re.compile(r"\(?[rf]*['\"]+cuda:")
_STARTS = re.compile(rf"(?:{STARTING})$")
"""Functions that start another process."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_GPUS_OF_COMMAND = re.compile(r"VISIBLE_DEVICES|--\w*gpus?\b|--device\b")
"""How a command line is told of devices."""
_COMMAND = re.compile(
    r"VISIBLE_DEVICES|--\w|(^|\s)(python3?|torchrun|srun|sbatch|mpirun|deepspeed|accelerate)\s|\bgres=|#SBATCH|#PBS"
)
"""What a command line, or a script for another program to run, has in it."""
_TELLS = re.compile(
    r"^(print|log|info|debug|warn|warning|error|critical|exception|exit|echo|write|writelines|skip|skipif|skipIf"
    r"|skipUnless|fail|xfail|add_argument|add_option|update|append|join|add_row|add_text|add_scalar|add_scalars|metric|markdown|title"
    r"|caption|note|text)(_|$)|(_|^)(log|print|report|message|msg|description|postfix|title|label|metrics?)$"
    r"|(Error|Exception|Warning)$",
    re.IGNORECASE,
)
"""Names of functions and classes that tell a person of something, or keep what is told."""
_TERMINAL = re.compile(r"(sys\.)?std(out|err)\.|tqdm\.|st\.|click\.")
_WRITES = re.compile(r"(^|_)(dump|write|writerows?|save|to_csv|to_json)(_|$)")
"""Functions that write a file of settings."""
_OF_TORCH = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which torch's own ranks are counted, on every accelerator."""
_SAID = ("reason", "msg", "message", "desc", "help", "description", "title", "label")
_KEEP_NUMBER = ("max", "min", "int", "bool", "float", "list", "range")
_OF_LIGHTNING = {"accelerator", "gpus", "devices", "num_gpus", "strategy", "precision"}
_OPTIONS_OF_GPUS = re.compile(r"(^|_)(n|num)?_?gpus?(_per_\w+)?$|^cuda_device$|^ctx_id$|^gpu_ids?$")
"""Arguments by which libraries are told to use NVIDIA's GPUs."""
_KEY_OF_GPUS = re.compile(r"(num_)?gpus?$", re.IGNORECASE)
"""Keys of dictionaries by which schedulers are asked for GPUs."""
_ABOUT_CUDA = re.compile(r"cuda.*avail|avail.*cuda|nvidia", re.IGNORECASE)
"""Names that say that CUDA is there."""
_KEY_ABOUT_CUDA = re.compile(r"cuda|nvidia", re.IGNORECASE)
_MOST = 60


def reason_against_giving(file: SourceFile, question: cst.CSTNode) -> str:
    """Why the answer to a question for CUDA must not be true for another accelerator; ``""`` if it may be."""
    values = [*_values(file, question)]
    for value in values:
        if library := _library(file, value):
            return f"`{library}` gets its answer, and may mean CUDA by it"
    if name := _resource(file, question, values):
        return (
            f"it reaches `{name}`, by which a scheduler such as Ray gives out GPUs that may be NVIDIA's alone"
        )
    if word := _word_for_lightning(file, question, values):
        return f"it decides about `{word}`, by which Lightning or another library chooses CUDA"
    if name := _field_about_cuda(file, values):
        return f"it is kept as `{name}`, by which the program may tell of CUDA"
    for value in values:
        if variable := _variable_set(file, value):
            return (
                f"it sets the variable `{variable}` of the environment, by which other code may choose CUDA"
            )
        if line := line_of_file(file, value):
            return f"line {line} writes its answer to a file, which another program may read"
        if line := _text_given(file, value):
            return f"a text or a command in line {line}, which other code reads, is made by its answer"
    if line := _command_with_gpus(file, question, values):
        return f"line {line} tells other processes of GPUs, which may be CUDA's, by such a number"
    if call := _call_of_others(file, question):
        return f"it decides about `{call}`, by which another library uses CUDA"
    if word := _word_chosen(file, question):
        return f'the code that it decides about says "{word}", which stays'
    return ""


@kept
def _values(file: SourceFile, question: cst.CSTNode) -> list[cst.CSTNode]:
    """The expressions that have the answer, or a number, a flag or a word that is chosen by it."""
    found: dict[int, cst.CSTNode] = {}
    waiting: list[cst.CSTNode] = [question]
    while waiting and len(found) < _MOST:
        start = waiting.pop()
        for use in uses_of(file, start):
            if id(use) in found:
                continue
            found[id(use)] = use
            waiting += [one for one in _chosen_by(file, use) if id(one) not in found]
    return [*found.values()]


def _chosen_by(file: SourceFile, use: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What a use of an answer chooses: a choice, the flags and numbers that a branch sets, ``max(1, n)``."""
    whole = whole_condition(file, use)
    at = file.tree.parent(whole)
    if isinstance(at, cst.Comparison):
        whole = whole_condition(file, at)
        at = file.tree.parent(whole)
    if whole is not use:
        yield whole
    if isinstance(at, cst.IfExp) and at.test is whole:
        if _is_plain(at.body) and _is_plain(at.orelse):
            yield whole_choice(file, at)
    elif isinstance(at, cst.If) and at.test is whole:
        blocks = [at.body, *([at.orelse.body] if isinstance(at.orelse, cst.Else) else [])]
        for block in blocks:
            for line in block.body:
                for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
                    value = small.value if isinstance(small, (cst.Assign, cst.AnnAssign)) else None
                    if value is not None and _is_plain(value):
                        yield value
    elif isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        if (
            isinstance(call, cst.Call)
            and called_name(call) in _KEEP_NUMBER
            and isinstance(call.func, cst.Name)
        ):
            yield call


def _is_plain(value: cst.CSTNode) -> bool:
    """Whether a value is a number, a flag or a word that names no device of torch."""
    if isinstance(value, cst.UnaryOperation):
        return _is_plain(value.expression)
    if isinstance(value, cst.IfExp):
        return _is_plain(value.body) and _is_plain(value.orelse)
    text = string_value(value)
    if text is not None:
        return _DEVICE.match(text) is None
    is_constant = isinstance(value, cst.Name) and value.value in ("None", "True", "False")
    is_call = isinstance(value, cst.Call) and called_name(value) in ("device_count", "current_device")
    return is_constant or is_call or isinstance(value, (cst.Integer, cst.List, cst.Tuple))


# -- libraries ---------------------------------------------------------------------------------------


def _library(file: SourceFile, value: cst.CSTNode) -> str:
    """The library that gets a value, directly or in an object with settings, and may mean CUDA by it."""
    for held in (value, *holders_given(file, value)):
        given = file.tree.given_to(held)
        name = package_of_others(file, given.call.func) if given is not None else ""
        if name and given is not None and given.word not in _SAID:
            return name
        if given is not None and _OPTIONS_OF_GPUS.search(given.word) and _is_of_others(file, given.call.func):
            return dotted(given.call.func) or called_name(given.call) or "a library"
    return ""


def _is_of_others(file: SourceFile, function: cst.CSTNode) -> bool:
    """Whether a function may be a library's that means CUDA by a flag: also a method of an object."""
    package = next(iter(file.tree.may_be(function)), "").partition(".")[0]
    if package:
        return package in KEEP_SETTINGS
    holder = function.value if isinstance(function, cst.Attribute) else None
    while isinstance(holder, (cst.Attribute, cst.Call, cst.Subscript)):
        holder = holder.func if isinstance(holder, cst.Call) else holder.value
    is_object = isinstance(holder, cst.Name) and holder.value not in ("self", "cls")
    named = {name.partition(".")[0] for name in file.tree.imported_packages}
    others = named - FOR_ANY - KEEP_SETTINGS - set(sys.stdlib_module_names) - file.survey.modules
    return is_object and bool(others | (named & {"ray", "submitit"}))


def package_of_others(file: SourceFile, function: cst.CSTNode) -> str:
    """The package of a function that is neither torch's nor Python's nor the project's; else ``""``."""
    package = next(iter(file.tree.may_be(function)), "").partition(".")[0]
    package = package or package_of_object(file, function) or _package_held(file, function)
    known = package in FOR_ANY or package in KEEP_SETTINGS or package in sys.stdlib_module_names
    is_own = package in file.survey.modules and package not in OF_OTHERS
    return "" if known or is_own else package


def _package_held(file: SourceFile, function: cst.CSTNode) -> str:
    """The package of the class or function that a name holds, also as one of a table: ``KINDS[name]``."""
    waiting: list[cst.CSTNode | None] = [function]
    if isinstance(function, cst.Name):
        waiting = [*file.bound_values(function)]
    for _ in range(_MOST):
        if not waiting:
            break
        value = waiting.pop()
        if isinstance(value, cst.Subscript):
            table = value.value
            waiting += file.bound_values(table) if isinstance(table, cst.Name) else [table]
        elif isinstance(value, cst.Dict):
            waiting += [one.value for one in value.elements]
        elif value is not None and (full := next(iter(file.tree.may_be(value)), "")):
            return full.partition(".")[0]
    return ""


def _resource(file: SourceFile, question: cst.CSTNode, values: list[cst.CSTNode]) -> str:
    """The name by which the project tells a scheduler of GPUs, if an answer reaches it; else ``""``.

    A value that is kept by that name or under a key for GPUs, the result of a function of that name, and what
    a branch enters under such a key.
    """
    names = file.survey.resources
    if not names:
        return ""
    function = file.tree.function(question)
    if isinstance(function, cst.FunctionDef) and function.name.value in names:
        return function.name.value
    for value in values:
        for name in _names_given(file, value):
            if name in names or _KEY_OF_GPUS.match(name):
                return name
    places = branches_of_result(file, question)
    keys = (
        ((one, string_value(one.key) or "") for one in file.tree.of_type(cst.DictElement)) if places else ()
    )
    for entry, key in keys:
        start = file.span(entry).start
        if _KEY_OF_GPUS.match(key) and any(place.start <= start < place.end for place in places):
            return key
    return ""


def _names_given(file: SourceFile, value: cst.CSTNode) -> Iterator[str]:
    """The attributes, keys, arguments and fields that a value is kept by."""
    at = file.tree.parent(value)
    if isinstance(at, (cst.Assign, cst.AnnAssign)):
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else [at.target]
        yield from (entry_key(one) or last_name(one) for one in targets)
    elif isinstance(at, cst.DictElement):
        yield string_value(at.key) or ""
    elif (given := file.tree.given_to(value)) is not None:
        yield given.word


def _field_about_cuda(file: SourceFile, values: list[cst.CSTNode]) -> str:
    """The argument or the key by which an answer is kept, if it says that CUDA is there; else ``""``."""
    for value in values:
        at = file.tree.parent(value)
        says = _KEY_ABOUT_CUDA if isinstance(at, cst.DictElement) else _ABOUT_CUDA
        names = _names_given(file, value) if isinstance(at, (cst.Arg, cst.DictElement)) else ()
        if name := next((one for one in names if says.search(one)), ""):
            return name
    return ""


def _word_for_lightning(file: SourceFile, question: cst.CSTNode, values: list[cst.CSTNode]) -> str:
    """The setting of Lightning's trainers that a test decides about: ``cfg.trainer.accelerator = "cpu"``."""
    words = _OF_LIGHTNING if uses_lightning(file) else {"accelerator"}
    for value in values:
        at = file.tree.parent(value)
        targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else []
        names = [last_name(one) for one in targets if isinstance(one, cst.Attribute)]
        names += [entry_key(one) or "" for one in targets]
        names += [string_value(at.key) or ""] if isinstance(at, cst.DictElement) else []
        given = file.tree.given_to(value)
        names += [given.word] if given is not None else []
        if word := next((one for one in names if one in words), ""):
            return word
    decided = decided_by(file, question)
    blocks = [decided.body, decided.orelse] if isinstance(decided, cst.If) else []
    for block in blocks:
        for target in _targets_in(file, block) if block is not None else ():
            name = entry_key(target) or last_name(target)
            if name == "accelerator" and not isinstance(target, cst.Name):
                return name
    return ""


def _targets_in(file: SourceFile, block: cst.CSTNode) -> Iterator[cst.CSTNode]:
    place = file.span(block)
    for one in file.tree.of_type(cst.AssignTarget):
        if place.start <= file.span(one).start < place.end:
            yield one.target


# -- texts -------------------------------------------------------------------------------------------


@kept
def given_to_those_who_mean_cuda(file: SourceFile) -> list[cst.BaseExpression]:
    """What other libraries and processes get: by a flag or a number in it they may use CUDA."""
    found: list[cst.BaseExpression] = []
    for call in file.tree.of_type(cst.Call):
        is_process = _STARTS.match(file.tree.qualified(call.func) or "") is not None
        if not (is_process or (call.args and package_of_others(file, call.func))):
            continue
        for argument in call.args:
            parts = walk(argument.value) if is_process else [argument.value]
            found += [one for one in parts if isinstance(one, (cst.Name, cst.Attribute, cst.Call))]
    return found


def _variable_set(file: SourceFile, value: cst.CSTNode) -> str:
    """The variable of the environment that gets a value, if it is not one of torch's for its ranks."""
    at = file.tree.parent(value)
    targets = [one.target for one in at.targets] if isinstance(at, cst.Assign) else []
    for one in targets:
        if isinstance(one, cst.Subscript) and file.tree.qualified(one.value) == "os.environ":
            key = entry_key(one) or "?"
            return "" if key in _OF_TORCH else key
    return ""


def line_of_file(file: SourceFile, value: cst.CSTNode) -> int:
    """The line in which a value, or settings with it, are written to a file; 0 if they are not."""
    for held in (value, *holders_given(file, value)):
        given = file.tree.given_to(held)
        is_known = (
            given is None or given.full.startswith("torch.") or _TERMINAL.match(dotted(given.call.func))
        )
        if given is not None and _WRITES.search(given.name) and not is_known:
            return file.tree.line(file.span(given.call).start)
    return 0


def _text_given(file: SourceFile, value: cst.CSTNode) -> int:
    """The line in which a value becomes a part of a text that is no message; 0 if it does not."""
    for use in uses_of(file, value, computed=True):
        if (text := text_with(file, use)) is None or _is_device(file, text):
            continue
        is_command = _COMMAND.search(file.tree.source(text)) is not None
        for one in uses_of(file, text, computed=True):
            is_read = _is_read(file, one) and not _is_told(file, one)
            if file.tree.qualified(one) is None and (is_command or is_read):
                return file.tree.line(file.span(text).start)
    return 0


def _command_with_gpus(file: SourceFile, question: cst.CSTNode, values: list[cst.CSTNode]) -> int:
    """The line of a command with GPUs, in a file that starts processes and does more than tell a number."""
    commands = _commands_with_gpus(file)
    is_count = isinstance(question, cst.Call) and called_name(question) == "device_count"
    if not commands or not is_count or all(_is_told(file, value) for value in values):
        return 0
    return file.tree.line(commands[0].start)


@kept
def _commands_with_gpus(file: SourceFile) -> list[Span]:
    """The texts about GPUs in the functions that start other processes, and what these get."""
    starts = (
        call for call in file.tree.of_type(cst.Call) if _STARTS.match(file.tree.qualified(call.func) or "")
    )
    functions = {id(file.tree.function(call)) for call in starts}
    texts: list[cst.SimpleString | cst.FormattedStringText] = [*file.tree.of_type(cst.SimpleString)]
    texts += file.tree.of_type(cst.FormattedStringText)
    return [
        file.span(text)
        for text in (texts if functions else ())
        if _GPUS_OF_COMMAND.search(text.value) and id(file.tree.function(text)) in functions
    ]


def text_with(file: SourceFile, part: cst.CSTNode) -> cst.CSTNode | None:
    """The text that an expression is a part of: of ``f"{n} GPUs"``, ``"%d" % n``, ``str(n)``."""
    at = file.tree.parent(part)
    if isinstance(at, cst.FormattedStringExpression):
        return file.tree.parent(at)
    if isinstance(at, (cst.Tuple, cst.Element)):
        whole = file.tree.parent(at) if isinstance(at, cst.Element) else at
        around = file.tree.parent(whole) if isinstance(whole, cst.Tuple) else None
        is_format = isinstance(around, cst.BinaryOperation) and isinstance(around.operator, cst.Modulo)
        return around if is_format and string_value(getattr(around, "left", None)) is not None else None
    if isinstance(at, cst.BinaryOperation):
        sides = (at.left, at.right)
        return at if any(string_value(side) is not None for side in sides) else None
    given = file.tree.given_to(part)
    if given is None:
        return None
    is_text = given.name in ("str", "repr") and isinstance(given.call.func, cst.Name)
    func = given.call.func
    is_format = (
        given.name == "format" and isinstance(func, cst.Attribute) and string_value(func.value) is not None
    )
    return given.call if is_text or is_format else None


def _is_device(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether a text, or what it is appended to, is the name of a device with its number."""
    around = file.tree.parent(text)
    whole = around if isinstance(around, cst.BinaryOperation) else text
    return any(_DEVICE_TEXT.match(file.tree.source(one)) for one in (text, whole))


def _is_read(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether something gets a text that may not be a message: a call, a result, an attribute or an entry."""
    at = file.tree.parent(text)
    if isinstance(at, cst.Assign):
        names = [entry_key(one.target) or last_name(one.target) for one in at.targets]
        is_kept = all(isinstance(one.target, cst.Name) for one in at.targets)
        return not is_kept and not any(name in _OF_TORCH or _TELLS.search(name) for name in names)
    return isinstance(at, (cst.Arg, cst.Return, cst.Element, cst.DictElement, cst.BinaryOperation))


def _is_told(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a message, an error or a log has an expression in it."""
    for below, around in file.tree.upwards(node):
        if isinstance(around, (cst.Raise, cst.Assert)):
            return True
        if isinstance(around, cst.Arg) and around.keyword is not None and around.keyword.value in _SAID:
            return True
        if isinstance(around, cst.Call):
            name = called_name(around) or ""
            package = next(iter(file.tree.may_be(around.func)), "").partition(".")[0]
            if _TELLS.search(name) or package in KEEP_SETTINGS or package == "logging":
                return True
            if below is around.func:
                continue
        if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            names = (
                [last_name(one.target) for one in around.targets] if isinstance(around, cst.Assign) else []
            )
            return any(map(_TELLS.search, names))
    return False


@kept
def _words_about_cuda(file: SourceFile) -> list[tuple[cst.SimpleString, str]]:
    """The short texts of the file about CUDA that are no name of a device."""
    texts = ((one, string_value(one) or "") for one in file.tree.of_type(cst.SimpleString))
    return [
        (text, word)
        for text, word in texts
        if _WORD.search(word) and not _DEVICE.match(word) and len(word) <= _LONGEST_WORD
    ]


def _word_chosen(file: SourceFile, question: cst.CSTNode) -> str:
    """A word about CUDA in the code that a test decides about, which other code than messages gets."""
    places = branches_of_result(file, question)
    for text, word in _words_about_cuda(file) if places else ():
        start = file.span(text).start
        if not any(place.start <= start < place.end for place in places):
            continue
        if (" " in word and not _COMMAND.search(word)) or word.startswith(("torch.cuda.", "cuda")):
            continue
        if _FILE.search(word):
            continue
        at = file.tree.parent(text)
        is_key = isinstance(at, cst.Index) or (isinstance(at, cst.DictElement) and at.key is text)
        is_compared = isinstance(at, (cst.Comparison, cst.ComparisonTarget))
        if is_key or is_compared or isinstance(at, cst.Expr) or _is_told(file, text):
            continue
        uses = [one for one in uses_of(file, text) if one is not text]
        if isinstance(at, cst.Assign) and uses and all(_is_compared_or_told(file, one) for one in uses):
            continue
        return word
    return ""


def _is_compared_or_told(file: SourceFile, use: cst.CSTNode) -> bool:
    at = file.tree.parent(use)
    return isinstance(at, (cst.Comparison, cst.ComparisonTarget)) or _is_told(file, use)


def _call_of_others(file: SourceFile, question: cst.CSTNode) -> str:
    """A call in the code that a test decides about by which another library is told to use CUDA."""
    for place in controlled_quietly(file, question):
        for call in file.calls_within(place):
            package = package_of_others(file, call.func)
            if package and _WORD.search(_said_in(call)):
                return dotted(call.func)
        for start, name in _names_of_others(file):
            if place.start <= start < place.end:
                return name
    return ""


def _said_in(call: cst.Call) -> str:
    """The names and texts of a call that are not those of the program: its function, keywords and strings."""
    words = [_CAMEL.sub(" ", dotted(call.func))]
    for one in call.args:
        words += [one.keyword.value] if one.keyword is not None else []
        text = string_value(one.value) or ""
        words += [text] if _DEVICE.match(text) is None else []
    return " ".join(words).replace("_", " ")


@kept
def _names_of_others(file: SourceFile) -> list[tuple[int, str]]:
    """Where the file reads names about CUDA of other libraries: ``cv2.dnn.DNN_BACKEND_CUDA``."""
    found = []
    for one in file.tree.of_type(cst.Attribute):
        if _WORD.search(one.attr.value.replace("_", " ")) and package_of_others(file, one):
            found.append((file.span(one).start, dotted(one)))
    return found
