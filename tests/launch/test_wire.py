"""Lines of JSON between the processes of a job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import LaunchProtocolError
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.wire import LineBuffer, decode, encode

KINDS = {"number": int, "text": str, "outcome": Outcome}


@given(st.binary(max_size=50))
def test_a_line_is_a_message_or_an_error_of_ours(line: bytes) -> None:
    with suppress(LaunchProtocolError):
        assert isinstance(decode(line, KINDS), dict)


def test_parts_of_unknown_names_are_ignored() -> None:
    assert decode(encode({"number": 1, "added_later": []}), KINDS) == {"number": 1}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 200_000,
        b'{"number":' * 100_000,
        b"9" * 100_000,
        b'{"number": 1e400}',
        b'{"number": 1.5}',
        b'{"number": true}',
        b'{"number": 99999999999999999999999}',
        b'{"number": "1"}',
        b'{"text": null}',
        b'{"text": {}}',
        b'{"outcome": 0}',
        b'{"outcome": {}}',
        b'{"outcome": {"code": 0, "failed": [], "reason": null}}',
        b'{"outcome": {"code": 0, "failed": null, "reason": null, "more": 1}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_is_an_error_of_ours(line: bytes) -> None:
    with pytest.raises(LaunchProtocolError):
        decode(line, KINDS)


failures = st.builds(
    RankFailure,
    rank=st.integers(0, 9),
    host=st.text(max_size=5),
    pid=st.none() | st.integers(1, 9),
    code=st.integers(-64, 255),
    last_lines=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    cause=st.none() | st.text(max_size=5),
)
outcomes = st.builds(
    Outcome, st.integers(-64, 255), failed=st.none() | failures, reason=st.none() | st.text(max_size=5)
)


@given(outcomes)
def test_a_dataclass_is_read_as_it_was_written(outcome: Outcome) -> None:
    assert decode(encode({"outcome": asdict(outcome)}), KINDS) == {"outcome": outcome}


@dataclass(frozen=True)
class Nested:
    numbers: tuple[float, ...]
    names: Mapping[str, tuple[int, ...]]
    flag: bool = False


def test_fields_may_be_nested() -> None:
    def read(value: object) -> Nested:
        return decode(encode({"nested": value}), {"nested": Nested})["nested"]

    nested = Nested((1.0, 2.5), {"a": (1, 2)}, True)
    assert read(asdict(nested)) == nested
    assert read({"numbers": [1], "names": {}, "flag": False}) == Nested((1.0,), {})
    for name, wrong in (("numbers", [None]), ("numbers", 1), ("names", {"a": [1.5]}), ("flag", 0)):
        with pytest.raises(LaunchProtocolError, match=name):
            read({**asdict(nested), name: wrong})


@given(st.lists(st.binary(max_size=10), max_size=10))
def test_lines_are_put_together_from_pieces(parts: list[bytes]) -> None:
    lines = LineBuffer(1000)
    found = [line for part in parts for line in lines.feed(part)]
    assert found == b"".join(parts).split(b"\n")[:-1]


@pytest.mark.parametrize("pieces", [[b"x" * 11], [b"x" * 6] * 2, [b"x" * 11 + b"\n"], [b"ok\n" + b"x" * 11]])
def test_a_line_longer_than_the_limit_is_refused(pieces: list[bytes]) -> None:
    lines = LineBuffer(10)
    *first, last = pieces
    for piece in first:
        lines.feed(piece)
    with pytest.raises(LaunchProtocolError, match="longer than 10 bytes"):
        lines.feed(last)


def test_a_line_may_be_as_long_as_the_limit() -> None:
    lines = LineBuffer(10)
    assert lines.feed(b"x" * 10) == []
    assert lines.feed(b"\n" + b"y" * 10 + b"\nz") == [b"x" * 10, b"y" * 10]


def test_a_long_line_takes_time_in_proportion_to_its_length() -> None:
    """Eight times as long takes about eight times as long, not 64 times."""

    def seconds(pieces: int) -> float:
        lines, piece = LineBuffer(1 << 30), b"x" * 256
        began = time.process_time()
        for _ in range(pieces):
            lines.feed(piece)
        return time.process_time() - began

    # One time of five is enough: other work on the same core costs the caches, and so processor time.
    assert any(seconds(80_000) < 24 * max(seconds(10_000), 0.002) for _ in range(5))
