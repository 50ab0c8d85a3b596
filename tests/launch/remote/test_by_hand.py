"""Nodes that are started by hand meet, and none waits for another that has gone."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import environment

from ports import free_port

SUM = """
import os, socket, time
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:  # at the port where the nodes met
        print("heard", server.accept()[0].recv(9).decode(), flush=True)
else:
    for _ in range(600):
        try: socket.create_connection(place).sendall(b"rank 1"); break
        except ConnectionRefusedError: time.sleep(0.1)
"""
SLEEP = "import os, time; print('up', os.environ['RANK'], flush=True); time.sleep(600)"
FAIL = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(600)"


class Nodes:
    """Starts `acclimate run --node_rank …` for nodes on this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port, self._folder, self._stack = free_port(), folder, stack

    def start(self, node: int, code: str, *options: str, count: int = 2) -> subprocess.Popen[str]:
        script = self._folder / "script.py"
        script.write_text(code)
        place = ["--master_addr", "127.0.0.1", "--master_port", str(self.port)]
        numbers = ["--num_nodes", str(count), "--node_rank", str(node), "--num_accelerators", "1"]
        job = subprocess.Popen(
            [sys.executable, "-m", "acclimate", "run", *place, *numbers, *options, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._stack.callback(end, job)
        return job


def end(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        job.kill()
    job.communicate()


def ends(jobs: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """How each ended: its code, and what it wrote."""
    told = [job.communicate(timeout=240) for job in jobs]
    return [(job.returncode, *streams) for job, streams in zip(jobs, told, strict=True)]


def without_waiting(messages: str) -> str:
    """Messages without the line that tells of a node that takes seconds to start, as on a busy machine."""
    return re.sub(r"^acclimate run: waiting for node .*\n", "", messages, flags=re.MULTILINE)


def up(jobs: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until the rank of each node runs."""
    for number, job in enumerate(jobs):
        assert job.stdout is not None
        assert job.stdout.readline() == f"up {number}\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def test_nodes_meet_in_any_order_and_leave_the_port_to_the_ranks(nodes: Nodes) -> None:
    later = nodes.start(1, SUM)
    ((code, heard, messages), second) = ends([nodes.start(0, SUM), later])
    assert (code, heard, without_waiting(messages)) == (0, "heard rank 1\n", "")
    assert second[0] == 0


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_ends_the_others_with_a_report(nodes: Nodes, killed: int) -> None:
    jobs = [nodes.start(node, SLEEP) for node in (0, 1)]
    up(jobs)
    jobs[killed].send_signal(signal.SIGKILL)
    ((code, _, stderr),) = ends([jobs[1 - killed]])
    assert (code, without_waiting(stderr)) == (1, f"acclimate run: node {killed} was lost.\n")


def test_a_rank_that_fails_ends_all_nodes_with_its_code_and_name(nodes: Nodes) -> None:
    for code, _, stderr in ends([nodes.start(node, FAIL, count=3) for node in range(3)]):
        assert code == 7
        assert re.search(r"rank 1 \(host .*, pid \d+\) ended with exit code 7\.", stderr)


def test_an_interrupted_node_ends_the_others(nodes: Nodes) -> None:
    jobs = [nodes.start(node, SLEEP) for node in (0, 1)]
    up(jobs)
    jobs[1].send_signal(signal.SIGTERM)
    (first, second) = ends(jobs)
    assert (first[0], second[0]) == (143, 143)
    assert "node 1: SIGTERM was forwarded" in first[2]


@pytest.mark.parametrize(
    ("node", "missing"), [(0, "node 1 of 2"), pytest.param(1, "node 0 at 127.0.0.1", marks=pytest.mark.slow)]
)
def test_a_node_that_never_starts_is_waited_for_with_a_message_until_the_limit(
    nodes: Nodes, node: int, missing: str
) -> None:
    ((code, stdout, stderr),) = ends([nodes.start(node, SLEEP, "--start_timeout", "6")])
    assert (code, stdout) == (2, "")
    waiting, error = stderr.splitlines()
    assert waiting.startswith(f"acclimate run: waiting for {missing}")
    assert error.count("no rank was started: waited 6 s (--start_timeout)") == 1
    assert missing in error


def test_nodes_of_different_jobs_do_not_start_together(nodes: Nodes) -> None:
    first = nodes.start(0, SLEEP, "--start_timeout", "6", count=3)
    told = ends([nodes.start(1, SLEEP, count=2)])
    assert told[0][0] == 2
    assert "node 0 was started for 3 nodes, and this is node 1 of 2" in told[0][2]
    ((code, _, stderr),) = ends([first])
    assert (code, "no rank was started" in stderr, "nodes 1, 2 of 3" in stderr) == (2, True, True)


def test_strangers_at_the_port_disturb_nobody(nodes: Nodes) -> None:
    first = nodes.start(0, SUM)
    calls = []
    while len(calls) < 3:
        try:
            calls.append(socket.create_connection(("127.0.0.1", nodes.port)))
        except ConnectionRefusedError:
            assert first.poll() is None
    calls[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
    calls[1].sendall(b'{"here": {"node": -5, "nodes": 2}}\n')
    code, heard, messages = ends([first, nodes.start(1, SUM)])[0]
    assert (code, heard, without_waiting(messages)) == (0, "heard rank 1\n", "")
    for call in calls:
        call.close()
