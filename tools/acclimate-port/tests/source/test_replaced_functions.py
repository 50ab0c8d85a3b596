"""A function of torch.cuda that a test replaces is still called by the module that the test is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import AVAILABLE, EACH_TARGET, ported_project, site

MODULE = f"import torch\n\n\ndef seed():\n    if {AVAILABLE}:\n        torch.cuda.manual_seed(0)\n"
REPLACING = {
    "by the module's name": "@mock.patch('app.tools.torch.cuda.is_available')\ndef test_seed(answer):\n    seed()\n",
    "by torch's name": "@mock.patch('torch.cuda.is_available', lambda: True)\ndef test_seed():\n    seed()\n",
    "as an object": "def test_seed():\n    with mock.patch.object(torch.cuda, 'is_available'):\n        seed()\n",
    "by a fixture": "def test_seed(monkeypatch):\n    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)\n    seed()\n",
}
OTHERS = {
    "another function": "@mock.patch('torch.cuda.device_count')\ndef test_seed(answer):\n    seed()\n",
    "a function of another module": "@mock.patch('app.other.torch.cuda.is_available')\ndef test_seed(answer):\n    pass\n",
    "nothing": "def test_seed():\n    seed()\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", [*REPLACING, *OTHERS])
def test_a_question_that_a_test_answers_is_unsafe(kind: str, target: str, tmp_path: Path) -> None:
    files = {
        "app/__init__.py": "",
        "app/tools.py": MODULE,
        "tests/test_tools.py": "from unittest import mock\n\nimport torch\nfrom app.tools import seed\n\n\n"
        + (REPLACING | OTHERS)[kind],
    }
    found = site(ported_project(tmp_path, files, target)["app/tools.py"], AVAILABLE)
    assert found.status is (Status.UNSAFE if kind in REPLACING else Status.CONVERTED), found


@EACH_TARGET
def test_a_module_that_no_such_test_imports_is_ported(target: str, tmp_path: Path) -> None:
    files = {
        "app/tools.py": MODULE,
        "app/other.py": MODULE,
        "tests/test_tools.py": "from unittest import mock\nfrom app.tools import seed\n\n\n"
        + REPLACING["by torch's name"],
    }
    results = ported_project(tmp_path, files, target)
    assert site(results["app/tools.py"], AVAILABLE).status is Status.UNSAFE
    assert site(results["app/other.py"], AVAILABLE).status is Status.CONVERTED
