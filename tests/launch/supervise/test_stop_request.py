"""Another process that may end the ranks, such as the launcher of a job on many hosts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")

SUPERVISED = """
import json, os, sys, time
from acclimate.launch.plan.job import RankPlan
from acclimate.launch.supervise.supervisor import StopRequest, supervise
reading, writing = os.pipe()
begun = time.monotonic()
asked = []
{request}
plan = RankPlan(0, 0, (sys.executable, "-c", {rank!r}), dict(os.environ))
outcome = supervise([plan], grace_s={grace}, tagged=True, stop=request)
print(json.dumps([outcome.code, outcome.reason, len(asked)]))
"""


def supervised(request: str, rank: str = "import time; time.sleep(600)", grace: float = 0.5) -> list[object]:
    """The code and the reason with which a job ended, and how often the request was looked at."""
    ended = subprocess.run(
        [sys.executable, "-c", SUPERVISED.format(request=request, rank=rank, grace=grace)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(),
        timeout=240,
    )
    answer: list[object] = json.loads(ended.stdout)
    return answer


def test_a_request_ends_the_ranks_with_its_reason() -> None:
    request = """
def read():
    asked.append(os.read(reading, 10))
    return "Because."
os.write(writing, b"x")
request = StopRequest(reading, read)
"""
    assert supervised(request) == [-15, "Because.", 1]


def test_a_request_is_looked_at_when_it_is_due_though_nothing_came() -> None:
    request = """
def read():
    asked.append(time.monotonic())
    return "Silent." if len(asked) == 2 else None
request = StopRequest(reading, read, due_at=lambda: begun + 0.2 + 0.2 * len(asked))
"""
    assert supervised(request) == [-15, "Silent.", 2]


def test_a_request_that_was_taken_is_not_looked_at_again() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    request = """
def read():
    asked.append(0)
    return "Once."
request = StopRequest(reading, read, due_at=lambda: begun + 0.2)
"""
    assert supervised(request, deaf, 1.0)[1:] == ["Once.", 1]


def test_a_rank_that_failed_is_told_while_others_still_end() -> None:
    request = """
request = StopRequest(reading, lambda: None, lambda failure: asked.append(failure.code))
"""
    assert supervised(request, "raise SystemExit(7)") == [7, None, 1]


def test_a_connection_that_stays_open_is_read_after_it_has_asked_to_end() -> None:
    request = """
def read():
    asked.append(os.read(reading, 10))
    if len(asked) < 3:
        os.write(writing, b"x")
    return "Because." if len(asked) == 1 else None
os.write(writing, b"x")
request = StopRequest(reading, read, is_open=lambda: True)
"""
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert supervised(request, ignores) == [-15, "Because.", 3]
