"""DeepSpeed itself on our accelerator: run by ``make test-deepspeed``, in an environment that has it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from acclimate.compat.deepspeed import OPS_VARIABLE

try:
    version("deepspeed")
except PackageNotFoundError:
    pytest.skip("DeepSpeed is not installed; make test-deepspeed has it", allow_module_level=True)

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
DTYPES = ("fp32", "bf16")
WHOLE = tuple(f"{stage},none,{dtype}" for stage in range(4) for dtype in DTYPES)
OFFLOADED = tuple(f"{stage},cpu,{dtype}" for stage in (1, 2, 3) for dtype in DTYPES)
NVME = tuple(f"3,nvme,{dtype}" for dtype in DTYPES)
"""DeepSpeed offloads to NVMe with stage 3 only."""
LOADS: dict[str, tuple[str, dict[str, str]]] = {
    "own": ("", {"DS_ACCELERATOR": "cpu"}),
    "cpu": ("--deepspeed", {"DS_ACCELERATOR": "cpu", OPS_VARIABLE: "0"}),
    "sim": ("--deepspeed", {"DS_ACCELERATOR": "sim", OPS_VARIABLE: "0"}),
    "cpu, our ops": ("--deepspeed", {"DS_ACCELERATOR": "cpu", OPS_VARIABLE: "1"}),
    "sim, our ops": ("--deepspeed", {"DS_ACCELERATOR": "sim", OPS_VARIABLE: "1"}),
}
"""For each column of the table: the option of ``acclimate run``, and the variables."""
Losses = dict[str, list[float]]
Table = dict[tuple[int, str], dict[str, Losses]]
"""Losses by number of ranks, column and setting."""


def results(load: str, ranks: int, settings: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Runs the program and returns what rank 0 printed for each setting."""
    option, variables = LOADS[load]
    options = [word for word in ("--num_accelerators", str(ranks), option) if word]
    meeting = tempfile.mkdtemp(dir=folder)
    done = subprocess.run(
        [sys.executable, "-m", "acclimate", "run", *options, str(PROGRAM), str(folder), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEETING": meeting, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    found = {result["setting"]: result for result in map(json.loads, lines)}
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(found) == set(settings)
    return found


@functools.cache
def deepspeeds_own_op_writes_to_nvme() -> bool:
    """Asks DeepSpeed whether libaio is here, which its own op is built with; ours does not need it."""
    program = (
        "from deepspeed.ops.op_builder import AsyncIOBuilder; print(AsyncIOBuilder().is_compatible(False))"
    )
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1] == "True"


def settings_of(load: str) -> tuple[str, ...]:
    if "ops" in load:
        return (*OFFLOADED, *NVME)  # the others use none of these ops
    return (*WHOLE, *OFFLOADED, *(NVME if deepspeeds_own_op_writes_to_nvme() else ()))


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What the tests below found; printed after the last of them."""
    found: Table = {}
    yield found
    lines = ["\n\nThe loss of the last step:\n", f"| ZeRO, offload, dtype | ranks | {' | '.join(LOADS)} |"]
    lines.append(f"|---|---|{'---|' * len(LOADS)}")
    for ranks, setting in itertools.product((1, 2), (*WHOLE, *OFFLOADED, *NVME)):
        losses = [found.get((ranks, load), {}).get(setting) for load in LOADS]
        cells = " | ".join(f"{loss[-1]:.9f}" if loss else "" for loss in losses)
        lines.append(f"| {setting.replace(',', ', ')} | {ranks} | {cells} |")
    # What a fixture writes at its end belongs to a test that passed, and pytest would keep it.
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.get_terminal_writer().line("\n".join(lines))


def own_losses(table: Table, ranks: int, folder: Path) -> Losses:
    """Returns those of DeepSpeed's own accelerator, which are computed once."""
    if (ranks, "own") not in table:
        found = results("own", ranks, settings_of("own"), folder)
        table[ranks, "own"] = {setting: ran["losses"] for setting, ran in found.items()}
    return table[ranks, "own"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("load", [load for load in LOADS if load != "own"])
def test_losses_are_those_of_deepspeeds_own_accelerator(
    load: str, ranks: int, table: Table, tmp_path: Path
) -> None:
    own = own_losses(table, ranks, tmp_path)
    found = results(load, ranks, settings_of(load), tmp_path)
    table[ranks, load] = {setting: ran["losses"] for setting, ran in found.items()}
    for setting, ran in found.items():
        # Where the states lie changes no loss.
        theirs = own.get(setting) or own[setting.replace("nvme", "cpu")]
        assert ran["accelerator"] == "AcclimateAccelerator"
        assert ran["device"].partition(":")[0] == load.partition(",")[0]
        assert ran["builder"].startswith("acclimate." if "ops" in load else "deepspeed.")
        if "ops" in load:  # another kernel for Adam rounds elsewhere
            assert ran["losses"] == pytest.approx(theirs, rel=2e-2 if "bf16" in setting else 1e-5)
        else:
            assert ran["losses"] == theirs, setting


CHECKPOINTS = ("1,cpu,fp32", "2,cpu,bf16", "3,cpu,fp32")
THREE = ("own", "cpu", "sim")


def test_the_program_of_the_page_trains_on_two_ranks(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "deepspeed.md"
    found = re.search(r"```python\n(# train.py\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (tmp_path / "train.py").write_text(found[1])
    launcher = [sys.executable, "-m", "acclimate", "run", "--deepspeed", "--num_accelerators", "2"]
    done = subprocess.run(
        [*launcher, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+) on cpu", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_one_accelerator_goes_on_with_the_same_losses_on_another(
    ranks: int, tmp_path: Path
) -> None:
    def losses(load: str, what: str, writers: tuple[str, ...]) -> list[list[list[float]]]:
        wanted = [[f"{checkpoint},{what},{writer}" for checkpoint in CHECKPOINTS] for writer in writers]
        found = results(load, ranks, tuple(itertools.chain(*wanted)), tmp_path)
        return [[found[setting]["losses"] for setting in settings] for settings in wanted]

    saved = [losses(load, "save", (load,)) for load in THREE]
    assert saved[0] == saved[1] == saved[2]
    # After a checkpoint, DeepSpeed's Adam computes the powers of its betas anew: the last digits differ from
    # those of a run that goes on, so a loaded one is compared with one that was loaded.
    loaded = {load: losses(load, "load", THREE) for load in THREE}
    expected = loaded["own"][0]
    assert loaded == {load: [expected] * len(THREE) for load in THREE}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_inference_gives_the_logits_of_deepspeeds_own_accelerator(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = tuple(f"infer,none,{dtype}" for dtype in DTYPES)
    found = {load: results(load, ranks, settings, tmp_path) for load in THREE}
    for setting in settings:
        for load in ("cpu", "sim"):
            assert found[load][setting]["losses"] == found["own"][setting]["losses"], (load, setting)
            assert found[load][setting]["device"].partition(":")[0] == load
