"""The code blocks of a page of the documentation, and whether output is what the page shows."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:#|//) ([\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    line: int
    """Of its first line of content, from 1."""
    language: str
    words: tuple[str, ...]
    """What stands after the language."""
    content: str

    @cached_property
    def first_line(self) -> str:
        return self.content.partition("\n")[0]

    @property
    def file(self) -> str | None:
        """The file that the block is, where its first line is a comment that names one."""
        match = _FILE.match(self.first_line)
        return match[1] if match else None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Of a console: each command, and the output shown below it."""
        parts = re.split(r"^\$ (.*)\n", self.content, flags=re.MULTILINE)
        return list(zip(parts[1::2], parts[2::2], strict=True))


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        line = text.count("\n", 0, match.start("content")) + 1
        found.append(Block(line, language, tuple(words), match["content"]))
    return found


def run_command(
    command: str, env: Mapping[str, str], folder: Path, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs a command of a page, which needs no shell, with standard error in its output."""
    words = shlex.split(command)
    variables = list(itertools.takewhile(lambda word: re.match(r"\w+=", word), words))
    program, *arguments = words[len(variables) :]
    return subprocess.run(
        [sys.executable if program == "python" else shutil.which(program, path=env["PATH"]), *arguments],
        env={**env, **dict(word.split("=", 1) for word in variables)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def agrees(output: str, shown: str) -> bool:
    """Whether output is what a page shows: "…" stands for any part of a line, and alone for any lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) + r" *\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, output if not output or output.endswith("\n") else output + "\n") is not None


def links(page: Path) -> list[str]:
    """What a page's links lead to: a file beside it, a heading after "#", or both."""
    return re.findall(r"\]\(([^)]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
