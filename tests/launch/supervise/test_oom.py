"""Whether the kernel's out-of-memory killer is named as the sender of a SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from control_groups import limited_group
from launching import command, environment, living

from acclimate.launch.supervise.rank_process import KillCount, count_kills, explain_sigkill


def recorded(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kills_are_counted_in_a_version_2_control_group(tmp_path: Path) -> None:
    root = recorded(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
            "sys/fs/cgroup/job/memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
            "sys/fs/cgroup/memory.events": "oom_kill 9\n",
            "proc/vmstat": "pgfault 5\noom_kill 11\n",
        },
    )
    assert count_kills(root) == KillCount(group=2, host=11)


def test_kills_are_counted_in_a_version_1_control_group(tmp_path: Path) -> None:
    root = recorded(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "proc/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            "proc/vmstat": "pgfault 5\n",
        },
    )
    assert count_kills(root) == KillCount(group=4, host=None)


@pytest.mark.parametrize("record", ["oom_kill", "oom_kill ", "oom_kill -", "oom_k", "oom_kill_disable 1", ""])
def test_a_record_that_is_cut_short_counts_nothing(record: str, tmp_path: Path) -> None:
    root = recorded(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
            "sys/fs/cgroup/job/memory.events": f"oom 3\n{record}",
            "proc/vmstat": f"pgfault 5\n{record}",
        },
    )
    assert count_kills(root) == KillCount(group=None, host=None)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (KillCount(2, 11), KillCount(3, 12), "likely cause: it killed a process of this control group"),
        (KillCount(2, 11), KillCount(4, 13), "likely cause: it killed 2 processes of this control group"),
        (KillCount(None, 11), KillCount(None, 12), "likely cause: it killed a process on this host"),
        (KillCount(2, 11), KillCount(2, 12), "did not act"),  # in another container
        (KillCount(None, 11), KillCount(None, 11), "did not act"),
    ],
)
def test_the_kernels_counters_tell_who_sent_a_sigkill(
    before: KillCount, after: KillCount, words: str
) -> None:
    explanation = explain_sigkill(before, after)
    assert explanation is not None
    assert words in explanation


def test_without_counters_nothing_is_claimed() -> None:
    for before, after in ((None, None), (None, 3), (3, None)):
        assert explain_sigkill(KillCount(before, before), KillCount(after, after)) is None


def test_a_rank_that_the_out_of_memory_killer_ends_is_reported_so(tmp_path: Path) -> None:
    with limited_group("memory", 150 << 20) as join:
        code = "x = bytearray(1 << 20)\nwhile True: x += bytes(1 << 20)"
        ended = subprocess.run(
            [*join, *command(2, code)], capture_output=True, text=True, env=environment(), timeout=240
        )
        assert ended.returncode == 137, ended.stderr
        assert "out-of-memory killer is the likely cause: it killed" in ended.stderr
        assert not living(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux only")
@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_at_the_time_limit_is_not_said_to_be_killed_by_a_process() -> None:
    limited = ["sh", "-c", 'ulimit -t 1; exec "$@"', "sh"]
    ended = subprocess.run(
        [*limited, *command(1, "while True: pass")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
    )
    assert ended.returncode == 137, ended.stderr
    assert "another process, or the kernel at the time limit (ulimit -t), sent the signal." in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux only")
def test_this_machines_kernel_can_be_asked() -> None:
    counted = count_kills()
    assert counted.group is None or counted.group >= 0
    assert counted.host is None or counted.host >= 0
