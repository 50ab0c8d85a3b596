"""What docs/huggingface.md shows runs as it is printed, and says what is true of the installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, agrees, blocks, links

from fresh_process import plain_environment

PAGE = DOCS / "huggingface.md"
COMMANDS = [command for block in blocks(PAGE) if block.language == "console" for command in block.commands]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_prints_what_the_page_shows(command: str, shown: str, tmp_path: Path) -> None:
    for package in ("accelerate", "transformers", "acclimate_sim"):
        pytest.importorskip(package)
    for block in blocks(PAGE):
        if block.file:
            (tmp_path / str(block.file)).write_text(block.content)
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    run = subprocess.run(
        command, shell=True, cwd=tmp_path, env={**plain_environment(), "PATH": programs},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert agrees(run.stdout, shown), run.stdout


def test_every_link_leads_somewhere() -> None:
    assert [link for link in links(PAGE) if not (DOCS / link).exists()] == []
