"""What stays and raises without CUDA ends a program on another device: its device is not ported either."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

KEEPS = 'def keep(model, path):\n    model.memory = torch.load(path)["model"]\n'
COPIES = (
    "def keep(model, path):\n    saved = torch.load(path)\n    state = saved['model']\n"
    "    model.load_state_dict(state)\n"
)
MOVES = "import torch\n{}\n\ndef f(model):\n{}    return model(torch.ones(1).cuda())\n"


@pytest.mark.parametrize("call", ["torch.cuda.ipc_collect()", "torch.cuda.memory_summary()"])
@pytest.mark.parametrize("guard", [False, True])
def test_a_call_that_raises_without_cuda_holds_the_device_back(
    call: str, guard: bool, tmp_path: Path
) -> None:
    line = f"try:\n        {call}\n    except Exception:\n        pass" if guard else call
    files = {"main.py": MOVES.format("", f"    {line}\n")}
    for target in ("torch", "acclimate"):
        found = site(ported_project(tmp_path, files, target)["main.py"], "torch.ones(1).cuda()")
        stays = target == "torch" and not guard  # acclimate has both
        assert (found.status is Status.UNSAFE) == stays, (target, found)


@EACH_TARGET
def test_a_load_to_where_a_checkpoint_was_saved_holds_back_what_runs_it(target: str, tmp_path: Path) -> None:
    files = {
        "utils.py": f"import torch\n\n\n{KEEPS}",
        "run.py": MOVES.format("from utils import keep\n", "    keep(model, 'x.pth')\n"),
        "through.py": "import utils\n\n\ndef both(model):\n    utils.keep(model, 'y.pth')\n",
        "main.py": MOVES.format("from through import both\n", "    both(model)\n"),
        "other.py": MOVES.format("import utils\n", ""),
    }
    results = ported_project(tmp_path, files, target)
    for name in ("run.py", "main.py"):
        found = site(results[name], "torch.ones(1).cuda()")
        assert found.status is Status.UNSAFE, found
        assert "utils.py:5 loads a checkpoint" in found.reason, found
    assert site(results["other.py"], "torch.ones(1).cuda()").status is Status.CONVERTED
    files["utils.py"] = f"import torch\n\n\n{COPIES}"
    results = ported_project(tmp_path, files, target)
    assert site(results["run.py"], "torch.ones(1).cuda()").status is Status.CONVERTED
    assert 'torch.load(path, map_location="cpu")' in results["utils.py"].after.replace("'", '"')
