"""A device is not ported safely beside code that runs with CUDA or on a host alone, whatever its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
USES = f"def f(model, x):\n    device = {CHOICE}\n    return torch.ones(1, device=device)\n"

UNSAFE = {
    "a package that the file needs": f"import torch\nfrom flash_attn import flash_attn_func\n\n\n{USES}",
    "operators of a CPU and CUDA": (
        f"import torch\nfrom torch_cluster import knn_graph\n\n\n{USES}\n\ndef g(x):\n    return knn_graph(x)\n"
    ),
    "an old class with a device": (
        f"import torch\n\n\n{USES}\n\ndef g(x, device):\n    return torch.LongTensor(x, device=device)\n"
    ),
    "NVIDIA's server": f"import torch\nimport triton_python_backend_utils as server\n\n\n{USES}",
    "models of fastai": f"import torch\nfrom fastai.vision.all import *\n\n\n{USES}",
    "ranks of Horovod": f"import horovod.torch as hvd\nimport torch\n\nhvd.init()\n\n\n{USES}",
    "an agent that chooses its device": (
        f"import torch\nfrom stable_baselines3 import PPO\n\nagent = PPO('MlpPolicy', 'Pendulum-v1')\n\n\n{USES}"
    ),
    "a callback of catalyst": (
        f"import torch\nfrom catalyst import dl\n\n\nclass Own(dl.Callback):\n    def f(self, x):\n        return torch.ones(1, device={CHOICE})\n"
    ),
    "kernels of numba": f"import torch\nfrom numba import cuda\n\n\n{USES}",
    "64 bits by default": f"import torch\n\ntorch.set_default_dtype(torch.float64)\n\n\n{USES}",
    "64 bits by a name": f"import torch\n\ndtype = torch.double\ntorch.set_default_dtype(dtype)\n\n\n{USES}",
    "a model of 64 bits": f"import torch\n\n\ndef f(net):\n    device = {CHOICE}\n    return net.double().to(device)\n",
    "options of 64 bits": f"import torch\n\n\ndef f():\n    return dict(a=1, b={{'dtype': torch.double, 'device': {CHOICE}}})\n",
    "a class of Lightning": (
        "import pytorch_lightning as pl\nimport torch\n\n\nclass Net(pl.LightningModule):\n    def training_step(self, x):\n"
        f"        return torch.ones(1, device={CHOICE})\n"
    ),
    "a metric of Lightning's model": (
        "import pytorch_lightning\nimport torch\nimport torchmetrics\n\n\nclass Own(torchmetrics.Metric):\n"
        f"    def update(self, x):\n        return torch.ones(1, device={CHOICE})\n"
    ),
    "the device of a module beside such a class": (
        f"import pytorch_lightning as pl\nimport torch\n\ndevice = torch.device({CHOICE})\n\n\n"
        "class Net(pl.LightningModule):\n    def forward(self, x):\n        return x.to(device)\n"
    ),
    "a trainer elsewhere in the file": (
        f"import pytorch_lightning as pl\nimport torch\n\n\n{USES}\n\ndef g(model):\n"
        "    pl.Trainer(accelerator='gpu', devices=1).fit(model)\n"
    ),
    "a method of another library's object": (
        f"import torch\nfrom ultralytics import YOLO\n\n\ndef f(x):\n    net = YOLO('n')\n    return net.predict(x, device={CHOICE})\n"
    ),
    "a decoder": f"import torch\nimport torchvision\n\n\ndef f(x):\n    return torchvision.io.decode_jpeg(x, device={CHOICE})\n",
    "the name of a file that is read": (
        f"import torch\n\n\ndef f():\n    device = {CHOICE}\n    return torch.load(f'net_{{device}}.pt', map_location=device)\n"
    ),
}
ACCELERATOR = {
    "keywords of a dictionary": f"kw = dict(accelerator={CHOICE})\n    return pl.Trainer(**kw)",
    "a dictionary": f"kw = {{'accelerator': {CHOICE}}}\n    return pl.Trainer(**kw)",
    "an entry": f"kw = {{}}\n    kw['accelerator'] = {CHOICE}\n    return pl.Trainer(**kw)",
    "an attribute": f"cfg.trainer.accelerator = {CHOICE}\n    return hydra.utils.instantiate(cfg.trainer)",
    "an option": f"parser.add_argument('--accelerator', default={CHOICE})\n    return parser.parse_args()",
    "an argument of the project's own": f"return run(accelerator={CHOICE})",
}
SAFE = {
    "an optional package": (
        f"import torch\n\ntry:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n\n\n{USES}"
    ),
    "64 bits on the host": f"import torch\n\n\n{USES}\n\ndef g(x):\n    return x.cpu().double()\n",
    "a function beside a class of Lightning": (
        f"import pytorch_lightning as pl\nimport torch\n\n\n{USES}\n\nclass Net(pl.LightningModule):\n    pass\n"
    ),
    "a message with the device": f"import torch\n\n\ndef f():\n    device = {CHOICE}\n    print(f'runs on {{device}}')\n    return torch.ones(1, device=device)\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", UNSAFE)
def test_a_device_beside_code_for_cuda_and_the_host_alone_is_unsafe(kind: str, target: str) -> None:
    assert port_text(UNSAFE[kind], Settings(target)).text == UNSAFE[kind]


@EACH_TARGET
@pytest.mark.parametrize("kind", SAFE)
def test_a_device_that_such_code_does_not_get_is_ported(kind: str, target: str) -> None:
    assert "'cuda'" not in port_text(SAFE[kind], Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize("kind", ACCELERATOR)
def test_the_word_for_lightnings_accelerator_stays(kind: str, target: str) -> None:
    source = f"import hydra\nimport pytorch_lightning as pl\nimport torch\n\n\ndef f(cfg, parser, run):\n    {ACCELERATOR[kind]}\n"
    assert port_text(source, Settings(target, unsafe=True)).text == source


@EACH_TARGET
def test_a_trainer_holds_back_the_devices_of_the_files_that_its_program_uses(
    target: str, tmp_path: Path
) -> None:
    files = {
        "train.py": "import pytorch_lightning as pl\nfrom net import f\n\n\ndef main(net):\n    pl.Trainer(accelerator='gpu').fit(f(net))\n",
        "net.py": f"import torch\n\n\n{USES}",
    }
    found = ported_project(tmp_path, files, target)["net.py"]
    assert {one.status for one in found.sites} == {Status.UNSAFE}


@EACH_TARGET
def test_a_module_that_needs_a_package_for_nvidia_holds_back_those_that_import_it(
    target: str, tmp_path: Path
) -> None:
    for head, status in (
        ("import xformers.ops\n", Status.UNSAFE),
        ("try:\n    import xformers.ops\nexcept ImportError:\n    pass\n", Status.CONVERTED),
    ):
        files = {
            "main.py": f"import torch\nfrom attend import attend\n\n\n{USES}",
            "attend.py": f"{head}\n\ndef attend(x):\n    return x\n",
        }
        found = ported_project(tmp_path, files, target)["main.py"]
        assert site(found, CHOICE).status is status
