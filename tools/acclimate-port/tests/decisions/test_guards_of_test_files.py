"""A guard of a test suite, and the tests of other files that it skips, are ported together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import AVAILABLE, EACH_TARGET, differing, ported_project, program, site

KEPT = "import pytest\nimport torch\n\n\n{}def test_kept({}make):\n    make().cuda()\n"
OTHER = "import pytest\nimport torch\n\n\n{}def test_other({}):\n    assert torch.ones(1).cuda().sum() == 1\n"
LISTED = "import pathlib\n\nimport torch\n\nHERE = pathlib.Path(__file__).parent\ncollect_ignore = []\n"
GUARDS = {
    "a list that a loop fills": (
        LISTED
        + f"if not {AVAILABLE}:\n    for one in (HERE / 'tests').glob('*_gpu.py'):\n        collect_ignore.append(str(one))\n",
        "",
        "",
    ),
    "a list in one statement": (
        f"import torch\n\ncollect_ignore_glob = ['*.txt'] if {AVAILABLE} else ['*.txt', 'tests/*']\n",
        "",
        "",
    ),
    "a pattern behind a flag": (
        f"import torch\n\nGPU = {AVAILABLE}\ncollect_ignore_glob = []\nif not GPU:\n    collect_ignore_glob += ['*_gpu.py']\n",
        "",
        "",
    ),
    "a folder": (LISTED + f"if not {AVAILABLE}:\n    collect_ignore.append('tests')\n", "", ""),
    "a list whose files no text names": (
        f"import torch\n\nfrom toolz import FILES\n\ncollect_ignore = FILES if not {AVAILABLE} else []\n",
        "",
        "",
    ),
    "a hook that looks at a mark": (
        "import pytest\nimport torch\n\n\ndef pytest_collection_modifyitems(config, items):\n"
        f"    if {AVAILABLE}:\n        return\n    for item in items:\n        if 'gpu' in item.keywords:\n"
        "            item.add_marker(pytest.mark.skip(reason='no GPU'))\n",
        "@pytest.mark.gpu\n",
        "",
    ),
    "a hook that looks at the file": (
        f"import torch\n\n\ndef pytest_ignore_collect(collection_path):\n    return not {AVAILABLE} and '_gpu' in collection_path.name\n",
        "",
        "",
    ),
    "a fixture that skips": (
        f"import pytest\nimport torch\n\n\n@pytest.fixture\ndef gpu():\n    if not {AVAILABLE}:\n        pytest.skip('no GPU')\n",
        "",
        "gpu, ",
    ),
}


def project(kind: str, kept: str = KEPT) -> dict[str, str]:
    conftest, mark, fixture = GUARDS[kind]
    return {
        "conftest.py": conftest,
        "tests/test_kept_gpu.py": kept.format(mark, fixture),
        "tests/test_other_gpu.py": OTHER.format(mark, fixture.removesuffix(", ")),
    }


@EACH_TARGET
@pytest.mark.parametrize("kind", GUARDS)
def test_a_guard_stays_with_a_test_of_another_file_that_stays(kind: str, target: str, tmp_path: Path) -> None:
    results = ported_project(tmp_path, project(kind), target)
    found = site(results["conftest.py"], AVAILABLE)
    assert found.status in (Status.UNSAFE, Status.LEFT), found
    assert "test_kept_gpu.py:6" in found.reason or "test_kept_gpu.py:7" in found.reason
    # So do the other tests that it skips, which would not run elsewhere.
    assert site(results["tests/test_other_gpu.py"], "torch.ones(1).cuda()").status is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize("kind", GUARDS)
def test_a_guard_is_ported_with_the_tests_of_other_files(kind: str, target: str, tmp_path: Path) -> None:
    results = ported_project(tmp_path, project(kind, OTHER.replace("other", "kept")), target)
    for name, code in (("conftest.py", AVAILABLE), ("tests/test_other_gpu.py", "torch.ones(1).cuda()")):
        assert site(results[name], code).status is Status.CONVERTED


@EACH_TARGET
@pytest.mark.parametrize(
    "kind", ["a list that a loop fills", "a pattern behind a flag", "a hook that looks at a mark"]
)
def test_tests_that_a_guard_does_not_skip_hold_nothing_back(kind: str, target: str, tmp_path: Path) -> None:
    files = {**project(kind, OTHER.replace("other", "kept")), "tests/test_more.py": KEPT.format("", "")}
    results = ported_project(tmp_path, files, target)
    assert site(results["conftest.py"], AVAILABLE).status is Status.CONVERTED


def test_a_ported_guard_would_run_tests_that_fail_on_another_accelerator() -> None:
    """The tests above can fail: a guard that is ported alone does something else there."""
    source = program(f"if not {AVAILABLE}:\n    return 'skipped'\nreturn x.cuda()")
    ported = source.replace(AVAILABLE, "torch.accelerator.is_available()")
    assert any(case.startswith("OTHER") for case in differing(source, ported))


ASKS = f"import pynvml\nimport torch\n\n\ndef devices():\n    if not {AVAILABLE}:\n        return []\n    pynvml.nvmlInit()\n    return [0]\n"
TESTS = "import torch\nfrom tools import devices\n\n\ndef {name}():\n    found = devices()\n    if {asked}:\n        assert found\n    else:\n        assert not found\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("lib", "status"),
    [
        (ASKS, Status.UNSAFE),
        ("import torch\n\n\ndef devices():\n    return torch.zeros(3)\n", Status.CONVERTED),
    ],
)
def test_a_test_of_a_function_whose_question_stays_asks_as_it_does(
    lib: str, status: Status, target: str, tmp_path: Path
) -> None:
    test = TESTS.format(name="test_devices", asked=AVAILABLE)
    files = {"tools.py": lib, "test_tools.py": test}
    assert site(ported_project(tmp_path, files, target)["test_tools.py"], AVAILABLE).status is status


OPERATOR = "import torch\nfrom torch.library import custom_op\n\n\n@custom_op('own::twice', mutates_args={{}}{given})\ndef twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
CALLS = "import pytest\nimport torch\n\nimport ops_of_own\n\n\n@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')\ndef test_twice():\n    a = torch.ones(2, device='cuda')\n    assert torch.ops.own.twice(a).sum() == 4\n"


@EACH_TARGET
@pytest.mark.parametrize("given", [", device_types='cuda'", ""])
def test_a_test_of_an_operator_of_the_projects_own_stays(given: str, target: str, tmp_path: Path) -> None:
    files = {"ops_of_own.py": OPERATOR.format(given=given), "test_twice.py": CALLS}
    found = ported_project(tmp_path, files, target)["test_twice.py"]
    assert {one.status for one in found.sites} == {Status.UNSAFE}
