"""docs/add_a_vendor.md is followed to the letter, by somebody who has the vendor's package and nothing else.

The page's files are written as it names them, its commands run in order, and they print what it shows.
``acme_software`` holds what the vendor gives: ``torch_acme``, the emulated device under another name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from page_blocks import DOCS, Block, agrees, anchors, blocks, links, prose, run_command

from fresh_process import plain_environment
from warm_python import WarmPython

PAGE = DOCS / "add_a_vendor.md"
BLOCKS = blocks(PAGE)
ACME_SOFTWARE = Path(__file__).parent / "acme_software"
CONSOLES = [block for block in BLOCKS if block.language == "console"]
(EVERY_PROMISE,) = (block for block in CONSOLES if block.first_line == "$ acclimate conformance")
"""Takes most of a minute; nothing after it needs it."""

pytestmark = [
    pytest.mark.usefixtures("warm_starts"),
    pytest.mark.skipif(
        torch.accelerator.is_available(), reason="the page shows what a machine without an accelerator prints"
    ),
    pytest.mark.skipif(
        not entry_points(group="acclimate.backends", name="sim"), reason="acclimate-sim is not installed"
    ),
]


class Reader:
    """Somebody who follows the page in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outputs: dict[Block, list[str]] = {}
        installed = folder / "site"
        python_path = os.pathsep.join(map(str, (installed, ACME_SOFTWARE)))
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        self.environment = {
            **plain_environment(),
            "PATH": programs,
            "PYTHONPATH": python_path,
            "COLUMNS": "100",
            # pip installs beside the project's environment, and asks no index.
            "PIP_TARGET": str(installed),
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def follow(self, block: Block) -> list[str]:
        """Does what a block says after all that stands before it; gives what its commands print."""
        for earlier in BLOCKS[: BLOCKS.index(block)]:
            if earlier not in self.outputs and earlier != EVERY_PROMISE:
                self.outputs[earlier] = self._do(earlier)
        self.outputs[block] = self._do(block)
        return self.outputs[block]

    def _do(self, block: Block) -> list[str]:
        if block.file:
            file = self.folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.content)
        return [self._run(command) for command, _ in block.commands if block.language == "console"]

    def _run(self, command: str) -> str:
        return run_command(command, self.environment, self.folder).stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Reader:
    made = Reader(tmp_path_factory.mktemp("acme"))
    program = "from acclimate import get_accelerator; get_accelerator()"  # builds the device, and says so
    sim = {**made.environment, "ACCLIMATE_ACCELERATOR": "sim"}
    with warm_python.in_place():
        subprocess.run([sys.executable, "-c", program], env=sim, check=True, capture_output=True, timeout=600)
    return made


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=pytest.mark.slow if block != CONSOLES[0] else ()) for block in CONSOLES],
    ids=lambda block: f"{PAGE.name}:{block.line}",
)
def test_each_command_prints_what_the_page_shows(block: Block, reader: Reader) -> None:
    for (command, shown), output in zip(block.commands, reader.follow(block), strict=True):
        assert agrees(output, shown), f"$ {command}\n{output}"


def test_a_vendor_writes_as_few_lines_as_the_page_says() -> None:
    record, accelerator = (
        next(block.content for block in BLOCKS if (block.file or "").endswith(name))
        for name in ("/__init__.py", "/accelerator.py")
    )
    code = [line for line in (record + accelerator).splitlines() if not re.match(r' *("""|#|$)', line)]
    assert "in about 20 lines" in " ".join(prose(PAGE).split())
    assert len(code) <= 20


def test_the_rows_fit_the_tables_they_are_for() -> None:
    rows = [block.content for block in BLOCKS if block.language == "markdown"]
    tables = [DOCS.parent / "README.md", DOCS / "backends.md"]
    for row, page in zip(rows, tables, strict=True):
        columns = re.findall(r"^\| name .*$", page.read_text(encoding="utf-8"), re.MULTILINE)[0]
        assert row.count("|") == columns.count("|")


def test_every_link_leads_somewhere() -> None:
    for target in links(PAGE):
        name, _, anchor = target.partition("#")
        page = PAGE.parent / name
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page), target
