"""The workflow in docs/extension.md is valid, and its options exist."""

from __future__ import annotations

import re

import pytest
from page_blocks import DOCS, blocks

PAGE = DOCS / "extension.md"


def test_the_workflow_is_short_and_runs_pytest_with_options_that_exist(pytestconfig: pytest.Config) -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = (block for block in blocks(PAGE) if block.language == "yaml")
    assert len(block.content.splitlines()) <= 25
    steps = yaml.safe_load(block.content)["jobs"]["sim"]["steps"]
    (command,) = (step["run"] for step in steps if step.get("run", "").startswith("pytest"))
    for option in re.findall(r"--[a-z-]+", command):
        assert hasattr(pytestconfig.option, option.removeprefix("--").replace("-", "_")), option


PROFILES = re.findall(r'"([^"]*=[^"]*)"', re.findall(r"profile: \[.*", PAGE.read_text())[0])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_workflows_profiles_are_profiles(profile: str) -> None:
    settings = pytest.importorskip("acclimate_sim.profile")
    assert settings.parse(profile).devices == 2
