"""Observations on the inputs of torch's own tests find planted faults, and nothing on a sound device."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from fresh_process import plain_environment
from warm_python import WarmPython

HERE = Path(__file__).parent
FAULTS = [
    node.name
    for node in ast.parse((HERE / "sampled_mutants.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
]


@pytest.fixture(scope="module")
def told(warm_python: WarmPython) -> dict[str, list[str]]:
    """What the observations say; torch's own tests change torch, so another process imports them."""
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    with warm_python.in_place():
        run = subprocess.run(
            [sys.executable, "sampled_mutants.py"], cwd=HERE, env=environment, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return cast("dict[str, list[str]]", json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_observation_on_torchs_inputs_finds_the_fault(fault: str, told: dict[str, list[str]]) -> None:
    assert told[f"{fault} planted"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_observation_finds_nothing_on_a_sound_device(fault: str, told: dict[str, list[str]]) -> None:
    assert told[f"{fault} absent"] == []


LACKING = """
import torch
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.claims import lacking

accelerator = get_accelerator()
for dtype in (torch.float8_e5m2, torch.complex32, torch.int64, torch.float16):
    try:
        torch.zeros(2).to(dtype).to(accelerator.current_device_name())
    except TypeError as error:
        print(lacking(accelerator, error).partition(":")[0])
    print(lacking(accelerator, RuntimeError(f"a conversion to {dtype} failed")).partition(":")[0])
"""


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    ("profile", "lacks"),
    [("v100-like", ["float8_e5m2"]), ("no=int64+complex", ["complex32", "int64"]), ("", [])],
)
def test_a_dtype_is_lacking_if_the_device_stores_none_and_not_if_torch_cannot_add_it(
    profile: str, lacks: list[str]
) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": profile}
    run = subprocess.run(
        [sys.executable, "-c", LACKING], env=environment, capture_output=True, text=True, timeout=60
    )
    told = [f"the device has no {dtype}" for dtype in lacks for _ in range(2)]
    assert list(filter(None, run.stdout.splitlines())) == told, run.stderr
