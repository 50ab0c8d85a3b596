"""The command line, as real processes: what is printed where, exit codes, and readers that leave early."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import acclimate
from acclimate.cli import ABOUT, COMMANDS, TOOLS
from fake_vendors import FakeMachine
from fresh_process import plain_environment
from quick_parameters import few_of

INSTALLED = [str(Path(sys.executable).parent / "acclimate")]
AS_MODULE = [sys.executable, "-m", "acclimate"]


def run(
    command: list[str], *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env={**plain_environment(), **(env or {})},
        timeout=600,
    )


def test_version_is_also_a_command() -> None:
    ended = run(AS_MODULE, "version")
    assert (ended.returncode, ended.stdout) == (0, f"acclimate {acclimate.__version__}\n")


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "arguments",
    [[], ["ops", "build"], *(pytest.param([name], marks=pytest.mark.slow) for name in ("info", "port"))],
)
def test_help_shows_what_the_option_of_that_name_shows(arguments: list[str]) -> None:
    ended = run(AS_MODULE, "help", *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == run(AS_MODULE, *arguments, "--help").stdout


def test_completion_names_the_package_that_it_needs() -> None:
    code = (
        "import sys\nsys.modules['shtab'] = None\nfrom acclimate.cli import main\n"
        "sys.exit(main(['completion', 'bash']))"
    )
    ended = run([sys.executable, "-c", code])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "pip install shtab" in ended.stderr


@pytest.mark.usefixtures("warm_starts")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "completion.bash"
    script.write_text(run(AS_MODULE, "completion", "bash").stdout)
    ask = (
        f"source {script}; for line in 'acclimate ver' 'acclimate generate --max'; do "
        "COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _shtab_acclimate; "
        'echo "${COMPREPLY[@]}"; done'
    )
    assert run(["bash", "-c", ask]).stdout.split() == ["version", "--max_new_tokens"]


def test_dir_shows_the_public_names_only() -> None:
    from acclimate import llm, ops
    from acclimate.llm import split

    for package in (acclimate, llm, ops, split):
        assert sorted(dir(package)) == sorted(package.__all__)
        assert all(getattr(package, name) is not None for name in dir(package))


@pytest.mark.usefixtures("warm_starts")
def test_the_notice_that_only_the_cpu_was_found_is_for_programs_and_not_for_commands() -> None:
    program = "import acclimate\nprint(acclimate.get_accelerator().name)"
    ended = run([sys.executable, "-c", program])
    if ended.stdout != "cpu\n":
        pytest.skip("this machine has another accelerator")
    assert "Setting accelerator to CPU" in ended.stderr
    for command in (["ops"], ["info"]):
        assert "Setting accelerator" not in run(AS_MODULE, *command).stderr


@pytest.mark.parametrize("command", [INSTALLED, AS_MODULE], ids=["installed", "module"])
def test_the_version_is_the_packages(command: list[str]) -> None:
    ended = run(command, "--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"acclimate {acclimate.__version__}\n", "")


@pytest.mark.parametrize(
    "command",
    [pytest.param(INSTALLED, marks=pytest.mark.slow), AS_MODULE],
    ids=["installed", "module"],
)
@pytest.mark.usefixtures("warm_starts")
def test_info_works_however_it_is_started(command: list[str]) -> None:
    ended = run(command, "info", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["acclimate"] == acclimate.__version__
    assert "Traceback" not in ended.stderr


def test_without_a_command_every_command_is_listed_and_the_exit_code_is_2() -> None:
    ended = run(AS_MODULE, env={"COLUMNS": "200"})
    assert (ended.returncode, ended.stdout) == (2, "")
    shown = " ".join(ended.stderr.split())
    assert all(f" {name} {summary}" in shown for name, (summary, _) in {**COMMANDS, **TOOLS}.items())


@pytest.mark.usefixtures("warm_starts")
def test_a_terminal_of_unknown_width_shows_the_report() -> None:
    ended = run([*AS_MODULE, "info"], env={"COLUMNS": "0"})
    assert ended.returncode == 0
    assert "cpu" in ended.stdout


def test_help_names_no_file_of_the_repository_which_a_wheel_lacks() -> None:
    shown = run(AS_MODULE, "--help").stdout
    assert "Exit codes" in shown
    assert ".md" not in shown
    assert "docs/" not in shown


def test_help_goes_to_stdout_and_lists_every_command() -> None:
    ended = run(AS_MODULE, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(name in ended.stdout for name in (*COMMANDS, *TOOLS, *ABOUT))
    assert "not installed" not in ended.stdout


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    few_of(
        [
            (["infos"], "invalid choice: 'infos'"),
            (["--no-such-option"], "acclimate: error: unrecognized arguments: --no-such-option"),
            (["--verison"], "unrecognized arguments: --verison; did you mean --version?"),
            (["--verison", "info"], "did you mean --version?"),
            (["infos"], "did you mean info?"),
            (["generate", "--modle=x", "text"], "unrecognized arguments: --modle=x; did you mean --model?"),
            (["plan", "--dtypo"], "unrecognized arguments: --dtypo; did you mean --dtype?"),
            (["plan"], "one of the arguments MODEL -m/--model is required"),
            (["help", "infos"], "did you mean info?"),
            (["version", "info"], "acclimate version: error: unrecognized arguments: info"),
            (["completion", "bas"], "did you mean bash?"),
            (["ops", "biuld"], "did you mean build?"),
            (["ops", "build", "--acelerator", "cpu"], "did you mean --accelerator?"),
            (["run", "--num_acelerators", "2", "x.py"], "did you mean --num_accelerators?"),
            (["info", "--no-such-option"], "acclimate info: error: unrecognized arguments: --no-such-option"),
            (["info", "surplus"], "unrecognized arguments: surplus"),
        ],
        3,
    ),
)
def test_a_command_line_that_makes_no_sense_is_refused_with_exit_code_2(
    arguments: list[str], complaint: str
) -> None:
    ended = run(AS_MODULE, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("name", few_of([*COMMANDS, *TOOLS], 3))
def test_every_command_explains_itself(name: str) -> None:
    ended = run(AS_MODULE, name, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: acclimate {name}")


def test_parsing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from acclimate.cli import main\n"
        "sys.argv = ['acclimate', '--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.usefixtures("warm_starts")
def test_a_choice_that_cannot_be_used_is_one_message_and_exit_code_1() -> None:
    ended = run(INSTALLED, "info", env={"DS_ACCELERATOR": "hpu"})
    assert ended.returncode == 1
    assert "HPU_Accelerator requires habana_frameworks.torch.hpu" in ended.stdout
    assert "unset DS_ACCELERATOR to detect what is here." in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("warm_starts")
def test_an_installed_plug_in_is_found_by_the_command(machine: FakeMachine) -> None:
    machine.write(
        "visitor",
        "from acclimate import Backend\n"
        "RECORD = Backend('visitor', 'x:Y', lambda: 'the visitor is not at home.', 5)\n",
    )
    machine.add_entry_points([("visitor", "visitor:RECORD")])
    ended = run(INSTALLED, "info", "--json", env={"PYTHONPATH": str(machine.folder)})
    assert {"name": "visitor", "reason": "the visitor is not at home.", "auto_detect": True} in json.loads(
        ended.stdout
    )["candidates"]


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "option", [pytest.param([], id="table"), pytest.param(["--json"], id="json", marks=pytest.mark.slow)]
)
def test_a_reader_that_leaves_early_causes_no_traceback(option: list[str]) -> None:
    command = subprocess.Popen(
        [*INSTALLED, "info", *option],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**plain_environment(), "DS_ACCELERATOR": "cpu"},
    )
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()  # gone before the first line is written
    complaint = command.stderr.read()
    command.stderr.close()
    assert (command.wait(timeout=600), complaint) == (1, "")


@pytest.mark.slow
def test_head_shows_the_first_line_and_nothing_else() -> None:
    shown = subprocess.run(
        ["/bin/sh", "-c", '"$0" info | head -n 1', *INSTALLED],
        capture_output=True,
        text=True,
        env={**plain_environment(), "DS_ACCELERATOR": "cpu", "COLUMNS": "60"},
        timeout=600,
    )
    assert shown.stdout.startswith("acclimate")
    assert (shown.stdout.count("\n"), shown.stderr) == (1, "")
