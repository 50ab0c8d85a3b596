"""One accelerator per process: chosen once, the same in every thread, replaced only on purpose."""

from __future__ import annotations

import pytest

from fake_vendors import BY_WAY, FakeMachine
from fresh_process import FreshProcesses
from quick_parameters import few_of


def test_sixteen_threads_that_race_get_one_object_from_one_probe(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write(
        "slow",
        """
import time
from acclimate import Backend
probes = []
def probe():
    probes.append(1)
    time.sleep(0.2)
BACKEND = Backend("slow", "acclimate.backends.cpu:CPUAccelerator", probe, 5)
""",
    )
    machine.add_entry_points([("slow", "slow:BACKEND")])
    told = fresh.check(
        """
import threading
import acclimate.selection
start = threading.Barrier(16)
found = []
def ask():
    start.wait()
    found.append(acclimate.selection.get_accelerator())
threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
import slow
tell(found=len(found), objects=len(set(map(id, found))), probes=len(slow.probes))
""",
        path=machine.path,
    ).told
    assert told == {"found": 16, "objects": 1, "probes": 1}


def test_the_choice_is_kept_when_the_environment_changes_later(fresh: FreshProcesses) -> None:
    told = fresh.check("""
import os
from acclimate import get_accelerator
first = get_accelerator()
os.environ["DS_ACCELERATOR"] = "no such"
tell(same=get_accelerator() is first)
""").told
    assert told["same"]


def test_an_object_given_to_set_accelerator_is_the_accelerator(fresh: FreshProcesses) -> None:
    told = fresh.check("""
from acclimate import get_accelerator, set_accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.selection import chosen_by
mine = CPUAccelerator()
set_accelerator(mine)
tell(same=get_accelerator() is mine, how=chosen_by())
""").told
    assert told == {"same": True, "how": "set_accelerator"}


def test_set_accelerator_takes_a_name_and_outranks_the_variables(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["npu"])
    ended = fresh.check(
        """
from acclimate import get_accelerator, set_accelerator
set_accelerator("npu")
tell(name=get_accelerator().name)
""",
        path=machine.path,
        env={"DS_ACCELERATOR": "cpu"},
    )
    assert ended.told["name"] == "npu"
    assert ended.stderr == ""


def test_replacing_the_accelerator_in_use_is_logged(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(BY_WAY["npu"])
    ended = fresh.check(
        """
from acclimate import get_accelerator, set_accelerator
get_accelerator()
set_accelerator("cpu")
set_accelerator("cpu")
tell(name=get_accelerator().name)
""",
        path=machine.path,
    )
    assert ended.told["name"] == "cpu"
    assert ended.stderr == "The accelerator of this process changes from npu to cpu.\n"


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("5", "InvalidBackendError", "not int"),
        ("None", "InvalidBackendError", "not NoneType"),
        ("CPUAccelerator", "InvalidBackendError", "not"),  # the class, where an object is wanted
        ("BUILTIN[0]", "InvalidBackendError", "not Backend"),
        ("'cdua'", "UnknownAcceleratorError", 'did you mean "cuda"?'),
        ("''", "UnknownAcceleratorError", "must be one of"),
        ("'npu'", "AcceleratorUnavailableError", "or call get_accelerator() without choosing"),
    ],
)
@pytest.mark.parametrize("call", few_of(("set_accelerator({})", "use_accelerator({}).__enter__()"), 2))
def test_a_wrong_choice_is_refused_and_changes_nothing(
    call: str, wrong: str, error: str, words: str, fresh: FreshProcesses
) -> None:
    told = fresh.check(f"""
import acclimate
from acclimate import get_accelerator, set_accelerator, use_accelerator
from acclimate.backends import BUILTIN
from acclimate.backends.cpu import CPUAccelerator
before = get_accelerator()
try:
    {call.format(wrong)}
except acclimate.AcclimateError as problem:
    tell(type=type(problem).__name__, message=str(problem))
tell(same=get_accelerator() is before)
""").told
    assert told["type"] == error
    assert words in told["message"]
    assert told["same"]


def test_use_accelerator_holds_within_its_block_and_in_other_threads(fresh: FreshProcesses) -> None:
    told = fresh.check("""
import threading
from acclimate import get_accelerator, use_accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.selection import chosen_by
before, mine, seen = get_accelerator(), CPUAccelerator(), []
with use_accelerator(mine) as given:
    thread = threading.Thread(target=lambda: seen.append(get_accelerator() is mine))
    thread.start()
    thread.join()
    with use_accelerator("cpu") as inner:
        nested = get_accelerator() is inner is not mine
    tell(given=given is mine, inside=get_accelerator() is mine, thread=seen[0], nested=nested)
tell(after=get_accelerator() is before, how=chosen_by())
""").told
    assert told == {
        "given": True,
        "inside": True,
        "thread": True,
        "nested": True,
        "after": True,
        "how": "detection",
    }


def test_use_accelerator_is_undone_after_an_exception(fresh: FreshProcesses) -> None:
    told = fresh.check("""
from acclimate import get_accelerator, use_accelerator
before = get_accelerator()
for problem in (ValueError, KeyboardInterrupt, SystemExit):
    try:
        with use_accelerator("cpu"):
            raise problem
    except problem:
        tell(**{problem.__name__: get_accelerator() is before})
""").told
    assert told == {"ValueError": True, "KeyboardInterrupt": True, "SystemExit": True}


def test_use_accelerator_before_any_choice_leaves_the_choice_open(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["npu"])
    told = fresh.check(
        """
from acclimate import get_accelerator, use_accelerator
with use_accelerator("cpu"):
    tell(inside=get_accelerator().name)
tell(after=get_accelerator().name)
""",
        path=machine.path,
    ).told
    assert told == {"inside": "cpu", "after": "npu"}


@pytest.mark.parametrize(("name", "supported"), [("cpu", True), ("xpu.external", True), ("generic", False)])
def test_only_the_specifications_nine_count_as_supported(
    name: str, supported: bool, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY[name])
    told = fresh.check(
        machine.prelude
        + "from acclimate import is_current_accelerator_supported as ask\ntell(supported=ask())",
        path=machine.path,
    ).told
    assert told["supported"] is supported


def test_the_first_call_of_a_process_may_be_in_compiled_code(fresh: FreshProcesses) -> None:
    ended = fresh.check(
        """
import torch
from acclimate import get_accelerator

@torch.compile(fullgraph=True, backend="eager")
def step(x):
    acc = get_accelerator()
    with acc.amp.autocast(enabled=False):
        return x.to(acc.device_name()) + 1

tell(found=[step(torch.ones(n)).tolist() for n in (2, 3)], name=get_accelerator().name)
""",
        env={"ACCLIMATE_ACCELERATOR": "cpu"},
    )
    assert ended.told == {"found": [[2.0, 2.0], [2.0, 2.0, 2.0]], "name": "cpu"}
