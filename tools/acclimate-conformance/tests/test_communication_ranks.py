"""The processes of the communication checks report faults, and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from acclimate.backends.cpu import CPUAccelerator
from acclimate_conformance.checks.communication.observer import Observer
from acclimate_conformance.checks.communication.ranks import _joined
from acclimate_conformance.checks.communication.topics import TOPICS

WAITS = """\
import sys, threading
from acclimate_conformance.checks.communication.time_limit import limited

def collective():
    threading.Event().wait()

with limited(0.2, __file__, lambda why: sys.stdout.write(why) and sys.stdout.flush()):
    collective()
"""

WAITS_FOR_ANOTHER = """\
import sys, threading, time
from acclimate_conformance.checks.communication import time_limit

time_limit._ALONE_S = 0.3
start = time.monotonic()

def collective():
    threading.Event().wait()

def ended():
    return "rank 1" if time.monotonic() > start + 0.3 else ""

with time_limit.limited(500, __file__, lambda why: sys.stdout.write(why) and sys.stdout.flush(), ended):
    collective()
"""

LATE = """\
import sys, time
from pathlib import Path
from torch import distributed
from acclimate.backends.cpu import CPUAccelerator
from acclimate_conformance.checks.communication import options
from acclimate_conformance.checks.communication.observer import Observer

number, folder = int(sys.argv[1]), Path(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=number, world_size=2)
here = Observer(CPUAccelerator(), number, 2, folder)
options._GROUP_TIMEOUT_S = 2.0
time.sleep(number * 4 * options._GROUP_TIMEOUT_S)
options.time_limits_of_groups(here)
print(here.broken, here.lacking)
"""


OF_GLOO = """\
from pathlib import Path
from torch import distributed
from acclimate.selection import load_by_name
from acclimate_conformance.checks.communication.observer import Observer

accelerator = load_by_name("sim", "")
name = accelerator.communication_backend_name()
distributed.init_process_group(name, store=distributed.HashStore(), rank=0, world_size=1)
print(name, Observer(accelerator, 0, 1, Path()).is_of_a_vendor)
"""


def test_a_rank_that_waits_ends_at_its_time_limit_and_names_the_call(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 1, run.stderr
    assert run.stdout == "did not end within 0.2 s, and was in threading.Event().wait()"


def test_a_rank_does_not_wait_long_for_one_that_has_ended(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(WAITS_FOR_ANOTHER)
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=400)
    assert run.returncode == 1, run.stderr
    assert run.stdout == "waited for rank 1, which had ended, and was in threading.Event().wait()"


@pytest.mark.slow
def test_a_rank_may_come_late_to_a_group_with_a_short_time_limit(tmp_path: Path) -> None:
    """On a busy machine, ranks end the topic before at different times."""
    program = tmp_path / "late.py"
    program.write_text(LATE)
    command = [sys.executable, str(program)]
    ranks = [
        subprocess.Popen([*command, str(number), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert said == ["[] []\n"] * 2


def test_a_backend_made_of_gloo_is_held_to_tags_and_time_outs_whatever_its_name() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    run = subprocess.run([sys.executable, "-c", OF_GLOO], capture_output=True, text=True, timeout=600)
    assert run.stdout == "simccl False\n", run.stderr


def test_topics_that_a_rank_did_not_reach_are_broken_and_say_where_it_ended() -> None:
    names = [topic.__name__ for topic in TOPICS]
    whole = {name: {"broken": [], "lacking": []} for name in names}
    ended = {name: whole[name] for name in names[:4]}
    ended[names[4]] = {"broken": [f"it ended at {names[4]}: it raised"], "lacking": []}
    waited = {name: whole[name] for name in names[:4]}
    waited[names[4]] = {
        "broken": [f"it ended at {names[4]}: it waited for rank 1, which had ended"],
        "lacking": [],
    }
    joined = _joined([whole, ended])
    assert [name for name in names if joined[name]["broken"]] == names[4:]
    for name in names[5:]:
        assert joined[name]["broken"] == [
            f"the ranks did not reach it: rank 1: it ended at {names[4]}: it raised"
        ]
    joined = _joined([waited, ended])
    causes = {tuple(joined[name]["cause"]) for name in names[4:]}
    assert causes == {
        (f"a rank ended, and left the others alone: rank 1: it ended at {names[4]}: it raised",)
    }
    assert not any(joined[name]["cause"] for name in names[:4])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.tensor([2**60]), [2**60 + 3]),
        (torch.tensor([2**24], dtype=torch.int32), [2**24 + 1]),
        (torch.tensor([1.0], dtype=torch.float64), [1 + 2.0**-48]),
    ],
    ids=["int64", "int32", "float64"],
)
def test_a_rank_notices_the_last_digit(tmp_path: Path, found: torch.Tensor, expected: list[float]) -> None:
    here = Observer(CPUAccelerator(), 0, 2, tmp_path)
    here.same(torch.tensor(expected, dtype=found.dtype), expected, "the same")
    assert here.broken == []
    here.same(found, expected, "another")
    assert len(here.broken) == 1
