"""A device that a file of settings gives a program, and a file that cannot be read, are halves of it too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.settings_files import devices_given, read_all
from porting import ported_project, site

SITE = "torch.cuda.is_available()"
MAIN = """import torch
{head}


{decorator}
def main(args):
    model = torch.nn.Linear(2, 2)
    if torch.cuda.is_available():
        model.cuda()
    torch.distributed.init_process_group(args.ddp_backend)
    return model(torch.zeros(1, 2).to(args.device))
"""
YAML = "lr: 0.1\ndevice: cuda\n"
PROGRAMS = {
    "a path in hydra's decorator": ("import hydra", '@hydra.main(config_path="conf/config.yaml")', YAML),
    "a folder and a name": ("import hydra", '@hydra.main(config_path="conf", config_name="config")', YAML),
    "a file that is loaded": ("import yaml\n\nCONFIG = yaml.safe_load(open('conf/config.yaml'))", "", YAML),
    "a backend": (
        "from omegaconf import OmegaConf\n\nC = OmegaConf.load('conf/config.yaml')",
        "",
        "ddp_backend: nccl\n",
    ),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_whose_settings_name_cuda_is_not_ported_without_them(kind: str, tmp_path: Path) -> None:
    head, decorator, settings = PROGRAMS[kind]
    files = {"train.py": MAIN.format(head=head, decorator=decorator), "conf/config.yaml": settings}
    found = site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE)
    assert found.status is Status.UNSAFE
    assert "config.yaml:" in found.reason
    assert "gives the same program its device" in found.reason
    free = {**files, "conf/config.yaml": "device: cpu\n"}
    assert site(ported_project(tmp_path, free, "acclimate")["train.py"], SITE).status is Status.CONVERTED


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"device": "cuda:0"}'),
        ("config.toml", '[run]\ndevice = "cuda"\n'),
    ],
)
def test_settings_in_other_formats_count_too(name: str, text: str, tmp_path: Path) -> None:
    files = {"train.py": MAIN.format(head=f"CONFIG = open('{name}')", decorator=""), name: text}
    found = site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE)
    assert found.status is Status.UNSAFE
    assert name in found.reason


def test_settings_that_others_choose_count_too(tmp_path: Path) -> None:
    files = {
        "train.py": MAIN.format(
            head="import hydra", decorator='@hydra.main(config_path="conf", config_name="config")'
        ),
        "conf/config.yaml": "defaults:\n  - run: gpu\n  - _self_\n\nlr: 1\n",
        "conf/run/gpu.yaml": YAML,
        "conf/run/other.yaml": "backend: nccl\n",
    }
    found = site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE)
    assert found.status is Status.UNSAFE
    assert "gpu.yaml:2" in found.reason


def test_settings_that_the_program_does_not_read_do_not_count(tmp_path: Path) -> None:
    head, decorator, _ = PROGRAMS["a file that is loaded"]
    text = MAIN.format(head=head, decorator=decorator)
    files = {"train.py": text, "conf/config.yaml": "dist:\n  backend: nccl\n"}
    assert site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE).status is Status.CONVERTED
    files["train.py"] = f"import net\n{text}"
    files["net.py"] = "import torch\n\n\ndef init(opt):\n    return opt['dist']['backend']\n"
    assert site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE).status is Status.UNSAFE


def test_settings_that_the_program_does_not_name_do_not_count(tmp_path: Path) -> None:
    files = {"train.py": MAIN.format(head="", decorator=""), "conf/config.yaml": YAML}
    assert site(ported_project(tmp_path, files, "acclimate")["train.py"], SITE).status is Status.CONVERTED


def test_only_a_device_or_a_backend_counts() -> None:
    assert devices_given("a.json", '{"name": "cuda"}') == {}
    assert devices_given("a.json", '{\n"device": "cpu",\n"dist_backend": "nccl"}') == {"dist_backend": 3}
    assert devices_given("a.yml", "# device: cuda\nname: cuda\nrun-device: cuda") == {"run_device": 3}


NET = "import torch\n\n\ndef new():\n    return torch.nn.Linear(2, 2).cuda()\n"
REFUSED = "import torch\nfrom net import (\n    new,\n)\n\nx = torch.zeros(1, 2){}\nprint new()(x)\n"


def test_what_a_refused_file_imports_is_not_ported_without_it(tmp_path: Path) -> None:
    files = {"net.py": NET, "train.py": REFUSED.format(".cuda(async=True)")}
    found = ported_project(tmp_path, files, "acclimate", refused=["train.py"])["net.py"].sites[0]
    assert found.status is Status.UNSAFE
    assert "train.py:6" in found.reason


@pytest.mark.parametrize(
    "text", ["import torch\nx = torch.zeros(1).cuda(async=True)\n", REFUSED.format("  # cuda")]
)
def test_a_refused_file_without_the_import_or_without_cuda_does_not_count(text: str, tmp_path: Path) -> None:
    files = {"net.py": NET, "train.py": text}
    found = ported_project(tmp_path, files, "acclimate", refused=["train.py"])["net.py"]
    assert found.sites[0].status is Status.CONVERTED


BROKEN = """\
import torch


class Factory:
    def make(opt):
        from nets import Net
        return Net(opt)


class Net:
    def __init__(self, opt):
        self.net = torch.nn.Linear(4, 4)
        self.net{move}
        print "made"
"""
RUNS_BOTH = "import options\nfrom models import Factory\n\n\ndef main(opt):\n    options.start(opt)\n    Factory.make(opt)\n"
OPTIONS = "import torch\n\n\ndef start(opt):\n    torch.cuda.set_device(opt.gpu)\n"


@pytest.mark.parametrize("move", [".cuda()", ".train()  # cuda"])
@pytest.mark.parametrize("through", [True, False])
def test_what_a_program_runs_of_a_refused_file_holds_its_device_back(
    move: str, through: bool, tmp_path: Path
) -> None:
    names = ("nets.py", "models.py") if through else ("models.py",)
    broken = BROKEN.format(move=move)
    files = {"main.py": RUNS_BOTH, "options.py": OPTIONS, **dict.fromkeys(names, broken)}
    if through:  # the first one only gives on what it makes
        files["models.py"] = BROKEN.format(move=".train()  # cuda")
    found = ported_project(tmp_path, files, "acclimate", refused=sorted(names))["options.py"].sites[0]
    assert (found.status is Status.CONVERTED) == (move != ".cuda()")


def test_settings_that_this_user_may_not_read_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's answer is replaced, since tests may run as root, who may read all files."""
    for name in ("closed.yaml", "open.yaml"):
        (tmp_path / name).write_text("device: cuda\n")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed.yaml")
    assert [*read_all([tmp_path / "train.py"])] == [tmp_path / "open.yaml"]
