"""Names that pages import from acclimate exist where the pages import them from."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from page_blocks import DOCS, blocks

PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def imports(page: Path) -> Iterator[tuple[str, str]]:
    """Each module and name that a page's Python blocks import from acclimate."""
    for block in blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(dedent(block.content))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "acclimate":
                    yield from ((str(node.module), alias.name) for alias in node.names)


NAMES = sorted({found for page in PAGES for found in imports(page)})


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(name) for name in NAMES])
def test_a_documented_name_can_be_imported_as_documented(module: str, name: str) -> None:
    home = importlib.import_module(module)
    assert hasattr(home, name) or importlib.import_module(f"{module}.{name}")
