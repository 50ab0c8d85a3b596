"""The options of all commands have one style, accept both spellings, and show their defaults."""

from __future__ import annotations

import argparse
from importlib import import_module

import pytest

from acclimate.cli import COMMANDS
from acclimate.command_line import CommandParser, HelpFormatter


def parser_of(command: str) -> CommandParser:
    parser = CommandParser(prog=f"acclimate {command}")
    import_module(COMMANDS[command][1]).add_arguments(parser)
    return parser


def actions(command: str) -> list[argparse.Action]:
    return parser_of(command)._actions


def visible(command: str) -> list[argparse.Action]:
    return [action for action in actions(command) if action.help != argparse.SUPPRESS]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_declared_with_underscores(command: str) -> None:
    names = [name for action in actions(command) for name in action.option_strings]
    assert [name for name in names if "-" in name.lstrip("-")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_read_with_dashes_too(command: str) -> None:
    words = [
        (action, name)
        for action in visible(command)
        for name in action.option_strings
        if "_" in name and action.choices is None
    ]
    for action, name in words:
        spelt = name.replace("_", "-")
        value = [] if action.nargs == 0 else ["3"]
        read = vars(parser_of(command).parse_args([spelt, *value, *_positional(command)]))
        assert read == vars(parser_of(command).parse_args([name, *value, *_positional(command)]))
        assert read[action.dest] not in (None, action.default)


def _positional(command: str) -> list[str]:
    return ["a"] if command in ("run", "plan") else []


@pytest.mark.parametrize("given", ["--new-tokens=7", "--new_tokens=7", "--new-tok=7"])
def test_a_value_after_an_equals_sign_and_a_shortened_name_are_read(given: str) -> None:
    assert parser_of("bench").parse_args([given]).new_tokens == "7"


def test_the_values_of_options_and_the_arguments_of_a_script_keep_their_dashes() -> None:
    read = parser_of("run").parse_args(["--log-dir", "my-logs", "train.py", "--num-gpus", "--my-own"])
    assert (read.log_dir, read.script) == ("my-logs", ["train.py", "--num-gpus", "--my-own"])
    assert parser_of("bench").parse_args(["--model=a-b"]).model == "a-b"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_each_default(command: str) -> None:
    with_default = [
        action
        for action in visible(command)
        if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, (), [], "")
    ]
    for action in with_default:
        told = HelpFormatter("acclimate")._expand_help(action)
        # `auto` of --launcher is said in words.
        assert (
            f"default: {action.default:g}" in told
            if isinstance(action.default, float)
            else (f"default: {action.default}" in told or action.dest == "launcher")
        ), action.dest
    assert with_default or command in ("info", "ops")


@pytest.mark.parametrize("given", [["a/model"], ["--model", "a/model"]])
@pytest.mark.parametrize("command", ["bench", "plan"])
def test_a_model_is_given_with_its_option_or_without(command: str, given: list[str]) -> None:
    assert parser_of(command).parse_args([*given, "--dtype", "auto"]).model == "a/model"
    assert parser_of(command).parse_args(["--dtype", "auto", *given]).model == "a/model"


def test_bench_without_a_model_takes_the_demo_model() -> None:
    assert parser_of("bench").parse_args([]).model is None


@pytest.mark.parametrize("columns", [60, 120])
def test_the_help_of_run_fits_the_terminal_but_for_its_longest_example(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = parser_of("run").format_help().splitlines()
    longer = [line for line in lines if len(line) > columns]
    assert all(line.startswith("  acclimate run ") for line in longer)
    assert max(map(len, lines)) <= 80 or columns > 80
