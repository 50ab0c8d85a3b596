"""A text ends before the first stop text, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.llm.text.tokenizers import StopTexts


@given(st.text("ab#", max_size=30), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3), st.data())
def test_what_is_passed_on_is_the_text_before_the_first_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    passed: list[str] = []
    stop = StopTexts(stops, passed.append)
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        stop.put(rest[:size])
        rest = rest[size:]
    stop.end()
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    # A longer stop text that begins earlier may end after a shorter one, which has ended the text by then.
    assert text.startswith(stop.text)
    assert (stop.found is not None) == (first < len(text))
    assert "".join(passed) == stop.text
    if len(stops) == 1:
        assert stop.text == text[:first]


@pytest.mark.parametrize("pieces", [["one ##", "# two"], ["one ###"], [*"one ### two"]])
def test_no_part_of_a_stop_text_is_shown(pieces: list[str]) -> None:
    shown: list[str] = []
    stop = StopTexts(["###"], shown.append)
    for piece in pieces:
        stop.put(piece)
    assert "".join(shown) == "one "
    assert stop.found == "###"


def test_what_only_began_like_a_stop_text_is_shown_at_the_end() -> None:
    shown: list[str] = []
    stop = StopTexts(["###"], shown.append)
    stop.put("one ##")
    assert "".join(shown) == "one "
    stop.end()
    assert "".join(shown) == "one ##"
