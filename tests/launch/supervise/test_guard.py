"""No process of a job is left, whichever process is killed or stopped; each test runs `acclimate run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from launching import (
    FAMILY,
    all_ready,
    assert_nothing_is_left,
    command,
    launched,
    names_in,
    parent_of,
    pid_in,
    ranks_code,
    state_of,
    wait_until,
)

from quick_parameters import quick

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")


def test_children_and_daemons_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with launched(command(2, ranks_code(tmp_path, FAMILY + "ready()"), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 0
        assert job.living() == {}


def test_nothing_is_left_of_any_rank_when_one_fails(tmp_path: Path) -> None:
    text = FAMILY + "ready()\nwhile rank == 1: time.sleep(1)\nsys.exit(4)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 4
        assert job.living() == {}


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert_nothing_is_left(job)


def test_nothing_is_left_when_a_guard_is_killed_and_the_job_ends(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        guard = parent_of(pid_in(tmp_path / "ready1"))
        assert Path(f"/proc/{guard}/comm").read_text() == "rank-guard\n"
        os.kill(guard, signal.SIGKILL)
        _, stderr = job.read()
        assert job.wait() == 137
        assert job.living() == {}
    assert "rank 1 (" in stderr
    assert f"Its guard process (pid {guard}) was killed by SIGKILL (signal 9)" in stderr


def test_a_rank_dies_with_launcher_and_guard_killed_at_once(tmp_path: Path) -> None:
    with launched(command(1, ranks_code(tmp_path, "ready()\ntime.sleep(600)"))) as job:
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
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "60")) as job:
        job.read()
        assert job.wait() == 3


def test_killing_what_has_the_launchers_command_line_leaves_no_process(tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")  # only in the launcher's command line
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3", "--log_dir", logs)) as job:
        all_ready(tmp_path, 2)
        subprocess.run(["pkill", "-9", "-f", logs], check=True)
        assert job.wait() == -signal.SIGKILL
        assert_nothing_is_left(job)


def test_guard_and_standby_have_names_of_their_own(tmp_path: Path) -> None:
    with launched(command(1, ranks_code(tmp_path, "ready()\ntime.sleep(600)"), "--grace", "0.3")) as job:
        guard = parent_of(pid_in(tmp_path / "ready0"))
        standby = parent_of(guard)
        assert parent_of(standby) == job.process.pid
        shown = [names_of(pid) for pid in (guard, standby)]
    assert shown == [
        ("rank-guard", "rank-guard: rank 0"),
        ("rank-standby", "rank-standby: rank 0"),
    ]


def names_of(pid: int) -> tuple[str, str]:
    """What ``ps`` shows of a process: its name, and its command line."""
    folder = Path(f"/proc/{pid}")
    return (folder / "comm").read_text().strip(), (folder / "cmdline").read_text().strip("\0")


@pytest.mark.parametrize("first", quick(("launcher", "guards"), "guards"))
def test_nothing_is_left_when_launcher_and_guards_are_killed_at_once(first: str, tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "60")) as job:
        all_ready(tmp_path, 2)
        guards = [parent_of(pid_in(tmp_path / f"ready{rank}")) for rank in range(2)]
        kill_at_once([job.process.pid, *guards] if first == "launcher" else [*guards, job.process.pid])
        assert_nothing_is_left(job)


def kill_at_once(pids: list[int]) -> None:
    """Stopped first, so that none of them sees another one's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def test_the_kernel_ends_a_ranks_process_group_when_all_above_it_are_killed_at_once(tmp_path: Path) -> None:
    with launched(command(1, ranks_code(tmp_path, FAMILY + "ready()\ntime.sleep(600)"))) as job:
        guard = parent_of(pid_in(tmp_path / "ready0"))
        daemon = pid_in(tmp_path / "daemon0")
        kill_at_once([job.process.pid, parent_of(guard), guard])
        wait_until(lambda: set(job.living()) <= {daemon}, "the end of all but the daemon")


def test_a_rank_is_reported_when_its_standby_is_killed(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        os.kill(parent_of(parent_of(pid_in(tmp_path / "ready1"))), signal.SIGKILL)
        _, stderr = job.read()
        assert job.wait() == 137
        assert job.living() == {}
    assert "rank 1 (" in stderr


def may_choose_pids() -> bool:
    """Whether the kernel lets a test have a pid again."""
    return os.geteuid() == 0 and os.access("/proc/sys/kernel/ns_last_pid", os.W_OK)


@pytest.mark.skipif(not may_choose_pids(), reason="only root may set the last pid, in kernels that have it")
@pytest.mark.parametrize("guard", quick(("lives", "is killed"), "is killed"))
def test_a_failed_rank_is_reported_though_a_later_process_has_its_pid(guard: str, tmp_path: Path) -> None:
    text = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own, guard = os.getpid(), os.getppid()
if os.fork() == 0:
    os.setsid()
    while Path(f"/proc/{{own}}").exists(): time.sleep(0.01)
    while not (folder / "again").exists():
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(own - 1))
        child = os.fork()
        if child == 0:
            os._exit(0)
        if child == own: ready("again")
        else: os.waitpid(child, 0)
    if {guard == "is killed"}: os.kill(guard, signal.SIGKILL)
    os._exit(0)
os._exit(6)
"""
    # In a pid namespace of its own, so that other processes do not take the pid.
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    with launched([*alone, *command(1, ranks_code(tmp_path, text), "--grace", "600")]) as job:
        _, stderr = job.read()
        assert job.wait() == 6, stderr
    assert "ended with exit code 6." in stderr
    assert "again" in names_in(tmp_path)


# -- guards that are stopped -------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", quick(("guard", "standby", "both"), "both"))
def test_a_launcher_ends_though_a_guard_is_stopped(stopped: str, tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(1, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        guard = parent_of(pid_in(tmp_path / "ready0"))
        # The standby first: it would have the guard go on.
        for pid in {"guard": [guard], "standby": [parent_of(guard)], "both": [parent_of(guard), guard]}[
            stopped
        ]:
            os.kill(pid, signal.SIGSTOP)
        job.signal(signal.SIGTERM)
        job.read()
        assert job.wait() == 128 + signal.SIGTERM
        assert job.living() == {}


def test_a_rank_that_ends_under_a_stopped_guard_ends_the_job(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)\nsys.exit(5)"
    with launched(command(1, ranks_code(tmp_path, text))) as job:
        os.kill(parent_of(pid_in(tmp_path / "ready0")), signal.SIGSTOP)
        (tmp_path / "go").touch()
        job.read()
        assert job.wait() == 5


@pytest.mark.slow
def test_a_guard_that_is_stopped_again_and_again_is_killed(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(1, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        guard = parent_of(pid_in(tmp_path / "ready0"))
        over = threading.Event()

        def stop() -> None:
            while not over.wait(0.001):
                with suppress(ProcessLookupError):
                    os.kill(guard, signal.SIGSTOP)

        stopping = threading.Thread(target=stop)
        stopping.start()
        try:
            job.signal(signal.SIGTERM)
            _, stderr = job.read()
            assert job.wait() == 128 + signal.SIGTERM
            assert job.living() == {}
        finally:
            over.set()
            stopping.join()
    # Between two stops it may have had the time to do its work.
    assert "does not respond" in stderr or "the ranks have ended" in stderr


@pytest.mark.parametrize("whose", quick(("rank", "child", "daemon"), "daemon"))
def test_a_stopped_process_is_continued_to_hear_that_it_has_to_end(whose: str, tmp_path: Path) -> None:
    text = f"""
def stopped(name):
    signal.signal(signal.SIGTERM, lambda *_: (ready(name + "-heard"), os._exit(0)))
    ready(name)
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()
if {whose!r} != "rank" and os.fork() == 0:
    if {whose!r} == "daemon": os.setsid()
    stopped("process")
if {whose!r} == "rank": stopped("process")
while not (folder / "go").exists(): time.sleep(0.01)
"""
    with launched(command(1, ranks_code(tmp_path, text), "--grace", "60")) as job:
        process = pid_in(tmp_path / "process")
        wait_until(lambda: state_of(process) == "T", "the process to stop")
        if whose == "rank":
            job.signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        job.read()
        assert job.wait() == 0
    assert "process-heard" in names_in(tmp_path)
