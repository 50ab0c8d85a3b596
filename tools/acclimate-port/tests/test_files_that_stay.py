"""Files that are not ported hold back the edits of those that run with them: nobody knows what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acclimate_port import __main__ as program
from acclimate_port.engine import Settings, Status
from acclimate_port.files.notebook import code_of
from acclimate_port.files.workers import port_files
from acclimate_port.source.outline import blocks_of_refused
from porting import EACH_TARGET, site

CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'
LIB = f"import torch\n\n\ndef batch():\n    device = torch.device({CHOICE})\n    return torch.zeros(1, 3).to(device)\n"
MAIN = f"import torch\nfrom lib import batch\n\ndevice = torch.device({CHOICE})\nprint(torch.nn.Linear(3, 1).to(device)(batch()))\n"
OTHER = "import torch\nfrom lib import batch\n\nprint(torch.nn.Linear(3, 1)(batch()))\n"

KEPT = (
    "import torch\n\n\ndef net():\n    found = torch.nn.Linear(3, 1)\n    if torch.cuda.is_available():\n"
    "        assert torch.cuda.get_device_capability() > (7, 0)\n        found.cuda()\n    return found\n"
)


def _notebook(source: str, separators: tuple[str, str] | None = None) -> str:
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
    data = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 2}
    return json.dumps(data, indent=1, separators=separators)


REFUSED = {
    "an encoding that is not known": ("main.py", f"# -*- coding: future_fstrings -*-\n{MAIN}"),
    "a null byte": ("main.py", f"{MAIN}# \0\n"),
    "Python 2": ("main.py", f"{MAIN}print 'done'\n"),
    "a notebook that cannot be written back": ("main.ipynb", _notebook(MAIN, (" , ", " : "))),
    "a notebook whose code is not Python": ("main.ipynb", _notebook(f"{MAIN}print 'done'\n")),
    "a notebook that is no JSON": ("main.ipynb", _notebook(MAIN).rstrip("}")),
}
"""Each with the name of the file."""


def _status(folder: Path, files: dict[str, str], target: str = "acclimate") -> Status:
    for name, text in files.items():
        (folder / name).write_text(text)
    paths = sorted(folder.iterdir())
    results = port_files(paths, Settings(target), False, 1, lambda: None)
    return site(next(one for one in results if one.path.name == "lib.py"), CHOICE).status


@EACH_TARGET
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_file_imports_that_cannot_be_ported_stays_with_it(
    kind: str, target: str, tmp_path: Path
) -> None:
    name, text = REFUSED[kind]
    assert _status(tmp_path, {name: text, "lib.py": LIB}, target) is Status.UNSAFE


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_cannot_be_ported_and_has_no_device_holds_nothing_back(kind: str, tmp_path: Path) -> None:
    name, text = REFUSED[kind]
    lines = [one for one in OTHER.replace("device", "place").splitlines() if "cuda" not in one]
    assert _status(tmp_path, {name: "\n".join(lines), "lib.py": LIB}) is Status.CONVERTED
    assert text != OTHER


def test_a_file_of_python_2_that_names_no_device_joins_what_it_imports(tmp_path: Path) -> None:
    main = "from lib import batch\nfrom kept import net\n\nprint net()(batch())\n"
    assert _status(tmp_path, {"main.py": main, "kept.py": KEPT, "lib.py": LIB}) is Status.UNSAFE


def test_a_notebook_that_names_no_device_joins_what_it_imports(tmp_path: Path) -> None:
    main = _notebook("%matplotlib inline\nfrom lib import batch\nfrom kept import net\nprint(net()(batch()))")
    assert _status(tmp_path, {"main.ipynb": main, "kept.py": KEPT, "lib.py": LIB}) is Status.UNSAFE


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("train", f"#!/usr/bin/env python3\n{MAIN}", []),
        ("train.pyx", MAIN.replace("device = ", "cdef object device = "), []),
        ("own/train.py", MAIN, ["--exclude", "own"]),
    ],
)
def test_a_program_that_is_not_ported_holds_back_what_it_imports(
    name: str, text: str, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "lib.py").write_text(LIB)
    program.main([str(tmp_path), "--write", *options])
    assert "cuda" not in (tmp_path / "lib.py").read_text()
    (tmp_path / "lib.py").write_text(LIB)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    program.main([str(tmp_path), "--write", *options])
    assert (tmp_path / "lib.py").read_text() == LIB
    assert (tmp_path / name).read_text() == text


def test_functions_of_cython_are_found_by_their_text() -> None:
    text = "cdef int n = f(3)\ncpdef inline double area(x):\n    pass\ncdef class Net(Base):\n    pass\nasync def go():\n    pass\n"
    assert [name for name, _, _ in blocks_of_refused(text)] == ["area", "Net", "go"]


def test_the_code_of_a_notebook_is_found_if_its_json_is_broken() -> None:
    assert "device = 1\nx.to(device)" in code_of(_notebook("device = 1\nx.to(device)\n").rstrip("}"))
    assert code_of(_notebook("!ls\nx = 1")) == "pass\nx = 1"
