"""Many processes ask for one op at once, some are killed: one compiles it, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from building import COMPILER, Workshop, python_environment

from warm_python import WarmPython

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")

# One line when it is about to ask, one with what it got.
ASK = """
import sys
from tiny_op import builder
print("asks", flush=True)
builder.TinyBuilder().load()
print(builder.answers, flush=True)
"""


class Asker:
    """A process that asks for the op."""

    def __init__(self, workshop: Workshop, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            env=python_environment(workshop) | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_it_asks(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "asks\n", self.process.communicate()[1]

    def answer(self) -> str:
        stdout, stderr = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, stderr
        return stdout.split()[-1]


@pytest.fixture
def ask(workshop: Workshop, warm_python: WarmPython) -> Iterator[Callable[..., Asker]]:
    """Starts processes that ask, and ends those that a failed test leaves."""
    askers: list[Asker] = []

    def start(**env: str) -> Asker:
        with warm_python.in_place():
            askers.append(Asker(workshop, **env))
        return askers[-1]

    yield start
    (workshop.folder / "slow").unlink(missing_ok=True)
    for asker in askers:
        asker.process.kill()
        asker.process.communicate()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, f"waited 240 s for {what}"
        time.sleep(0.02)


def test_eight_processes_that_ask_at_once_compile_once(workshop: Workshop) -> None:
    outcome = workshop.run("""
import os, sys
from tiny_op import builder
start, go = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            builder.TinyBuilder().load()
            code = 0 if builder.answers == [42] else 2
        finally:
            os._exit(code)
    children.append(child)
os.close(go)
tell(codes=[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
""")
    assert outcome.told == {"codes": [0] * 8}, outcome.stderr
    assert len(workshop.compiled()) == 2  # its two sources, once each
    assert not workshop.leftovers()


def test_a_builder_killed_in_mid_compile_does_not_block_the_others(
    workshop: Workshop, ask: Callable[..., Asker]
) -> None:
    slow, started = workshop.folder / "slow", workshop.folder / "started"
    slow.touch()
    builder = ask()
    wait_for(started.exists, "the compiler to start")
    others = [ask(), ask()]
    for other in others:
        other.wait_until_it_asks()
    assert workshop.leftovers()
    builder.process.send_signal(signal.SIGKILL)
    builder.process.wait()
    killed_compilers = [int(line) for line in started.read_text().split()]
    slow.unlink()
    assert [other.answer() for other in others] == ["[42]", "[42]"]
    wait_for(lambda: not any(map(is_running, killed_compilers)), "the dead builder's compilers")
    assert not workshop.leftovers()
    assert len(workshop.libraries()) == 1


def test_a_killed_builder_takes_its_compilers_with_it(workshop: Workshop, ask: Callable[..., Asker]) -> None:
    started = workshop.folder / "started"
    (workshop.folder / "slow").touch()  # as long as it is there, a compiler does not end by itself
    builder = ask()
    wait_for(lambda: started.exists() and started.read_text().split(), "the compiler to start")
    compilers = [int(line) for line in started.read_text().split()]
    assert all(map(is_running, compilers))
    builder.process.send_signal(signal.SIGKILL)
    builder.process.wait()
    wait_for(lambda: not any(map(is_running, compilers)), "the dead builder's compilers")


def test_no_compiler_starts_that_would_outlive_a_builder_killed_at_that_moment(workshop: Workshop) -> None:
    code = """
import os, signal, time
from acclimate.ops.build.run_compilers import Compilers
from tiny_op.builder import TinyBuilder
def killed(compilers):  # before the watcher knows of the compiler
    if any("-c" in process.args for process in compilers._running):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
Compilers._tell_watcher = killed
TinyBuilder().build()
"""
    outcome = workshop.fresh.run(code, path=[workshop.folder / "tiny"], env=workshop.env)
    assert outcome.returncode == -signal.SIGKILL, outcome.stderr
    assert workshop.compiled() == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_waiting_too_long_names_who_builds(workshop: Workshop, ask: Callable[..., Asker]) -> None:
    slow, started = workshop.folder / "slow", workshop.folder / "started"
    slow.touch()
    builder = ask()
    wait_for(started.exists, "the compiler to start")
    other = ask(ACCLIMATE_BUILD_TIMEOUT="0.1")
    _, stderr = other.process.communicate(timeout=600)
    assert other.process.returncode == 1
    message = stderr.strip().splitlines()[-1]
    assert message.startswith("acclimate.errors.OpLockTimeoutError: Waited 0.1 s for process ")
    assert f"process {builder.process.pid} on {socket.gethostname()} (since 20" in message
    assert 'building the op "tiny"' in message
    slow.unlink()
    assert builder.answer() == "[42]"


def test_a_child_forked_by_a_builder_that_was_killed_does_not_hold_its_lock(workshop: Workshop) -> None:
    outcome = workshop.run(f"""
import os, signal, time
from pathlib import Path
from acclimate.cache.lock import hold
path = Path({str(workshop.folder / "lock")!r})
ready, tell_ready = os.pipe()
alive, ours = os.pipe()  # the child lives as long as this process
builder = os.fork()
if builder == 0:
    os.close(ours)
    with hold(path, 10, "building"):
        if os.fork() == 0:
            os.read(alive, 1)
            os._exit(0)
        os.write(tell_ready, b".")
        time.sleep(600)
os.read(ready, 1)
os.kill(builder, signal.SIGKILL)
os.waitpid(builder, 0)
with hold(path, 10, "building"):
    tell(held=True)
""")
    assert outcome.told == {"held": True}, outcome.stderr


def test_what_dead_builders_of_an_older_source_left_is_removed(workshop: Workshop) -> None:
    left = workshop.cache / "ops" / "tiny" / ".0123456789abcdef-01234567.89abcdef.partial"
    left.mkdir(parents=True)
    (left / "tiny.o").write_bytes(b"half")
    workshop.run("from tiny_op.builder import TinyBuilder\nTinyBuilder().load()")
    assert not workshop.leftovers()


def test_a_lock_file_that_a_dead_host_left_does_not_block(workshop: Workshop) -> None:
    load = "from tiny_op import builder\nbuilder.TinyBuilder().load()\ntell(answers=builder.answers)"
    workshop.run(load)
    (library,) = workshop.libraries()
    (lock,) = library.parents[1].glob(".*.lock")
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2020-01-01T00:00:00+00:00"}))
    library.write_bytes(b"")
    assert workshop.run(load, env={"ACCLIMATE_BUILD_TIMEOUT": "0"}).told == {"answers": [42]}


def test_a_time_out_that_is_no_number_is_refused(workshop: Workshop) -> None:
    outcome = workshop.run(
        """
from acclimate.errors import InvalidEnvironmentError
from tiny_op.builder import TinyBuilder
try:
    TinyBuilder().load()
except InvalidEnvironmentError as error:
    tell(message=str(error))
""",
        env={"ACCLIMATE_BUILD_TIMEOUT": "soon"},
    )
    assert outcome.told["message"].startswith('ACCLIMATE_BUILD_TIMEOUT is "soon"')
