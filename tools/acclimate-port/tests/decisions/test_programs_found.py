"""Each file of a program is found: by `import *`, in tables of modules, and where two folders hold a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
WIDE = (
    "import numpy as np\nimport torch\n\n\nclass Base:\n    def __init__(self):\n        self.t = np.linspace(0, 1, 9)\n\n"
    "    def at(self, device):\n        return torch.from_numpy(np.linspace(0, 1, 9)).to(device)\n"
)
USES = {
    "a base class": "class Spaced(Base):\n    pass\n",
    "an object": "def Spaced():\n    return Base()\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", USES)
def test_a_name_that_comes_by_a_star_is_the_one_of_the_nearest_folder(
    kind: str, target: str, tmp_path: Path
) -> None:
    spaced = f"from diffusion.base import *\n\n\n{USES[kind]}"
    main = f"import torch\nfrom diffusion.spaced import Spaced\n\n\ndef run():\n    return Spaced().at({CHOICE})\n"
    files = {f"one/{name}": text for name, text in (("main.py", main), ("diffusion/spaced.py", spaced))}
    files |= {name.replace("one/", "two/"): text for name, text in files.items()}
    files["one/diffusion/base.py"] = WIDE
    files["two/diffusion/base.py"] = WIDE.replace("9))", "9, dtype=np.float32))")
    results = ported_project(tmp_path, files, target)
    found = site(results["one/main.py"], CHOICE)
    assert found.status is Status.UNSAFE, found
    assert "one/diffusion/base.py:10" in found.reason, found
    assert site(results["two/main.py"], CHOICE).status is Status.CONVERTED


@EACH_TARGET
def test_each_module_of_a_table_that_a_function_makes_may_be_meant(target: str, tmp_path: Path) -> None:
    layer = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, n):\n        return torch.arange(n).cuda()\n"
    main = (
        "import torch\nfrom models import linear, wave\n\n\ndef build(name, x):\n"
        "    table = {'linear': linear, 'wave': wave}\n    x.cuda()\n    return table[name].Model()\n"
    )
    files = {"models/__init__.py": "", "models/linear.py": layer, "models/wave.py": layer, "main.py": main}
    results = ported_project(tmp_path, files, target)
    for name in ("models/linear.py", "models/wave.py"):
        found = site(results[name], "torch.arange(n).cuda()")
        assert found.status is Status.UNSAFE, found
        assert "main.py:7" in found.reason, found


@EACH_TARGET
def test_a_file_that_imports_itself_is_found(target: str, tmp_path: Path) -> None:
    work = "import GPUtil\nimport torch\n\n\ndef work(rank, count):\n    torch.cuda.set_device(rank)\n    GPUtil.showUtilization()\n\n\n"
    start = (
        "def start():\n    from train import work\n\n    count = torch.cuda.device_count()\n"
        "    torch.multiprocessing.spawn(work, nprocs=count, args=(count,))\n"
    )
    found = site(
        ported_project(tmp_path, {"train.py": work + start}, target)["train.py"], "torch.cuda.device_count()"
    )
    assert found.status is Status.UNSAFE, found
    assert "line 6" in found.reason, found


@EACH_TARGET
def test_a_count_for_workers_on_any_device_is_ported(target: str, tmp_path: Path) -> None:
    text = (
        "import torch\n\n\ndef work(rank):\n    torch.cuda.set_device(rank)\n\n\ndef start():\n"
        "    count = torch.cuda.device_count()\n    torch.multiprocessing.spawn(work, nprocs=count)\n"
    )
    results = ported_project(tmp_path, {"train.py": text}, target)
    assert site(results["train.py"], "torch.cuda.device_count()").status is Status.CONVERTED


def test_a_file_that_is_only_read_may_have_a_number_for_a_device(tmp_path: Path) -> None:
    own = (
        "import somelib\nimport torch\nfrom flags import has_gpu\n\n\nclass Own(torch.nn.Module):\n"
        "    def sample(self, where: int):\n        return torch.randn(2).to(where) if has_gpu() else None\n"
    )
    run = "import torch\nfrom own import Own\n\nprint(Own(), 'nvidia' if torch.ones(1).device.type == 'cuda' else 'x')\n"
    files = {
        "flags.py": "import torch\n\n\ndef has_gpu():\n    return torch.cuda.is_available()\n",
        "own.py": own,
        "run.py": run,
    }
    results = ported_project(tmp_path, files, "acclimate")
    assert site(results["flags.py"], "torch.cuda.is_available()").status is Status.UNSAFE
    assert "own.py" not in results


@EACH_TARGET
def test_a_device_in_settings_that_a_package_gives_on_under_another_name_is_of_the_program(
    target: str, tmp_path: Path
) -> None:
    count = "torch.cuda.device_count()"
    files = {
        "config/__init__.py": "from .defaults import _C as cfg\n",
        "config/defaults.py": "from yacs.config import CfgNode\n\n_C = CfgNode()\n_C.MODEL = CfgNode()\n_C.MODEL.DEVICE = 'cuda'\n",
        "engine.py": f"import torch\n\n\ndef run(cfg, model):\n    if {count} > 1:\n        model = torch.nn.DataParallel(model)\n"
        "    return model.to(cfg.MODEL.DEVICE)\n",
        "train.py": "from config import cfg\nfrom engine import run\n\n\ndef main(model):\n    run(cfg, model)\n",
    }
    found = site(ported_project(tmp_path, files, target)["engine.py"], count)
    assert found.status is Status.UNSAFE, found
    assert "defaults.py:5" in found.reason


KEPT = "import torch\n{imports}\n\ndef main(model):\n    model.cuda()\n{uses}\n\nmain(1)\n"
EYE = "torch.eye(3).cuda()"
TOOLS = f"import torch\n\n\ndef grid():\n    return {EYE}\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("main", "status"),
    [
        (KEPT.format(imports="", uses=""), Status.UNSAFE),
        (KEPT.format(imports="from tools import grid\n", uses="    grid()\n"), Status.UNSAFE),
        ("import torch\n\nprint(torch.zeros(3).cuda())\n", Status.CONVERTED),
        ("import tools\n\nprint(tools.grid())\n", Status.CONVERTED),
    ],
)
def test_code_that_nothing_runs_stays_with_the_programs_of_the_project(
    main: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {"tools.py": TOOLS, "main.py": main}
    assert site(ported_project(tmp_path, files, target)["tools.py"], EYE).status is status


@EACH_TARGET
def test_code_that_nothing_runs_holds_no_other_code_of_its_file_back(target: str, tmp_path: Path) -> None:
    tools = f"{TOOLS}\n\nDEVICE = {CHOICE}\n\n\ndef ones():\n    return torch.ones(3).to(DEVICE)\n"
    files = {
        "tools.py": tools,
        "main.py": KEPT.format(imports="", uses=""),
        "other.py": "from tools import ones\n\nprint(ones())\n",
    }
    found = ported_project(tmp_path, files, target)["tools.py"]
    assert site(found, EYE).status is Status.UNSAFE
    assert site(found, CHOICE).status is Status.CONVERTED
