"""``acclimate …``: parses the command line and hands over to one room.

A command's module is imported only when that command is run, so that each starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from acclimate import __version__
from acclimate.errors import AcclimateError

COMMANDS = {
    "info": ("what was found on this machine, what was rejected and why", "acclimate.info.command"),
    "run": ("start ranks of a script, here or on many hosts, bound to cores", "acclimate.launch.command"),
    "generate": ("make a language model write text on this accelerator", "acclimate.inference.command"),
    "ops": ("list the native ops of this accelerator, build them ahead, clean them", "acclimate.ops.command"),
    "conformance": (
        "check that an accelerator keeps every promise of the interface",
        "acclimate.conformance.command",
    ),
}
"""Name of each command: a line of help, and the module with its ``add_arguments`` and ``run``."""

INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended: 128 + the signal's number."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (2 for an error of the user's)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started this, as some daemons do
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - for the whole run
    parser = argparse.ArgumentParser(
        prog="acclimate", description="The same PyTorch LLM code on any accelerator."
    )
    parser.add_argument("--version", action="version", version=f"acclimate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    asked = parser  # whose usage an error shows
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == wanted:
            asked = command
            import_module(module).add_arguments(command)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, TextIOWrapper):  # a letter that the terminal cannot show must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = import_module(COMMANDS[args.command][1]).run(args)
        sys.stdout.flush()
    except AcclimateError as error:
        sys.stderr.write(f"acclimate {args.command}: error: {error}\n")
        return 2
    except KeyboardInterrupt:  # while a command's module is imported, or where it has nothing to add
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        return 1
    return code
