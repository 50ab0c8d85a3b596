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
        f"import torch\n\nfrom lists import FILES\n\ncollect_ignore = FILES if not {AVAILABLE} else []\n",
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
