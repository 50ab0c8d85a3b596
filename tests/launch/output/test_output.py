"""What the ranks' output looks like on files and pipes, byte by byte, and what happens where it cannot go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_groups import limited_group
from hypothesis import given
from hypothesis import strategies as st
from launching import command, environment, launched, living, run, wait_until

from acclimate.launch.output.views import Source, TaggedLines
from acclimate.launch.output.writer import LogFile, Tail, Writer
from acclimate.launch.supervise.oom import KillCount, count_kills, explain_sigkill

RANKS = [Source(f"[rank {rank}] ", stream) for rank in range(3) for stream in (1, 2)]


class Paper(Writer):
    """A writer that keeps all."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


# -- tagging -----------------------------------------------------------------------------------------


def test_each_line_has_its_ranks_tag() -> None:
    ended = run(2, "import os, sys; print('out'); print('err', file=sys.stderr)")
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(ended.stderr.splitlines()) == ["[rank 0] err", "[rank 1] err"]


def test_a_single_ranks_output_is_passed_on_byte_by_byte() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'a\r\nb\xff\0c\rd'); sys.stderr.write('e')"
    ended = subprocess.run(command(1, code), capture_output=True, env=environment(), timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"a\r\nb\xff\0c\rd", b"e")


def test_bytes_that_are_no_utf_8_pass_through_a_tag() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'caf\xe9 \xf0\x9f\n')"
    ended = subprocess.run(command(2, code), capture_output=True, env=environment(), timeout=60)
    assert sorted(ended.stdout.splitlines()) == [b"[rank 0] caf\xe9 \xf0\x9f", b"[rank 1] caf\xe9 \xf0\x9f"]


def test_a_rank_is_unbuffered_and_an_unfinished_line_is_shown(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
print("working...", end="")
while not pathlib.Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.01)
print(" done")
"""
    with launched(command(2, code)) as job:
        assert job.process.stdout is not None
        seen = b""
        while seen.count(b"working...") < 2:
            seen += os.read(job.process.stdout.fileno(), 4096)
        (tmp_path / "go").touch()
        stdout, _ = job.read()
    # A line that another rank's line broke goes on under a tag of its own.
    lines = (seen.decode() + stdout).splitlines()
    for tag in ("[rank 0] ", "[rank 1] "):
        own = [line.removeprefix(tag) for line in lines if line.startswith(tag)]
        assert own in (["working... done"], ["working...", " done"])
    assert len(lines) in (3, 4)


pieces = st.lists(
    st.tuples(
        st.sampled_from(RANKS), st.lists(st.sampled_from([b"a", b"\xff", b"\r", b"\n", b"bc"])).map(b"".join)
    ),
    max_size=30,
)


@given(pieces, st.booleans())
def test_tagging_loses_and_mixes_no_byte(written: list[tuple[Source, bytes]], impatient: bool) -> None:
    paper = Paper()
    view = TaggedLines(paper)
    for source, data in written:
        view.feed(source, data)
        if impatient:
            for due in list(view._due):
                view._due[due] = 0.0
            view.flush()
    for source in RANKS:
        view.end(source)
    for tag in {source.tag for source in RANKS}:
        # A line is one rank's alone, whichever of its streams; the two streams may take turns.
        lines = [line for line in paper.written.split(b"\n") if tag.encode() in line]
        assert not any(other.tag.encode() in line for line in lines for other in RANKS if other.tag != tag)
        shown = b"".join(lines).replace(tag.encode(), b"")
        told = b"".join(data for source, data in written if source.tag == tag)
        # Only a carriage return at the very end of a stream may be dropped, as nothing is left to go back to.
        assert sorted(shown.replace(b"\r", b"")) == sorted(told.replace(b"\r", b"").replace(b"\n", b""))


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xff", b"\r\n"])).map(b"".join), st.integers(1, 5))
def test_how_the_bytes_arrive_does_not_matter(data: bytes, size: int) -> None:
    whole, torn = Paper(), Paper()
    for paper, step in ((whole, len(data) or 1), (torn, size)):
        view = TaggedLines(paper)
        for start in range(0, len(data), step):
            view.feed(RANKS[0], data[start : start + step])
        view.end(RANKS[0])
    assert whole.written == torn.written


def test_each_update_of_a_progress_bar_keeps_its_return_and_has_a_tag() -> None:
    paper = Paper()
    view = TaggedLines(paper)
    view.feed(RANKS[0], b"\r 10%\r 20%\n")
    assert paper.written == b"\r[rank 0]  10%\r[rank 0]  20%\n"


def test_a_line_that_was_just_begun_waits_though_the_one_before_it_was_late() -> None:
    paper = Paper()
    view = TaggedLines(paper)
    view.feed(RANKS[0], b"late")
    view._due[RANKS[0]] = 0.0
    view.feed(RANKS[0], b"\nnew")
    view.flush()
    assert paper.written == b"[rank 0] late\n"


def test_windows_line_ends_stay() -> None:
    paper = Paper()
    TaggedLines(paper).feed(RANKS[0], b"one\r\ntwo\r\n")
    assert paper.written == b"[rank 0] one\r\n[rank 0] two\r\n"


def test_an_endless_line_is_shown_before_it_ends() -> None:
    paper = Paper()
    view = TaggedLines(paper)
    for _ in range(100):
        view.feed(RANKS[0], b"x" * 1000)
    assert paper.written.count(b"x") > 60_000
    assert paper.written.count(b"[rank 0]") == 1


# -- the last lines ----------------------------------------------------------------------------------


def test_the_tail_keeps_the_last_20_lines_of_both_streams_in_order() -> None:
    tail = Tail()
    for number in range(30):
        tail.feed(1 + number % 2, f"{number}\n".encode())
    assert tail.lines() == tuple(str(number) for number in range(10, 30))


def test_the_tail_shows_the_last_state_of_a_progress_bar_and_what_was_unfinished() -> None:
    tail = Tail()
    tail.feed(2, b"\r10%\r20%")
    tail.feed(2, b"\r100%\n")
    tail.feed(1, b"almost \xff")
    assert tail.lines() == ("100%", "almost \\xff")


@given(st.binary(max_size=5000), st.integers(1, 700))
def test_the_tail_takes_anything(data: bytes, size: int) -> None:
    tail = Tail()
    for start in range(0, len(data), size):
        tail.feed(1, data[start : start + size])
    assert len(tail.lines()) <= 20
    assert all("\n" not in line for line in tail.lines())


# -- logs --------------------------------------------------------------------------------------------


def test_each_rank_has_a_log_file_of_its_own_besides(tmp_path: Path) -> None:
    logs = tmp_path / "not" / "there"
    code = "import os, sys; print('out of', os.environ['RANK']); print('err', file=sys.stderr)"
    ended = run(2, code, "--log_dir", str(logs))
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out of 0", "[rank 1] out of 1"]
    for rank in range(2):
        assert sorted((logs / f"rank_{rank}.log").read_text().splitlines()) == ["err", f"out of {rank}"]


def test_a_second_run_does_not_take_away_the_first_ones_log(tmp_path: Path) -> None:
    for text in ("first", "second"):
        run(1, f"print({text!r})", "--log_dir", str(tmp_path))
    assert (tmp_path / "rank_0.log").read_text() == "first\nsecond\n"


def test_a_log_folder_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(1, "print('started')", "--log_dir", str(tmp_path / "file" / "logs"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "The log of rank 0 cannot be written: Not a directory" in ended.stderr
    assert "--log_dir" in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel's full disk is not here")
def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").symlink_to("/dev/full")
    code = "import os\nfor n in range(3): print('line', n)"
    ended = run(2, code, "--log_dir", str(tmp_path))
    assert ended.returncode == 0
    assert sorted(ended.stdout.splitlines()) == sorted(
        f"[rank {r}] line {n}" for r in (0, 1) for n in range(3)
    )
    log = tmp_path / "rank_1.log"
    assert ended.stderr == f"acclimate run: the log of rank 1 ends here: {log}: No space left on device.\n"
    assert (tmp_path / "rank_0.log").read_text() == "line 0\nline 1\nline 2\n"


def test_a_log_is_closed_with_its_error_kept(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write(b"x" * 100_000)
    log.close()
    assert (log.error, (tmp_path / "log").stat().st_size) == (None, 100_000)


# -- readers that are slow, or gone ------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_that_leaves_early_ends_the_job(ranks: int) -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    with launched(command(ranks, code, "--grace", "30")) as job:
        assert job.process.stdout is not None
        os.read(job.process.stdout.fileno(), 10)
        job.process.stdout.close()
        assert job.process.stderr is not None
        complaint = job.process.stderr.read().decode()
        assert job.wait() == 128 + signal.SIGPIPE
        assert job.living() == {}
    assert complaint == "acclimate run: nobody reads standard output any more, so the ranks were ended.\n"


def test_head_is_not_kept_waiting() -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    shown = subprocess.run(
        ["sh", "-c", '"$@" 2>/dev/null | head -n 2', "sh", *command(1, code)],
        capture_output=True,
        env=environment(),
        timeout=60,
    )
    assert shown.stdout == b"0\n1\n"


def test_a_slow_reader_slows_the_ranks_and_loses_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
block, count = "x" * 9999 + "\\n", open({str(tmp_path / "count")!r}, "ab", buffering=0)
for n in range(500): sys.stdout.write(block); count.write(b".")
"""
    with launched(command(1, code)) as job:
        assert job.process.stdout is not None
        count = tmp_path / "count"
        wait_until(lambda: count.exists() and count.stat().st_size, "the first block")
        before = 0
        while before != count.stat().st_size:
            before = count.stat().st_size
            time.sleep(0.3)
        assert before < 400, "the launcher keeps no more than about a megabyte"
        stdout, _ = job.read()
        assert job.wait() == 0
    assert len(stdout) == 5_000_000


def test_a_slow_reader_does_not_keep_a_failure_from_ending_the_job(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    code = f"""
import os, pathlib, sys, time
if os.environ["RANK"] == "0":
    while True: print("x" * 1000)
time.sleep(0.3)
pathlib.Path({str(failing)!r}).touch()
sys.exit(3)
"""
    with launched(command(2, code)) as job:
        wait_until(failing.exists, "a rank to fail")
        wait_until(lambda: len(job.living()) == 1, "only the launcher to be left, with what was not read")
        assert job.process.stdout is not None
        while os.read(job.process.stdout.fileno(), 1 << 16):
            pass
        assert job.wait() == 3


def test_ctrl_c_ends_a_launcher_whose_output_nobody_takes(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"import pathlib; print('x' * 500_000); pathlib.Path({str(done)!r}).touch()"
    with launched(command(1, code)) as job:
        wait_until(done.exists, "the rank to write")
        wait_until(lambda: len(job.living()) == 1, "the rank to end")
        job.signal(signal.SIGINT)
        assert job.wait() == 0, "the rank had ended well by itself"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel's full disk is not here")
def test_standard_output_on_a_full_disk_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    code = f"import pathlib; print('x'); pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command(1, code), stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60, text=True
        )
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)
    assert ended.stderr == (
        "acclimate run: standard output cannot be written (No space left on device); the ranks go on.\n"
    )


def test_closed_standard_streams_are_no_obstacle(tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    ended = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command(2, code)], env=environment(), timeout=60
    )
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)


def test_standard_input_is_the_only_ranks_or_the_first_ones() -> None:
    code = "import sys; print(sys.stdin.read())"
    for ranks, shown in ((1, ["hello"]), (2, ["[rank 0] hello", "[rank 1] "])):
        ended = subprocess.run(
            command(ranks, code), input="hello", capture_output=True, text=True, env=environment(), timeout=60
        )
        assert sorted(ended.stdout.splitlines()) == shown


def test_a_lot_of_output_of_many_ranks_arrives_whole() -> None:
    code = "import os\nfor n in range(2000): print(os.environ['RANK'], n, 'x' * 50)"
    ended = run(4, code)
    lines = ended.stdout.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {rank} {n} {'x' * 50}" for n in range(2000)]


# -- who sent a SIGKILL ------------------------------------------------------------------------------


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
    assert explain_sigkill(KillCount(None, None), KillCount(None, None)) is None


def test_a_rank_that_the_out_of_memory_killer_ends_is_reported_so(tmp_path: Path) -> None:
    with limited_group("memory", 150 << 20) as join:
        code = "x = bytearray(1 << 20)\nwhile True: x += bytes(1 << 20)"
        ended = subprocess.run(
            [*join, *command(2, code)], capture_output=True, text=True, env=environment(), timeout=60
        )
        assert ended.returncode == 137, ended.stderr
        assert "out-of-memory killer is the likely cause: it killed" in ended.stderr
        assert not living(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux only")
def test_this_machines_kernel_can_be_asked() -> None:
    counted = count_kills()
    assert counted.group is None or counted.group >= 0
    assert counted.host is None or counted.host >= 0
