"""Ranks of ``generate`` and ``bench`` get the options that the user gave."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from acclimate.command_line import CommandParser
from acclimate.llm.commands import bench, chat, generate
from acclimate.llm.commands.request import rank_arguments

Declare = Callable[[argparse.ArgumentParser], None]


@pytest.mark.parametrize(
    ("declare", "positional", "told"),
    [
        (generate.add_arguments, "prompt", ["--as-rank", "80"]),
        (chat.add_arguments, "model", ["--as-rank", "80"]),
        (bench.add_arguments, "model", ["--as-rank"]),
    ],
)
@pytest.mark.parametrize("given", ["text", "--as it looks", None])
def test_a_rank_reads_every_option_that_the_user_gave(
    declare: Declare, positional: str, told: list[str], given: str | None
) -> None:
    parser = CommandParser()
    declare(parser)
    options: dict[str, object] = {
        name: True if value is False else "7 of $" for name, value in vars(parser.parse_args([])).items()
    }
    if "stop" in options:
        options["stop"] = ["7 of $", "--x"]
    asked = argparse.Namespace(**options | {positional: given, "command": "any"})
    read = vars(parser.parse_args(rank_arguments(asked, positional, *told)))
    launchers = {"num_accelerators", "bind_core_list", "as_rank", "as_launcher", "on_terminal"}
    assert {name: str(read[name]) for name in read.keys() - launchers} == {
        name: str(getattr(asked, name)) for name in read.keys() - launchers
    }
    assert read["as_rank"]
    assert read["num_accelerators"] == "1"
