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
    "a part by its length": "def accept(device):\n    print(int(device[5:] or 0))\n    return device\n",
    "a part by its text": "def accept(device):\n    print(int(str(device).replace('cuda:', '') or 0))\n    return device\n",
    "a substitution": "import re\n\n\ndef accept(device):\n    print(int(re.sub('cuda:?', '', device) or 0))\n    return device\n",
    "a search": "def accept(device):\n    print('GPU' if device.count('cuda') else 'CPU')\n    return device\n",
}
CLASSES = {
    "a pattern of a field": "class Config(Base):\n    device: str = Field('cpu', pattern='^(cpu|cuda)')\n",
    "a validator": "class Config(Base):\n    device: str\n\n    @field_validator('device')\n    def check(cls, value):\n"
    "        if not value.startswith(('cpu', 'cuda')):\n            raise ValueError\n        return value\n",
    "a list of a field": "class Config(Base):\n    device = attr.ib(validator=attr.validators.in_(['cpu', 'cuda']))\n",
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


@EACH_TARGET
@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_of_another_file_may_check_its_fields(kind: str, target: str, tmp_path: Path) -> None:
    main = f"import torch\nfrom other import Config\n\nconfig = Config(device={CHOICE})\nx = torch.ones(1, device=config.device)\n"
    head = "import attr\nfrom pydantic import BaseModel as Base, Field, field_validator\n\n\n"
    files = {"other.py": f"{head}{CLASSES[kind]}", "main.py": main}
    assert not site(ported_project(tmp_path, files, target)["main.py"], CHOICE).safe
    files["other.py"] = files["other.py"].replace("cuda", "gpu")
    assert site(ported_project(tmp_path, files, target)["main.py"], CHOICE).safe
