"""A check that accepts only the names of some devices refuses another accelerator's, so the device keeps its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, check, differing, ported_project, program, reasons, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
CHECKS = {
    "a list": ("ALLOWED = ('cpu', 'cuda')", "if where not in ALLOWED:\n    raise ValueError(where)"),
    "the keys of a table": ("SIZES = {'cpu': 1, 'cuda': 8}", "assert where in SIZES"),
    "a set": ("ALLOWED = frozenset(['cpu', 'cuda'])", "assert where in ALLOWED"),
    "a pattern": ("import re", r"if not re.match(r'^(cpu|cuda(:\d+)?)$', where):" + "\n    raise ValueError"),
    "a compiled pattern": ("import re\nKNOWN = re.compile('cpu|cuda')", "assert KNOWN.fullmatch(where)"),
    "an enumeration": ("from enum import Enum\nclass Where(Enum):\n    GPU = 'cuda'\n    CPU = 'cpu'", "where = Where(where).value"),
}  # fmt: skip


@EACH_TARGET
@pytest.mark.parametrize("kind", CHECKS)
def test_a_device_whose_name_a_check_would_refuse_is_not_ported(kind: str, target: str) -> None:
    head, body = CHECKS[kind]
    source = program(f"where = {CHOICE}\n{body}\nreturn torch.ones(1, device=where)", f"import torch\n{head}")
    unsafe = check(source, target, changed=False)
    assert "accepts only the names of some devices" in reasons(unsafe)
    assert differing(source, unsafe.text)


@EACH_TARGET
@pytest.mark.parametrize("decorator", ["", "@dataclass\n"])
def test_only_a_class_that_checks_its_fields_refuses_a_name(decorator: str, target: str) -> None:
    source = (
        "from dataclasses import dataclass\nfrom typing import Literal\n\nimport torch\nfrom pydantic import BaseModel\n\n\n"
        f"{decorator}class Config(BaseModel):\n    device: Literal['cpu', 'cuda']\n\n\n"
        f"def main():\n    config = Config(device={CHOICE})\n    return torch.ones(1, device=config.device)\n"
    )
    assert (CHOICE in port_text(source, Settings(target)).text) == (not decorator)


OTHER_FILES = {
    "a list": "ALLOWED = ('cpu', 'cuda')\n\n\ndef accept(device):\n    assert device in ALLOWED\n    return device\n",
    "an enumeration": "from enum import Enum\n\n\nclass accept(str, Enum):\n    GPU = 'cuda'\n    CPU = 'cpu'\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OTHER_FILES)
def test_the_check_may_be_in_another_file(kind: str, target: str, tmp_path: Path) -> None:
    files = {
        "other.py": OTHER_FILES[kind],
        "main.py": f"import torch\nfrom other import accept\n\n\ndef main():\n    return torch.ones(1, device=accept({CHOICE}))\n",
    }
    found = site(ported_project(tmp_path, files, target)["main.py"], CHOICE)
    assert not found.safe, found
    assert "other.py:" in found.reason
