"""The coordinator's reactions to messages of its peers, which are scripted here."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from acclimate.errors import HostUnreachableError
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.remote import coordinator as coordinator_module
from acclimate.launch.remote.coordinator import Coordinator, Peer
from acclimate.launch.remote.protocol import WINDOW_BYTES, Output, Ready
from acclimate.launch.wire import Message

JOB = JobPlan((HostPlan("a", (0,)), HostPlan("b", (0,))), ("true",), {}, "/", "cpu", grace_s=0.0)
FAILED = Outcome(7, RankFailure(1, "b", 42, 7))


class Recorder:
    """The way to a peer, which keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, object]] = []

    def fileno(self) -> int:
        return -1

    def send(self, message: Mapping[str, object]) -> None:
        self.sent.append(message)

    def receive(self) -> list[Message] | None:
        return None


class Script:
    """Processes elsewhere that say these things, one in each turn of the loop, and then are gone."""

    def __init__(self, *steps: Callable[[Coordinator], object]) -> None:
        self.steps = list(steps)

    def open(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._next()

    def _next(self) -> None:
        if self.steps:
            self.steps.pop(0)(self.coordinator)
            self.coordinator.loop.after(0.0, self._next)
        else:
            self.is_done = True

    is_done = False

    @property
    def running(self) -> bool:
        return not self.is_done

    def kill(self) -> None:
        pass


def says(number: int, **message: object) -> Callable[[Coordinator], object]:
    return lambda coordinator: coordinator.handle(coordinator.peers[number], message)


def is_lost(number: int, words: str) -> Callable[[Coordinator], object]:
    return lambda coordinator: coordinator.lost(coordinator.peers[number], words)


READY = (says(0, ready=Ready("10.0.0.1", 4000)), says(1, ready=Ready(None, 5000)))


def conduct(*steps: Callable[[Coordinator], object], job: JobPlan = JOB) -> tuple[Outcome, list[Recorder]]:
    channels = [Recorder(), Recorder()]
    peers = [Peer(host.name, channel) for host, channel in zip(job.hosts, channels, strict=True)]
    return Coordinator(job, peers).run(Script(*steps)), channels


def test_all_are_started_with_the_address_and_port_of_the_first() -> None:
    outcome, channels = conduct(*READY, says(0, outcome=Outcome(0)), says(1, outcome=Outcome(0)))
    assert outcome == Outcome(0)
    start = {"start": {"master_addr": "10.0.0.1", "master_port": 4000}}
    assert [channel.sent for channel in channels] == [[start], [start]]


def test_nobody_is_started_before_all_are_ready() -> None:
    with pytest.raises(HostUnreachableError, match='no answer from "b"'):
        conduct(READY[0])


def test_the_first_to_fail_is_blamed_and_ends_the_others() -> None:
    later = Outcome(9, RankFailure(0, "a", 41, 9))
    outcome, channels = conduct(
        *READY, says(1, failed=FAILED), says(0, outcome=later), says(1, outcome=FAILED)
    )
    assert outcome == FAILED
    assert {"stop": 'A rank on host "b" failed.'} in channels[0].sent


def test_a_host_that_is_lost_ends_the_job_and_is_named() -> None:
    outcome, channels = conduct(*READY, is_lost(1, "gone"), says(0, outcome=Outcome(-15)))
    assert (outcome.code, outcome.reason) == (1, 'host "b" was lost: gone')
    assert {"stop": 'host "b" was lost: gone'} in channels[0].sent


def test_the_loss_of_a_host_does_not_hide_another_that_did_not_report() -> None:
    outcome, _ = conduct(*READY, is_lost(1, "gone"))
    reason = 'host "b" was lost: gone. "a" did not report how its ranks ended, so they may still run.'
    assert (outcome.code, outcome.reason) == (1, reason)


def test_a_refusal_is_told_and_nobody_is_started() -> None:
    with pytest.raises(HostUnreachableError, match='host "b": no such folder'):
        conduct(READY[0], says(1, refused="no such folder"))


@pytest.mark.parametrize(
    "wrong",
    [
        Outcome(256),
        Outcome(-1000),
        Outcome(10**9),
        Outcome(1, RankFailure(2, "b", 42, 7)),
        Outcome(1, RankFailure(-1, "b", 42, 7)),
        Outcome(1, RankFailure(1, "b", 42, 300)),
    ],
)
@pytest.mark.parametrize("part", ["failed", "outcome"])
def test_an_outcome_that_no_rank_can_have_loses_the_peer_that_told_it(part: str, wrong: Outcome) -> None:
    outcome, _ = conduct(
        *READY, says(1, **{part: wrong}), says(1, outcome=FAILED), says(0, outcome=Outcome(0))
    )
    assert outcome.code == 1
    assert outcome.reason is not None
    assert outcome.reason.startswith('host "b" was lost: it sent an invalid message')


@pytest.mark.parametrize("code", [255, -9, -64])
def test_the_codes_that_ranks_can_have_are_taken(code: int) -> None:
    failed = Outcome(code, RankFailure(1, "b", 42, code))
    assert conduct(*READY, says(1, outcome=failed), says(0, outcome=Outcome(0)))[0] == failed


def test_a_peer_is_wanted_until_it_is_lost() -> None:
    coordinator = Coordinator(JOB, [Peer("a"), Peer("b")])
    first, second = coordinator.peers
    assert coordinator.handle(first, {"refused": "because"})
    assert not coordinator.handle(second, {"outcome": Outcome(10**9)})
    assert not coordinator.handle(second, {"refused": "because"})
    coordinator.loop.close()


def test_agents_hear_regularly_that_the_launcher_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "ALIVE_EVERY_S", 0.01)
    _, channels = conduct(*READY, lambda _: time.sleep(0.05), *[lambda _: None] * 3, *all_end())
    assert [channel.sent.count({"alive": True}) > 0 for channel in channels] == [True, True]


def test_a_host_that_writes_for_ever_and_does_not_answer_ends_no_later_than_a_silent_one() -> None:
    code = """
from acclimate.errors import HostUnreachableError
from acclimate.launch.output.views import Source
from acclimate.launch.remote.coordinator import Coordinator, Peer
from test_coordinator import JOB

class Writing:
    running = True
    def open(self, coordinator): coordinator.pump.feed(1, Source("", 1), b"welcome " * (1 << 20))
    def kill(self): pass

try:
    Coordinator(JOB, [Peer("a"), Peer("b")], answer_s=0.1).run(Writing())
except HostUnreachableError:
    raise SystemExit(7)
"""
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folders}) as one:
        try:
            assert one.wait(120) == 7  # nobody reads what it writes
        finally:
            one.kill()


# -- output of ranks ---------------------------------------------------------------------------------


def prints(number: int, stream: int, data: bytes) -> Callable[[Coordinator], object]:
    return says(number, output=Output(stream, base64.b64encode(data).decode()))


def test_agents_output_is_shown_in_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    _, channels = conduct(
        *READY,
        prints(0, 1, b"[rank 0] be"),
        prints(1, 1, b"[rank 1] whole\n[rank 1] no end"),
        prints(0, 1, b"gun\n"),
        prints(0, 2, b"[rank 0] error\n"),
        *all_end(),
    )
    output, errors = capfd.readouterr()
    assert output == "[rank 1] whole\n[rank 0] begun\n[rank 1] no end"
    assert errors == "[rank 0] error\n"
    taken = [message["taken"] for message in channels[0].sent if "taken" in message]
    assert taken == [{"stream": 1, "count": 11}, {"stream": 1, "count": 4}, {"stream": 2, "count": 15}]


def test_an_agent_gets_no_room_for_output_before_a_slow_reader_has_taken_the_last() -> None:
    reading, writing = os.pipe()
    code = """
import sys
sys.path.append(sys.argv[1])
from test_coordinator import JOB, READY, Script, Recorder, all_end, prints
from acclimate.launch.remote.coordinator import Coordinator, Peer
channels, sent = [Recorder(), Recorder()], 0
def given():
    return sum(message["taken"]["count"] for message in channels[0].sent if "taken" in message)
def print_if_there_is_room(coordinator):
    global sent
    if given() == sent < 2_000_000:
        prints(0, 1, b"x" * 15_999 + b"\\n")(coordinator)
        sent += 16_000
def look(coordinator):
    print(given(), file=sys.stderr, flush=True)
def print_the_rest(coordinator):
    print_if_there_is_room(coordinator)
    if sent < 2_000_000:
        script.steps.insert(0, print_the_rest)
peers = [Peer(host.name, channel) for host, channel in zip(JOB.hosts, channels)]
script = Script(*READY, *[print_if_there_is_room] * 200, look, print_the_rest, *all_end())
Coordinator(JOB, peers).run(script)
print(given(), file=sys.stderr)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        stdout=writing, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(writing)
        assert process.stderr is not None
        first = process.stderr.readline()
        with open(reading, "rb") as file:
            assert len(file.read()) == 2_000_000
        second = process.stderr.read()
    assert 1_000_000 <= int(first) < 1_300_000
    assert int(second) == 2_000_000


def test_an_agent_that_sends_more_output_than_it_may_is_lost() -> None:
    much = bytes(WINDOW_BYTES + 1)
    outcome, _ = conduct(*READY, prints(1, 1, much), says(0, outcome=Outcome(0)))
    assert outcome.reason == (
        'host "b" was lost: it sent an invalid message: It sent more output than it may.'
    )


@pytest.mark.parametrize("data", ["not base64!", "é", "abc"])
def test_output_that_cannot_be_decoded_loses_the_agent(data: str) -> None:
    outcome, _ = conduct(*READY, says(1, output=Output(1, data)), says(0, outcome=Outcome(0)))
    assert outcome.reason == 'host "b" was lost: it sent an invalid message: output.data is not base64.'


# -- hosts that do not answer any more ---------------------------------------------------------------


def interrupt(coordinator: Coordinator) -> None:
    coordinator.end_by(signal.SIGINT)


def test_an_interrupted_job_does_not_say_that_ranks_have_ended_of_which_it_has_no_report() -> None:
    ended = Outcome(-2, None, "SIGINT was forwarded, and the ranks have ended.")
    outcome, _ = conduct(*READY, interrupt, says(0, outcome=ended))
    reason = 'SIGINT was forwarded, but "b" did not report how its ranks ended, so they may still run.'
    assert outcome == Outcome(-2, None, reason)
    assert conduct(*READY, interrupt, says(0, outcome=ended), says(1, outcome=ended))[0] == ended


def test_a_failed_job_names_the_hosts_of_whose_ranks_it_has_no_report() -> None:
    outcome, _ = conduct(*READY, says(1, failed=FAILED))
    reason = '"a", "b" did not report how their ranks ended, so they may still run.'
    assert outcome == replace(FAILED, reason=reason)
    outcome, _ = conduct(*READY, says(1, outcome=Outcome(1, None, "host b: no space.")))
    assert (
        outcome.reason == 'host b: no space. "a" did not report how its ranks ended, so they may still run.'
    )


def test_a_second_ctrl_c_waits_for_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Script):
        running = True

    monkeypatch.setattr(coordinator_module, "_SETTLE_S", 0.05)
    peers = [Peer("a", Recorder()), Peer("b", Recorder())]
    coordinator = Coordinator(replace(JOB, grace_s=600.0), peers)
    began = time.monotonic()
    outcome = coordinator.run(Hanging(*READY, interrupt, interrupt))
    assert time.monotonic() - began < 300
    assert outcome.code == -signal.SIGINT


def all_end() -> tuple[Callable[[Coordinator], object], ...]:
    return says(0, outcome=Outcome(0)), says(1, outcome=Outcome(0))
