"""How the ranks' output looks on files, pipes and many hosts, byte by byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import command, environment, launched, run
from paper import RANKS, Counted, Paper

from acclimate.launch.output import views
from acclimate.launch.output.views import (
    LONGEST_PARTIAL,
    Source,
    TaggedLines,
    TaggedTerminal,
    View,
    WholeLines,
)
from acclimate.launch.output.writer import Writer


def test_each_line_has_its_ranks_tag() -> None:
    ended = run(2, "import os, sys; print('out'); print('err', file=sys.stderr)")
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(ended.stderr.splitlines()) == ["[rank 0] err", "[rank 1] err"]


def test_a_single_ranks_output_is_passed_on_byte_by_byte() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'a\r\nb\xff\0c\rd'); sys.stderr.write('e')"
    ended = subprocess.run(command(1, code), capture_output=True, env=environment(), timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"a\r\nb\xff\0c\rd", b"e")


def test_bytes_that_are_no_utf_8_pass_through_a_tag() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'caf\xe9 \xf0\x9f\n')"
    ended = subprocess.run(command(2, code), capture_output=True, env=environment(), timeout=240)
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


def test_a_last_line_without_a_newline_gets_one_so_that_the_next_begins_anew() -> None:
    paper = Paper()
    view = TaggedLines(paper)
    view.feed(RANKS[0], b"last")
    view.end(RANKS[0])
    view.end(RANKS[2])
    view.feed(RANKS[2], b"next\n")
    assert paper.written == b"[rank 0] last\n[rank 1] next\n"


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


# -- lines that do not end ---------------------------------------------------------------------------


VIEWS: list[Callable[[Writer], View]] = [TaggedLines, WholeLines, TaggedTerminal]


@pytest.mark.parametrize("view_class", VIEWS)
@pytest.mark.parametrize("piece", [10, 1 << 16])
def test_an_endless_line_costs_each_byte_once_and_little_memory(
    view_class: Callable[[Writer], View], piece: int
) -> None:
    size = 300 * piece
    paper = Paper()
    view = view_class(paper)
    Counted.copied = 0
    for _ in range(size // piece):
        view.feed(RANKS[0], Counted(b"x" * piece))
        view.flush()
    assert Counted.copied <= 3 * size
    held = size - paper.written.count(b"x")
    assert held <= 2 * LONGEST_PARTIAL
    view.end(RANKS[0])
    view.flush()
    assert shown_in_the_end(paper.written).count(b"x") == size


def shown_in_the_end(written: bytes | bytearray) -> bytes:
    """Without what was erased: a row of an unfinished line."""
    parts = bytes(written).split(b"\r\x1b[J")
    return b"".join(part[: part.rfind(b"\n") + 1] for part in parts[:-1]) + parts[-1]


@pytest.mark.parametrize("view_class", VIEWS)
def test_a_line_in_many_pieces_costs_each_byte_once(view_class: Callable[[Writer], View]) -> None:
    view = view_class(Paper())
    Counted.copied = 0
    for _ in range(20):
        for _ in range(1000):
            view.feed(RANKS[0], Counted(b"x"))
        view.feed(RANKS[0], Counted(b"\n"))
    assert Counted.copied <= 3 * 20_020


def test_an_endless_progress_bar_on_a_terminal_is_drawn_from_its_newest_state() -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    for step in range(10_000):
        view.feed(RANKS[0], Counted(b"\r%5d" % step + b"#" * 50))
    view.end(RANKS[0])
    view.flush()
    assert paper.written.count(b"#") == 50
    assert b"9999#" in paper.written


@given(st.lists(st.sampled_from([b"a", "é".encode(), "漢".encode(), "🙂".encode(), b"\xff"])).map(b"".join))
def test_a_long_line_on_a_terminal_is_cut_between_letters(data: bytes) -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    with patch.object(views, "LONGEST_PARTIAL", 5):
        for start in range(len(data)):
            view.feed(RANKS[0], data[start : start + 1])
        view.end(RANKS[0])
        view.flush()
    lines = shown_in_the_end(paper.written).replace(RANKS[0].tag.encode(), b"").split(b"\n")
    assert b"".join(lines) == data
    with suppress(UnicodeDecodeError):
        data.decode()
        assert all(line.decode() is not None for line in lines)


# -- lines of several hosts --------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=10), max_size=10))
def test_lines_of_a_host_are_shown_whole_and_nothing_is_lost(parts: list[bytes]) -> None:
    paper = Paper()
    view = WholeLines(paper)
    for part in parts:
        view.feed(RANKS[0], part)
        assert not paper.written or paper.written.endswith((b"\n", b"\r"))
    view.end(RANKS[0])
    assert paper.written == b"".join(parts)


HOSTS = {"one": (b"[rank 0] ", "AB\n"), "two": (b"[rank 1] ", "ab\n")}
"""The tag that each host's lines begin with, and what it writes."""
hosts_lines = st.lists(
    st.sampled_from(list(HOSTS)).flatmap(lambda host: st.tuples(st.just(host), st.text(HOSTS[host][1]))),
    max_size=20,
)


@given(hosts_lines)
def test_long_lines_of_several_hosts_keep_their_tags_and_do_not_mix(written: list[tuple[str, str]]) -> None:
    paper = Paper()
    view = WholeLines(paper)
    at_start = dict.fromkeys(HOSTS, True)
    with patch.object(views, "LONGEST_PARTIAL", 10):
        for host, text in written:
            for letter in text.encode():  # as an agent sends it
                tag = HOSTS[host][0] if at_start[host] else b""
                view.feed(Source(host, 1), tag + bytes([letter]))
                at_start[host] = letter == ord("\n")
        for host in HOSTS:
            view.end(Source(host, 1))
    plain = bytes(paper.written)
    for line in plain.split(b"\n"):
        tags = [host for host, (tag, _) in HOSTS.items() if tag in line]
        assert len(tags) == bool(line)
        if line:
            assert set(line.removeprefix(HOSTS[tags[0]][0])) <= set(HOSTS[tags[0]][1].encode())
    for tag, _ in HOSTS.values():
        plain = plain.replace(tag, b"")
    for host, (_, letters) in HOSTS.items():
        own = "".join(text for name, text in written if name == host).replace("\n", "").encode()
        assert bytes(byte for byte in plain if byte in letters.strip().encode()) == own


# -- rows of a terminal ------------------------------------------------------------------------------


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(views, "time", made)
    return made


def drawn(view: TaggedTerminal, paper: Paper) -> bytes:
    """What the next flush writes."""
    before = len(paper.written)
    view.flush()
    return bytes(paper.written[before:])


def test_unfinished_lines_are_drawn_together_after_a_moment(clock: Clock) -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    view.feed(RANKS[0], b"one")
    clock.now += 0.02
    view.feed(RANKS[2], b"two")
    assert view.flush() == pytest.approx(0.03)
    assert not paper.written
    clock.now += 0.04
    assert drawn(view, paper) == b"[rank 0] one\n[rank 1] two"
    assert view.flush() is None
    assert drawn(view, paper) == b""


def test_rows_are_erased_before_the_next_are_drawn(clock: Clock) -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    for source, text in zip(RANKS[::2], (b"one", b"two", b"three"), strict=True):
        view.feed(source, text)
    clock.now += 1
    view.flush()
    view.feed(RANKS[0], b" more\n")
    assert drawn(view, paper) == b"\r\x1b[A\x1b[A\x1b[J[rank 0] one more\n[rank 1] two\n[rank 2] three"
    view.feed(RANKS[2], b"\n")
    assert drawn(view, paper) == b"\r\x1b[A\x1b[J[rank 1] two\n[rank 2] three"
    view.feed(RANKS[4], b"\n")
    assert drawn(view, paper) == b"\r\x1b[J[rank 2] three\n"
    view.feed(RANKS[0], b"a\n")
    assert drawn(view, paper) == b"[rank 0] a\n"


def test_the_row_that_changed_last_is_the_lowest(clock: Clock) -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    for source, text in ((RANKS[0], b"a"), (RANKS[2], b"b"), (RANKS[0], b"c"), (RANKS[4], b"  ")):
        view.feed(source, text)
    clock.now += 1
    assert drawn(view, paper) == b"[rank 1] b\n[rank 0] ac"


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("x" * 70, "x" * 70),
        ("x" * 71, "x" * 70),
        ("漢" * 40, "漢" * 35),
        ("x" * 69 + "漢y", "x" * 69),
        ("e\u0301" * 80, "e\u0301" * 70),
        ("\x1b[31m" + "x" * 100, "\x1b[31m" + "x" * 70 + "\x1b[m"),
        ("\x1b[31mx\x1b[2A", "\x1b[31mx"),
    ],
)
def test_a_row_is_cut_to_the_width_of_the_terminal(text: str, row: str, clock: Clock) -> None:
    paper = Paper()
    view = TaggedTerminal(paper)
    view.feed(RANKS[0], text.encode())
    clock.now += 1
    assert drawn(view, paper).decode() == f"[rank 0] {row}"


def test_a_line_of_a_host_goes_on_without_a_second_tag_where_no_other_came_between() -> None:
    paper = Paper()
    view = WholeLines(paper)
    with patch.object(views, "LONGEST_PARTIAL", 12):
        for piece in (b"[rank 0] aaaa", b"aaaaaaaaaaaaa", b"b\n", b"[rank 0] c\n"):
            view.feed(RANKS[0], piece)
    assert paper.written == b"[rank 0] aaaaaaaaaaaaaaaaab\n[rank 0] c\n"
