"""Progress bars fit the terminal, and keep their numbers."""

from __future__ import annotations

import re

import pytest

from acclimate.llm.progress import compile_progress, figures_line, progress_bar, progress_on_terminal

LONG = "a-model-with-a-very-long-name-70B-Instruct-of-some-maker-IQ2_XXS"


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).replace("\r", "\n").splitlines()


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("name", ["gemma-3-270m-q4_k_m", LONG])
def test_a_bar_fits_the_terminal_and_shows_its_numbers(
    name: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_on_terminal(columns), progress_bar(f"loading {name}", 241_000_000) as advance:
        advance(241_000_000)
    lines = [line for line in shown(capsys) if line.startswith("loading")]
    assert lines
    assert max(map(len, lines)) <= columns
    assert all("/241.0 MB" in line for line in lines)
    assert all(f"loading {name[:18]}" in line for line in lines)


def test_compiling_is_shown_as_steps_of_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_on_terminal(60), compile_progress() as show:
        for step in range(1, 19):
            show(step, 18, "a.cpp")
            if step == 7:
                break
    lines = [line for line in shown(capsys) if line.startswith("compiling")]
    assert " 7 of 18 " in lines[-1]
    assert max(map(len, lines)) <= 60


def test_where_there_is_no_terminal_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with compile_progress() as show:
        show(1, 2, "a.cpp")
        show(2, 2, "a.so")
    assert shown(capsys) == ["acclimate: compiled 1 of 2: a.cpp", "acclimate: compiled 2 of 2: a.so"]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (0, ["[cpu | bfloat16 | 268.1 M parameters | loaded in 1.71 s]"]),
        (60, ["[cpu | bfloat16 | 268.1 M parameters | loaded in 1.71 s]"]),
        (54, ["[cpu | bfloat16 | 268.1 M parameters |", " loaded in 1.71 s]"]),
        (5, ["[cpu |", " bfloat16 |", " 268.1 M parameters |", " loaded in 1.71 s]"]),
    ],
)
def test_figures_break_between_two_parts_where_a_terminal_is_narrow(columns: int, lines: list[str]) -> None:
    with progress_on_terminal(columns):
        found = figures_line(["cpu", "bfloat16", "268.1 M parameters", "loaded in 1.71 s"])
    assert found.splitlines() == lines
