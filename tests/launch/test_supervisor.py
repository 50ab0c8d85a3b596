"""What the supervisor promises about processes: how jobs end, with which code, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_groups import limited_group
from launching import Launched, command, environment, launched, names_in, run, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")

READY = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path({folder!r})
def ready(name=None):
    (folder / (name or f"ready{{rank}}")).write_text(str(os.getpid()))
def wait():
    while True: time.sleep(0.05)  # Python misses a signal that comes just before a long sleep
"""
"""How each of these ranks begins: it tells that it is ready by a file with its pid."""


def code(folder: Path, text: str) -> str:
    return READY.format(folder=str(folder)) + text


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text(), f"{path.name} with a pid")
    return int(path.read_text())


def all_ready(folder: Path, ranks: int) -> None:
    wait_until(lambda: {f"ready{rank}" for rank in range(ranks)} <= names_in(folder), "all ranks to be ready")


def assert_nothing_is_left(job: Launched) -> None:
    wait_until(lambda: not job.living(), f"the end of {job.living()}")


# -- exit codes --------------------------------------------------------------------------------------


def test_ranks_that_end_well_make_exit_code_0_and_no_word_of_the_launchers() -> None:
    ended = run(2, "pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("exit_code", [1, 3, 42, 255])
def test_the_exit_code_is_the_failed_ranks_own(exit_code: int) -> None:
    ended = run(2, f"import os, sys; sys.exit({exit_code} if os.environ['RANK'] == '1' else 0)")
    assert ended.returncode == exit_code
    assert f"rank 1 (host {os.uname().nodename}, pid " in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].endswith(f"ended with exit code {exit_code}.")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMIN + 1])
def test_a_killed_rank_makes_128_plus_the_signal_and_its_name_is_told(number: int) -> None:
    ended = run(2, f"import os, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), {int(number)})")
    assert ended.returncode == 128 + number
    assert f"(signal {int(number)})" in ended.stderr
    if number in list(signal.Signals):
        assert f"was killed by {signal.Signals(number).name}" in ended.stderr


def test_a_sigkill_that_no_one_confesses_to_is_told_from_the_out_of_memory_killers() -> None:
    ended = run(1, "import os; os.kill(os.getpid(), 9)")
    assert (
        "The kernel's out-of-memory killer did not act, so another process sent the signal." in ended.stderr
    )


def test_the_report_ends_with_the_last_20_lines_of_the_failed_rank_and_then_the_cause(tmp_path: Path) -> None:
    text = """
ready()
while rank == 0: time.sleep(1)
for number in range(100): print("line", number)
sys.stderr.write("the very end")
sys.exit(7)
"""
    ended = run(2, code(tmp_path, text))
    lines = ended.stderr.splitlines()
    assert ended.returncode == 7
    assert lines[-1].startswith("acclimate run: rank 1 (host ")
    assert lines[-22] == "acclimate run: the last 20 lines of rank 1:"
    assert lines[-21:-1] == [*(f"    line {number}" for number in range(81, 100)), "    the very end"]


def test_the_rank_that_failed_first_is_named_not_one_that_failed_because_of_it(tmp_path: Path) -> None:
    text = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
    ready()
    wait()
while not (folder / "ready0").exists(): time.sleep(0.01)
sys.exit(5)
"""
    ended = run(2, code(tmp_path, text))
    assert ended.returncode == 5
    assert "rank 1 (" in ended.stderr
    assert "rank 0 (" not in ended.stderr


def test_a_rank_for_which_there_is_no_process_left_is_named_with_the_limit() -> None:
    with limited_group("pids", 2) as join:  # the launcher and a guard
        ended = subprocess.run(
            [*join, *command(1, "print('started')")],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
    assert (ended.returncode, ended.stdout) == (126, "")
    assert "ended with exit code 126. It was not started: Resource temporarily unavailable." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    arguments = [*command(1, "")[:-4], "--no_python", str(script)]
    with launched(arguments) as job:
        _, stderr = job.read()
        assert job.wait() == 127
    assert f"{script} cannot be run: No such file or directory." in stderr


# -- one ends all ------------------------------------------------------------------------------------


def test_the_first_failing_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    text = """
ready()
while len(list(folder.glob("ready*"))) < 8: time.sleep(0.01)
if rank == 5: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    with launched(command(8, code(tmp_path, text), "--grace", "60")) as job:
        _, stderr = job.read()
        assert job.wait() == 137
        assert job.living() == {}
    assert "rank 5 (" in stderr


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
while len(list(folder.glob("ready*"))) < 2: time.sleep(0.01)
if rank == 1: sys.exit(3)
time.sleep(600)
"""
    with launched(command(2, code(tmp_path, text), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 3
        assert job.living() == {}


def test_a_rank_has_the_grace_to_end_in_its_own_way(tmp_path: Path) -> None:
    text = """
def leave(*_):
    time.sleep(0.3)
    ready("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
ready()
while len(list(folder.glob("ready*"))) < 2: time.sleep(0.01)
if rank == 1: sys.exit(3)
wait()
"""
    ended = run(2, code(tmp_path, text), "--grace", "20")
    assert ended.returncode == 3
    assert (tmp_path / "saved").exists()


# -- nothing is left ---------------------------------------------------------------------------------

FAMILY = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
deaf = subprocess.Popen([sys.executable, "-c", '''
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
open(os.environ["DEAF"], "w").write(str(os.getpid()))
time.sleep(600)
'''], env={**os.environ, "DEAF": str(folder / f"deaf{rank}")})
if os.fork() == 0:  # a daemon: a session of its own, and a parent that is gone
    os.setsid()
    if os.fork() == 0:
        ready(f"daemon{rank}")
        time.sleep(600)
    os._exit(0)
while not ((folder / f"deaf{rank}").exists() and (folder / f"daemon{rank}").exists()): time.sleep(0.01)
"""
"""A rank's children: one in its process group, one that ignores all but SIGKILL, and a daemon."""


def test_children_and_daemons_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with launched(command(2, code(tmp_path, FAMILY + "ready()"), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 0
        assert job.living() == {}


def test_nothing_is_left_of_any_rank_when_one_fails(tmp_path: Path) -> None:
    text = FAMILY + "ready()\nwhile rank == 1: time.sleep(1)\nsys.exit(4)"
    with launched(command(2, code(tmp_path, text), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 4
        assert job.living() == {}


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert_nothing_is_left(job)


def test_nothing_is_left_when_a_guard_is_killed_and_the_job_ends(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        guard = parent_of(pid_in(tmp_path / "ready1"))
        assert Path(f"/proc/{guard}/comm").read_text() == "acclimate-guard\n"
        os.kill(guard, signal.SIGKILL)
        _, stderr = job.read()
        assert job.wait() == 137
        assert job.living() == {}
    assert "rank 1 (" in stderr
    assert f"Its guard process (pid {guard}) was killed by signal 9" in stderr


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_rank_dies_with_launcher_and_guard_killed_at_once(tmp_path: Path) -> None:
    with launched(command(1, code(tmp_path, "ready()\ntime.sleep(600)"))) as job:
        rank = pid_in(tmp_path / "ready0")
        os.kill(parent_of(rank), signal.SIGKILL)
        job.signal(signal.SIGKILL)
        assert_nothing_is_left(job)


def test_a_stopped_rank_ends_too(tmp_path: Path) -> None:
    text = """
ready()
while len(list(folder.glob("ready*"))) < 2: time.sleep(0.01)
if rank == 1:
    time.sleep(0.2)
    sys.exit(3)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    with launched(command(2, code(tmp_path, text), "--grace", "60")) as job:
        job.read()
        assert job.wait() == 3


# -- signals -----------------------------------------------------------------------------------------

TELLING = """
def tell(number, frame):
    ready(f"got{number}-{rank}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT): signal.signal(number, tell)
ready()
wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_launcher_reaches_every_rank(number: int, tmp_path: Path) -> None:
    with launched(command(2, code(tmp_path, TELLING))) as job:
        all_ready(tmp_path, 2)
        job.signal(number)
        job.read()
        assert job.wait() == 0, "both ranks dealt with it and ended well"
    assert {f"got{int(number)}-0", f"got{int(number)}-1"} <= names_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_do_not_deal_with_a_signal_make_128_plus_it(number: int, tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nready()\ntime.sleep(600)"
    with launched(command(2, code(tmp_path, text))) as job:
        all_ready(tmp_path, 2)
        job.signal(number)
        _, stderr = job.read()
        assert job.wait() == 128 + number
    assert (
        stderr == f"acclimate run: {signal.Signals(number).name} was passed on, and the ranks have ended.\n"
    )


def test_a_rank_that_hangs_after_ctrl_c_is_killed_after_the_grace(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(600)"
    with launched(command(2, code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGINT)
        job.read()
        assert job.wait() == 130
        assert job.living() == {}


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, lambda *_: ready(f'heard{rank}'))\nready()\nwait()"
    with launched(command(2, code(tmp_path, text), "--grace", "600")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGINT)
        wait_until(lambda: {"heard0", "heard1"} <= names_in(tmp_path), "the first to be heard")
        job.signal(signal.SIGINT)
        job.read()
        assert job.wait() == 130
        assert job.living() == {}


def test_a_schedulers_notice_reaches_the_ranks_and_ends_nothing(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGUSR1, lambda *_: ready(f"noticed{rank}"))
ready()
while not (folder / "go").exists(): time.sleep(0.01)
"""
    with launched(command(2, code(tmp_path, text))) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGUSR1)
        wait_until(lambda: {"noticed0", "noticed1"} <= names_in(tmp_path), "the notice")
        (tmp_path / "go").touch()
        assert job.wait() == 0


def test_a_signal_that_the_launcher_was_started_to_ignore_is_ignored_by_all(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    with launched(["nohup", *command(2, code(tmp_path, text))]) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGHUP)
        os.kill(pid_in(tmp_path / "ready0"), signal.SIGHUP)
        time.sleep(0.1)
        (tmp_path / "go").touch()
        assert job.wait() == 0


def test_a_paused_launcher_pauses_its_ranks(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    # As a shell starts it: in a group of its own, in the session of who could continue it.
    in_a_group = {"start_new_session": False, "preexec_fn": os.setpgrp}
    with launched(command(2, code(tmp_path, text)), **in_a_group) as job:
        all_ready(tmp_path, 2)
        ranks = [pid_in(tmp_path / f"ready{rank}") for rank in range(2)]
        job.signal(signal.SIGTSTP)
        wait_until(lambda: all(state_of(rank) == "T" for rank in ranks), "the ranks to stop")
        wait_until(lambda: state_of(job.process.pid) == "T", "the launcher to stop")
        job.signal(signal.SIGCONT)
        wait_until(lambda: all(state_of(rank) in "SR" for rank in ranks), "the ranks to go on")
        (tmp_path / "go").touch()
        assert job.wait() == 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
