"""What a test gets from a fixture of ``conftest.py`` is of its program, though it imports nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
OPS = "from mine import _C\n\n\ndef nms(x):\n    if x.is_cuda:\n        return _C.nms_cuda(x)\n    return _C.nms_cpu(x)\n"
TEST = "import torch\nfrom ops import nms\n\n\n{decorator}def test_nms({parameter}):\n    assert len(nms(torch.ones(3)))\n"
FIXTURE = f"import pytest\nimport torch\n\n\n{{decorator}}def where({{parameter}}):\n    return {CHOICE}\n"
GIVEN = {
    "by its name": ("@pytest.fixture\n", "", "", "where"),
    "by another name": ("@pytest.fixture(name='gpu')\n", "", "", "gpu"),
    "to all tests": ("@pytest.fixture(autouse=True)\n", "", "", ""),
    "by a mark": ("@pytest.fixture\n", "", "@pytest.mark.usefixtures('where')\n", ""),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("folder", ["", "tests/"])
def test_a_device_stays_where_a_test_that_gets_it_runs_what_stays(
    folder: str, kind: str, target: str, tmp_path: Path
) -> None:
    of_fixture, own, of_test, taken = GIVEN[kind]
    files = {
        "ops.py": OPS,
        f"{folder}conftest.py": FIXTURE.format(decorator=of_fixture, parameter=own),
        "tests/test_ops.py": TEST.format(decorator=of_test, parameter=taken),
    }
    found = site(ported_project(tmp_path, files, target)[f"{folder}conftest.py"], CHOICE)
    assert found.status is Status.UNSAFE, found
    assert "ops.py:5" in found.reason


@EACH_TARGET
def test_a_device_through_another_fixture_stays_too(target: str, tmp_path: Path) -> None:
    other = "\n\n@pytest.fixture\ndef model(where):\n    return torch.nn.Linear(2, 2).to(where)\n"
    files = {
        "ops.py": OPS,
        "conftest.py": FIXTURE.format(decorator="@pytest.fixture\n", parameter="") + other,
        "test_ops.py": TEST.format(decorator="", parameter="model"),
    }
    found = site(ported_project(tmp_path, files, target)["conftest.py"], CHOICE)
    assert found.status is Status.UNSAFE, found


@EACH_TARGET
@pytest.mark.parametrize("parameter", ["", "other"])
def test_a_device_that_no_test_of_what_stays_gets_is_ported(
    parameter: str, target: str, tmp_path: Path
) -> None:
    files = {
        "ops.py": OPS,
        "conftest.py": FIXTURE.format(decorator="@pytest.fixture\n", parameter=""),
        "test_ops.py": TEST.format(decorator="", parameter=parameter),
        "sub/test_own.py": "import torch\n\n\ndef test_own(where):\n    assert len(torch.ones(2, device=where))\n",
    }
    found = site(ported_project(tmp_path, files, target)["conftest.py"], CHOICE)
    assert found.status is Status.CONVERTED, found


@EACH_TARGET
def test_the_nearest_fixture_of_a_name_is_the_one_that_a_test_gets(target: str, tmp_path: Path) -> None:
    fixture = FIXTURE.format(decorator="@pytest.fixture\n", parameter="")
    files = {
        "ops.py": OPS,
        "conftest.py": fixture,
        "tests/conftest.py": fixture,
        "tests/test_ops.py": TEST.format(decorator="", parameter="where"),
    }
    results = ported_project(tmp_path, files, target)
    assert site(results["conftest.py"], CHOICE).status is Status.CONVERTED
    assert site(results["tests/conftest.py"], CHOICE).status is Status.UNSAFE


LEAVES = (
    "import torch\n\n\ndef test_big(device):\n    if {more}not torch.cuda.is_available():\n        return\n"
    "    x = torch.rand(2).to(device)\n    if torch.cuda.is_available():\n        del x\n        torch.cuda.empty_cache()\n"
)


@EACH_TARGET
@pytest.mark.parametrize("more", ["", "'big' in str(device) and "])
def test_a_test_that_returns_early_goes_with_the_device_of_its_fixture(
    more: str, target: str, tmp_path: Path
) -> None:
    fixture = (
        "import pytest\nimport torch\n\n\n@pytest.fixture\ndef device():\n"
        "    is_new = torch.cuda.is_available() and torch.cuda.get_device_capability() > (7, 0)\n"
        "    return torch.device('cuda' if is_new else 'cpu')\n"
    )
    files = {"conftest.py": fixture, "test_big.py": LEAVES.format(more=more)}
    found = ported_project(tmp_path, files, target)["test_big.py"].sites
    first = next(one for one in found if one.text == "torch.cuda.is_available()")
    assert first.status is Status.UNSAFE, found
