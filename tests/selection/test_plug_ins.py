"""A third party's accelerator is found, chosen and used through an entry point, with no edit to acclimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_vendors import BY_WAY, FakeMachine
from fresh_process import FreshProcesses

VENDOR = Path(__file__).parent / "made_up_vendor"
SELECT = """
import acclimate
from acclimate.selection import detect_all
try:
    tell(name=acclimate.get_accelerator().name)
except Exception as error:
    tell(error=str(error), type=type(error).__name__, ours=isinstance(error, acclimate.AcclimateError))
tell(reasons={candidate.name: candidate.reason for candidate in detect_all()})
"""


@pytest.fixture
def acme(machine: FakeMachine) -> FakeMachine:
    """A machine with the made-up vendor's package and card."""
    machine.path.append(VENDOR)
    machine.add_entry_points([("acme", "acme_torch:ACME")])
    return machine


@pytest.fixture
def acme_only_by_name(machine: FakeMachine) -> FakeMachine:
    """As ``acme``, with a record that takes no part in detection."""
    machine.path.append(VENDOR)
    machine.add_entry_points([("acme", "acme_torch:ONLY_BY_NAME")])
    return machine


# -- a made-up vendor --------------------------------------------------------------------------------


def test_a_made_up_vendor_is_detected(acme: FakeMachine, fresh: FreshProcesses) -> None:
    ended = fresh.check(SELECT, path=acme.path)
    assert ended.told["name"] == "acme"
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_made_up_vendor_is_selected_by_name(acme: FakeMachine, fresh: FreshProcesses) -> None:
    acme.add(BY_WAY["xpu.external"])
    for variable in ("DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR"):
        assert fresh.check(SELECT, path=acme.path, env={variable: "acme"}).told["name"] == "acme"


@pytest.mark.parametrize(("other", "chosen"), [("mlu", "mlu"), ("cuda", "acme"), ("cpu", "acme")])
def test_a_made_up_vendor_is_tried_at_its_rank(
    other: str, chosen: str, acme: FakeMachine, fresh: FreshProcesses
) -> None:
    acme.add(BY_WAY[other])
    assert fresh.check(acme.prelude + SELECT, path=acme.path).told["name"] == chosen


def test_a_made_up_vendors_tensors_compute_on_its_device(acme: FakeMachine, fresh: FreshProcesses) -> None:
    told = fresh.check(
        """
import torch
from acclimate import get_accelerator
accelerator = get_accelerator()
x = torch.empty(2, 3, device=accelerator.current_device_name()).fill_(2.0)
y = (x * 3 + x) @ torch.empty(3, 1, device=accelerator.device_name()).fill_(1.0)
tell(
    device=str(y.device), ours=accelerator.on_accelerator(y), host=accelerator.on_accelerator(y.cpu()),
    values=y.cpu().tolist(), count=accelerator.device_count(), current=accelerator.current_device(),
)
""",
        path=acme.path,
    ).told
    assert told == {
        "device": "acme:0",
        "ours": True,
        "host": False,
        "values": [[24.0], [24.0]],
        "count": 1,
        "current": 0,
    }


def test_a_made_up_vendors_op_is_built_from_its_own_package(acme: FakeMachine, fresh: FreshProcesses) -> None:
    told = fresh.check(
        """
import torch
from acclimate import get_accelerator
accelerator = get_accelerator()
x = torch.empty(2, device=accelerator.current_device_name()).fill_(3.0)
tell(
    home=accelerator.op_builder_dir(),
    module=accelerator.get_op_builder("DoubleBuilder").__module__,
    values=accelerator.create_op_builder("DoubleBuilder").load().double(x).cpu().tolist(),
    absent=accelerator.create_op_builder("NoSuchBuilder"),
    variables=accelerator.visible_devices_envs(),
)
""",
        path=acme.path,
    ).told
    assert told == {
        "home": "acme_torch.ops",
        "module": "acme_torch.ops",
        "values": [6.0, 6.0],
        "absent": None,
        "variables": ["ACME_VISIBLE_CARDS"],
    }


def test_a_made_up_vendor_without_its_hardware_is_passed_over(
    acme: FakeMachine, fresh: FreshProcesses
) -> None:
    told = fresh.check(SELECT, path=acme.path, env={"ACME_CARDS": "0"}).told
    assert told["name"] == "cpu"
    assert told["reasons"]["acme"] == "no Acme card is inserted."


def test_a_made_up_vendor_without_its_card_is_refused_with_its_own_remedy(
    acme: FakeMachine, fresh: FreshProcesses
) -> None:
    told = fresh.check(SELECT, path=acme.path, env={"ACME_CARDS": "0", "DS_ACCELERATOR": "acme"}).told
    assert told["error"] == (
        "no Acme card is inserted.\nInsert an Acme card, or unset DS_ACCELERATOR to detect what is here."
    )


def test_an_unknown_name_is_compared_with_plug_ins_too(acme: FakeMachine, fresh: FreshProcesses) -> None:
    told = fresh.check(SELECT, path=acme.path, env={"DS_ACCELERATOR": "amce"}).told
    assert told["error"].endswith("'sdaa', 'acme']. Value \"amce\" is not supported; did you mean \"acme\"?")


# -- only by name ------------------------------------------------------------------------------------


def test_a_record_without_detection_is_not_detected(
    acme_only_by_name: FakeMachine, fresh: FreshProcesses
) -> None:
    assert fresh.check(SELECT, path=acme_only_by_name.path).told["name"] == "cpu"


def test_a_record_without_detection_is_chosen_by_name(
    acme_only_by_name: FakeMachine, fresh: FreshProcesses
) -> None:
    told = fresh.check(SELECT, path=acme_only_by_name.path, env={"ACCLIMATE_ACCELERATOR": "acme"}).told
    assert told["name"] == "acme"


def test_the_device_of_a_record_without_detection_is_not_detected_as_a_generic_one(
    acme_only_by_name: FakeMachine, fresh: FreshProcesses
) -> None:
    code = "import torch, acme_torch.device\nassert torch.accelerator.current_accelerator().type == 'acme'\n"
    told = fresh.check(code + SELECT, path=acme_only_by_name.path).told
    assert told["name"] == "cpu"
    assert told["reasons"]["acme"] is None
    assert told["reasons"]["(other)"].startswith("torch knows no device")


# -- broken plug-ins ---------------------------------------------------------------------------------

BROKEN = {
    "import_error": (
        "raise ImportError('too old')",
        "ImportError: too old",
    ),
    "system_exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "syntax_error": ("def broken(:", "SyntaxError"),
    "unspeakable": ("class E(Exception):\n    def __str__(self): raise KeyError\nraise E", "E"),
    "no_attribute": ("", "AttributeError"),
    "wrong_type": (
        "RECORD = 'acme'",
        "InvalidBackendError: plug_in:RECORD is a str, not an acclimate.Backend.",
    ),
    "built_in_name": (
        "from acclimate import Backend\nRECORD = Backend('cpu', 'x:Y', lambda: None, 1)",
        'InvalidBackendError: plug_in:RECORD takes the name "cpu", which is built in.',
    ),
    "wrong_rank": (
        "from acclimate import Backend\nRECORD = Backend('x', 'x:Y', lambda: None, None)",
        "InvalidBackendError: plug_in:RECORD: rank is None, but must be a whole number.",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plug_in_is_reported_and_stops_nothing(
    kind: str, acme: FakeMachine, fresh: FreshProcesses
) -> None:
    source, why = BROKEN[kind]
    acme.write("plug_in", source)
    acme.add_entry_points([("broken", "plug_in:RECORD")])
    told = fresh.check(SELECT, path=acme.path).told
    assert told["name"] == "acme"
    assert told["reasons"]["broken"].startswith(f"its plug-in failed: {why}")


def test_a_broken_plug_in_chosen_by_name_is_refused_with_what_broke(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("plug_in", "raise ImportError('too old')")
    machine.add_entry_points([("broken", "plug_in:RECORD")])
    told = fresh.check(SELECT, path=machine.path, env={"ACCLIMATE_ACCELERATOR": "broken"}).told
    assert told["type"] == "AcceleratorUnavailableError"
    assert "ImportError: too old" in told["error"]


def test_a_broken_plug_in_with_a_built_in_name_does_not_block_the_built_in_accelerator(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("plug_in", "raise ImportError('too old')")
    machine.add_entry_points([("cpu", "plug_in:RECORD")])
    assert fresh.check(SELECT, path=machine.path, env={"DS_ACCELERATOR": "cpu"}).told["name"] == "cpu"


# -- found, but not loadable -------------------------------------------------------------------------

PRESENT = """
from acclimate import Backend
RECORD = Backend(
    "hollow", "hollow.accelerator:Hollow", lambda: None, 5, yields_to=["made", "of", "a", "list"]
)
"""
UNLOADABLE = {
    "import_error": ("raise ImportError('no driver')", "ImportError: no driver"),
    "system_exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no_class": ("", "AttributeError"),
    "abstract": (
        "from acclimate import Accelerator\nclass Hollow(Accelerator): pass",
        "TypeError: Can't instantiate abstract class Hollow",
    ),
    "not_an_accelerator": (
        "class Hollow: pass",
        'InvalidBackendError: The target of the "hollow" record, hollow.accelerator:Hollow, returns a '
        "Hollow; it must be a subclass of acclimate.Accelerator.",
    ),
    "asks_for_itself": (
        "from acclimate import get_accelerator\nget_accelerator()",
        "SelectionInProgressError: get_accelerator() was called while the accelerator is being chosen",
    ),
}


@pytest.fixture
def hollow(machine: FakeMachine) -> FakeMachine:
    """A machine with a plug-in that says it can be used."""
    machine.write("hollow", PRESENT)
    machine.add_entry_points([("hollow", "hollow:RECORD")])
    return machine


@pytest.mark.parametrize("kind", UNLOADABLE)
def test_what_cannot_be_loaded_is_reported_and_detection_goes_on(
    kind: str, hollow: FakeMachine, fresh: FreshProcesses
) -> None:
    source, why = UNLOADABLE[kind]
    hollow.write("hollow.accelerator", source)
    hollow.add(BY_WAY["npu"])
    ended = fresh.check(SELECT, path=hollow.path)
    assert ended.told["name"] == "npu"
    assert ended.told["reasons"]["hollow"].startswith(f"it was found, but cannot be loaded: {why}")
    assert ended.stderr.count("The hollow accelerator is not used") == 1


@pytest.mark.parametrize("kind", UNLOADABLE)
def test_what_cannot_be_loaded_is_one_clear_error_when_chosen_by_name(
    kind: str, hollow: FakeMachine, fresh: FreshProcesses
) -> None:
    source, why = UNLOADABLE[kind]
    hollow.write("hollow.accelerator", source)
    told = fresh.check(SELECT, path=hollow.path, env={"ACCLIMATE_ACCELERATOR": "hollow"}).told
    assert told["ours"], told
    assert (
        why.removeprefix("InvalidBackendError: ").removeprefix("SelectionInProgressError: ") in told["error"]
    )
