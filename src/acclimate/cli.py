"""``acclimate …``: parses the command line, runs a command, and turns any error into one line.

A command's module is imported only when that command runs, so that each starts fast.

docs/commands.md explains the exit codes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import TextIO

from acclimate import __version__
from acclimate.command_line import CommandParser, options_of
from acclimate.errors import AcclimateError, MissingExtraError, MissingFileError
from acclimate.host.exit_codes import INTERRUPTED, OWN_ERROR, READER_LEFT, TEXT_READER_LEFT, USER_ERROR
from acclimate.host.install_hints import install_tool, pip_install

COMMANDS = {
    "info": ("show the accelerator of this machine, and why others cannot be used", "acclimate.info"),
    "run": ("start a script's ranks, here or on many hosts, bound to cores", "acclimate.launch.command"),
    "generate": (
        "generate text with a language model on this accelerator",
        "acclimate.llm.commands.generate",
    ),
    "chat": ("talk with a language model, which remembers the conversation", "acclimate.llm.commands.chat"),
    "serve": (
        "answer requests of OpenAI's clients with a language model, over HTTP",
        "acclimate.llm.commands.serve",
    ),
    "bench": ("measure how fast a language model runs here", "acclimate.llm.commands.bench"),
    "plan": ("show how a model is split over ranks; nothing is loaded", "acclimate.llm.commands.plan"),
    "ops": ("list, build or remove the native ops of this accelerator", "acclimate.ops.command"),
}
"""The commands by name, each with a line of help and the module of its ``add_arguments`` and ``run``."""

ABOUT = {
    "help": "show the options of a command",
    "version": "show the version",
    "completion": "print a script that completes commands and options in a shell",
}
"""Commands about the program itself, each with a line of help."""

TOOLS = {
    "port": ("turn CUDA-only source into source for any accelerator", "acclimate-port"),
    "conformance": (
        "check that an accelerator keeps every promise of the interface",
        "acclimate-conformance",
    ),
}
"""Commands of packages of their own, each with a line of help and its package, which is in ``tools/``."""

_SHELLS = ("bash", "zsh", "tcsh")
_GROUP = "acclimate.commands"  # the entry points of installed packages: a command's name and its module

_LONGEST_MESSAGE = 500


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
        argv: the arguments without the program's name. ``None``: this process's, whose standard streams and
            handling of Ctrl-C are then set up for the command.
    """
    with _own_process() if argv is None else contextlib.nullcontext(_Interrupts()) as interrupts:
        arguments = list(sys.argv[1:] if argv is None else argv)
        command = next(
            (
                argument
                for argument in arguments
                if argument in COMMANDS or argument in TOOLS or argument in ABOUT
            ),
            None,
        )
        title = f"acclimate {command}" if command else "acclimate"
        try:
            try:
                code = _run(arguments)
            finally:
                _finish_output()
            interrupts.is_over = True  # before the question, so that no Ctrl-C comes between both
            if interrupts.seen and code == 0:  # a library has swallowed the exception
                raise KeyboardInterrupt
            return code
        except SystemExit:  # argparse's, which has printed the reason
            raise
        except BaseException as error:  # noqa: BLE001 - the one place where any error becomes one line
            interrupts.is_over = True
            # A library may have turned a Ctrl-C into another error.
            code, message = _explained(KeyboardInterrupt() if interrupts.seen else error, command)
            if os.environ.get("ACCLIMATE_TRACEBACK") == "1":
                sys.excepthook(type(error), error, error.__traceback__)
            if message:
                _say(f"{title}: {message}\n")
            return code


def _run(arguments: list[str]) -> int:
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, commands = _parser(wanted)
    if not arguments:
        parser.print_help(sys.stderr)
        return USER_ERROR
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        (commands[wanted].parser if wanted in commands else parser).refuse(unknown, options_of(parser))
    if args.command in ABOUT:
        return _run_about(args)
    # torch warns if numpy, which it does not need, is missing; `python -W error` must not end a command.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal lacks must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except OSError as error:  # torch's libraries would abort the process
        raise MissingFileError(
            f"the working directory cannot be used: {error.strerror}. It has probably been deleted; cd to "
            "another directory"
        ) from error
    run = import_module(commands[args.command].module).run
    with _without_fallback_notice():
        code: int = run(args, _deepspeed_environment) if args.command == "run" else run(args)
    return code


@dataclass(frozen=True)
class _Command:
    module: str
    """Empty for a command of this module, and for one that is not installed."""
    parser: CommandParser


def _parser(wanted: str | None, *, whole: bool = False) -> tuple[CommandParser, dict[str, _Command]]:
    """Returns the parser with the options of the wanted command, or of all; and the commands by name."""
    parser = CommandParser(
        prog="acclimate",
        description="The same PyTorch LLM code on any accelerator.",
        epilog="ACCLIMATE_TRACEBACK=1 shows where an error comes from. Exit codes: 0 success; 1 a negative "
        "result; 2 an error in the command line, a file or this machine; 70 a bug in acclimate; 130 Ctrl-C. "
        "`acclimate run` returns that of the ranks.",
    )
    parser.add_argument("--version", action="version", version=f"acclimate {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    known = dict(COMMANDS)
    if whole or (wanted not in COMMANDS and wanted not in ABOUT):
        known |= _commands_of_other_packages(wanted)
    commands = {}
    for name, (summary, module) in (known | {name: (told, "") for name, told in ABOUT.items()}).items():
        command = choices.add_parser(name, help=summary.replace("%", "%%"), description=summary)
        commands[name] = _Command(module, command)
        if name == "help":
            command.add_argument("words", nargs="*", metavar="COMMAND", help="such as: ops build")
        elif name == "completion":
            command.add_argument(
                "shell",
                choices=_SHELLS,
                metavar="|".join(_SHELLS),
                help='as in: eval "$(acclimate completion bash)"',
            )
        elif module and (whole or name == wanted):
            import_module(module).add_arguments(command)
    return parser, commands


def _run_about(args: Namespace) -> int:
    if args.command == "help":
        return _run([*args.words, "--help"])
    if args.command == "version":
        return _run(["--version"])
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError(f"completion needs the package shtab: {pip_install('shtab')}") from error
    sys.stdout.write(shtab.complete(_parser(None, whole=True)[0], args.shell) + "\n")
    return 0


@contextlib.contextmanager
def _without_fallback_notice() -> Iterator[None]:
    """Turns off a notice for authors of programs; `acclimate info` shows what was found."""
    logger = logging.getLogger("acclimate.selection.fallback")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _commands_of_other_packages(wanted: str | None) -> dict[str, tuple[str, str]]:
    """Returns the commands of installed packages, and what `--help` says of missing :data:`TOOLS`.

    Raises:
        MissingExtraError: the wanted command is one of :data:`TOOLS`, and its package is not installed.
    """
    from importlib.metadata import entry_points  # takes as long as all other imports here

    found = {}
    for entry in entry_points(group=_GROUP):
        told = TOOLS[entry.name][0] if entry.name in TOOLS else entry.dist and entry.dist.metadata["Summary"]
        if entry.name not in COMMANDS:
            found[entry.name] = (told or entry.module, entry.module)
    for name, (summary, package) in TOOLS.items():
        if name in found:
            continue
        install = install_tool(package)
        if name == wanted:
            raise MissingExtraError(
                f"this command is in the package {package}, which is not installed: {install}"
            )
        found[name] = (f"{summary} (not installed: {install})", "")
    return found


def _deepspeed_environment(python_path: str, asked: str) -> dict[str, str]:
    """Returns the variables of ``--deepspeed``, for launch/, which must not import the layer above it."""
    from acclimate.compat.deepspeed import child_environment

    return child_environment(python_path, asked)


# -- errors in one line ------------------------------------------------------------------------------


def _explained(error: BaseException, command: str | None) -> tuple[int, str]:
    """Returns the exit code and the message for an error of a command."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, BrokenPipeError):  # the reader of the output, such as `head`, has exited
        _give_up(sys.stdout)
        return TEXT_READER_LEFT if command in ("chat", "generate") else READER_LEFT, ""
    if isinstance(error, AcclimateError):
        return USER_ERROR, f"error: {error}"
    reason = _output_error()
    if reason is not None:
        return USER_ERROR, f"error: the output cannot be written: {reason}"
    if isinstance(error, OSError) and error.errno is not None:
        return USER_ERROR, f"error: {_in_one_line(error)}{_MORE}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("acclimate"):
        package = error.name.partition(".")[0]
        return USER_ERROR, f'error: the package "{package}" is not installed: {pip_install(package)}{_MORE}'
    if isinstance(error, MemoryError):
        return USER_ERROR, f"error: out of memory{_MORE}"
    told = ": ".join(filter(None, (type(error).__name__, _in_one_line(error))))
    return OWN_ERROR, (
        f"internal error: {told}. Please report it to acclimate's maintainers, with what the same command "
        "prints when ACCLIMATE_TRACEBACK=1 is set."
    )


_MORE = " (ACCLIMATE_TRACEBACK=1 shows where)"


def _in_one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split()).rstrip(".")
    except Exception:  # noqa: BLE001 - a vendor's __str__ may raise anything
        text = ""
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} …"


def _output_error() -> str | None:
    """Returns why standard output cannot be written; ``None`` if it can."""
    try:
        _finish_output()
    except OSError as error:
        _give_up(sys.stdout)
        return error.strerror
    return None


def _finish_output() -> None:
    """Flushes the output.

    Raises:
        OSError: it cannot be written, or an earlier write failed, which argparse ignores.
    """
    with contextlib.suppress(ValueError):  # it has been closed
        sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is not None:
        raise failure


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _give_up(stream: TextIO) -> None:
    """Sends a stream's buffer to /dev/null, since Python flushes it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


# -- the process -------------------------------------------------------------------------------------


class _Stream(TextIOWrapper):
    """A standard stream on the buffer of Python's own stream, which it never closes."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def close(self) -> None:
        """Flushes without closing."""
        with contextlib.suppress(ValueError, OSError):
            self.flush()


class _OutputStream(_Stream):
    """Standard output that records its first failure."""

    failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            return super().write(text)

    def flush(self) -> None:
        with self._remembering():
            super().flush()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


class _ErrorStream(_Stream):
    """Standard error whose failures do not end a command."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            _give_up(self)
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


@dataclass
class _Interrupts:
    seen: bool = False
    is_over: bool = False
    """Whether the command has ended, so that nothing is left to interrupt."""

    def raise_one(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if not self.is_over:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _own_process() -> Iterator[_Interrupts]:
    """Opens closed standard streams, and makes Ctrl-C end the process without a traceback."""
    _open_standard_streams()
    if os.environ.get("COLUMNS", "").strip() == "0":  # Emacs and some CI say so for an unknown width
        del os.environ["COLUMNS"]  # rich would show nothing
    interrupts = _Interrupts()
    sys.unraisablehook = _report_unraisable
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # which nohup and a shell's "&" set
        signal.signal(signal.SIGINT, interrupts.raise_one)
    try:
        yield interrupts
    finally:
        # Python only cleans up from here on, and would print a traceback if it were interrupted.
        interrupts.is_over = True
        if signal.getsignal(signal.SIGINT) == interrupts.raise_one:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    # A Ctrl-C in a finalizer or callback; main() ends the command afterwards.
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _open_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that the parent process has closed, as some daemons do.

    Otherwise the next opened file would get the number of a standard stream, and output of a child.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)  # open() returns the lowest free number: this one
            os.set_inheritable(number, True)
    for number, name, kind in ((1, "stdout", _OutputStream), (2, "stderr", _ErrorStream)):
        stream = getattr(sys, name)
        if stream is None:
            # Also stored as sys.__stdout__ or sys.__stderr__, which keeps its buffer open.
            stream = open(number, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, f"__{name}__", stream)
        if isinstance(stream, TextIOWrapper):
            setattr(sys, name, kind(stream))
