"""Other projects' libraries and test suites use sim as their device."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_process import run_program, run_python

TRAIN = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from acclimate.compat.accelerate import accelerator_options
options = accelerator_options()
from accelerate import Accelerator
from accelerate.utils import set_seed

trainer = Accelerator(mixed_precision="bf16", **options)
set_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.ones(32, 1)), batch_size=4)
model, optimizer, loader = trainer.prepare(model, optimizer, loader)
losses = []
for rows, targets in loader:
    loss = mse_loss(model(rows), targets)
    trainer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weights = trainer.gather(next(model.parameters()))
"""


def test_accelerate_trains_and_divides_a_model_over_the_devices() -> None:
    pytest.importorskip("accelerate")
    program = f"""{TRAIN}
print(trainer.device, rows.device, losses[-1] < losses[0])

from accelerate import dispatch_model, infer_auto_device_map
from acclimate.compat.accelerate import max_memory
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
free = max_memory()
print(sorted(map(str, free)), free[1] > 15 << 30)
parts = infer_auto_device_map(layers, max_memory={{0: 40_000, 1: 40_000, "cpu": free["cpu"]}})
divided = dispatch_model(layers, parts)
print(sorted(set(map(str, parts.values()))), divided[0].weight.device, divided[1].weight.device)
print(divided(torch.ones(1, 64)).shape)
"""
    assert run_program(program).splitlines() == [
        "sim:0 sim:0 True",
        "['0', '1', 'cpu'] True",
        "['0', '1', 'cpu'] sim:0 sim:1",
        "torch.Size([1, 64])",
    ]


def test_a_loaded_state_continues_the_random_numbers_of_the_device_and_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program = f"""
import logging, torch
from accelerate import Accelerator
from acclimate.compat.accelerate import accelerator_options, keep_random_state
logging.basicConfig(format="%(message)s")
trainer = Accelerator(**accelerator_options())
keep_random_state(trainer)
trainer.prepare(torch.nn.Linear(2, 2))
draw = lambda: [torch.rand(3, device=device).cpu() for device in ("sim:0", "sim:1", "cpu")]
draw()
trainer.save_state({str(tmp_path / "state")!r})
drawn = draw()
draw()
trainer.load_state({str(tmp_path / "state")!r})
print(*map(torch.equal, drawn, draw()))
(__import__("pathlib").Path({str(tmp_path / "state")!r}) / "acclimate_random_states_0.pt").unlink()
trainer.load_state({str(tmp_path / "state")!r})
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * 3
    assert "the random numbers of sim continue" in result.stderr


@pytest.mark.slow
def test_accelerate_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(f"""{TRAIN}
same = bool((weights[0] == weights[1]).all())
with open({str(tmp_path)!r} + f"/{{trainer.process_index}}", "w") as file:
    print(trainer.num_processes, trainer.device, type(model).__name__, same, file=file)
trainer.end_training()
""")
    run = run_python("-m", "acclimate", "run", "--num_accelerators", "2", str(script))
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"2 sim:{rank} DistributedDataParallel True\n"


def test_a_projects_own_tests_see_sim_as_the_accelerator_and_keep_their_default_device(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_own.py").write_text("""
import os
import torch

DEVICE = torch.accelerator.current_accelerator()

def test_own():
    assert torch.zeros(2, device=DEVICE).device == torch.device("sim:0")
    assert torch.zeros(2).device == torch.device("cpu")
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "sim"
""")
    run = run_python(
        "-m", "pytest", "-p", "no:cacheprovider", "--on-accelerator", "sim", "--sim-profile", "mps-like",
        str(tmp_path), accelerator=None,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "accelerator: sim, 1 device of type sim, TRANSFORMERS_TEST_DEVICE=sim" in run.stdout


@pytest.mark.slow
def test_transformers_tests_take_the_device_specification(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "sim_device.py").write_text("from acclimate_sim.transformers_device import *\n")
    (tmp_path / "test_device.py").write_text("""
from transformers import testing_utils

def test_device():
    assert testing_utils.torch_device == "sim"
    assert testing_utils.backend_device_count("sim") == 2
    testing_utils.backend_manual_seed("sim", 1)
    testing_utils.backend_empty_cache("sim")
""")
    program = f"""
import os, sys, pytest
os.chdir({str(tmp_path)!r})
os.environ["TRANSFORMERS_TEST_DEVICE_SPEC"] = "sim_device.py"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "."]))
"""
    run = run_python("-c", program)
    assert run.returncode == 0, run.stdout + run.stderr
