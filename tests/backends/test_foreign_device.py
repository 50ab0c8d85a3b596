"""A device of other people: torchvulkan on Mesa's lavapipe, which computes on the host's processors.

acclimate has no line of code for it. ``.ci/install-packages`` installs lavapipe; torchvulkan comes from PyPI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fresh_process import plain_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 3600
"""A limit that only a hang reaches: all checks take minutes of processor time, and longer beside others."""
PACKAGE = "torchvulkan==0.2.1"

# What torchvulkan and Mesa 22.3 do otherwise than the interface says; docs/backends.md has an input for each.
THEIRS = {
    "dtypes/attention_with_every_option",
    "dtypes/autocast_chooses_dtypes",
    "dtypes/copies_of_lazy_views",
    "dtypes/derivatives_forwards",
    "dtypes/every_option_of_an_operator",
    "dtypes/every_small_number",
    "dtypes/gradients_are_clipped",
    "dtypes/gradients_are_slopes",
    "dtypes/gradients_as_on_the_host",
    "dtypes/gradients_in_hard_cases",
    "dtypes/gradients_of_operators",
    "dtypes/integers_with_options",
    "dtypes/kernels_as_on_the_host",
    "dtypes/known_results",
    "dtypes/known_results_of_precision",
    "dtypes/layers",
    "dtypes/layers_with_options",
    "dtypes/lists_of_tensors_as_on_the_host",
    "dtypes/long_reductions",
    "dtypes/operators_after_other_calls",
    "dtypes/operators_as_on_the_host",
    "dtypes/operators_at_edges",
    "dtypes/operators_in_any_setting",
    "dtypes/operators_in_every_dtype",
    "dtypes/operators_in_place_and_into_others",
    "dtypes/operators_in_place_on_views",
    "dtypes/operators_of_any_length",
    "dtypes/operators_on_any_layout",
    "dtypes/operators_on_other_operands",
    "dtypes/operators_on_rows_that_differ",
    "dtypes/operators_on_special_numbers",
    "dtypes/operators_within_autocast",
    "dtypes/overflow",
    "dtypes/pairs_of_numbers",
    "dtypes/places_and_order",
    "dtypes/reductions",
    "dtypes/reductions_with_options",
    "dtypes/results_are_rounded",
    "dtypes/results_have_the_default_dtype",
    "dtypes/results_have_torchs_dtype",
    "dtypes/results_keep_the_memory_format",
    "dtypes/sums",
    "dtypes/wrong_arguments_are_refused",
    "dtypes/wrong_shapes_are_refused",
    "graphs/every_kind_of_input_is_read_again",
    "launching/fork_after_selection",
    "memory/walks_over_memory",
    "random/distributions",
    "random/refused_draws_change_nothing",
    "runtime/fake_tensors_tell_the_truth",
    "runtime/optimizers_go_on",
    "runtime/walks_over_saved_tensors",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which a process finds torchvulkan; skips where it cannot be had or finds no device."""
    folder = tmp_path_factory.mktemp("packages")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    installed = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=600)
    if installed.returncode != 0:
        pytest.skip(f"{PACKAGE} cannot be installed: {installed.stderr.strip()[-200:]}")
    variables = {
        **plain_environment(),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "ACCLIMATE_ACCELERATOR": "vulkan",
    }
    count = "import torch, torchvulkan; print(torchvulkan.device_count())"
    counted = subprocess.run(
        [sys.executable, "-c", count], env=variables, capture_output=True, text=True, timeout=600
    )
    if counted.stdout.strip() in ("", "0"):
        why = counted.stderr.strip()[-200:] or "it finds no driver; .ci/install-packages installs lavapipe"
        pytest.skip(f"torchvulkan cannot be used: {why}")
    return variables


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)


def test_it_is_found_in_its_package_by_its_name(environment: dict[str, str]) -> None:
    ended = run(environment, "-m", "acclimate", "info", "--json")
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["error"] is None
    assert found["accelerator"]["name"] == "vulkan"


@pytest.mark.timeout(LIMIT_S)
def test_it_fails_only_the_checks_of_conformance_that_are_its_own_fault(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ended = run(environment, "-m", "acclimate", "conformance", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    outcomes = {result["check"]: result["outcome"] for result in results["results"]}
    assert {check for check, outcome in outcomes.items() if outcome == "failed"} <= THEIRS, ended.stdout
    assert list(outcomes.values()).count("passed") > 240, ended.stdout


def test_a_gpt_trains_on_it_with_ddp_on_two_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    model = [
        "--layers",
        "1",
        "--width",
        "32",
        "--heads",
        "2",
        "--context",
        "32",
        "--batch",
        "4",
        "--lr",
        "1e-2",
    ]
    run_of = [
        "--data",
        str(ROOT / "README.md"),
        "--steps",
        "30",
        "--warmup",
        "5",
        "--out",
        str(tmp_path / "run"),
    ]
    ended = run(environment, *launch, "examples/train_gpt.py", *model, *run_of)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks, ddp" in ended.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5, rows


def test_a_model_writes_the_same_text_on_it_as_on_the_host(
    environment: dict[str, str], tmp_path: Path
) -> None:
    make = f"from tiny_models import save_tiny_model; save_tiny_model('llama', {str(tmp_path)!r})"
    made = run({**environment, "PYTHONPATH": str(ROOT / "tests" / "llm")}, "-c", make)
    assert made.returncode == 0, made.stderr
    command = ["-m", "acclimate", "generate", "hello", "--model", str(tmp_path), "--max_new_tokens", "8"]
    command += ["--dtype", "float32"]
    texts = []
    for name in ("vulkan", "cpu"):
        ended = run({**environment, "ACCLIMATE_ACCELERATOR": name}, *command)
        assert ended.returncode == 0, ended.stderr
        assert f"[{name}" in ended.stdout + ended.stderr
        texts.append(re.sub(r"\[(vulkan|cpu).*", "", ended.stdout).strip())
    assert texts[0] == texts[1] != ""
