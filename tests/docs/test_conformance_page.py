"""docs/conformance.md is made from the checks and the planted faults, and is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.accelerator import CATEGORIES
from acclimate_conformance.runner.catalog import checks

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.usefixtures("warm_starts")
def test_the_page_is_what_the_checks_say() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_conformance.py", "--check"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_every_name_of_the_interface_is_observed_by_a_check() -> None:
    names = {name for category in CATEGORIES for name in vars(category) if not name.startswith("_")}
    observed = {name for check in checks() if check.name != "signatures" for name in check.observes}
    assert names - observed == set(), "no check looks at these"
    assert observed - names == set(), "checks name what the interface does not have"


def test_every_check_says_what_it_looks_at_in_one_sentence() -> None:
    for check in checks():
        assert check.promise.endswith("."), check.id
        assert check.rules, check.id
    assert len({check.id for check in checks()}) == len(checks())
