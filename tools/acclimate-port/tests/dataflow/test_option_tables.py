"""The default of an option for a device counts as one also in a table, as does what a setter of a device gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_project, site

TABLES = [
    "[{'name': '--rl_device', 'type': str, 'default': 'cuda:0'}]",
    "[dict(name='--rl_device', default='cuda:0')]",
    "{'--rl_device': {'type': str, 'default': 'cuda:0'}}",
    "[{'flags': ['-d', '--device'], 'default': 'cuda:0'}]",
    "[('--rl_device', 'cuda:0', 'where the policy is')]",
]


@EACH_TARGET
@pytest.mark.parametrize("table", TABLES)
def test_the_default_of_an_option_in_a_table_keeps_the_program_whole(table: str, target: str) -> None:
    source = f"import torch\n\nOPTIONS = {table}\n\n\ndef f(n):\n    return torch.ones(n).cuda()\n"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert [one.status for one in ported.sites] == [Status.UNSAFE, Status.UNSAFE]


@EACH_TARGET
@pytest.mark.parametrize(
    "table",
    [
        "[{'name': '--kind', 'default': 'cuda:0'}]",
        "[{'name': 'device', 'note': 'cuda:0'}]",
        "[('--kind', 'cuda:0')]",
        "{'--kind': {'default': 'cuda:0'}}",
    ],
)
def test_a_text_in_another_table_is_data(table: str, target: str) -> None:
    source = f"import torch\n\nOPTIONS = {table}\n\n\ndef f(n):\n    return torch.ones(n).cuda()\n"
    assert "cuda()" not in port_text(source, Settings(target)).text


UTILS = (
    "import torch\n\n\nclass Utils:\n    device = 'cpu'\n\n    {0}\n    def set_default_device({1}device):\n"
    "        Utils.device = device\n\n    def zeros(self, n):\n        return torch.zeros(n, device=Utils.device)\n"
)
SETS = (
    "import torch\nfrom utils import Utils\n\nif torch.cuda.is_available():\n    {}('cuda')\n"
    "x = torch.ones(1)\nif torch.cuda.is_available():\n    x = x.cuda()\n"
)


@EACH_TARGET
@pytest.mark.parametrize(("kind", "first"), [("@classmethod", "cls, "), ("@staticmethod", "")])
def test_a_setter_of_the_program_takes_a_device(kind: str, first: str, target: str, tmp_path: Path) -> None:
    files = {"utils.py": UTILS.format(kind, first), "main.py": SETS.format("Utils.set_default_device")}
    assert "cuda" not in ported_project(tmp_path, files, target)["main.py"].after


@EACH_TARGET
@pytest.mark.parametrize("setter", ["Utils.set_default_device", "Utils().use_device"])
def test_what_only_its_name_shows_to_set_a_device_is_unsafe(setter: str, target: str, tmp_path: Path) -> None:
    results = ported_project(tmp_path, {"main.py": SETS.format(setter)}, target)
    assert site(results["main.py"], "'cuda'").status is Status.UNSAFE
    assert not results["main.py"].changed
