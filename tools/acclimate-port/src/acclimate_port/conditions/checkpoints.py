"""Tests that decide to which device a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import uses_of_result, where_true
from acclimate_port.dataflow.map_location import is_map_location
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import called_name, entry_key, keyword, string_value, walk
from acclimate_port.source_file import SourceFile, kept

_UNPICKLE = ("pickle.load", "pickle.loads", "dill.load", "cloudpickle.load", "joblib.load")
_BOTH = {"bare", "host"}
SPLIT = "line {line} loads a checkpoint to CUDA if it was saved there, and only without CUDA to the host"


def decides_location(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a checkpoint is loaded without a device if a test is true, so that it goes back to CUDA.

    ``map_location=None if use_cuda else "cpu"``, also as an ``if`` that sets a name, or ``torch.load(path)``
    in a branch.
    """
    if not file.loads:
        return False
    tests = {test, *uses_of_result(file, test)}
    if any(tests & {*walk(choice.test)} for choice in _named_in_branches(file)):
        return True
    places = where_true(file, test)
    for call in file.loads:
        span = file.span(call)
        if _is_bare(call):
            if any(place.start <= span.start and span.end <= place.end for place in places):
                return True
        elif _chooses_none(file, call, tests):
            return True
    return False


def _is_bare(call: cst.Call) -> bool:
    """Whether a call loads a checkpoint to the device that it was saved on."""
    is_open = any(argument.star == "**" for argument in call.args)
    given = keyword(call, "map_location")
    if given is not None or is_open or len(call.args) > 1:
        return given is not None and isinstance(given.value, cst.Name) and given.value.value == "None"
    return True


def _chooses_none(file: SourceFile, call: cst.Call, tests: set[cst.CSTNode]) -> bool:
    """Whether one of the tests chooses between ``None`` and a device for ``map_location``."""
    for choice in (argument.value for argument in call.args):
        if isinstance(choice, cst.IfExp) and is_map_location(file, choice):
            sides = (choice.body, choice.orelse)
            has_none = any(isinstance(side, cst.Name) and side.value == "None" for side in sides)
            if has_none and tests & set(walk(choice.test)):
                return True
    return False


@kept
def _named_in_branches(file: SourceFile) -> list[cst.If]:
    """Each ``if`` that sets a name, which is given as ``map_location``, to ``None`` or else to the host."""
    found = []
    for choice in file.tree.of_type(cst.If):
        if not isinstance(choice.orelse, cst.Else):
            continue
        here, there = _assigned(choice.body), _assigned(choice.orelse.body)
        for name in here.keys() & there.keys():
            places = {_location(file, side[name]) for side in (here, there)}
            if places == _BOTH and any(is_map_location(file, use) for use in uses_of(file, here[name])):
                found.append(choice)
    return found


def _assigned(branch: cst.BaseSuite) -> dict[str, cst.BaseExpression]:
    """What a branch assigns to names."""
    assigned = (one for one in walk(branch) if isinstance(one, cst.Assign))
    return {
        target.target.value: one.value
        for one in assigned
        for target in one.targets
        if isinstance(target.target, cst.Name)
    }


@kept
def reason_against_split(file: SourceFile) -> str:
    """Why a device of the program is unsafe: a flag decides whether a checkpoint goes back to CUDA.

    ``torch.load(path) if args.cuda else torch.load(path, map_location="cpu")``: the program shows that the
    checkpoint comes from CUDA, so that it cannot be loaded where the flag is set on another accelerator.
    """
    found = _split(file) if file.loads or "Unpickler" in file.tree.text else ()
    first = min((file.span(choice).start for choice in found), default=None)
    return SPLIT.format(line=file.tree.line(first)) if first is not None else ""


def _split(file: SourceFile) -> Iterator[cst.CSTNode]:
    """The choices between a load to the device of the checkpoint and one to the host."""
    loads = {id(call): call for call in file.loads}
    around = (one for call in file.loads for one in file.tree.ancestors(call))
    for choice in {id(one): one for one in around if isinstance(one, (cst.If, cst.IfExp))}.values():
        sides = [[*walk(side)] for side in (choice.body, choice.orelse) if side is not None]
        loaded = [[loads[id(one)] for one in side if id(one) in loads] for side in sides]
        if len(loaded) == 2 and all(loaded):
            forms = [{_form(file, call) for call in side} for side in loaded]
            if forms in ([{"bare"}, {"host"}], [{"host"}, {"bare"}]):
                yield choice
    for choice in file.tree.of_type(cst.IfExp):
        places = {_location(file, choice.body), _location(file, choice.orelse)}
        options = {_options(choice.body), _options(choice.orelse)}
        is_place = places == _BOTH and any(is_map_location(file, use) for use in uses_of(file, choice))
        # ACC202 ports a `map_location` that a question for CUDA chooses.
        is_ported = is_map_location(file, choice) and _asks_plainly(file, choice.test)
        if (is_place and not is_ported) or options == _BOTH:
            yield choice
    yield from (choice for choice in _named_in_branches(file) if not _asks_plainly(file, choice.test))
    yield from (*_by_entry(file), *_by_unpickler(file))


def _asks_plainly(file: SourceFile, test: cst.BaseExpression) -> bool:
    """Whether a test is a question for CUDA and nothing else: ``not torch.cuda.is_available()``."""
    asked = test.expression if isinstance(test, cst.UnaryOperation) else test
    return isinstance(asked, cst.Call) and file.tree.qualified(asked.func) == "torch.cuda.is_available"


def _by_entry(file: SourceFile) -> Iterator[cst.CSTNode]:
    """Where a branch alone adds the host to the options of a load: ``options["map_location"] = "cpu"``."""
    for entry in file.tree.of_type(cst.Subscript):
        value = file.tree.value_of(entry)
        if value is None or entry_key(entry) != "map_location" or _location(file, value) != "host":
            continue
        block = file.tree.parent(file.tree.parent(file.tree.statement(entry)) or entry)
        branch = file.tree.parent(block) if block is not None else None
        if isinstance(branch, cst.If) and branch.orelse is None and block is branch.body:
            yield entry


def _by_unpickler(file: SourceFile) -> Iterator[cst.CSTNode]:
    """The choices between a plain ``pickle.load`` and a class that unpickles on the host."""
    for call in file.tree.of_type(cst.Call):
        choice = file.tree.around(call, cst.If) if "Unpickler" in (called_name(call) or "") else None
        sides = (choice.body, choice.orelse) if choice is not None else ()
        own = [side for side in sides if side is not None and call not in walk(side)]
        others = (one for side in own for one in walk(side) if isinstance(one, cst.Call))
        if choice is not None and any(file.tree.qualified(one.func) in _UNPICKLE for one in others):
            yield choice


def _form(file: SourceFile, call: cst.Call) -> str:
    """``bare`` for a load to the device of the checkpoint, ``host`` for one to the host, or ``""``."""
    if _is_bare(call):
        return "bare"
    given = keyword(call, "map_location")
    value = given.value if given is not None else call.args[1].value if len(call.args) > 1 else None
    return _location(file, value)


def _location(file: SourceFile, value: cst.CSTNode | None) -> str:
    """``bare`` for ``None``, ``host`` for the host's name or a function that keeps its storage, or ``""``."""
    if isinstance(value, cst.Name) and value.value == "None":
        return "bare"
    if isinstance(value, cst.Lambda):
        given = value.params.params
        is_storage = isinstance(value.body, cst.Name) and given and value.body.value == given[0].name.value
        return "host" if is_storage else ""
    if isinstance(value, cst.Call) and file.tree.qualified(value.func) == "torch.device" and value.args:
        value = value.args[0].value
    return "host" if (string_value(value) or "").partition(":")[0] == "cpu" else ""


def _options(value: cst.CSTNode) -> str:
    """``host`` for ``{"map_location": "cpu"}``, ``bare`` for ``{}``, or ``""``."""
    if isinstance(value, cst.Call) and called_name(value) == "dict":
        given = {one.keyword.value: one.value for one in value.args if one.keyword is not None}
    elif isinstance(value, cst.Dict):
        entries = (one for one in value.elements if isinstance(one, cst.DictElement))
        given = {string_value(one.key) or "": one.value for one in entries}
    else:
        return ""
    if not given:
        return "bare"
    return "host" if string_value(given.get("map_location")) == "cpu" else ""
