"""A device in an object with settings is not ported safely if another library gets the object."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_project, site

HEAD = "import argparse\nimport copy\nfrom types import SimpleNamespace\n\nimport torch\nimport wandb\nfrom ding.policy import create_policy\n\n\n"
CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
USES = "    return torch.ones(1, device={})\n"
HOLDERS = {
    "an attribute": ("def f(cfg):\n    cfg.device = {}\n", "cfg", "cfg.device"),
    "an attribute of a part": ("def f(cfg):\n    cfg.policy.device = {}\n", "cfg", "cfg.policy.device"),
    "the part itself": ("def f(cfg):\n    cfg.policy.device = {}\n", "cfg.policy", "cfg.policy.device"),
    "an attribute of self": (
        "class A:\n  def f(self):\n    self.cfg.device = {}\n",
        "self.cfg",
        "self.cfg.device",
    ),
    "an entry": ("def f(cfg):\n    cfg['device'] = {}\n", "cfg", "cfg['device']"),
    "a dictionary": ("def f():\n    cfg = {{'n': 1, 'device': {}}}\n", "cfg", "cfg['device']"),
    "a dictionary in another": (
        "def f():\n    cfg = {{'policy': {{'device': {}}}}}\n",
        "cfg",
        "cfg['policy']['device']",
    ),
    "a namespace": ("def f():\n    cfg = SimpleNamespace(device={})\n", "cfg", "cfg.device"),
    "a copy": ("def f(cfg):\n    cfg.device = {}\n    own = copy.deepcopy(cfg)\n", "own", "cfg.device"),
    "keywords": ("def f(cfg):\n    cfg['device'] = {}\n", "**cfg", "cfg['device']"),
    "options": (
        "def f():\n    parser = argparse.ArgumentParser()\n    parser.add_argument('--device', default={})\n"
        "    args = parser.parse_args()\n",
        "args",
        "args.device",
    ),
    "a result with options": (
        "def options():\n    parser = argparse.ArgumentParser()\n    parser.add_argument('--device', default={})\n"
        "    return parser.parse_args()\n\n\ndef f():\n    args = options()\n",
        "vars(args)",
        "args.device",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_device_in_settings_that_another_library_gets_is_unsafe(kind: str, target: str) -> None:
    head, given, read = HOLDERS[kind]
    source = f"{HEAD}{head.format(CHOICE)}    create_policy({given})\n{USES.format(read)}"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert any("`ding`" in one.reason for one in ported.sites)


@EACH_TARGET
@pytest.mark.parametrize("kind", [kind for kind in HOLDERS if kind != "keywords"])
def test_settings_that_are_stored_or_stay_in_the_program_are_ported(kind: str, target: str) -> None:
    head, given, read = HOLDERS[kind]
    source = f"{HEAD}{head.format(CHOICE)}    wandb.init({given})\n{USES.format(read)}"
    assert CHOICE not in port_text(source, Settings(target)).text


SETS = "import torch\nfrom other import Run\n\n\ndef main(cfg):\n    cfg.policy.device = {}\n    return Run(cfg)\n"
GETS = {
    "a function": "import torch\nfrom ding.policy import create_policy\n\n\ndef Run(cfg):\n"
    "    torch.cuda.empty_cache()\n    return {}(cfg.policy)\n",
    "a method": "import torch\nfrom ding.policy import create_policy\n\n\nclass Run:\n    def __init__(self, cfg):\n"
    "        self.cfg = cfg\n\n    def run(self):\n        torch.cuda.empty_cache()\n        return {}(self.cfg.policy)\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", GETS)
def test_a_library_gets_the_settings_in_another_file(kind: str, target: str, tmp_path: Path) -> None:
    for name, status in (("create_policy", Status.UNSAFE), ("print", Status.CONVERTED)):
        files = {"main.py": SETS.format(CHOICE), "other.py": GETS[kind].format(name)}
        found = site(ported_project(tmp_path / name, files, target)["main.py"], CHOICE)
        assert found.status is status
