"""The tests of a device's name that a device reaches: ``device == "cpu"``, ``device.startswith("cuda")``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.proofs import asks_for_cuda
from acclimate_port.conditions.statements import decided_by
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import called_name, dotted, string_value, walk
from acclimate_port.source_file import SourceFile

_NAMES = ("cuda", "cpu")


def tests_reached(file: SourceFile, device: cst.CSTNode) -> list[cst.CSTNode]:
    """The tests that a device reaches, which compare it with the name of a CUDA device or of the CPU."""
    if file.device_tests is None:
        known: dict[int, list[cst.CSTNode]] = defaultdict(list)
        for test, operand in _tests(file):
            known[id(operand)].append(test)
        file.device_tests = known
    compared = file.device_tests
    if not compared:
        return []
    reached = (
        test
        for use in uses_of(file, device)
        for test in compared.get(id(use), ())
        if not _is_over(file, use, device)
    )
    return [test for test in reached if not _only_falls_back(file, test)]


def _is_over(file: SourceFile, use: cst.CSTNode, device: cst.CSTNode) -> bool:
    """Whether a local name is read before it gets a device, and not again: in no loop, and above it."""
    tree = file.tree
    assign = tree.parent(device)
    function = tree.function(device)
    if not isinstance(use, cst.Name) or not isinstance(assign, cst.Assign) or function is None:
        return False
    is_own = all(dotted(one.target) == use.value for one in assign.targets)
    if not is_own or tree.function(use) is not function or file.span(use).end > file.span(device).start:
        return False
    if any(isinstance(node, (cst.Global, cst.Nonlocal)) for node in walk(function)):
        return False
    return not any(isinstance(around, (cst.For, cst.While)) for around in tree.ancestors(device))


def tests_of_devices(file: SourceFile) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """The tests that ask whether a device is CUDA, or which of a list it is, each with what it compares."""
    for test, operand in _tests(file, ("cuda", "nccl")):
        if string_value(operand) is None and not may_stay(file, test):
            yield test, operand


def may_stay(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test may stay beside the accelerator's name: it falls back to the CPU, or only pins."""
    return _only_falls_back(file, test) or _only_pins(file, test)


def _only_pins(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test only gives the value of ``pin_memory``, which changes no result: it may stay."""
    at = file.tree.parent(test)
    if isinstance(at, cst.Assign):
        return all("pin_memory" in file.tree.source(one.target) for one in at.targets)
    return isinstance(at, cst.Arg) and at.keyword is not None and at.keyword.value == "pin_memory"


def _only_falls_back(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test chooses the CPU where CUDA is missing, and does nothing else: ``device = "cpu"``.

    The accelerator's name never needs that, so such a test may stay beside it. The same holds for a test that
    adds the number of the device: ``if device == "cuda": device = f"cuda:{torch.cuda.current_device()}"``.
    """
    statement = decided_by(file, test)
    if not isinstance(statement, cst.If) or statement.orelse is not None:
        return False
    lines = [line.body for line in statement.body.body if isinstance(line, cst.SimpleStatementLine)]
    given = [one for line in lines for one in line if isinstance(one, cst.Assign)]
    if not len(given) == len(statement.body.body) == sum(map(len, lines)):
        return False
    if asks_for_cuda(file, statement.test):
        return all(any(string_value(part) == "cpu" for part in walk(one.value)) for one in given)
    asked, source = file.tree.source(test), file.tree.source
    return all("cuda:" in source(one.value) and source(one.targets[0].target) in asked for one in given)


def _tests(file: SourceFile, names: tuple[str, ...] = _NAMES) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """The tests of one of some names of devices in a file, each with what it compares."""
    for test in file.tree.of_type(cst.Comparison):
        sides = [test.left, *(target.comparator for target in test.comparisons)]
        if any(_names_device(file, side, names) for side in sides):
            yield from ((test, side) for side in sides)
    for call in file.tree.of_type(cst.Call):
        is_start = called_name(call) == "startswith" and bool(call.args)
        if (
            is_start
            and isinstance(call.func, cst.Attribute)
            and _names_device(file, call.args[0].value, names)
        ):
            yield call, call.func.value
    for match in file.tree.of_type(cst.Match):
        for case in match.cases:
            if isinstance(case.pattern, cst.MatchValue) and _names_device(file, case.pattern.value, names):
                yield case, match.subject


def _names_device(file: SourceFile, side: cst.CSTNode, names: tuple[str, ...]) -> bool:
    """Whether an expression is one of some names of devices, or a list with such a name."""
    listed = side.elements if isinstance(side, (cst.Tuple, cst.List, cst.Set)) else ()
    texts = [_text(file, side), *(_text(file, element.value) for element in listed)]
    return any(text is not None and text.partition(":")[0] in names for text in texts)


def _text(file: SourceFile, node: cst.CSTNode) -> str | None:
    """A string, also that of a constant of the program's: ``DeviceType.CUDA``, ``CUDA = "cuda"``."""
    if isinstance(node, cst.Attribute) and node.attr.value == "value":  # of an enumeration
        node = node.value
    if isinstance(node, cst.Attribute) and node.attr.value.isupper():
        owner = file.values.classes.get(dotted(node.value))
        lines = owner.body.body if owner is not None else ()
        own = (one for line in lines if isinstance(line, cst.SimpleStatementLine) for one in line.body)
        given = {dotted(one.targets[0].target): one.value for one in own if isinstance(one, cst.Assign)}
        return string_value(given.get(node.attr.value)) if owner is not None else node.attr.value.lower()
    if isinstance(node, cst.Name) and node.value.isupper():
        bound = file.bound_values(node)
        return string_value(bound[0]) if len(bound) == 1 else node.value.lower() if not bound else None
    return string_value(node)


# -- lists of devices --------------------------------------------------------------------------------


def listed_devices(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """The names of CUDA devices in lists whose entries a test compares.

    ``for device in ["cpu", "cuda"]:``, ``@parametrize("device", ["cpu", "cuda"])``. After the edits the test
    must find the same entry as before.
    """
    names = (node for node in walk(test) if isinstance(node, cst.Name))
    return [
        literal
        for name in names
        for holder in _lists(file, name)
        for literal in walk(holder)
        if (string_value(literal) or "").startswith("cuda")
    ]


def _lists(file: SourceFile, name: cst.Name) -> Iterator[cst.CSTNode]:
    """The lists that a name gets its values from."""
    for assignment in file.tree.assignments(name):
        bound = assignment.node
        around = file.tree.parent(bound)
        if isinstance(bound, cst.Param):
            yield from _parameters_of_test(file, bound)
        elif isinstance(around, (cst.For, cst.CompFor)) and around.target is bound:
            yield around.iter


def _parameters_of_test(file: SourceFile, parameter: cst.Param) -> Iterator[cst.CSTNode]:
    function = file.tree.parent(file.tree.parent(parameter) or parameter)
    for decorator in function.decorators if isinstance(function, cst.FunctionDef) else ():
        call = decorator.decorator
        if isinstance(call, cst.Call) and called_name(call) == "parametrize" and len(call.args) > 1:
            said = string_value(call.args[0].value) or ""
            if parameter.name.value in said.replace(",", " ").split():
                yield call.args[1].value
