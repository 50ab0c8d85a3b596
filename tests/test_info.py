"""`acclimate info` shows what was found, what was rejected and why, whatever vendors' packages do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import acclimate
from acclimate.backends import BUILTIN
from fake_vendors import BREAKAGES, IN_ORDER, WITH_PACKAGE, FakeMachine, FakeVendor
from fresh_process import FreshProcesses, Outcome
from quick_parameters import quick

INFO = "import sys\nfrom acclimate.cli import main\nsys.exit(main(['info', {}]))\n"
SHORT = INFO.format("")
TABLE = INFO.format("'--all'")
JSON = INFO.format("'--json'")


def way(vendor: FakeVendor) -> str:
    return vendor.way


def report(outcome: Outcome) -> dict[str, Any]:
    """The object that ``--json`` printed, which has to be all that it printed."""
    parsed = json.loads(outcome.stdout)
    assert isinstance(parsed, dict)
    return parsed


def words(outcome: Outcome) -> str:
    """What the tables say, as one line, with the lines between the cells taken away."""
    return " ".join("".join(" " if c in "│┃┏┓┗┛┡┩└┘━─┬┴┳╇┼" else c for c in outcome.stdout).split())


def test_a_choice_that_cannot_be_used_is_explained_beside_the_accelerator(fresh: FreshProcesses) -> None:
    outcome = fresh.run(SHORT, env={"DS_ACCELERATOR": "hpu"})
    line = next(line for line in outcome.stdout.splitlines() if line.startswith("accelerator"))
    assert "none" in line
    assert "HPU_Accelerator requires habana_frameworks.torch.hpu, which is not installed" in line
    assert outcome.stdout.count("unset DS_ACCELERATOR to detect what is here") == 1


# -- what the JSON object holds ----------------------------------------------------------------------

TEXT, SIZE = str, int
SCHEMA: dict[str, Any] = {
    "acclimate": TEXT,
    "torch": TEXT,
    "python": TEXT,
    "system": TEXT,
    "host": {
        "processors": SIZE,
        "memory_nodes": SIZE,
        "processor_quota": (float, type(None)),
        "total_memory": SIZE,
        "available_memory": SIZE,
    },
    "accelerator": {
        "name": TEXT,
        "device_type": TEXT,
        "chosen_by": TEXT,
        "devices": [{"name": TEXT, "product": TEXT, "total_memory": SIZE, "available_memory": SIZE}],
        "supported_dtypes": [TEXT],
        "communication_backend": TEXT,
        "compile_backend": TEXT,
        "visible_devices_variables": [TEXT],
        "triton": bool,
        "toolkit_version": (TEXT, type(None)),
    },
    "error": (TEXT, type(None)),
    "candidates": [{"name": TEXT, "reason": (TEXT, type(None)), "auto_detect": bool}],
}


def difference(value: Any, schema: Any, place: str = "report") -> str | None:
    """Where a value departs from a schema; None where it does not."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or set(value) != set(schema):
            return f"{place} has {value if not isinstance(value, dict) else sorted(value)}"
        parts = [difference(value[key], schema[key], f"{place}.{key}") for key in schema]
        return next(filter(None, parts), None)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return f"{place} is {value!r}"
        parts = [difference(item, schema[0], f"{place}[{index}]") for index, item in enumerate(value)]
        return next(filter(None, parts), None)
    kinds = schema if isinstance(schema, tuple) else (schema,)
    return None if type(value) in kinds else f"{place} is {value!r}"


def test_the_json_report_keeps_to_its_schema(fresh: FreshProcesses) -> None:
    found = report(fresh.check(JSON))
    assert difference(found, SCHEMA) is None
    assert found["accelerator"]["devices"]
    assert found["accelerator"]["supported_dtypes"]


def test_the_json_report_is_true(fresh: FreshProcesses) -> None:
    found = report(fresh.check(JSON))
    assert (found["acclimate"], found["torch"]) == (acclimate.__version__, torch.__version__)
    assert found["error"] is None
    assert found["accelerator"]["name"] == found["accelerator"]["devices"][0]["name"] == "cpu"
    assert found["accelerator"]["chosen_by"] == "detection"
    host, device = found["host"], found["accelerator"]["devices"][0]
    assert 0 < host["available_memory"] <= host["total_memory"] == device["total_memory"]
    assert host["processors"] > 0
    assert host["memory_nodes"] > 0


def test_the_json_report_lists_every_way_in_the_order_of_detection(fresh: FreshProcesses) -> None:
    names = [candidate["name"] for candidate in report(fresh.check(JSON))["candidates"]]
    builtin = [record.name for record in sorted(BUILTIN, key=lambda record: record.rank)]
    assert names == [*builtin[:-1], "(other)", "cpu"]


@pytest.mark.parametrize("variable", ["DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR"])
def test_the_report_says_which_variable_chose(variable: str, fresh: FreshProcesses) -> None:
    choice = {variable: "cpu"}
    assert report(fresh.check(JSON, env=choice))["accelerator"]["chosen_by"] == f"{variable}=cpu"
    assert f"cpu by {variable}=cpu" in words(fresh.check(TABLE, env=choice))


# -- every reason is shown ---------------------------------------------------------------------------


def test_the_table_shows_the_reason_of_every_rejection(fresh: FreshProcesses) -> None:
    shown, found = words(fresh.check(TABLE)), report(fresh.check(JSON))
    rejected = [candidate for candidate in found["candidates"] if candidate["reason"] is not None]
    assert len(rejected) == len(IN_ORDER) - 1
    for candidate in rejected:
        assert f"{candidate['name']} no {candidate['reason']}" in shown
    assert "cpu yes" in shown


@pytest.mark.parametrize("vendor", quick({way(vendor): vendor for vendor in WITH_PACKAGE}, "npu", "xpu_ipex"))
@pytest.mark.parametrize("breakage", ["AttributeError", "Unspeakable"])
def test_what_a_broken_package_raised_is_shown(
    vendor: FakeVendor, breakage: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add_broken(vendor, BREAKAGES[breakage])
    outcome = fresh.check(TABLE, path=machine.path)
    assert f"{vendor.requirement}, which is installed but fails to import: {breakage}" in words(outcome)


@pytest.mark.parametrize(
    "message", ["[/usr/lib/libhccl.so] missing", "[red]driver[/red] :warning: too old", "[bold", "\\[x]"]
)
def test_a_vendors_message_is_shown_as_it_is(
    message: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("torch_npu", f"raise RuntimeError({message!r})")
    assert f"RuntimeError: {message}" in words(fresh.check(TABLE, path=machine.path))


def test_broken_plug_ins_are_shown_after_the_rest(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write("plug_in", "raise ImportError('made for another version')")
    machine.write("other", "RECORD = 5")
    machine.add_entry_points([("first", "plug_in:RECORD"), ("second", "other:RECORD")])
    candidates = report(fresh.check(JSON, path=machine.path))["candidates"][-2:]
    assert {candidate["name"]: candidate["reason"] for candidate in candidates} == {
        "first": "its plug-in failed: ImportError: made for another version",
        "second": "its plug-in failed: InvalidBackendError: other:RECORD is a int, not an acclimate.Backend.",
    }


def add_quiet(machine: FakeMachine) -> None:
    """Adds a usable accelerator that is chosen only by its name."""
    machine.write(
        "quiet",
        "from acclimate import Backend\n"
        "RECORD = Backend('quiet', 'quiet:None', lambda: None, 5, auto_detect=False)\n",
    )
    machine.add_entry_points([("quiet", "quiet:RECORD")])


def test_a_way_that_is_never_detected_says_how_to_choose_it(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    add_quiet(machine)
    assert "quiet yes only by name: ACCLIMATE_ACCELERATOR=quiet" in words(
        fresh.check(TABLE, path=machine.path)
    )


# -- a choice or a device that fails -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DS_ACCELERATOR": "npu"}, "NPU_Accelerator requires torch_npu, which is not installed"),
        ({"DS_ACCELERATOR": "cdua"}, 'Value "cdua" is not supported; did you mean "cuda"?'),
        ({"DS_ACCELERATOR": "cpu", "ACCLIMATE_ACCELERATOR": "npu"}, 'DS_ACCELERATOR is "cpu" and ACCLIMATE'),
    ],
    ids=["unavailable", "unknown", "conflict"],
)
def test_a_choice_that_cannot_be_used_is_explained_and_the_exit_code_is_1(
    environment: dict[str, str], message: str, fresh: FreshProcesses
) -> None:
    table = fresh.run(TABLE, env=environment)
    assert table.returncode == 1
    assert message in words(table)
    assert "Traceback" not in table.stderr
    data = fresh.run(JSON, env=environment)
    assert data.returncode == 1
    found = report(data)
    assert found["accelerator"] is None
    assert message in found["error"]
    assert {"name": "cpu", "reason": None, "auto_detect": True} in found["candidates"]


def test_the_version_of_a_vendors_toolkit_is_shown(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write(
        "torch_npu",
        """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
torch.npu = types.ModuleType("torch.npu")
torch.npu.device_count = lambda: 1
torch.npu.get_device_properties = lambda index: types.SimpleNamespace(name="Ascend910B", total_memory=2**36)
""",
    )
    (machine.folder / "ascend_toolkit_install.info").write_text("package_name=Ascend\nversion=8.2.RC1\n")
    outcome = fresh.run(TABLE, path=machine.path, env={"ASCEND_HOME_PATH": str(machine.folder)})
    assert outcome.returncode == 0, outcome.stderr
    assert "toolkit 8.2.RC1" in words(outcome)


def test_a_driver_that_fails_when_described_is_explained(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write(
        "torch_npu",
        """
import types, torch
def fail(*args): raise RuntimeError("aclInit failed, error 507008")
torch.utils.rename_privateuse1_backend("npu")
torch.npu = types.ModuleType("torch.npu")
torch.npu.device_count = lambda: 1
torch.npu.get_device_name = fail
""",
    )
    outcome = fresh.run(TABLE, path=machine.path)
    assert outcome.returncode == 1
    assert "RuntimeError: aclInit failed, error 507008" in words(outcome)
    assert "Traceback" not in outcome.stderr


def test_what_was_found_but_cannot_be_loaded_is_not_shown_as_usable(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write(
        "hollow",
        "from acclimate import Backend\nRECORD = Backend('hollow', 'no_such_module:X', lambda: None, 5)\n",
    )
    machine.add_entry_points([("hollow", "hollow:RECORD")])
    shown = words(fresh.check(TABLE, path=machine.path))
    assert "hollow no it was found, but cannot be loaded: ModuleNotFoundError" in shown


# -- without --all -----------------------------------------------------------------------------------


def test_what_was_found_comes_first_and_each_rejected_accelerator_takes_one_line(
    fresh: FreshProcesses,
) -> None:
    lines = fresh.check(SHORT).stdout.splitlines()
    rejected = [row for row in report(fresh.check(JSON))["candidates"] if row["reason"] is not None]
    title = next(number for number, line in enumerate(lines) if line.startswith("Not used"))
    assert lines[1].split()[:2] == ["accelerator", "cpu"]
    assert [line.split()[0] for line in lines[title + 1 :]] == [row["name"] for row in rejected]


def test_no_warning_stands_before_the_report(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write("torch_npu", "raise RuntimeError('no driver')")
    outcome = fresh.check(SHORT, path=machine.path)
    assert outcome.stderr == ""
    assert "no driver" in outcome.stdout


def test_a_reason_of_several_lines_stays_on_one(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write(
        "wordy",
        "from acclimate import Backend\n"
        "RECORD = Backend('wordy', 'wordy:None', lambda: 'first line\\nsecond line', 5)\n",
    )
    machine.add_entry_points([("wordy", "wordy:RECORD")])
    (line,) = [row for row in fresh.check(SHORT, path=machine.path).stdout.splitlines() if "wordy" in row]
    assert line.split("  ")[-1].strip() == "first line second line"


def test_a_usable_accelerator_that_is_not_used_says_how_to_choose_it(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    add_quiet(machine)
    shown = words(fresh.check(SHORT, path=machine.path))
    assert "quiet can be used, only by name: ACCLIMATE_ACCELERATOR=quiet" in shown


# -- where it is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, pytest.param(60, marks=pytest.mark.slow), 200])
def test_every_reason_can_be_read_on_a_terminal_of_any_width(columns: int, fresh: FreshProcesses) -> None:
    outcome = fresh.check(TABLE, env={"COLUMNS": str(columns)})
    longest = max(len(line) for line in outcome.stdout.splitlines() if line[:1] in "┏┃┡│└")
    assert longest <= columns
    spelled = words(outcome).replace(" ", "")
    for candidate in report(fresh.check(JSON))["candidates"]:
        assert (candidate["reason"] or "").replace(" ", "") in spelled


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_the_same_words(
    encoding: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("torch_npu", "raise RuntimeError('\\u521d\\u59cb\\u5316 failed')")
    set_up = f"import sys\nsys.stdout.reconfigure(encoding={encoding!r})\n"
    shown = fresh.check(set_up + TABLE, path=machine.path).stdout
    assert "failed" in shown


def test_output_that_is_no_terminal_has_no_colours(fresh: FreshProcesses) -> None:
    assert "\x1b" not in fresh.check(TABLE).stdout
