"""Code that leaves CUDA unused where its edit counts the devices: a device's name, a seed.

After the first count, a process ignores changes of ``CUDA_VISIBLE_DEVICES``, and a process that is forked
from it cannot use CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.dataflow.map_location import is_used_at_once
from acclimate_port.source.torch_cuda import LEAVE_CUDA_UNUSED
from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source_file import SourceFile, cuda_name, is_assigned, kept

_SETS = ("setdefault", "putenv", "setenv", "update")
_SUFFIX = "_VISIBLE_DEVICES"
_START = {"Process", "Pool", "Queue", "Manager"}
_RUN_ELSEWHERE = {"Process", "Thread", "spawn", "start_processes", "apply", "apply_async", "map", "submit"}
AT_IMPORT = "it looks up the accelerator when the module is imported"
SET_LATER = "it counts the devices, and a later change of *_VISIBLE_DEVICES would have no effect"
SET_IN_VAIN = (
    "it reads *_VISIBLE_DEVICES for torch, and a later change, which has no effect now, would have one"
)
FORKED_LATER = "it counts the devices, and a process that is forked later could not use them"


def reason_against_counting(file: SourceFile, node: cst.CSTNode, *, is_device: bool, is_lookup: bool) -> str:
    """Why an edit must not count the devices here; ``""`` if it may.

    Args:
        file: the file.
        node: the code that the edit changes.
        is_device: whether it is a device, which is used only where something gets it.
        is_lookup: whether it is something that leaves CUDA unused until then.
    """
    name = cuda_name(file, node.func if isinstance(node, cst.Call) else node)
    if is_lookup and _runs_when_imported(file, node):
        return AT_IMPORT
    if file.target.name == "acclimate" and _is_set_in_vain(file, node):
        return SET_IN_VAIN
    leaves_unused = name in LEAVE_CUDA_UNUSED or (is_device and not is_used_at_once(file, node))
    if not leaves_unused or file.is_guarded(node) or _counts_around(file, node):
        return ""
    settings = _settings(file)
    is_first = not is_device or _is_option(file, node)
    function = file.tree.function(node)
    # Another function may choose the devices before or after this one; a device is used later.
    near = settings if is_first else [one for one in settings if file.tree.function(one) is function]
    if any(not _is_before(file, setting, node) for setting in near):
        return SET_LATER
    if file.survey.sets_visible_devices and not settings and is_first:
        return SET_LATER
    if is_device and _runs_in_child(file, node):
        return ""
    return FORKED_LATER if (file.survey.forks and not is_device) or _forks(file) else ""


def _is_set_in_vain(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether code asks torch for CUDA, which starts CUDA, before its function chooses the visible devices.

    acclimate asks the driver's library instead, so that a later choice has an effect.
    """
    if not _settings(file):
        return False
    function, at = file.tree.function(node), file.span(node).start
    own = (one for one in _settings(file) if file.tree.function(one) is function)
    if not any(file.span(one).start > at for one in own):
        return False
    calls = (one for one in walk(node) if isinstance(one, cst.Call))
    return any(cuda_name(file, one.func) == "is_available" for one in calls)


def _runs_when_imported(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an import of the module evaluates a node, and does not use or count the devices itself."""
    is_run = file.runs_at_import(node) and not file.is_of_program(node)
    return is_run and not file.uses_devices_at_import


def _is_option(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a device is the default of an option, which a program reads before it does anything else."""
    return any(
        isinstance(around, cst.Call) and called_name(around) == "add_argument"
        for around in file.tree.ancestors(node)
    )


def _runs_in_child(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node is in a function that another process runs: ``Process(target=work)``."""
    functions = [one.name.value for one in file.tree.ancestors(node) if isinstance(one, cst.FunctionDef)]
    return "run" in functions or not _given_to_processes(file).isdisjoint(functions)


@kept
def _given_to_processes(file: SourceFile) -> set[str]:
    """The names in calls that run a function in another process or thread."""
    calls = (call for call in file.tree.of_type(cst.Call) if called_name(call) in _RUN_ELSEWHERE)
    return {node.value for call in calls for node in walk(call) if isinstance(node, cst.Name)}


@kept
def _settings(file: SourceFile) -> list[cst.CSTNode]:
    """The places where the file sets a variable such as ``CUDA_VISIBLE_DEVICES`` of its own process."""
    return [*_find_settings(file)]


def _find_settings(file: SourceFile) -> Iterator[cst.CSTNode]:
    for node in file.tree.of_type(cst.SimpleString):
        if not (string_value(node) or "").endswith(_SUFFIX):
            continue
        at = file.tree.parent(node)
        index = file.tree.parent(at) if isinstance(at, cst.Index) else None
        holder = file.tree.parent(index) if index is not None else None
        is_own = isinstance(holder, cst.Subscript) and file.tree.source(holder.value).endswith("environ")
        if is_own and holder is not None and is_assigned(file, holder):
            yield node
        call = file.tree.around(node, cst.Call)
        if call is not None and called_name(call) in _SETS and "env" in file.tree.source(call.func):
            yield node


def _is_before(file: SourceFile, setting: cst.CSTNode, call: cst.CSTNode) -> bool:
    """Whether a setting has been made when a call runs."""
    first, second = file.tree.function(setting), file.tree.function(call)
    is_earlier = file.span(setting).start < file.span(call).start
    return is_earlier if first is second else first is None


def _counts_around(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an earlier statement of the same function, or the very next one, counts the devices anyway."""
    for below, around in file.tree.upwards(node):
        if isinstance(around, (cst.IndentedBlock, cst.Module)):
            number = file.tree.number_in_block(below)
            following = (
                around.body[number + 1 : number + 2] if isinstance(below, cst.SimpleStatementLine) else ()
            )
            is_next = any(
                isinstance(one, cst.SimpleStatementLine) and _counts(file, one) for one in following
            )
            if is_next or _first_count(file, around) < number:
                return True
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return False
    return False


@kept
def _first_count(file: SourceFile, block: cst.CSTNode) -> int:
    """The number of the first statement of a block that counts the devices; the length if there is none."""
    statements = block.body if isinstance(block, (cst.IndentedBlock, cst.Module)) else ()
    for number, statement in enumerate(statements):
        at = statement.test if isinstance(statement, cst.If) else statement
        if isinstance(at, (cst.SimpleStatementLine, cst.BaseExpression)) and _counts(file, at):
            return number
    return len(statements)


def _counts(file: SourceFile, code: cst.CSTNode) -> bool:
    names = [cuda_name(file, one.func) for one in walk(code) if isinstance(one, cst.Call)]
    return any(name and name not in LEAVE_CUDA_UNUSED for name in names)


@kept
def _forks(file: SourceFile) -> bool:
    """Whether the file starts processes as copies of this one, which is the default on Linux."""
    for call in file.tree.of_type(cst.Call):
        full = file.tree.qualified(call.func) or ""
        package, _, name = full.rpartition(".")
        if full == "os.fork":
            return True
        if name in ("get_context", "set_start_method") and call.args:
            if string_value(call.args[0].value) == "fork":
                return True
        elif name in _START and package in ("multiprocessing", "torch.multiprocessing"):
            return "set_start_method" not in file.names and "get_context" not in file.names
    return False
