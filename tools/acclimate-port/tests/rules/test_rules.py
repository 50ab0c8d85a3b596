"""Every rule's examples are what it does, for both targets; its page shows them."""

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.rules import RULES, Example, Rule

EXAMPLES = [
    pytest.param(rule, example, target, id=f"{rule.code}-{number}-{target}")
    for rule in RULES
    for number, example in enumerate(rule.examples)
    for target in rule.targets
]


@pytest.mark.parametrize(("rule", "example", "target"), EXAMPLES)
def test_an_example_becomes_what_its_page_shows(rule: Rule, example: Example, target: str) -> None:
    expected = getattr(example, target)
    ported = port_text(example.before, Settings(target, unsafe=True))
    if expected is not None:
        assert ported.text == expected
        assert any(site.status is Status.CONVERTED for site in ported.sites)
    elif example.acclimate is None:
        assert ported.text == example.before
        assert any(site.code == rule.code and site.reason for site in ported.sites) or rule.code == "ACC107"


@pytest.mark.parametrize(("rule", "example", "target"), EXAMPLES)
def test_porting_an_example_twice_is_porting_it_once(rule: Rule, example: Example, target: str) -> None:
    for unsafe in (False, True):
        once = port_text(example.before, Settings(target, unsafe=unsafe)).text
        assert port_text(once, Settings(target, unsafe=unsafe)).text == once


def test_codes_and_names_are_unique_and_each_rule_explains_itself() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.explanation, rule.code
        assert rule.examples, rule.code


def test_the_pages_are_what_the_rules_say() -> None:
    script = Path(__file__).parents[4] / "docs" / "make_port.py"
    made = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
