"""DeepSpeed itself on our accelerator: run by ``make test-deepspeed``, in an environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

try:
    version("deepspeed")
except PackageNotFoundError:
    pytest.skip("DeepSpeed is not installed; make test-deepspeed has it", allow_module_level=True)

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
WHOLE = ("0,none,fp32", "1,none,bf16", "2,none,fp32", "3,none,fp32", "3,none,bf16")
OFFLOADED = ("1,cpu,fp32", "2,cpu,bf16", "3,cpu,fp32", "3,cpu,bf16")
NVME = ("3,nvme,fp32", "3,nvme,bf16")
HAS_LIBAIO = Path("/usr/include/libaio.h").exists()
"""Without it DeepSpeed's own op cannot write to NVMe; ours can."""
SETTINGS = (*WHOLE, *OFFLOADED, *(NVME if HAS_LIBAIO else ()))


def results(
    folder: Path, launcher: list[str], settings: tuple[str, ...], **environment: str
) -> dict[str, Any]:
    done = subprocess.run(
        [*launcher, str(PROGRAM), str(folder), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    found = {each["setting"]: each for each in map(json.loads, lines)}
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(found) == set(settings)
    return found


def launched(ranks: int, *options: str) -> list[str]:
    run = [sys.executable, "-m", "acclimate", "run", "--num_accelerators", str(ranks)]
    return [*run, *options]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """With DeepSpeed's own accelerator, on one rank and on two."""
    folder = tmp_path_factory.mktemp("own")
    return {ranks: results(folder, launched(ranks), SETTINGS, DS_ACCELERATOR="cpu") for ranks in (1, 2)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ops", ["0", "1"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_losses_are_those_of_deepspeeds_own_accelerator(
    accelerator: str, ranks: int, ops: str, own: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    settings = (*OFFLOADED, *NVME) if ops == "1" else SETTINGS
    found = results(
        tmp_path,
        launched(ranks, "--deepspeed"),
        settings,
        DS_ACCELERATOR=accelerator,
        ACCLIMATE_DEEPSPEED_OPS=ops,
    )
    for setting in settings:
        # Where the states lie changes no loss.
        ours, theirs = found[setting], own[ranks].get(setting) or own[ranks][setting.replace("nvme", "cpu")]
        assert ours["accelerator"] == "AcclimateAccelerator"
        assert ours["device"].partition(":")[0] == accelerator
        assert ours["builder"].startswith("acclimate." if ops == "1" else "deepspeed.")
        if ops == "1":  # another kernel for Adam rounds elsewhere
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-2 if "bf16" in setting else 1e-5)
        else:
            assert ours["losses"] == theirs["losses"], setting


CHECKPOINTS = ("1,cpu,fp32", "2,cpu,bf16", "3,cpu,fp32")
LOADS: dict[str, tuple[tuple[str, ...], str]] = {
    "own": ((), "cpu"),
    "cpu": (("--deepspeed",), "cpu"),
    "sim": (("--deepspeed",), "sim"),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "others"), [(1, ("cpu", "sim")), (2, ("sim",))])
def test_a_checkpoint_of_one_accelerator_goes_on_with_the_same_losses_on_another(
    ranks: int, others: tuple[str, ...], tmp_path: Path
) -> None:
    def losses(load: str, what: str, folder: str) -> list[Any]:
        options, accelerator = LOADS[load]
        settings = tuple(f"{each},{what}" for each in CHECKPOINTS)
        found = results(tmp_path / folder, launched(ranks, *options), settings, DS_ACCELERATOR=accelerator)
        return [found[each]["losses"] for each in settings]

    saved = {load: losses(load, "save", load) for load in ("own", *others)}
    assert all(saved[load] == saved["own"] for load in others)
    # After a checkpoint, DeepSpeed's Adam computes the powers of its betas anew: the last digits differ from
    # those of a run that goes on, so a loaded one is compared with one that was loaded.
    expected = losses("own", "load", "own")
    for other in others:
        assert losses(other, "load", "own") == expected, other
        assert losses("own", "load", other) == expected, other
    assert losses(others[-1], "load", others[0]) == expected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_inference_gives_the_logits_of_deepspeeds_own_accelerator(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = ("infer,none,fp32", "infer,none,bf16")
    found = {
        load: results(tmp_path, launched(ranks, *options), settings, DS_ACCELERATOR=accelerator)
        for load, (options, accelerator) in LOADS.items()
    }
    for setting in settings:
        for load in ("cpu", "sim"):
            assert found[load][setting]["losses"] == found["own"][setting]["losses"], (load, setting)
            assert found[load][setting]["device"].partition(":")[0] == load
