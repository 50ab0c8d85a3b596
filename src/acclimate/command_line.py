"""The parser of all commands: one style of options, defaults in the help, and hints at misspelt words."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence, Set
from typing import Any, NoReturn

from acclimate.errors import excerpt

_LONGEST_MESSAGE = 500


class CommandParser(argparse.ArgumentParser):
    """A parser that reads ``--max-new-tokens`` as ``--max_new_tokens``, for every option.

    Commands declare their options with underscores, like DeepSpeed's launcher and the arguments in Python. An
    unknown option is named before anything else is asked for, with the nearest known one.
    """

    _given: Sequence[str] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter} | settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses, and keeps the arguments for messages."""
        self._given = list(args or ())
        return super().parse_known_args(args, namespace)

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse asks this of each argument; values of options and a script's arguments stay as they are.
        name, equals, value = arg_string.partition("=")
        if name.startswith("--") and name not in self._option_string_actions:
            arg_string = f"--{name[2:].replace('-', '_')}{equals}{value}"
        return super()._parse_optional(arg_string)

    def refuse(self, unknown: Sequence[str], more: Set[str] = frozenset()) -> NoReturn:
        """Ends the process, because some arguments have no meaning; ``more`` are other options that have."""
        names = sorted(options_of(self) | more)
        near = [
            name
            for argument in unknown
            for name in difflib.get_close_matches(argument.partition("=")[0], names, 1)
        ]
        self._end(f"unrecognized arguments: {excerpt(' '.join(unknown), _LONGEST_MESSAGE)}", near)

    def error(self, message: str) -> NoReturn:
        """Ends the process after an error of argparse."""
        if "required" in message:
            names = {name.replace("-", "_") for name in options_of(self)}
            for argument in self._given:
                name = argument.partition("=")[0].replace("-", "_")
                if re.match(r"--?[^-\d]", argument) and not any(known.startswith(name) for known in names):
                    self.refuse([argument])
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        words = [str(word) for action in self._actions for word in action.choices or ()]
        self._end(message, difflib.get_close_matches(wrong[1], words, 1) if wrong else [])

    def _end(self, message: str, near: Sequence[str]) -> NoReturn:
        super().error(f"{message}; did you mean {' '.join(near)}?" if near else message)


class HelpFormatter(argparse.HelpFormatter):
    """Adds each option's default to its help, and keeps paragraphs with indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            paragraph
            if "\n  " in paragraph
            else super(HelpFormatter, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.help or ""
        # The help of some options says in words what happens without them. A flag's default is plain.
        if action.nargs == 0 or action.default in (None, argparse.SUPPRESS, "", (), []) or "default" in told:
            return action.help
        return f"{told}; default: %(default)s" if told else "default: %(default)s"


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the options of a parser, and of the parsers of its sub-commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and action.dest != "command":
            found = found.union(*map(options_of, action.choices.values()))
    return found
