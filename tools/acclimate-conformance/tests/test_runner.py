"""Checks that end their process or hang fail, and the others run: what the old runner did by itself."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from acclimate_conformance.checks.check import Check
from acclimate_conformance.checks.target import LOST, find
from acclimate_conformance.runner.examine import examine
from fresh_process import plain_environment

pytestmark = pytest.mark.usefixtures("warm_starts")

PROGRAM = """
import json, sys
from acclimate_conformance.errors import ConformanceError
from acclimate_conformance.runner import run
run.LOADING_S = {loading_s}
try:
    report = run.run({source!r}, {only!r}, timeout_s={timeout_s})
except ConformanceError as error:
    print(json.dumps({{"error": str(error)}}))
else:
    imported = [name for name in ("torch", "spoilt", "acclimate.accelerator") if name in sys.modules]
    print(json.dumps({{**report.as_dict(), "junit": report.junit.decode(), "imported": imported}}))
"""


def run(
    folder: Path,
    source: str,
    only: list[str],
    timeout_s: float | None = None,
    loading_s: float = 300,
    **variables: str,
) -> dict[str, Any]:
    """Runs checks from a process that can import the modules in a folder, which is its own."""
    program = PROGRAM.format(source=source, only=only, timeout_s=timeout_s, loading_s=loading_s)
    environment = {**plain_environment(), "PYTHONPATH": str(folder), **variables}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def spoilt(folder: Path, **bodies: str) -> str:
    """Writes an accelerator whose methods do something else; returns what names it."""
    methods = "".join(f"    def {name}(self, *_):\n        {body}\n" for name, body in bodies.items())
    (folder / "spoilt.py").write_text(
        "import ctypes, os, pathlib, signal, subprocess, sys, time\n"
        "from acclimate.backends.cpu import CPUAccelerator\n\n"
        f"class Spoilt(CPUAccelerator):\n{methods}"
    )
    return "spoilt:Spoilt"


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def by_check(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["check"]: result for result in report["results"]}


def test_a_check_that_ends_its_process_fails_with_how_it_ended_and_the_next_ones_run(tmp_path: Path) -> None:
    source = spoilt(
        tmp_path,
        is_bf16_supported="ctypes.string_at(0)",
        pin_memory_alignment="os.write(2, b'no pages'); os._exit(127)",
        toolkit_version="os.kill(os.getpid(), signal.SIGKILL)",
    )
    ending = ["dtypes/list_of_dtypes", "pinning/registration", "ops/toolkit"]
    report = run(tmp_path, source, ["devices/counts", *ending, "launching/exported_variables"])
    results = by_check(report)
    assert [results[name]["reason"] for name in ending] == [
        "its process was killed by SIGSEGV (signal 11)",
        "its process ended with exit code 127",
        "its process was killed by SIGKILL (signal 9)",
    ]
    assert "spoilt.py" in results[ending[0]]["detail"], "it does not say where"
    assert "no pages" in results[ending[1]]["detail"]
    assert report["total"]["passed"] == 2, "the checks before and after them"
    assert report["junit"].count("<failure") == 3
    assert "killed by SIGKILL" in report["junit"]


ASSERTING = """
import torch
from acclimate_sim.accelerator import SimAccelerator

class Asserting(SimAccelerator):
    def toolkit_version(self):
        torch.ones(3, device="sim:0")[torch.tensor([7], device="sim:0")]
        return super().toolkit_version()
"""
ON_ASSERTS = {"ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": "asserts"}


def test_a_fault_after_which_the_device_computes_nothing_fails_its_own_check_only(tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    (tmp_path / "asserting.py").write_text(ASSERTING)
    names = ["devices/counts", "ops/toolkit", "runtime/types_of_attributes", "launching/exported_variables"]
    report = run(tmp_path, "asserting:Asserting", names, **ON_ASSERTS)
    results = by_check(report)
    assert [results[name]["outcome"] for name in names] == ["passed", "failed", "passed", "passed"]
    reason = results["ops/toolkit"]["reason"]
    assert "device-side assert triggered" in reason
    assert reason.endswith(LOST)
    assert report["junit"].count("<failure") == 1
    assert LOST in report["junit"]


def test_where_no_worker_can_be_replaced_checks_after_such_a_fault_are_not_run(tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    (tmp_path / "asserting.py").write_text(ASSERTING)
    environment = {**plain_environment(), "PYTHONPATH": str(tmp_path), **ON_ASSERTS}
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "toolkit or types_of_attributes",
        "--acclimate-accelerator", "asserting:Asserting",
    ]  # fmt: skip
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert f"not checked, as it comes after ops/toolkit, {LOST}" in ended.stdout, ended.stdout + ended.stderr


LIMITS_S = (3, 30)
"""Time limits of checks that hang: the second if a busy machine does not reach the hang within the first."""


@pytest.mark.slow
def test_a_check_that_hangs_fails_even_with_pythons_lock_and_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    child = (
        f"child = subprocess.Popen(['sleep', '600']); pathlib.Path({str(mark)!r}).write_text(str(child.pid))"
    )
    source = spoilt(
        tmp_path,
        is_bf16_supported=f"{child}; time.sleep(600)",
        toolkit_version="ctypes.PyDLL(None).sleep(600)",
    )
    hanging = ["dtypes/list_of_dtypes", "ops/toolkit"]
    for limit in LIMITS_S:
        results = by_check(run(tmp_path, source, hanging, timeout_s=limit))
        for name in hanging:
            assert results[name]["reason"] == f"it did not finish within {limit} s"
        if mark.exists():
            break
    for name in hanging:
        assert "spoilt.py" in results[name]["detail"], "it does not say where"
    assert not is_alive(int(mark.read_text()))


@pytest.mark.slow  # the ranks are found by their process group, which those of a warm Python do not have
def test_ranks_of_a_check_that_is_ended_end_too(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    mark = f"pathlib.Path({str(ranks)!r}, str(os.getpid())).touch()"
    source = spoilt(tmp_path, communication_backend_name=f"{mark}; time.sleep(600)")
    for limit in (15, 60):
        (result,) = run(tmp_path, source, ["communication/collectives"], timeout_s=limit)["results"]
        assert result["reason"] == f"it did not finish within {limit} s"
        started = [int(rank.name) for rank in ranks.iterdir()]
        if started:
            break
    assert started
    assert [rank for rank in started if is_alive(rank)] == []


def test_an_accelerator_that_hangs_when_it_is_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(600)\n")
    told = run(tmp_path, "hanging:Device", [], loading_s=2)["error"]
    assert told.startswith('The accelerator "hanging:Device" cannot be loaded: it did not finish within 2 s.')


def test_an_accelerator_that_raises_when_it_is_made_is_told_and_one_without_a_name_is_checked(
    tmp_path: Path,
) -> None:
    raising = "raise RuntimeError('the driver is gone')"
    told = run(tmp_path, spoilt(tmp_path, __init__=raising), [])["error"]
    assert told == ('The accelerator "spoilt:Spoilt" cannot be loaded: RuntimeError: the driver is gone')
    report = run(
        tmp_path, spoilt(tmp_path, get_device_name=raising), ["devices/counts", "devices/properties"]
    )
    assert report["about"]["devices"] == ["cpu (get_device_name() raises RuntimeError: the driver is gone)"]
    assert [result["outcome"] for result in report["results"]] == ["passed", "failed"]


def test_after_a_crash_an_accelerator_that_can_no_longer_be_loaded_fails_the_rest(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = spoilt(tmp_path, is_bf16_supported=f"pathlib.Path({str(mark)!r}).touch(); os._exit(127)")
    with (tmp_path / "spoilt.py").open("a") as file:
        file.write(
            f"\nif os.path.exists({str(mark)!r}):\n    os.write(2, b'the driver is gone'); os._exit(3)\n"
        )
    report = run(tmp_path, source, ["dtypes/list_of_dtypes", "pinning/contents"])
    first, second = report["results"]
    assert first["reason"] == "its process ended with exit code 127"
    assert second["outcome"] == "failed"
    assert "cannot be loaded: its process ended with exit code 3" in second["reason"]
    assert "the driver is gone" in second["reason"]


def test_the_process_that_runs_pytest_imports_no_torch_no_accelerator_and_nothing_of_the_project(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    theirs = {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"}
    report = run(tmp_path, spoilt(tmp_path, ipc_collect="pass"), ["devices/counts"], **theirs)
    assert report["total"]["passed"] == 1
    assert report["imported"] == []
    assert os.environ.get("PYTEST_ADDOPTS") is None


def test_a_check_looks_for_garbage_only_among_its_own_objects() -> None:
    """Beside a program's objects, a check that collects garbage many times reached its time limit."""
    kept = [[number] for number in range(50_000)]
    seen: list[int] = []
    check = Check("devices", "counts", "", (), lambda _: seen.append(len(gc.get_objects())), 60, once=True)
    examine(check, find("cpu"))
    assert seen[0] < len(kept)
    assert gc.get_freeze_count() == 0
