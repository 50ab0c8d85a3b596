"""A process that imports torch has the device, if the environment names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_process import run_program

SPAWN = """
import multiprocessing
import torch

def multiply(queue):
    import sys
    value = torch.ones(2, 2, device="sim:1")
    queue.put(((value @ value).sum().item(), str(value.device), "acclimate_sim" in sys.modules))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=multiply, args=(queue,))
    child.start()
    child.join()  # what it says fits into the pipe, and a child that fails says nothing
    print(queue.get() if child.exitcode == 0 else f"exit code {child.exitcode}")
"""


@pytest.mark.slow
def test_a_spawned_child_makes_tensors_without_importing_acclimate(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    printed = run_program(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert printed == "(8.0, 'sim:1', True)"


def test_torch_can_be_imported_where_the_device_cannot_be_made() -> None:
    assert run_program("import torch; print(torch.ones(2).sum().item())", profile="devices=0") == "2.0"


def test_acclimate_and_torch_may_be_imported_in_either_order() -> None:
    for order in ("import torch; import acclimate", "import acclimate; import torch"):
        program = (
            f"{order}; acc = acclimate.get_accelerator(); print(acc.name, torch.ones(2, device='sim').device)"
        )
        assert run_program(program) == "sim sim:0"
