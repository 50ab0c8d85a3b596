"""docs/interface.md is made from the docstrings, and is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.accelerator import CATEGORIES, Accelerator

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.usefixtures("warm_starts")
def test_the_page_is_what_the_docstrings_say() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_interface.py", "--check"], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category.__name__)
def test_every_public_name_of_a_category_has_an_entry(category: type) -> None:
    page = (DOCS / "interface.md").read_text()
    names = [name for name in vars(category) if not name.startswith("_")]
    assert names
    missing = [name for name in names if f"### `{name}(" not in page and f"### `{name}:" not in page]
    assert not missing


def test_the_categories_hold_the_whole_interface() -> None:
    documented = {name for category in CATEGORIES for name in vars(category) if not name.startswith("_")}
    assert {name for name in dir(Accelerator) if not name.startswith("_")} == documented
