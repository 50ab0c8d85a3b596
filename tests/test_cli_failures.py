"""Every failure of a command gives one line and an exit code, wherever its output goes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from acclimate import cli
from acclimate.errors import AcclimateError, LaunchOptionError
from acclimate.host import exit_codes
from fresh_process import FreshProcesses, plain_environment
from pairs import all_pairs
from quick_parameters import quick

ACCLIMATE = [sys.executable, "-m", "acclimate"]
DOCUMENTED = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Makes ``acclimate try`` call a function."""

    def install(function: Callable[[], int]) -> None:
        module = ModuleType("try_command")
        module.__dict__.update(add_arguments=lambda parser: None, run=lambda args: function())
        monkeypatch.setitem(sys.modules, "try_command", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("tries", "try_command"))

    return install


def failing(error: BaseException) -> Callable[[], int]:
    def fail() -> int:
        raise error

    return fail


# -- what a command raises ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (LaunchOptionError("--x is 3, which is odd."), 2, "error: --x is 3, which is odd."),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/etc/shadow"), 2, "Permission denied: '/etc/shadow'"),
        (MemoryError(), 2, "error: out of memory"),
        (RuntimeError("line one\nline two"), 70, "internal error: RuntimeError: line one line two. Please"),
        (ZeroDivisionError(), 70, "internal error: ZeroDivisionError"),
        (UnicodeEncodeError("ascii", "ä", 0, 1, "no"), 70, "internal error: UnicodeEncodeError"),
        (BaseException("a panic"), 70, "internal error: BaseException: a panic"),
        (ValueError("x" * 10_000), 70, "xxx …"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_one_line_and_a_documented_exit_code(
    error: BaseException,
    code: int,
    said: str,
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(failing(error))
    assert cli.main(["try"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("acclimate try: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert (code == 70) == ("report it to acclimate's maintainers" in shown.err)
    assert f"| {code} |" in DOCUMENTED


def test_every_exit_code_is_documented() -> None:
    codes = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    assert codes == {int(code) for code in re.findall(r"(?:\| |returns )([1-9]\d*)(?: \|| if)", DOCUMENTED)}


@pytest.mark.parametrize("error", [RuntimeError("broken"), LaunchOptionError("wrong"), OSError(5, "bad")])
def test_the_traceback_is_shown_where_the_variable_asks_for_it(
    error: BaseException,
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command(failing(error))
    monkeypatch.setenv("ACCLIMATE_TRACEBACK", "1")
    cli.main(["try"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chat", "generate", "serve"])
def test_the_traceback_can_be_asked_for_of_an_error_of_a_model_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCLIMATE_TRACEBACK", "1")
    assert cli.main([name, "--num_accelerators=0"]) == exit_codes.USER_ERROR
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.splitlines()[-1].startswith(f"acclimate {name}: error: --num_accelerators must be from 1")


def test_an_error_while_a_commands_module_is_imported_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "try", ("tries", "acclimate.no_such_module"))
    assert cli.main(["try"]) == 70
    assert capsys.readouterr().err.startswith("acclimate try: internal error: ModuleNotFoundError: No module")


def test_an_error_that_cannot_be_shown_as_text_is_told_by_its_type(
    command: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    command(failing(SilentError()))
    assert cli.main(["try"]) == 70
    assert "internal error: SilentError" in capsys.readouterr().err


# -- where the output goes ----------------------------------------------------------------------------

COMMANDS = [
    ["info"], ["info", "--json"], ["ops"], ["ops", "--json"], ["ops", "clean"], ["ops", "clean", "--json"],
    ["--help"], ["--version"], ["ops", "--help"], ["conformance", "--help"],
]  # fmt: skip
EACH_WAY = quick(
    {" ".join(command): command for command in COMMANDS}, "info", "ops --json", "ops clean", "--version",
    "conformance --help",
)  # fmt: skip
"""One for each way to write: a table, JSON, a line, what argparse writes, and the help of another package."""


def started(arguments: list[str], setup: str) -> str:
    """Code that is ``acclimate`` with these arguments, after ``setup``."""
    return (
        f"import os, sys\nsys.argv = ['acclimate', *{arguments!r}]\n{setup}\n"
        "from acclimate.cli import main\nsys.exit(main())"
    )


@needs_full_device
@pytest.mark.parametrize("arguments", EACH_WAY)
def test_a_full_device_as_output_is_one_line_from(
    arguments: list[str], fresh: FreshProcesses, tmp_path: Path
) -> None:
    setup = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    env = {"DS_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(tmp_path)}
    outcome = fresh.run(started(arguments, setup), env=env)
    assert outcome.returncode == 2
    assert outcome.stderr.endswith("error: the output cannot be written: No space left on device\n")
    assert outcome.stderr.count("\n") == 1


@needs_full_device
@pytest.mark.parametrize(
    "arguments",
    [
        *EACH_WAY,
        pytest.param(["ops", "build", "no_such_op"], id="no such op", marks=pytest.mark.slow),
        pytest.param(["infos"], id="infos"),
    ],
)
def test_a_full_device_for_messages_changes_neither_output_nor_exit_code_of(
    arguments: list[str], fresh: FreshProcesses, tmp_path: Path
) -> None:
    env = {"DS_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(tmp_path)}
    expected = fresh.run(started(arguments, ""), env=env)
    outcome = fresh.run(started(arguments, "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"), env=env)
    # Without what changes from run to run, such as the memory that is free.
    shown, complete = (re.sub(r"\d+", "0", text) for text in (outcome.stdout, expected.stdout))
    assert (outcome.returncode, len(shown.split())) == (expected.returncode, len(complete.split()))


@needs_full_device
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("redirection", [">/dev/full", ">/dev/full 2>/dev/full"])
def test_python_has_nothing_to_add_when_the_process_ends(redirection: str, unbuffered: str) -> None:
    shown = subprocess.run(
        ["/bin/sh", "-c", f'"$0" "$@" {redirection}', *ACCLIMATE, "--help"],
        capture_output=True, text=True, env={**plain_environment(), "PYTHONUNBUFFERED": unbuffered},
        timeout=600,
    )  # fmt: skip
    said = "acclimate: error: the output cannot be written: No space left on device\n"
    assert (shown.returncode, shown.stderr) == (2, "" if "2>" in redirection else said)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_never_takes_the_place_of_a_stream_that_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "try_command.py").write_text(
        "import os, subprocess, sys\n"
        "def add_arguments(parser): pass\n"
        "def run(args):\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as file:\n"
        "        assert file.fileno() > 2, file.fileno()\n"
        "        subprocess.run(['/bin/sh', '-c', 'echo out; echo err >&2; cat'], check=True)\n"
        "        sys.stdout.write('out'); sys.stderr.write('err'); sys.stdout.flush()\n"
        "    return 7\n"
    )
    code = (
        "import sys; from acclimate import cli; cli.COMMANDS['try'] = ('', 'try_command')\n"
        "sys.argv[1:] = ['try']; sys.exit(cli.main())"
    )
    ended = subprocess.run(
        ["/bin/sh", "-c", f'"$0" "$@" {closed}', sys.executable, "-c", code],
        env={**plain_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 7, ended.stderr
    assert (tmp_path / "file").read_text() == ""


# -- Ctrl-C -------------------------------------------------------------------------------------------

INTERRUPTED = {
    "in its command": "import signal\ndef run(args): signal.raise_signal(signal.SIGINT)",
    "while a module is imported": "import signal\nsignal.raise_signal(signal.SIGINT)",
    "in a finalizer": (
        "import signal\nclass C:\n    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "def run(args):\n    C()\n    return 0"
    ),
    "where a library swallows it": (
        "import signal\ndef run(args):\n    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException: pass\n    return 0"
    ),
    "and is turned into another error": (
        "import signal\ndef run(args):\n    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException as error: raise ImportError('numpy failed') from error"
    ),
    "and again while it ends": (
        "import atexit, os, signal\nend = lambda: signal.raise_signal(signal.SIGINT)\natexit.register(end)\n"
        "def run(args): end()"
    ),
    "and again while it is explained": (
        "import signal\nfrom acclimate import cli\nexplained = cli._explained\n"
        "def again(*told):\n    signal.raise_signal(signal.SIGINT)\n    return explained(*told)\n"
        "cli._explained = again\ndef run(args): signal.raise_signal(signal.SIGINT)"
    ),
}


def try_command(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``acclimate try``, whose module is in a folder."""
    code = (
        "import sys; from acclimate import cli; cli.COMMANDS['try'] = ('', 'try_command')\n"
        "sys.argv[1:] = ['try']; sys.exit(cli.main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**plain_environment(), "PYTHONPATH": str(folder)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_is_one_line_and_130(when: str, tmp_path: Path) -> None:
    (tmp_path / "try_command.py").write_text("def add_arguments(parser): pass\n" + INTERRUPTED[when] + "\n")
    ended = try_command(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "acclimate try: interrupted\n")


def test_ctrl_c_after_the_command_has_ended_changes_nothing(tmp_path: Path) -> None:
    late = (
        "import signal\nget = signal.getsignal\n"
        "def get_late(number):\n    signal.getsignal = get\n    signal.raise_signal(number)\n"
        "    return get(number)\n"
        "def run(args):\n    signal.getsignal = get_late\n    return 0"
    )
    (tmp_path / "try_command.py").write_text("def add_arguments(parser): pass\n" + late + "\n")
    ended = try_command(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# Python's own start cannot be reached, so the signal comes after acclimate's first act.
TELLS_OF_ITS_START = """
import signal, sys
set_action = signal.signal
def tell_once(number, action):
    before = set_action(number, action)
    if action is signal.SIG_DFL:
        signal.signal = set_action
        print("started", flush=True)
    return before
signal.signal = tell_once
sys.argv[1:] = ["info"]
from acclimate.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.3, pytest.param(2.0, marks=pytest.mark.slow)])
def test_ctrl_c_while_torch_is_imported_shows_no_traceback(delay_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS_OF_ITS_START], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**plain_environment(), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode in (0, 130, -2), stderr
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr


def test_a_ctrl_c_that_was_ignored_from_the_start_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "try_command.py").write_text(
        "import signal\ndef add_arguments(parser): pass\n"
        "def run(args):\n    signal.raise_signal(signal.SIGINT)\n    return 7\n"
    )
    code = (
        "import sys; from acclimate import cli; cli.COMMANDS['try'] = ('', 'try_command')\n"
        "sys.argv[1:] = ['try']; sys.exit(cli.main())"
    )
    ended = subprocess.run(
        ["/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-c", code],
        env={**plain_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (7, "")


# -- where nothing is as usual ------------------------------------------------------------------------

ODD = {
    "a deleted working directory": ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", {}),
    "no home": ("del os.environ['ACCLIMATE_CACHE']; os.environ.pop('HOME', 0); import pwd\n"
                "def unknown(uid): raise KeyError('no such uid')\npwd.getpwuid = unknown", {}),
    "CXX with an open quotation mark": ("", {"CXX": '"g++ -O'}),
    "a file as cache": ("os.environ['ACCLIMATE_CACHE'] = '/etc/passwd'", {}),
    "a locale that does not exist": ("", {"LC_ALL": "xx_YY.nope"}),
    "output in ASCII": ("sys.stdout.reconfigure(encoding='ascii', errors='strict')", {}),
    "no folder for temporary files": ("", {"TMPDIR": "/nonexistent"}),
    "a terminal of no size": ("", {"COLUMNS": "0", "TERM": "bogus"}),
    "a group that is not there": ("", {"ACCLIMATE_CACHE_TRUST": "no-such-group"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("oddity", "arguments"),
    all_pairs(ODD, [["info"], ["ops"], ["ops", "--json"], ["ops", "clean"]], column_id=" ".join),
)
def test_no_command_shows_a_traceback_with(
    oddity: str, arguments: list[str], fresh: FreshProcesses, tmp_path: Path
) -> None:
    setup, env = ODD[oddity]
    outcome = fresh.run(
        started(arguments, setup), env={"DS_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(tmp_path), **env}
    )
    assert outcome.returncode in ((2,) if "deleted" in oddity else (0, 2)), outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert (outcome.returncode == 2) == (": error: " in outcome.stderr)


def test_every_error_type_ends_a_command_with_2(command: Callable[[Callable[[], int]], None]) -> None:
    for kind in AcclimateError.__subclasses__():
        command(failing(kind("words")))
        assert cli.main(["try"]) == 2
