"""The example on every backend, over a module with its vendor's recorded names on the emulated device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training import log_of, train

sys.path.append(str(Path(__file__).parents[1] / "backends"))  # also where only these tests are run

from stand_ins.folder import make_environment
from stand_ins.ways import WAYS

pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("called", WAYS)
def test_the_same_script_learns_on_every_backend(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_where_torch_is_built_for(WAYS[called].device_type)
    if WAYS[called].visible_devices:  # with which tests hide this machine's own GPUs
        monkeypatch.delenv(WAYS[called].visible_devices, raising=False)
    folder = tmp_path / "stand_in"
    folder.mkdir()
    found = train(tmp_path / "run", steps=12, env=make_environment(called, WAYS[called], folder))
    assert found[0]["loss"] > 5.2
    assert found[-1]["loss"] < 4.2
    assert log_of(tmp_path / "run").read_text().startswith(f"{WAYS[called].accelerator}: a stand-in for ")


def skip_where_torch_is_built_for(device_type: str) -> None:
    import torch

    built = {"cuda": torch.backends.cuda.is_built(), "mps": torch.backends.mps.is_built()}
    if (built | {"xpu": torch.xpu._is_compiled()}).get(device_type, False):
        pytest.skip(f"this torch is built for {device_type}, whose place a stand-in cannot take")
