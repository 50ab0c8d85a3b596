"""Every rule's examples are what it does, for both targets; its page shows them."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.rules import RULES, Example, Rule

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def examples(rule: Rule) -> Iterator[tuple[Example, str]]:
    """Each with each target."""
    return itertools.product(rule.examples, rule.targets)


@each_rule
def test_the_examples_become_what_the_page_shows(rule: Rule) -> None:
    for example, target in examples(rule):
        expected = getattr(example, target)
        ported = port_text(example.before, Settings(target, unsafe=True))
        if expected is not None:
            assert ported.text == expected, target
            assert any(site.status is Status.CONVERTED for site in ported.sites), (target, expected)
        elif example.acclimate is None:
            assert ported.text == example.before
            told = any(site.code == rule.code and site.reason for site in ported.sites)
            assert told or rule.code == "ACC107", (target, example.before)


@each_rule
def test_porting_an_example_twice_is_porting_it_once(rule: Rule) -> None:
    for (example, target), unsafe in itertools.product(examples(rule), (False, True)):
        once = port_text(example.before, Settings(target, unsafe=unsafe)).text
        assert port_text(once, Settings(target, unsafe=unsafe)).text == once, target


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
