"""A device that may reach an object of another library, or that nothing shows to be one, is not ported safely."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
OBJECTS = {
    "a graph of DGL": (
        "import dgl\nimport torch\n\ndevice = 'cpu'\nif torch.cuda.is_available():\n    device = torch.device('cuda')\n\n\n"
        "def f(edges):\n    g = dgl.graph(edges)\n    return g.to(device)\n"
    ),
    "a graph of DGL from another package": (
        "import torch\nfrom ogb.linkproppred import DglLinkPropPredDataset\n\ndevice = 'cpu'\nif torch.cuda.is_available():\n"
        "    device = torch.device('cuda')\n\n\ndef f(name):\n    data = DglLinkPropPredDataset(name)[0]\n    return data.to(device)\n"
    ),
    "an object of a kernel library that another function imports": (
        "import torch\n\n\ndef kernels():\n    from nvalchemiops.torch import D3Parameters\n\n    return D3Parameters\n\n\n"
        "class Calculator:\n    def __init__(self, parameters):\n"
        "        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "        self.parameters = kernels()(**parameters).to(device=self.device)\n"
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_device_for_an_object_of_another_library_is_unsafe(kind: str, target: str, tmp_path: Path) -> None:
    ported = ported_project(tmp_path, {"main.py": OBJECTS[kind]}, target)["main.py"]
    assert not ported.changed
    assert all(one.reason for one in ported.sites)


@EACH_TARGET
def test_a_module_in_a_file_of_sparse_layers_is_not_moved(target: str, tmp_path: Path) -> None:
    source = (
        "import spconv\nimport torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.conv = spconv.SubMConv3d(3, 4, 3)\n\n\ndef f():\n    return Net().cuda()\n"
    )
    for library, is_ported in (("spconv", False), ("einops", True)):
        files = {"net.py": source.replace("spconv", library)}
        assert ported_project(tmp_path / library, files, target)["net.py"].changed == is_ported


@EACH_TARGET
def test_a_model_of_sparse_layers_keeps_the_tensors_of_its_program_on_cuda(
    target: str, tmp_path: Path
) -> None:
    net = (
        "import spconv\nimport torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.grid = torch.full([3, 4], -1).cuda()\n        self.conv = spconv.SubMConv3d(3, 4, 3)\n"
    )
    run = f"import torch\nfrom net import Net\n\ndevice = torch.device({CHOICE})\n\n\ndef main():\n    return Net().to(device)\n"
    results = ported_project(tmp_path, {"net.py": net, "run.py": run}, target)
    assert not any(one.changed for one in results.values())


@EACH_TARGET
def test_a_device_for_an_object_that_another_module_makes_is_unsafe(target: str, tmp_path: Path) -> None:
    files = {
        "pkg/graphs.py": "try:\n    import dgl\nexcept ImportError:\n    dgl = None\n\n\ndef graph(atoms):\n    return dgl.graph(atoms)\n",
        "pkg/predict.py": "import torch\nfrom pkg.graphs import graph\n\n\ndef predict(atoms):\n"
        f"    device = {CHOICE}\n    return graph(atoms).to(device)\n",
    }
    found = site(ported_project(tmp_path, files, target)["pkg/predict.py"], CHOICE)
    assert found.status is Status.UNSAFE
    assert "graphs.py:8 runs code" in found.reason


CONFIG = "import torch\n\n\ndef get():\n    return {'threads': torch.get_num_threads()}\n"


@EACH_TARGET
def test_a_text_of_data_in_a_file_without_torch_stays(target: str, tmp_path: Path) -> None:
    source = (
        "import json\n\nfrom config import get\n\n\nclass Metadata:\n    rand_device = None\n\n\n"
        "def parse():\n    made = Metadata()\n    made.rand_device = 'cuda'\n    return json.dumps([get(), vars(made)])\n"
    )
    results = ported_project(tmp_path, {"config.py": CONFIG, "parse.py": source}, target)
    assert not results["parse.py"].changed


@EACH_TARGET
def test_a_device_that_a_call_takes_is_ported_in_a_file_without_torch(target: str, tmp_path: Path) -> None:
    source = "from nets import Net\n\n\ndef run():\n    place = 'cuda'\n    return Net().to(place)\n"
    nets = "import torch\n\n\nclass Net(torch.nn.Module):\n    pass\n"
    assert ported_project(tmp_path, {"nets.py": nets, "run.py": source}, target)["run.py"].changed


SETUP = f"import {{module}}\nimport torch\n\n\ndef setup(args):\n    args['device'] = torch.device({CHOICE})\n    return {{module}}.make()\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("module", "name", "status"),
    [
        ("dgl", "bg", Status.UNSAFE),
        ("dgllife", "batch_graph", Status.UNSAFE),
        ("dgl", "x", Status.UNSAFE),
        ("networkx", "bg", Status.CONVERTED),
    ],
)
def test_a_graph_that_another_file_moves_keeps_the_device_of_its_program(
    module: str, name: str, status: Status, target: str, tmp_path: Path
) -> None:
    run = f"from utils import setup\n\n\ndef main(args):\n    {name} = setup(args)\n    return {name}.to(args['device'])\n\n\nmain({{}})\n"
    files = {"utils.py": SETUP.format(module=module), "run.py": run}
    assert site(ported_project(tmp_path, files, target)["utils.py"], CHOICE).status is status
