"""How jobs end: with which code, and all ranks with the first that fails; each is an `acclimate run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from control_groups import limited_group
from launching import (
    command,
    environment,
    launched,
    ranks_code,
    run,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")


def test_ranks_that_end_well_make_exit_code_0_and_no_word_of_the_launchers() -> None:
    ended = run(2, "pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "exit_code", [255, *(pytest.param(code, marks=pytest.mark.slow) for code in (1, 3, 42))]
)
def test_the_exit_code_is_the_failed_ranks_own(exit_code: int) -> None:
    ended = run(2, f"import os, sys; sys.exit({exit_code} if os.environ['RANK'] == '1' else 0)")
    assert ended.returncode == exit_code
    assert f"rank 1 (host {os.uname().nodename}, pid " in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].endswith(f"ended with exit code {exit_code}.")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGRTMIN + 1,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
        ),
    ],
)
def test_a_killed_rank_makes_128_plus_the_signal_and_its_name_is_told(number: int) -> None:
    ended = run(2, f"import os, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), {int(number)})")
    assert ended.returncode == 128 + number
    how = f"signal {int(number)}"
    if number in list(signal.Signals):
        how = f"{signal.Signals(number).name} ({how})"
    assert f"was killed by {how}." in ended.stderr


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
    ended = run(2, ranks_code(tmp_path, text))
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
    ended = run(2, ranks_code(tmp_path, text))
    assert ended.returncode == 5
    assert "rank 1 (" in ended.stderr
    assert "rank 0 (" not in ended.stderr


@pytest.mark.parametrize(
    ("limit", "code", "words"),
    [
        (1, 2, "Rank 0 cannot be started: Resource temporarily unavailable."),
        (2, 126, "ended with exit code 126. It was not started: Resource temporarily unavailable."),
    ],
    ids=["not its standby", "not its guard"],
)
def test_a_rank_for_which_there_is_no_process_left_is_named_with_the_limit(
    limit: int, code: int, words: str
) -> None:
    with limited_group("pids", limit) as join:
        ended = subprocess.run(
            [*join, *command(1, "print('started')")],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=240,
        )
    assert (ended.returncode, ended.stdout) == (code, "")
    assert words in ended.stderr
    assert "a control group's pids.max" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_limit_on_open_files_that_comes_at_any_rank_is_told_and_nothing_is_left_running() -> None:
    limited = ["sh", "-c", 'ulimit -n 14; exec "$@"', "sh"]
    with launched([*limited, *command(4, "pass")]) as job:
        _, stderr = job.read()
        assert (job.wait(), job.living()) == (2, {})
    assert "cannot be started: Too many open files." in stderr


def test_pythons_development_mode_warns_of_nothing_in_launcher_and_guards() -> None:
    ended = run(2, "pass", PYTHONDEVMODE="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    ],
    ids=["ignores SIGCHLD", "blocks all signals"],
)
def test_ranks_end_well_under_a_parent_that(before: str) -> None:
    parent = f"import os, signal, sys\n{before}\nos.execv(sys.argv[1], sys.argv[1:])"
    with launched([sys.executable, "-c", parent, *command(2, "pass")]) as job:
        assert job.read() == ("", "")
        assert (job.wait(), job.living()) == (0, {})


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
    with launched(command(8, ranks_code(tmp_path, text), "--grace", "60")) as job:
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
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
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
    ended = run(2, ranks_code(tmp_path, text), "--grace", "20")
    assert ended.returncode == 3
    assert (tmp_path / "saved").exists()
