"""`acclimate run` on a terminal: a pseudo-terminal with the test at its other end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from launching import MARK, PATIENCE_S, command, environment, living, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="job control is looked at through /proc")


class Terminal:
    """What a person sees and types."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self.seen = b""
        self.status: int | None = None

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def hang_up(self) -> None:
        os.close(self._descriptor)

    def settings(self) -> list[object]:
        return list(termios.tcgetattr(self._descriptor))

    def read_until(self, text: bytes) -> bytes:
        """Waits for something to appear; gives all that was seen before it."""
        give_up = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < give_up, f"{text!r} did not appear in {self.seen!r}"
            if not self._read(0.1):
                break
        before, found, self.seen = self.seen.partition(text)
        assert found, f"{text!r} did not appear in {before!r}"
        return before

    def _read(self, timeout_s: float) -> bool:
        """Whether there may be more."""
        if select.select([self._descriptor], [], [], timeout_s)[0]:
            try:
                self.seen += os.read(self._descriptor, 4096)
            except OSError:  # the other end is closed
                return False
        return True

    def end(self) -> tuple[int, bytes]:
        """Reads to the end; the exit code, and what was not read before."""
        give_up = time.monotonic() + PATIENCE_S
        while self._read(0.1):
            assert time.monotonic() < give_up, f"no end after {self.seen!r}"
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status, self.seen


@contextmanager
def on_terminal(arguments: list[str], tmp_path: Path, **variables: str) -> Iterator[Terminal]:
    """Runs a program in a session of its own whose controlling terminal is the test's."""
    mark = str(tmp_path)
    env = environment(**{MARK: mark, "TERM": "xterm", **variables})
    pid, descriptor = pty.fork()
    if pid == 0:
        try:
            os.execvpe(arguments[0], arguments, env)
        finally:
            os._exit(127)
    terminal = Terminal(pid, descriptor)
    terminal.resize(80, 24)
    try:
        yield terminal
    finally:
        for left in living(mark):
            with suppress(ProcessLookupError):  # it may end with one that was killed before it
                os.kill(left, signal.SIGKILL)
        with suppress(OSError):  # a test may have closed it
            os.close(descriptor)
        if terminal.status is None:
            os.waitpid(pid, 0)


# -- a single rank -----------------------------------------------------------------------------------


def test_a_single_rank_keeps_the_terminal(tmp_path: Path) -> None:
    code = "import os; print([os.isatty(n) for n in range(3)], os.get_terminal_size().columns)"
    with on_terminal(command(1, code), tmp_path) as terminal:
        assert terminal.end() == (0, b"[True, True, True] 80\r\n")


def test_a_single_rank_that_is_logged_is_shown_on_the_terminal_too(tmp_path: Path) -> None:
    code = "import os; print([os.isatty(n) for n in range(3)])"
    with on_terminal(command(1, code, "--log_dir", str(tmp_path / "logs")), tmp_path) as terminal:
        assert terminal.end() == (0, b"[True, False, False]\r\n")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "[True, False, False]\n"


def test_several_ranks_have_no_terminal(tmp_path: Path) -> None:
    code = "import os; print([os.isatty(n) for n in range(3)])"
    with on_terminal(command(2, code), tmp_path) as terminal:
        exit_code, seen = terminal.end()
    assert exit_code == 0
    shown = sorted(line for line in screen(seen) if line)  # a line may be drawn before it is finished
    assert shown == [f"[rank {n}] [False, False, False]" for n in range(2)]


def test_a_single_rank_reads_what_is_typed(tmp_path: Path) -> None:
    code = "print('hello', input('name? '))"
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"name? ")
        terminal.type(b"Ada\n")
        exit_code, seen = terminal.end()
    assert (exit_code, seen) == (0, b"Ada\r\nhello Ada\r\n")


def test_a_reader_that_leaves_early_ends_a_single_rank_whose_input_is_the_terminal(tmp_path: Path) -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    pipeline = ["sh", "-c", '{ "$@"; echo "code $?" >&2; } | head -n 1', "sh", *command(1, code)]
    with on_terminal(pipeline, tmp_path) as terminal:
        _, seen = terminal.end()
    reason = b"acclimate run: the reader of standard output has exited, so the ranks were ended.\r\n"
    assert seen == b"0\r\n" + reason + b"code 141\r\n"


def test_ctrl_c_reaches_a_single_rank_once(tmp_path: Path) -> None:
    code = """
import time
try:
    print("ready")
    while True: time.sleep(0.05)  # Python misses a signal that comes just before a long sleep
except KeyboardInterrupt:
    time.sleep(0.5)  # a second one would end this
    print("dealt with")
"""
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        terminal.type(b"\x03")
        exit_code, seen = terminal.end()
    assert (exit_code, seen) == (0, b"^Cdealt with\r\n")


def test_a_single_rank_that_does_not_deal_with_ctrl_c_makes_130_and_no_report(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_DFL); print('ready'); time.sleep(60)"
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        terminal.type(b"\x03")
        assert terminal.end() == (130, b"^C")


def test_an_interactive_program_outlives_any_number_of_ctrl_c(tmp_path: Path) -> None:
    code = """
import signal, sys, time
heard = 0
def hear(*_):
    global heard
    heard += 1
    sys.stdout.write(f"again {heard}\\n")
signal.signal(signal.SIGINT, hear)
print("ready")
while heard < 3: time.sleep(0.05)
time.sleep(0.6)  # longer than the grace
print("still here")
"""
    with on_terminal(command(1, code, "--grace", "0.3"), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        for number in range(1, 4):
            terminal.type(b"\x03")
            terminal.read_until(f"again {number}\r\n".encode())
        assert terminal.end() == (0, b"still here\r\n")


@pytest.mark.slow
def test_ctrl_c_reaches_a_single_rank_once_though_the_launcher_hears_of_it_late(tmp_path: Path) -> None:
    code = """
import signal, sys, time
heard = False
def hear(*_):
    global heard
    heard = True
    print("heard")
signal.signal(signal.SIGINT, hear)
print("ready")
while not heard: time.sleep(0.05)
for _ in range(30): time.sleep(0.05)
print("still here")
"""
    with on_terminal(command(1, code, "--grace", "0.3"), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        os.kill(terminal.pid, signal.SIGSTOP)
        terminal.type(b"\x03")
        terminal.read_until(b"heard\r\n")
        time.sleep(0.5)  # longer than signals that come at one time are apart
        os.kill(terminal.pid, signal.SIGCONT)
        assert terminal.end() == (0, b"still here\r\n")


@pytest.mark.slow
def test_an_interrupt_from_elsewhere_after_ctrl_c_reaches_a_single_rank(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.stdout.write("heard\\n"))
print("ready")
while True: time.sleep(0.05)
"""
    with on_terminal(command(1, code, "--grace", "30"), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        terminal.type(b"\x03")
        terminal.read_until(b"heard\r\n")
        time.sleep(0.5)
        os.kill(terminal.pid, signal.SIGINT)
        terminal.read_until(b"heard\r\n")


def test_an_interrupt_from_elsewhere_is_passed_on_to_a_single_rank(tmp_path: Path) -> None:
    code = """
import time
try:
    print("ready")
    while True: time.sleep(0.05)
except KeyboardInterrupt: print("dealt with")
"""
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        os.kill(terminal.pid, signal.SIGINT)
        assert terminal.end() == (0, b"dealt with\r\n")


def test_a_single_rank_that_fails_later_than_ctrl_c_is_reported(tmp_path: Path) -> None:
    code = """
import sys, time
try:
    print("ready")
    while True: time.sleep(0.05)
except KeyboardInterrupt: sys.exit(3)
"""
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        terminal.type(b"\x03")
        exit_code, seen = terminal.end()
    assert exit_code == 3
    assert seen.endswith(b"ended with exit code 3.\r\n")


def test_a_rank_that_dies_with_the_echo_off_leaves_it_on(tmp_path: Path) -> None:
    code = """
import os, termios
settings = termios.tcgetattr(0)
settings[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, settings)
os.kill(os.getpid(), 9)
"""
    # The shell is still there afterwards, so the terminal can be asked.
    shell = ["sh", "-c", '"$@"; echo ended; read line', "sh"]
    with on_terminal([*shell, *command(1, code)], tmp_path) as terminal:
        before = terminal.settings()
        terminal.read_until(b"ended\r\n")
        assert terminal.settings() == before


def test_the_launcher_that_dies_takes_its_single_rank_along(tmp_path: Path) -> None:
    code = "import time; print('ready'); time.sleep(600)"
    with on_terminal(command(1, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        os.kill(terminal.pid, signal.SIGKILL)
        wait_until(lambda: not living(str(tmp_path)), "the end of the rank")


def test_a_terminal_that_is_closed_ends_the_job(tmp_path: Path) -> None:
    code = "import time; print('ready'); time.sleep(600)"
    for ranks in (1, 2):
        with on_terminal(command(ranks, code), tmp_path) as terminal:
            terminal.read_until(b"ready\r\n")
            terminal.hang_up()
            wait_until(lambda: not living(str(tmp_path)), "the end of the ranks")


# -- several ranks -----------------------------------------------------------------------------------


def test_ctrl_c_ends_several_ranks(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_DFL); print('ready'); time.sleep(60)"
    with on_terminal(command(2, code), tmp_path) as terminal:
        terminal.read_until(b"ready\r\n")
        terminal.read_until(b"ready\r\n")
        terminal.type(b"\x03")
        exit_code, seen = terminal.end()
    assert exit_code == 130
    assert b"SIGINT was forwarded" in seen


def screen(written: bytes) -> list[str]:
    """What a wide terminal shows in the end: just enough of one for text, line ends and moves up."""
    lines, row, column = [""], 0, 0
    text = written.decode()
    position = 0
    while position < len(text):
        letter = text[position]
        position += 1
        if letter == "\x1b":
            end = position
            while not text[end].isalpha():
                end += 1
            amount, code = text[position + 1 : end] or "1", text[end]
            position = end + 1
            if code == "A":
                row = max(0, row - int(amount))
            elif code == "J":
                lines[row:] = [lines[row][:column]]
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        else:
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


BARS = """
import os, sys, time
rank = int(os.environ["RANK"])
for step in range(0, 101, 20):
    sys.stderr.write(f"\\r{step}% of rank {rank} " + "#" * step)
    time.sleep(0.06)
    if step == 40: print("a line of rank", rank)
sys.stderr.write("\\n")
"""


def test_progress_bars_of_several_ranks_stay_whole_below_the_lines(tmp_path: Path) -> None:
    with on_terminal(command(3, BARS), tmp_path) as terminal:
        exit_code, seen = terminal.end()
    assert exit_code == 0
    shown = screen(seen)
    assert sorted(line for line in shown if "a line" in line) == [
        f"[rank {rank}] a line of rank {rank}" for rank in range(3)
    ]
    # Each bar is there once, in its last state, and whole.
    bars = sorted(line for line in shown if "%" in line)
    assert bars == [f"[rank {rank}] 100% of rank {rank} " + "#" * 100 for rank in range(3)]


def test_an_unfinished_line_never_takes_more_than_a_row(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"""
import pathlib, sys, time
sys.stdout.write('\\x1b[32m' + '漢字' * 60)
sys.stdout.flush()
while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)
"""
    with on_terminal(command(2, code), tmp_path) as terminal:
        drawn = terminal.read_until("漢".encode()).decode() + "漢"
        seen.touch()
        drawn += terminal.read_until(b"\x1b[J").decode()
        assert terminal.end()[0] == 0
    plain = re.sub(r"\x1b\[[0-9]*[mA]", "", drawn).strip("\r")
    for row in plain.split("\r\n"):
        assert sum(2 if letter in "漢字" else 1 for letter in row) <= 79, row


def test_much_output_without_a_newline_arrives_whole(tmp_path: Path) -> None:
    code = "import sys; [sys.stdout.write('x' * 10_000) for _ in range(50)]"
    with on_terminal(command(2, code), tmp_path) as terminal:
        exit_code, seen = terminal.end()
    assert exit_code == 0
    # What is written below rows that were drawn, one of each rank, begins by going up and erasing them.
    erased = 0
    for part in seen.split(b"\x1b[J")[:-1]:
        rows = 1 + part.count(b"\x1b[A")
        erased += b"".join(part.split(b"\n")[-rows:]).count(b"x")
    assert seen.count(b"x") - erased == 1_000_000
