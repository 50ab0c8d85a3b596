"""A broken record affects only its own plug-in: all commands work, and show the reason."""

from __future__ import annotations

import dataclasses

import pytest

from acclimate.backends import Backend
from fake_vendors import FakeMachine
from fresh_process import FreshProcesses
from quick_parameters import quick

FIELDS = tuple(field.name for field in dataclasses.fields(Backend))
FUNCTIONS = {"probe", "device_count", "is_installed", "visible_devices_variable"}

PLUG_IN = """
from acclimate import Backend
from acclimate.backends.cpu import CPUAccelerator

class Acme(CPUAccelerator):
    name = "acme"

class Unspeakable:
    def __repr__(self): raise RuntimeError("cannot say what it is")

class Blunt(BaseException): pass

def healthy(**changes):
    fields = dict(name="acme", target="plug_in:Acme", probe=lambda: None, rank=5, device_count=lambda: 1)
    return Backend(**{**fields, **changes})

def raising(error):
    def function(): raise error
    return function

def returning(value):
    return lambda: value

def with_raising_field(name, error):
    class Raising(Backend):
        def __getattribute__(self, asked):
            if asked == name: raise error
            return super().__getattribute__(asked)
    return Raising("acme", "plug_in:Acme", lambda: None, 5)

WRONG = [None, True, 5, -1, "", "two words", [1], Unspeakable()]
ERRORS = [RuntimeError("boom"), SystemExit(3), Blunt("enough")]
RECORD = healthy()
"""
ATTACK = """
import contextlib, functools, importlib.metadata, io, itertools, os, traceback
# What is installed stays the same, and reading it takes most of a command's time.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
import plug_in
from acclimate import AcclimateError, Backend, selection
from acclimate.cli import main
from acclimate.launch.plan.devices import count_local_ranks, find_accelerator

def ways(field):
    for value in plug_in.WRONG:
        yield f"{field} = {type(value).__name__}", lambda: plug_in.healthy(**{field: value})
        if field in FUNCTIONS:
            yield f"{field}() = {type(value).__name__}", lambda: plug_in.healthy(**{field: lambda: value})
    for error in plug_in.ERRORS:
        yield f"{field} raises {type(error).__name__}", lambda: plug_in.with_raising_field(field, error)
        if field in FUNCTIONS:
            raising = plug_in.raising(error)
            yield f"{field}() raises {type(error).__name__}", lambda: plug_in.healthy(**{field: raising})

def attempt(what):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return what(), said.getvalue()
        except BaseException:
            return traceback.format_exc(), said.getvalue()

def choose():
    selection._active = None
    name = selection.get_accelerator().name
    return 0 if name in ("acme", "cpu") else name

def plan():
    try:
        return 0 if count_local_ranks(find_accelerator()) > 0 else "no ranks"
    except AcclimateError:
        return 2

COMMANDS = {
    "info": lambda: main(["info", "--json"]),
    "ops": lambda: main(["ops"]),
    "run": plan,  # what of it reads records
}
count, wrong = 0, []
for way, make in itertools.islice(ways(FIELD), FIRST, None, EACH):
    plug_in.RECORD = make()
    for named in (False, True):
        os.environ.pop("ACCLIMATE_ACCELERATOR", None)
        if named:
            os.environ["ACCLIMATE_ACCELERATOR"] = "acme"
        else:
            code, said = attempt(choose)
            if code != 0:
                wrong.append((way, "get_accelerator()", str(code), said))
        for command in COMMANDS if count < 6 else ("info", "run"):
            selection._active = None
            code, said = attempt(COMMANDS[command])
            count += 1
            # Chosen by name, a broken one is an error of one line; else it costs nothing.
            if code not in ((0, 1, 2) if named else (0,)) or "Traceback" in said:
                wrong.append((way, command, named, str(code), said))
tell(count=count, wrong=wrong[:3])
"""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("field", quick(FIELDS, "name", "target", "probe", "device_type", "remedy"))
def test_no_fault_of_a_field_reaches_further_than_its_row(
    field: str, every: int, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    """Every fault of every field, or every twelfth: of each field others."""
    machine.write("plug_in", PLUG_IN)
    machine.add_entry_points([("acme", "plug_in:RECORD")])
    first = FIELDS.index(field) % every
    code = f"FIELD, FUNCTIONS, FIRST, EACH = {field!r}, {FUNCTIONS!r}, {first}, {every}\n" + ATTACK
    told = fresh.check(code, path=machine.path).told
    assert told["count"] >= 40 // every
    assert told["wrong"] == []


def test_a_probe_that_returns_no_sentence_is_a_reason(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write("plug_in", PLUG_IN)
    machine.add_entry_points([("acme", "plug_in:RECORD")])
    told = fresh.check(
        """
import plug_in
from acclimate.selection import detect_all
for value in (True, False, 0, 5, ""):
    plug_in.RECORD = plug_in.healthy(probe=lambda: value)
    (reason,) = [row.reason for row in detect_all() if row.name == "acme"]
    tell(**{repr(value): reason})
""",
        path=machine.path,
    ).told
    for value in ("True", "False", "0", "5", "''"):
        assert told[value].startswith(f"its probe failed: plug_in:RECORD: probe returned {value}, not None")


@pytest.mark.parametrize("field", sorted(FUNCTIONS))
def test_ranks_are_started_beside_a_plug_in_whose_function_raises(
    field: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("plug_in", PLUG_IN + f"RECORD = healthy({field}=raising(SystemExit(3)))\n")
    machine.add_entry_points([("acme", "plug_in:RECORD")])
    code = "from acclimate.cli import main\nimport sys\nsys.exit(main(['run', '--no_python', 'true']))"
    assert "Traceback" not in fresh.check(code, path=machine.path).stderr
