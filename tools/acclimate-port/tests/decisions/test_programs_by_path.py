"""What a program runs by a path, a setting or an entry point belongs to it, as what it imports does."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status
from acclimate_port.files.workers import port_files
from acclimate_port.source.named_in_texts import Names, Text
from acclimate_port.source.outline import outline
from porting import EACH_TARGET, ported_project, site

CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'
MODEL = (
    "import torch\n\n\nclass Model(torch.nn.Module):\n    def cast(self, batch):\n"
    f"        device = torch.device({CHOICE})\n        return batch.to(device)\n"
)
RUN = (
    "import argparse\nimport torch\n{head}\nuse = torch.cuda.is_available()\n\n\ndef main(args):\n    net = {made}()\n    if use:\n"
    "        assert torch.cuda.get_device_capability() >= (7, 0)\n        net.to('cuda')\n    return net.cast(torch.zeros(1))\n"
)
WAYS = {
    "runpy": RUN.format(head="import runpy", made="runpy.run_path(args.config)['model']"),
    "exec": RUN.format(head="", made="exec(open(args.config).read(), own := {}) or own['model']"),
    "a loader": RUN.format(
        head="from importlib.machinery import SourceFileLoader",
        made="SourceFileLoader('config', args.config).load_module().model",
    ),
    "mmengine": RUN.format(head="from mmengine import Config", made="Config.fromfile(args.config).model"),
    "detectron2": RUN.format(
        head="from detectron2.config import LazyConfig", made="LazyConfig.load(args.config).model"
    ),
}
CONFIGS = {
    "a name": "from lib.model import Model\n\nmodel = Model\n",
    "an entry": "from lib.model import Model\n\nmodel = {'type': Model}\n",
    "a base": "from mmengine import read_base\n\nwith read_base():\n    from .base import *\nfrom lib.model import Model\n\nmodel = Model\n",
    "a call": "from lib.model import Model\nimport registry\n\nregistry.use(Model)\n",
}


def _is_joined(files: dict[str, str], target: str, folder: Path) -> bool:
    found = site(ported_project(folder, files, target)["lib/model.py"], CHOICE)
    assert found.status is Status.CONVERTED or "run.py" in found.reason, found
    return found.status is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_only_a_configuration_names_is_of_the_program_that_runs_it(
    way: str, target: str, tmp_path: Path
) -> None:
    files = {
        "run.py": WAYS[way],
        "configs/one.py": CONFIGS["a name"],
        "lib/__init__.py": "",
        "lib/model.py": MODEL,
    }
    assert _is_joined(files, target, tmp_path / "one")
    alone = files | {"run.py": RUN.format(head="", made="args.net")}
    assert not _is_joined(alone, target, tmp_path / "two")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_may_use_a_class_in_any_way(kind: str, tmp_path: Path) -> None:
    files = {"run.py": WAYS["runpy"], "configs/one.py": CONFIGS[kind], "lib/model.py": MODEL}
    assert _is_joined(files, "acclimate", tmp_path)


@EACH_TARGET
def test_a_class_that_a_yaml_file_names_is_of_the_program_that_makes_it_though_others_import_it(
    target: str, tmp_path: Path
) -> None:
    made = "hydra.utils.instantiate(args.model)"
    other = "from lib.model import Model\n\n\ndef test_model():\n    assert Model()\n"
    files = {
        "run.py": RUN.format(head="import hydra", made=made),
        "lib/__init__.py": "",
        "lib/model.py": MODEL,
        "tests/test_model.py": other,
    }
    assert not _is_joined(files, target, tmp_path / "one")
    (tmp_path / "two" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "two" / "conf" / "model" / "big.yaml").write_text("net:\n  _target_: lib.model.Model\n")
    assert _is_joined(files, target, tmp_path / "two")


@EACH_TARGET
def test_an_entry_point_is_of_the_program_that_looks_for_it(target: str, tmp_path: Path) -> None:
    made = "[*entry_points(group='nets')][0].load()"
    files = {
        "run.py": RUN.format(head="from importlib.metadata import entry_points", made=made),
        "setup.py": "from setuptools import setup\n\nsetup(entry_points={'nets': ['big = lib.model:Model']})\n",
        "lib/__init__.py": "",
        "lib/model.py": MODEL,
        "tests/test_model.py": "from lib.model import Model\n\n\ndef test_model():\n    assert Model()\n",
    }
    assert _is_joined(files, target, tmp_path / "one")
    alone = files | {"setup.py": "from setuptools import setup\n\nsetup()\n"}
    assert not _is_joined(alone, target, tmp_path / "two")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "pyproject.toml").write_text(
        '[project.entry-points.nets]\nbig = "lib.model:Model"\n'
    )
    assert _is_joined(alone, target, tmp_path / "three")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("runpy.run_path(path)", Text(Names.FILE, "*")),
        ("runpy.run_path('conf/a.py')", Text(Names.SCRIPT, "conf/a.py")),
        ("exec(f'from models.{name} import Net')", Text(Names.MODULE, "models.*")),
        ("exec('from models.one import Net')", Text(Names.MODULE, "models.one")),
        ("text = 'from models.' + name + ' import Net'\nexec(text)", Text(Names.MODULE, "models.*")),
    ],
)
def test_what_runs_by_a_path_is_known_or_may_be_any(code: str, found: Text) -> None:
    assert found in outline(f"import runpy\n{code}\nnet.to(device)\n").texts


def test_a_module_without_a_device_chooses_one_of_several_by_a_text() -> None:
    texts = outline("text = 'from models.' + name + ' import Net'\nexec(text)\n").texts
    assert all(one.names not in (Names.FILE, Names.MODULE) for one in texts)


@pytest.mark.parametrize("code", ["torch.load(path)", "cursor.exec(path)", "config.load(path)"])
def test_what_loads_something_else_runs_no_file(code: str) -> None:
    assert all(one.names is not Names.FILE for one in outline(f"import torch\n{code}\n").texts)


def test_a_build_script_that_reads_its_version_runs_no_configuration() -> None:
    text = "from setuptools import setup\nexec(compile(open(path).read(), path, 'exec'))\nsetup()\n"
    assert all(one.names is not Names.FILE for one in outline(text).texts)


def test_settings_far_from_a_project_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text("net: lib.model.Model\n")
    (tmp_path / "own" / "lib").mkdir(parents=True)
    (tmp_path / "own" / "run.py").write_text(
        RUN.format(head="import hydra", made="hydra.utils.instantiate(args.model)")
    )
    (tmp_path / "own" / "lib" / "model.py").write_text(MODEL)
    (tmp_path / "own" / "test_model.py").write_text("from lib.model import Model\n")
    paths = sorted((tmp_path / "own").rglob("*.py"))
    results = port_files(paths, Settings("acclimate"), False, 1, lambda: None)
    assert site(results[0], CHOICE).status is Status.CONVERTED
