"""A whole job over the launcher's port, with scripts in the place of MPICH and pdsh: all ranks run here."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from launching import Launched, launched, wait_until

from acclimate.launch.remote.engine_program import CHECK_AFTER_S

MPIEXEC = f"""#!{sys.executable}
import os, pathlib, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    sys.exit(print("HYDRA build details:"))
folder = pathlib.Path({{folder!r}})
(folder / "launcher.part").write_text(os.environ["ACCLIMATE_LAUNCHER"])
(folder / "launcher.part").rename(folder / "launcher")
while not (folder / "go").exists():
    time.sleep(0.01)
ranks = int(sys.argv[sys.argv.index("-n") + 1])
command = sys.argv[sys.argv.index("none") + 1 :]
place = lambda rank: {{{{**os.environ, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}}}}
agents = [subprocess.Popen(command, env=place(rank)) for rank in range(ranks)]
sys.exit(max([agent.wait() for agent in agents]))
"""
CODE = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


class MpichJob:
    """Starts a job of two ranks; its agents start at :meth:`go`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("mpiexec", MPIEXEC.format(folder=str(folder))), ("ssh", "#!/bin/sh\nexit 0\n")):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "hosts").write_text("localhost slots=2\n")
        (folder / "script.py").write_text(CODE)
        launcher = [sys.executable, "-m", "acclimate", "run", "--launcher", "mpich"]
        self.command = [*launcher, "--hostfile", str(folder / "hosts"), str(folder / "script.py")]
        self.variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def port(self) -> int:
        """Where the launcher listens."""
        wait_until(lambda: (self.folder / "launcher").exists(), "the launcher's port")
        return int((self.folder / "launcher").read_text().rpartition(":")[2])

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def mpich(tmp_path: Path) -> MpichJob:
    return MpichJob(tmp_path)


def check_that_all_went_well(job: Launched) -> None:
    stdout, stderr = job.read()
    assert (job.wait(), stderr) == (0, ""), stderr
    assert sorted(stdout.splitlines()) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]


def call(port: int, data: bytes) -> None:
    """Says something, until the launcher hangs up or nothing more is to be said."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as stranger, suppress(OSError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


def test_strangers_who_say_anything_do_not_disturb_the_job(mpich: MpichJob) -> None:
    with launched(mpich.command, variables=mpich.variables) as job:
        port = mpich.port()
        for said in (
            '{"hello": {"key": "é", "rank": 0}}\n'.encode(),
            b"[" * 200_000 + b"\n",
            b"x" * 5_000_000,
            b'{"call": {"name": "\\ud800", "nonce": "\\u0000"}}\n{"hello": "\\ud800"}\n',
            b'{"call": {"name": "0", "nonce": "n"}}\n{"hello": "\xc3\xa9"}\n',
        ):
            call(port, said)
        mpich.go()
        check_that_all_went_well(job)


@pytest.mark.slow
def test_strangers_who_take_all_descriptors_do_not_disturb_the_job(mpich: MpichJob) -> None:
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *mpich.command]
    strangers = []
    with launched(limited, variables=mpich.variables) as job:
        port = mpich.port()
        for _ in range(300):
            with suppress(OSError):
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        # Meanwhile the launcher asks by ssh whether the silent hosts can be reached, which takes descriptors.
        time.sleep(CHECK_AFTER_S + 0.5)
        mpich.go()
        check_that_all_went_well(job)
    for stranger in strangers:
        stranger.close()


def test_strangers_keep_no_job_running(mpich: MpichJob) -> None:
    with (
        launched(mpich.command, variables=mpich.variables) as job,
        socket.create_connection(("127.0.0.1", mpich.port()), timeout=30),
    ):
        mpich.go()
        check_that_all_went_well(job)


def test_the_key_of_a_job_is_not_on_any_command_line(mpich: MpichJob) -> None:
    with launched(mpich.command, variables=mpich.variables) as job:
        mpich.port()
        key = (mpich.folder / "launcher").read_text().partition("@")[0]
        assert re.fullmatch("[0-9a-f]{32}", key)
        assert not [line for line in job.living().values() if key in line]
        mpich.go()
        check_that_all_went_well(job)


LAST_LINES = 5000
LAST_WORDS_CODE = f"""
import os, pathlib, signal, sys, time
def end(*_):
    for number in range({LAST_LINES}): print("x" * 100, number)
    sys.exit()
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    pathlib.Path("up").touch()
    time.sleep(600)
while not pathlib.Path("up").exists(): time.sleep(0.01)
sys.exit(3)
"""


def test_what_ranks_print_as_they_are_ended_is_shown_however_much(mpich: MpichJob) -> None:
    (mpich.folder / "script.py").write_text(LAST_WORDS_CODE)
    mpich.go()
    with launched(mpich.command, variables=mpich.variables, cwd=mpich.folder) as job:
        stdout, _ = job.read()
        assert job.wait() == 3
    assert stdout.splitlines() == [f"[rank 0] {'x' * 100} {number}" for number in range(LAST_LINES)]


SHORT_CODE = """
import os, pathlib, sys
stopped = pathlib.Path("stopped")
pathlib.Path("up" + os.environ["RANK"]).touch()
while not stopped.exists(): pass
for number in range(100):
    print("x" * 100, number)
    print("y" * 100, number, file=sys.stderr)
"""


def test_output_and_outcome_of_ranks_that_end_while_the_launcher_is_stopped_arrive(mpich: MpichJob) -> None:
    """Nothing that an agent has sent is dropped when it exits with a message of the launcher unread."""
    (mpich.folder / "script.py").write_text(SHORT_CODE)
    mpich.go()
    with launched(mpich.command, variables=mpich.variables, cwd=mpich.folder) as job:
        wait_until(lambda: all((mpich.folder / f"up{rank}").exists() for rank in (0, 1)), "both ranks")
        job.signal(signal.SIGSTOP)
        (mpich.folder / "stopped").touch()
        time.sleep(1)  # for the ranks to end; where it is too short, the promise is kept all the same
        job.signal(signal.SIGCONT)
        stdout, stderr = job.read()
        assert job.wait() == 0, stderr
    for text, filling in ((stdout, "x" * 100), (stderr, "y" * 100)):
        wanted = {f"[rank {rank}] {filling} {number}" for rank in (0, 1) for number in range(100)}
        assert (set(text.splitlines()), len(text.splitlines())) == (wanted, len(wanted))


def test_an_agent_whose_launcher_is_a_stranger_starts_no_rank(tmp_path: Path) -> None:
    """One that answers on the launcher's address with a job of its own."""
    agent = "import sys; from acclimate.launch.remote.agent import main; sys.exit(main())"
    names = ["--rank_variable", "PMI_RANK", "--local_rank_variable", "MPI_LOCALRANKID"]
    plan = '{"assignment": {"job": {"command": ["touch", "%s"]}, "node_rank": 0, "mark": ""}}\n'
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"k@127.0.0.1:{server.getsockname()[1]}"
        environment = {
            **os.environ, "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "ACCLIMATE_LAUNCHER": where,
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-c", agent, *names], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            connection, _ = server.accept()
            with connection:
                connection.sendall((plan % (tmp_path / "made")).encode())
                _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "the program that answers is not this job's launcher" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "made").exists()


PDSH = f"""#!{sys.executable}
import os, sys
host = sys.argv[sys.argv.index("-w") + 1]
os.execvp("sh", ["sh", "-c", sys.argv[-1].replace("%h", host).replace("%%", "%")])
"""
LINE, LINES = "y" * 1000, 4000
"""More than all pipes from the rank to the reader keep, and what the launcher and the agent keep."""
STALLED_CODE = f"""
import os, pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("signalled").touch())
for number in range({LINES}):
    print("{LINE}", number, file=sys.stderr, flush=True)
"""


def is_full(pipe: int) -> bool:
    return not select.select([], [pipe], [], 0)[1]


def test_the_launcher_passes_on_signals_while_pdshs_errors_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    pdsh = tmp_path / "bin" / "pdsh"
    pdsh.write_text(PDSH)
    pdsh.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    (tmp_path / "script.py").write_text(STALLED_CODE)
    launcher = [sys.executable, "-m", "acclimate", "run", "--launcher", "pdsh", "--hostfile", "hosts"]
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    reading, writing = os.pipe()
    with launched([*launcher, "script.py"], variables=variables, cwd=tmp_path, stderr=writing) as job:
        wait_until(lambda: is_full(writing), "a full pipe")
        job.signal(signal.SIGUSR1)
        wait_until((tmp_path / "signalled").exists, "the rank to get the signal")
        os.close(writing)
        with open(reading) as stderr:
            shown = stderr.read()
        assert job.wait() == 0, shown[-2000:]
    assert shown.splitlines() == [f"{LINE} {number}" for number in range(LINES)]
