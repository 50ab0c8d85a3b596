"""Accelerators that keep their promises pass, and every form of the report has the results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from acclimate_conformance.processes import end_group
from acclimate_conformance.runner.catalog import checks
from fresh_process import plain_environment

HERE = Path(__file__).parent
PROFILES = (
    "", "sync=check", "mps-like", "v100-like", "hpu-like", "devices=4,memory=1GiB", "devices=1", "no=int64",
    "no=complex", "no=float8", "no=float16+bfloat16+complex", "asserts",
)  # fmt: skip
"""Profiles of the emulated accelerator."""
WHOLE_RUN_S = 3600
"""A limit for all checks that only a hang reaches: beside a load of 20 they took 15 minutes."""
ON_A_DEVICE = ("devices", "random", "streams", "memory", "pinning")
"""What differs most between a device and the host."""
LONG = (
    "runtime/compiles", "runtime/compiled_functions_have_effects", "memory/other_processes_count",
    "random/recomputed_draws_repeat", "streams/named_streams_are_meant", "launching/launched_rank",
    "launching/first_use", "launching/processes_end", "launching/fork_after_selection",
    "launching/forked_children_use_the_host", "memory/memory_is_given_up",
    "random/draws_are_independent", "ops/packed_weights_multiply",
    "runtime/compiled_functions_keep_apart", "runtime/workers_draw_their_own_numbers",
    "runtime/checkpoints_draw_again", "runtime/processes_that_import_torch_only", "random/distributions",
)  # fmt: skip
"""These take a compiler, further processes or millions of draws; planted faults show that they are made."""
SLOW_WHERE_EMULATED = (
    "devices/synchronize", "devices/walks_over_what_is_current", "memory/device_arguments",
    "memory/no_layer_keeps_memory", "memory/nothing_leaks", "memory/peak_reset",
    "memory/pool_and_tensors_differ", "memory/reserved_follows_allocations",
    "memory/what_is_left_by_device", "random/draws_keep_their_range", "random/dropout",
    "random/walks_over_random_numbers", "streams/host_waits",
    "streams/streams_wait", "streams/streams_wait_for_other_devices",
)  # fmt: skip
"""Each takes 0.3 s or more there; where slow tests are left out, the CPU is tried with them in its place."""


def python(
    *arguments: str, folder: Path = HERE, timeout_s: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with the planted faults importable."""
    environment = {**plain_environment(), "PYTHONPATH": str(HERE), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def conformance(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "acclimate", "conformance", *arguments, timeout_s=WHOLE_RUN_S, **variables)


def only(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--only", name)]


def quick_checks(categories: Collection[str], without: Collection[str] = ()) -> list[str]:
    left_out = {*LONG, *without}
    return [check.id for check in checks() if check.category in categories and check.id not in left_out]


def require_no_failure(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    assert "100 %" in run.stdout
    assert "\nfailed" not in run.stdout


@pytest.fixture
def sim() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "start",
    [pytest.param("real", marks=[pytest.mark.slow, pytest.mark.timeout(WHOLE_RUN_S)]), "warm"],
)
def test_the_cpu_keeps_every_promise(start: str, tmp_path: Path) -> None:
    """Where slow tests are left out, only what neither the emulated device nor `test_sampled.py` tries."""
    written = tmp_path / "results.json"
    tried = (*ON_A_DEVICE, "dtypes", "communication")  # the last by tests/comm
    others = quick_checks({check.category for check in checks()}.difference(tried))
    chosen = only(*others, *SLOW_WHERE_EMULATED) if start == "warm" else []
    require_no_failure(conformance("--accelerator", "cpu", *chosen, "--json", str(written)))
    report = json.loads(written.read_text())
    assert report["about"]["accelerator"] == "cpu"
    assert report["total"]["failed"] == 0
    assert report["total"]["passed"] > 40
    assert {result["outcome"] for result in report["results"]} == {"passed", "not offered"}
    assert all(result["reason"] for result in report["results"] if result["outcome"] == "not offered")


@pytest.mark.usefixtures("warm_starts")
def test_the_accelerator_of_this_machine_keeps_every_promise() -> None:
    found = json.loads(python("-m", "acclimate", "info", "--json").stdout)["accelerator"]["name"]
    if found == "cpu":
        pytest.skip("this machine has no accelerator but its processors")
    require_no_failure(conformance("--accelerator", found))


@pytest.mark.usefixtures("sim", "warm_starts")
def test_the_emulated_device_keeps_the_promises_of_a_device() -> None:
    require_no_failure(
        conformance("--accelerator", "sim", *only(*quick_checks(ON_A_DEVICE, SLOW_WHERE_EMULATED)))
    )


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_RUN_S)
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_keeps_every_promise(profile: str) -> None:
    require_no_failure(conformance("--accelerator", "sim", ACCLIMATE_SIM=profile))


@pytest.mark.usefixtures("warm_starts")
def test_a_failure_is_told_with_the_reason_and_the_rule_in_every_form(tmp_path: Path) -> None:
    results, suite = tmp_path / "results.json", tmp_path / "results.xml"
    run = conformance(
        "--accelerator", "mutants:TextualCurrentDevice", *only("devices/counts", "devices/set_device"),
        "--json", str(results), "--junit", str(suite),
    )  # fmt: skip
    seen, rule = "current_device() is '0', of type str", "current_device: The index of the current device."
    assert run.returncode == 1
    assert seen in run.stdout
    assert rule in run.stdout
    assert "not offered" in run.stdout

    report = json.loads(results.read_text())
    failed, absent = report["results"]
    assert report["total"] == {"category": "all", "passed": 0, "failed": 1, "not_offered": 1, "score": 0.0}
    assert failed["outcome"] == "failed"
    assert seen in failed["reason"]
    assert rule in failed["rules"]
    assert (absent["outcome"], absent["reason"]) == ("not offered", "there is one device here")

    root = ElementTree.parse(suite).getroot()
    (tests,) = root
    assert (tests.get("tests"), tests.get("failures"), tests.get("skipped")) == ("2", "1", "1")
    failure, skipped = tests.find("testcase/failure"), tests.find("testcase/skipped")
    assert failure is not None
    assert seen in (failure.get("message") or "")
    assert rule in (failure.text or "")
    assert skipped is not None
    assert skipped.get("message") == "there is one device here"


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accelerator", "cqu"], 'did you mean "cpu"'),
        pytest.param(["--accelerator", "mutants:NoSuch"], "mutants:NoSuch", marks=pytest.mark.slow),
        pytest.param(
            ["--accelerator", "mutants:IdleAdamBuilder"],
            "must be a subclass of acclimate.Accelerator",
            marks=pytest.mark.slow,
        ),
        (["--accelerator", "cpu", "--only", "memmory"], 'no check or category "memmory"'),
        pytest.param(
            ["--accelerator", "cpu", *only("devices/counts"), "--json", "/no/such/folder/f"],
            "cannot be written",
            marks=pytest.mark.slow,  # test_report.py writes others meanwhile
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    run = conformance(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.usefixtures("warm_starts")
def test_an_accelerator_that_ends_its_process_when_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("import os\nos.write(2, b'no driver here')\nos._exit(127)\n")
    run = conformance("--accelerator", "dying:Device", PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert "ended with exit code 127" in run.stderr
    assert "no driver here" in run.stderr


def test_a_workers_processes_are_gone_when_ending_them_returns() -> None:
    """A killed process goes on until the kernel has freed its memory."""
    code = "import time; memory = b'x' * (300 << 20); print('started', flush=True); time.sleep(600)"
    command = ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        processes = [psutil.Process(shell.pid), *psutil.Process(shell.pid).children()]
        end_group(shell.pid)
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert len(processes) == 2
    assert alive == []


# -- the plugin for pytest -----------------------------------------------------------------------


@pytest.mark.usefixtures("warm_starts")
def test_the_plugin_adds_the_checks_to_a_projects_own_tests(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    run = python(
        "-m", "pytest", "-v", "-p", "no:cacheprovider",
        "-k", "test_own or (devices and counts) or set_device or seeds",
        "--acclimate-accelerator", "mutants:TextualCurrentDevice", folder=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "test_own.py::test_own PASSED" in run.stdout
    assert "::devices/counts FAILED" in run.stdout
    assert "::devices/set_device SKIPPED (there is one device here)" in run.stdout
    assert "current_device() is '0', of type str" in run.stdout
    assert "current_device: The index of the current device." in run.stdout
    assert "Traceback" not in run.stdout


@pytest.mark.slow
def test_the_plugin_runs_the_checks_alone(tmp_path: Path) -> None:
    run = python(
        "-m", "pytest", "-p", "no:cacheprovider", "-k", "devices", "--pyargs", "acclimate_conformance",
        folder=tmp_path, ACCLIMATE_ACCELERATOR="cpu",
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


def test_the_plugin_stays_out_of_projects_that_do_not_ask(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\ndef test_own():\n    assert 'torch' not in sys.modules\n"
    )
    run = python("-m", "pytest", "-p", "no:cacheprovider", folder=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


@pytest.mark.slow
def test_the_plugin_tells_an_accelerator_that_cannot_be_loaded(tmp_path: Path) -> None:
    run = python("-m", "pytest", "-p", "no:cacheprovider", "--acclimate-accelerator", "cqu", folder=tmp_path)
    assert run.returncode != 0
    assert 'did you mean "cpu"' in run.stdout
    assert "Traceback" not in run.stdout


@pytest.mark.usefixtures("warm_starts")
def test_what_an_accelerator_says_it_has_not_is_not_offered_and_a_reason_has_all_of_its_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "modest.py").write_text("""
from acclimate.backends.cpu import CPUAccelerator

class Modest(CPUAccelerator):
    supports_graphs = supports_collectives = False

    def current_stream(self, device_index=None):
        raise RuntimeError("The driver said:\\n  error 507008\\n  see the log")
""")
    env = {**plain_environment(), "PYTHONPATH": str(tmp_path)}
    arguments = ["--accelerator", "modest:Modest", "--json", "found.json"]
    for category in ("graphs", "communication", "streams/current_stream"):
        arguments += ["--only", category]
    command = [sys.executable, "-m", "acclimate", "conformance", *arguments]
    subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=600)
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    outcomes = {result["category"]: set() for result in results}
    for result in results:
        outcomes[result["category"]].add(result["outcome"])
    assert outcomes["graphs"] == outcomes["communication"] == {"not offered"}
    (reason,) = [result["reason"] for result in results if result["check"] == "streams/current_stream"]
    assert reason == "RuntimeError: The driver said: error 507008 see the log"
