"""What one file says about a class counts in the files that use it."""

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status
from acclimate_port.files.workers import port_files
from acclimate_port.source.survey import joined, survey
from porting import EACH_TARGET, ported_project, site

torch = pytest.importorskip("torch", reason="runs ported code")

GENERATOR = "class Generator(object):\n    def __init__(self, models):\n        self.models = models\n\n    def cuda(self):\n        return self\n"
USES = (
    "import torch\nfrom generator import Generator\n\nmodel = torch.nn.Linear(1, 1)\nmaker = Generator([model])\n"
    "maker.cuda()\nGenerator([]).cuda()\nmodel.cuda()\n"
)
MODULE = """\
import torch
from torch import nn


class Layer(nn.Module):
    def forward(self, x):
        return x + torch.zeros(1, device="cuda")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.start = torch.zeros(1, device="cuda")

    def forward(self, x):
        return self.layer(x) + self.empty()

    def empty(self):
        return torch.empty(0, device=torch.device("cuda"))
"""
SCRIPTS = "import torch\nfrom net import Net\n\nmodel = Net()\nscripted = torch.jit.script(model)\n"


def port(folder: Path, target: str, **files: str) -> dict[str, str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    paths = [folder / f"{name}.py" for name in files]
    results = port_files(paths, Settings(target, unsafe=True), apply=True, jobs=1, done=lambda: None)
    assert not [result.failure for result in results if result.failure]
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@EACH_TARGET
def test_calls_of_the_own_cuda_method_of_a_class_of_another_file_stay(tmp_path: Path, target: str) -> None:
    text = port(tmp_path, target, generator=GENERATOR, uses=USES)["uses"]
    assert "maker.cuda()" in text
    assert "Generator([]).cuda()" in text
    assert "model.to(" in text


@EACH_TARGET
def test_what_another_file_gives_to_torchscript_stays_compilable(tmp_path: Path, target: str) -> None:
    text = port(tmp_path, target, net=MODULE, scripts=SCRIPTS)["net"]
    assert text.count('device="cuda"') == 1
    assert 'torch.device("cuda")' in text
    assert "self.start = torch.zeros(1, device=" in text
    alone = tmp_path / "alone"
    alone.mkdir()
    assert '"cuda"' not in port(alone, target, net=MODULE)["net"]


def test_modules_and_classes_with_a_method_to_are_moved_with_it() -> None:
    assert survey(GENERATOR.encode()).with_own_cuda == {"Generator"}
    assert not survey(b"class A(nn.Module):\n    def cuda(self):\n        pass\n").with_own_cuda
    both = b"class A:\n    def cuda(self):\n        pass\n\n    def to(self, device):\n        pass\n"
    assert not survey(both).with_own_cuda
    assert survey(SCRIPTS.encode()).compiled == {"Net"}
    assert not survey(b"import torch\nfrom net import Net\n\nmodel = Net()\n").compiled


@EACH_TARGET
@pytest.mark.parametrize(
    "imports", ["import net", "from net import build", "from . import net", "from .net import build"]
)
def test_what_a_function_of_another_file_makes_for_torchscript_stays_compilable(
    tmp_path: Path, target: str, imports: str
) -> None:
    call = "build" if imports.endswith("build") else "net.build"
    scripts = f"import torch\n{imports}\n\nmodel, *_ = {call}()\nscripted = torch.jit.script(model)\n"
    text = port(tmp_path, target, net=MODULE, scripts=scripts)["net"]
    assert text.count('device="cuda"') == 1
    assert 'torch.device("cuda")' in text


def test_what_a_function_of_a_library_makes_for_torchscript_concerns_no_file(tmp_path: Path) -> None:
    scripts = "import torch\nimport lib\n\nmodel = lib.build()\nscripted = torch.jit.script(model)\n"
    assert '"cuda"' not in port(tmp_path, "acclimate", net=MODULE, scripts=scripts)["net"]


DEFAULT = "import torch\nfrom net import Net\n\ntorch.set_default_tensor_type(torch.cuda.HalfTensor)\nmodel = Net()\n"
WEIGHTS = "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        {}\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("self.weight = torch.nn.Parameter(torch.Tensor(3, 3))", True),
        ("from torch import Tensor; self.weight = Tensor(3, 3)", True),
        ("from fairscale.nn.model_parallel.layers import ParallelEmbedding", True),
        ("import apex", True),
        ("self.weight: torch.Tensor = torch.empty(3, 3)", False),
        ("self.weight = torch.FloatTensor(3, 3)", False),
    ],
)
def test_a_default_tensor_type_stays_where_something_obeys_it_and_no_default_device(
    line: str, stays: bool, target: str, tmp_path: Path
) -> None:
    text = port(tmp_path, target, main=DEFAULT, net=WEIGHTS.format(line))["main"]
    assert (text == DEFAULT) is stays
    assert ("set_default_device" in text) is not stays


def test_torchs_old_constructor_does_not_obey_a_default_device() -> None:
    with torch.device("meta"):
        assert torch.Tensor(2, 3).device.type == "cpu"
        assert torch.empty(2, 3).device.type == "meta"


BASES = {
    "nn.Linear": True,
    "torch.nn.Module": True,
    "pl.LightningModule": True,
    "ModelMixin, ConfigMixin": True,
    "transformers.LlamaForCausalLM": True,
    "nn.Parameter": False,
    "ConfigMixin": False,
    "unittest.TestCase": False,
}


@pytest.mark.parametrize("bases", BASES)
def test_a_class_of_the_project_is_a_module_by_the_bases_that_it_names(bases: str) -> None:
    known = survey(
        f"class Net({bases}):\n    pass\n\n\nclass Own(Net):\n    pass\n".encode(), Path("nets.py")
    )
    assert known.is_module("nets.Net") == known.is_module("nets.Own") == BASES[bases]


def test_a_class_that_the_project_defines_as_something_else_is_no_module() -> None:
    found = [survey(b"class ModelMixin:\n    pass\n", Path("own.py"))]
    found.append(survey(b"class Net(nn.Module):\n    pass\n", Path("nets.py")))
    assert not joined(found).is_module("own.ModelMixin")
    assert joined(found).is_module("nets.Net")


@EACH_TARGET
@pytest.mark.parametrize(("package", "status"), [("openchem", Status.CONVERTED), ("other", Status.UNSAFE)])
def test_a_package_of_folders_without_init_is_the_projects_own(
    package: str, status: Status, target: str, tmp_path: Path
) -> None:
    choice = "'cuda' if torch.cuda.is_available() else 'cpu'"
    files = {
        "openchem/models/net.py": "import torch\n\n\ndef build(device):\n    return torch.zeros(3, device=device)\n",
        "main.py": f"import torch\nfrom {package}.models.net import build\n\nprint(build({choice}))\n",
    }
    assert site(ported_project(tmp_path, files, target)["main.py"], choice).status is status


def test_the_folders_around_a_project_are_no_packages_of_it(tmp_path: Path) -> None:
    paths = [tmp_path / "wandb" / "own" / name for name in ("a.py", "b.py")]
    known = survey(b"import wandb.own\n").with_folders(paths)
    assert "wandb" not in known.modules
