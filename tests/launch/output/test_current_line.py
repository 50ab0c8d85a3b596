"""What is shown of an unfinished line, however its bytes arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from acclimate.launch.output.writer import CurrentLine

pieces = st.lists(st.lists(st.sampled_from([b"a", b"bc", b"\r"])).map(b"".join))


def shown_of(line: bytes) -> bytes:
    """What a terminal shows of a line that a carriage return begins anew."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


@given(st.lists(pieces), st.none() | st.integers(1, 4))
def test_a_line_is_shown_from_its_last_return_however_it_is_cut(
    lines: list[list[bytes]], kept_bytes: int | None
) -> None:
    current = CurrentLine(kept_bytes)
    for line in lines:
        for piece in line:
            current.feed(piece)
        wanted = shown_of(b"".join(line))[:kept_bytes]
        assert len(current) == len(wanted)
        assert current.start(3) == wanted[:3]
        assert current.take() == wanted
        assert len(current) == 0
