"""What the tests rest on: fresh processes, warm Pythons, signals, and how skipped tests are reported."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import warm_python as warm_python_module
from fresh_process import FreshProcesses, plain_environment
from run_in_parallel import LONGEST_FIRST, part_of
from session_signals import take_signals
from shared_bytecode import rewrite_share

ROOT = Path(__file__).parents[1]
SIM = "extensions/acclimate-sim/tests"


def test_entry_points_without_a_selection_are_those_of_all_groups(fresh: FreshProcesses) -> None:
    told = fresh.check("""
from importlib.metadata import entry_points
points = list(entry_points())
tell(groups=sorted({point.group for point in points}))
""").told
    assert {"console_scripts", "pytest11"} <= set(told["groups"])
    assert "acclimate.backends" not in told["groups"]


def test_a_run_that_is_given_up_ends_and_leaves_its_answer_to_no_other(fresh: FreshProcesses) -> None:
    def give_up(*_: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(InterruptedError):
            fresh.run(f"import os, signal; os.kill({os.getpid()}, signal.SIGUSR1); signal.pause()")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert fresh.check("tell(number=7)").told == {"number": 7}


WARM = """
import os, subprocess, sys, torch
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
again = subprocess.run([sys.executable, "-c", "import sys; sys.exit(5 if 'torch' in sys.modules else 6)"])
print(sys.stdin.read(), os.environ["SAID"], os.path.basename(os.getcwd()), again.returncode, again.args[0])
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_warm_python_has_its_own_streams_folder_environment_and_children(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WARM]
    options = {"input": "heard", "capture_output": True, "text": True, "cwd": tmp_path}
    ended = subprocess.run(command, env={**os.environ, "SAID": "told"}, **options)
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout == f"heard told {tmp_path.name} 6 {sys.executable}\n"


@pytest.mark.usefixtures("warm_starts")
def test_a_warm_python_ends_as_a_real_one_does(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", WARM, "7"]).returncode == 7
    (tmp_path / "failing.py").write_text("import atexit\natexit.register(print, 'bye')\n1 / 0\n")
    failing = subprocess.run(
        [sys.executable, "-m", "failing"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (failing.returncode, failing.stdout) == (1, "bye\n")
    assert failing.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "warm_python.py" not in failing.stderr
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


@pytest.mark.usefixtures("warm_model_starts")
def test_a_warm_python_for_models_has_transformers_once_it_imports_it() -> None:
    program = (
        "import sys\nassert 'transformers' not in sys.modules\nimport transformers\n"
        "print('transformers.models.llama.modeling_llama' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.usefixtures("warm_model_starts")
def test_a_warm_python_for_models_has_what_its_server_computed() -> None:
    program = (
        "from torch.fx.experimental.symbolic_shapes import uninteresting_files\n"
        "from transformers import conversion_mapping\n"
        "print(conversion_mapping._checkpoint_conversion_mapping_cache is not None)\n"
        "print(uninteresting_files.cache_info().currsize)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "True\n1\n", run.stderr


@pytest.mark.usefixtures("warm_starts")
def test_a_program_that_ends_or_stops_before_it_says_what_to_start_holds_up_no_other() -> None:
    with socket.socket(socket.AF_UNIX) as ended:
        ended.connect(warm_python_module._address)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(warm_python_module._address)
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode == 7


def test_a_run_that_ignores_ctrl_c_starts_programs_that_do_not() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        take_signals()
        program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert child.stdout == "False\n"
    finally:
        signal.signal(signal.SIGINT, before)


def environment() -> dict[str, str]:
    """For a pytest that is no part of this run, and loads no plugin but pytest-xdist."""
    own = {name: value for name, value in plain_environment().items() if "PYTEST" not in name}
    return {**own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder as no part of this run."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.usefixtures("warm_starts")
def test_a_reason_to_skip_is_told_once_with_the_number_of_tests(tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text("""
import pytest
@pytest.mark.parametrize("number", range(5))
def test_of_five(number): pytest.skip("not installed: slurmctld")
@pytest.mark.skipif(True, reason="no nvcc on PATH")
def test_of_one(): pass
""")
    run = run_pytest(tmp_path, "-p", "skip_summary")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("not installed: slurmctld") == 1
    assert "\n5 tests: not installed: slurmctld\n1 test: no nvcc on PATH\n" in run.stdout


def test_every_part_of_a_run_that_starts_first_exists() -> None:
    missing = [name for name in LONGEST_FIRST if not (ROOT / name).exists()]
    assert missing == []


def test_a_folder_named_as_a_whole_runs_in_one_process_without_its_files_that_are_named() -> None:
    named = f"{SIM}/test_sim_folders.py"
    assert part_of(f"{named}::test_one") == named
    for file in ("test_sim_profile.py", "test_sim_selection.py"):
        assert (
            part_of(f"extensions/acclimate-sim/tests/{file}::test_one[a/b]")
            == "extensions/acclimate-sim/tests"
        )
    assert part_of("tests/llm/gguf/test_gguf_claims.py::test_one") == "tests/llm/"
    on_sim = "extensions/acclimate-sim/tests/on_sim/test_models.py"
    assert part_of(f"{on_sim}::test_one") == on_sim
    assert part_of("tests/ops/test_registry.py::test_one") == "tests/ops/test_registry.py"


@pytest.mark.usefixtures("warm_starts")
def test_the_processes_of_a_run_share_a_server_of_warm_pythons(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"test_{name}.py").write_text("""
import os, subprocess, sys
def test_its_server(warm_starts, record_property):
    program = "import os; print(os.getppid())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    print(f"server {run.stdout.strip()} of {os.getpid()};")
""")
    modules = "import warm_starts\nwarm_starts.MODULES = ('json',)"  # torch would take seconds
    (tmp_path / "conftest.py").write_text(f"{modules}\nfrom warm_starts import *\n")
    run = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile", "-rP")
    assert run.returncode == 0, run.stdout + run.stderr
    told = re.findall(r"server (\d+) of (\d+);", run.stdout)
    assert len({process for _, process in told}) == 2
    assert len({server for server, _ in told}) == 1


@pytest.mark.usefixtures("warm_starts")
def test_a_test_that_native_code_holds_is_ended_and_named_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("""
import ctypes
def test_held():
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
def test_next(): pass
""")
    (limits,) = re.findall(r"^LIMITS +:= (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shorter = limits.replace("300", "1").replace("960", "2").split()
    run = run_pytest(tmp_path, "-n", "1", "-p", "pytest_timeout", *shorter)
    assert "crashed while running 'test_one.py::test_held'" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert "in test_held" in run.stderr, "it does not say where"


# -- a second run of what failed ---------------------------------------------------------------------


def run_twice(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder's ``test_one.py`` as `make test` does, with settings of its own."""
    script = ROOT / "tests" / "run_twice.py"
    command = [sys.executable, script, "-c", os.devnull, "--rootdir=.", "test_one.py"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("assert seen", 0, "failed beside other tests, and passed alone: test_one.py::test_it[0]"),
        ("assert number", 1, "failed beside other tests, and failed alone: test_one.py::test_it[0]"),
        pytest.param("assert seen or number", 0, "1 passed", marks=pytest.mark.slow),
        pytest.param("os._exit(3) if not seen else None", 3, "", marks=pytest.mark.slow),
    ],
)
def test_tests_that_fail_run_once_more_alone_and_are_named(
    tmp_path: Path, body: str, code: int, said: str
) -> None:
    (tmp_path / "test_one.py").write_text(f"""
import os, pathlib, pytest
@pytest.mark.parametrize("number", [0, 1])
def test_it(number):
    mark = pathlib.Path(f"{{number}}.seen")
    seen = mark.exists()
    mark.touch()
    {body}
""")
    run = run_twice(tmp_path)
    assert run.returncode == code, run.stdout + run.stderr
    assert said in run.stdout


@pytest.mark.usefixtures("warm_starts")
def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("""
import pytest
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    assert False
""")
    run = run_twice(tmp_path)
    assert (run.returncode, run.stdout.count("6 failed"), "alone" in run.stdout) == (1, 1, False)


def test_each_process_of_a_run_rewrites_its_share_of_the_assertions(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    for name in ("test_a", "test_b", "test_c", "test_d"):
        (tmp_path / f"{name}.py").write_text("assert 1" if name != "test_b" else "assert (")
    for number in range(2):
        process: Any = SimpleNamespace(
            workerinput={"workerid": f"gw{number}", "workercount": 2},
            rootpath=tmp_path,
            getini=lambda name: [""] if name == "testpaths" else pytestconfig.getini(name),
            stash=pytestconfig.stash,
        )
        rewrite_share(process)
        written = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
        assert written == ({"test_a", "test_c"}, {"test_a", "test_c", "test_d"})[number]
