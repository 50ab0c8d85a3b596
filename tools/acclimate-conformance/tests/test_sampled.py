"""Observations on the inputs of torch's own tests find planted faults, and nothing on a sound device."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

import pytest
import torch

from acclimate_conformance.checks.dtypes.sampled.comparing import attempt, difference_of_values
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place
from acclimate_conformance.checks.target import LOST
from fresh_process import plain_environment
from warm_python import WarmPython

HERE = Path(__file__).parent
Told: TypeAlias = Callable[[str], dict[str, list[str]]]


def observed(module: str) -> dict[str, str]:
    """The devices of a module's table, and what observes each, from its source."""
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert isinstance(table, ast.Dict)
    return {
        ast.unparse(device): ast.unparse(row.elts[0])
        for device, row in zip(table.keys, table.values, strict=True)
        if device and isinstance(row, ast.Tuple)
    }


FAULTS, SOUND = observed("sampled_mutants"), observed("sound_devices")
QUICK = {*{of: fault for fault, of in reversed(FAULTS.items())}.values(), *SOUND}
"""One fault of each observation, and all sound devices."""


FAULTS_OF_BOTH_LENGTHS = [
    pytest.param(fault, marks=() if fault in QUICK else pytest.mark.slow) for fault in FAULTS
]


@pytest.fixture(scope="module")
def told(warm_python: WarmPython) -> Told:
    """What the observations say; torch's own tests change torch, so another process imports them."""
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    pytest.importorskip("expecttest", reason="torch's own tests need it")

    @cache
    def observe(are_quick: bool) -> dict[str, list[str]]:
        devices = [device for device in (*FAULTS, *SOUND) if (device in QUICK) == are_quick]
        environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
        with warm_python.in_place():
            run = subprocess.run(
                [sys.executable, "sampled_mutants.py", *devices], cwd=HERE, env=environment,
                capture_output=True, text=True, timeout=600,
            )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return cast("dict[str, list[str]]", json.loads(run.stdout.splitlines()[-1]))

    return lambda device: observe(device in QUICK)


@pytest.mark.parametrize("fault", FAULTS_OF_BOTH_LENGTHS)
def test_an_observation_on_torchs_inputs_finds_the_fault(fault: str, told: Told) -> None:
    assert told(fault)[f"{fault} planted"]


@pytest.mark.parametrize("fault", FAULTS_OF_BOTH_LENGTHS)
def test_the_observation_finds_nothing_on_a_sound_device(fault: str, told: Told) -> None:
    assert told(fault)[f"{fault} absent"] == []


@pytest.mark.parametrize("device", SOUND)
def test_nothing_is_found_on_a_device_that_computes_otherwise_and_is_right(device: str, told: Told) -> None:
    assert told(device)[f"{device} planted"] == []


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


WITHOUT_TORCHS_TESTS = """
import torch
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.dtypes.sampled.child import TOPICS, _observed

del torch.cuda.jiterator
print(_observed(get_accelerator(), next(iter(TOPICS))))
"""


@pytest.mark.usefixtures("warm_starts")
def test_nothing_is_broken_where_torchs_own_tests_cannot_be_imported() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHS_TESTS], env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    told = ast.literal_eval(run.stdout)
    assert told["broken"] == []
    assert "cannot be imported: AttributeError" in told["absent"]
    assert "jiterator" in told["absent"]


def test_a_call_starts_with_the_same_random_numbers_and_leaves_no_work_for_devices_that_nobody_uses() -> None:
    noted = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    first, second = (attempt(lambda place: torch.rand(3, device=place.device), Place(HOST))[0] for _ in "ab")
    assert torch.equal(first, second)
    assert torch.cuda._lazy_seed_tracker.manual_seed_all_cb is noted


SEEDED = """
import torch
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings

def seeded(place):
    torch.manual_seed(42)
    return torch.nn.functional.dropout(torch.ones(9, device=place.device))

def inputs_of_the_host(place):
    return torch.rand(9, generator=torch.Generator().manual_seed(3)).to(place.device) + 1

def attention(place, share=0.0):
    x = torch.ones(1, 2, 3, 8, device=place.device)
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=share)

def attention_that_drops(place):
    return attention(place, 0.5)

found = Findings(get_accelerator())
for run in (seeded, inputs_of_the_host, attention, attention_that_drops):
    found.compare(run.__name__, run.__name__, run, near=lambda ours, theirs: "it differs")
print(found.broken)
"""


@pytest.mark.usefixtures("warm_starts")
def test_random_numbers_that_a_call_seeds_itself_are_not_compared_with_the_hosts() -> None:
    """As torch's own tests do in many functions; each device has its own generator."""
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    run = subprocess.run(
        [sys.executable, "-c", SEEDED], env=environment, capture_output=True, text=True, timeout=600
    )
    compared = [f"{name}: it differs" for name in ("inputs_of_the_host", "attention")]
    assert run.stdout == f"{compared}\n", run.stderr


MARKED = """
import torch
from acclimate_conformance.checks.dtypes.sampled.samples import fails_in_torch, operators

norm, product = (next(op for op in operators() if op.name == name) for name in ("native_batch_norm", "bmm"))
for op in (norm, product):
    print([fails_in_torch(op, "test_out", device, torch.float32) for device in ("cuda:0", "cpu", "meta")])
"""


@pytest.mark.usefixtures("warm_starts")
def test_an_operator_is_left_out_only_where_torchs_own_tests_expect_it_to_fail_on_that_type_of_device() -> (
    None
):
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    run = subprocess.run(
        [sys.executable, "-c", MARKED], env=plain_environment(), capture_output=True, text=True, timeout=600
    )
    assert run.stdout == "[True, False, False]\n[False, False, False]\n", run.stderr


SPOILED = """
import torch
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings

spoiled = False

def exp(x):
    global spoiled
    spoiled = True
    raise RuntimeError("misaligned address")

def fill(x, value):
    if spoiled:
        raise RuntimeError("misaligned address")
    return x.copy_(torch.full(x.shape, value))

library = torch.library.Library("aten", "IMPL")
library.impl("exp", exp, "PrivateUse1")
library.impl("fill_.Scalar", fill, "PrivateUse1")
found = Findings(get_accelerator())
for name in ("tanh", "exp", "ones_like"):
    found.compare(name, f"{name}(x)", lambda place: getattr(torch, name)(torch.zeros(2).to(place.device)))
print(found.broken, found.usable, found.enough, found.compared)
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_call_after_which_the_device_computes_nothing_is_the_last_one_that_is_noted() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    run = subprocess.run(
        [sys.executable, "-c", SPOILED], env=environment, capture_output=True, text=True, timeout=600
    )
    told = f"exp(x) raises RuntimeError: misaligned address, {LOST}"
    assert run.stdout == f"{[told]} False True 1\n", run.stderr


ASSERTING = """
import torch
from torch.nn import functional
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings

def exp(x):
    return x + x[torch.full_like(x, 7, dtype=torch.int64)]

library = torch.library.Library("aten", "IMPL")
library.impl("exp", exp, "PrivateUse1")
found = Findings(get_accelerator())

def loss(place):
    chances = place.put(torch.tensor([0.5, 2.0]))
    return functional.binary_cross_entropy(chances, chances)

found.compare("loss", "loss of a chance of 2", loss, may_be_refused=True)
print(found.broken, found.usable)
for name in ("tanh", "exp", "sin"):
    run = lambda place: getattr(torch, name)(torch.zeros(2).to(place.device))
    found.compare(name, f"{name}(x)", run, may_be_refused=True)
print(len(found.broken), found.broken[0].partition(" raises ")[0], found.usable, found.compared)
"""


@pytest.mark.usefixtures("warm_starts")
def test_numbers_that_the_host_refuses_are_not_asked_and_an_assert_is_blamed_on_the_call_that_made_it() -> (
    None
):
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": "asserts"}
    run = subprocess.run(
        [sys.executable, "-c", ASSERTING], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.stdout == "[] True\n1 exp(x) False 1\n", run.stderr


def test_rounding_noise_around_zero_is_no_difference_and_a_small_result_that_is_wrong_is_one() -> None:
    noise = torch.tensor([4.8e-7, -1.9e-7])
    near = {torch.float32: 1e-4}
    assert difference_of_values(noise, -noise, near) == ""
    assert difference_of_values(torch.tensor([1e-5]), torch.tensor([0.0]), near) != ""
