"""The guide and the tool agree: the tool writes the code that the guide shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Site, Status, port_text
from acclimate_port.rules import RULES

GUIDE = (Path(__file__).parents[3] / "docs" / "guide.md").read_text(encoding="utf-8")
HARDWARE = re.compile(r"cuda|nccl|pin_memory|Builder\(\)", re.IGNORECASE)
NUMBER = "the same, used as a number"
SNIPPETS = re.findall(r"```python\n# on CUDA only\n(.*?)```", GUIDE, re.DOTALL)
IMPORTS = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

"""


def port(source: str) -> tuple[str, tuple[Site, ...]]:
    """What the tool makes of a piece of a program, without the imports, and what it reports."""
    result = port_text(IMPORTS + source, Settings(unsafe=True))
    text = result.text.replace("from acclimate import get_accelerator\n", "").removeprefix(IMPORTS)
    return text.replace("get_accelerator()", "acc"), result.sites


def rows() -> list[tuple[str, str]]:
    """The table of runtime calls that need a decision: what is on CUDA only, and what is anywhere."""
    table = GUIDE.partition("| on CUDA only | anywhere |\n|---|---|\n")[2].partition("\n\n")[0]
    pairs = [line.strip("| ").split(" | ", 1) for line in table.splitlines()]
    return [(before, after) for before, after in pairs]


def by_hand() -> list[str]:
    """What the guide says of the rows that the tool leaves to people."""
    sentence = re.search(r"`acclimate port` makes most of these edits\. (.*?)\.\n\n", GUIDE, re.DOTALL)
    assert sentence is not None
    return re.findall(r"`(\w+)`", sentence[1])


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_snippet_for_cuda_is_ported_or_reported_line_by_line(snippet: str) -> None:
    text, sites = port(snippet)
    ast.parse(text)
    left = {site.line - IMPORTS.count("\n") for site in sites if site.status is not Status.CONVERTED}
    for number, line in enumerate(snippet.splitlines(), 1):
        if HARDWARE.search(line) and not line.startswith("from "):
            assert line not in text.splitlines() or number in left, line


@pytest.mark.parametrize(("before", "after"), rows())
def test_each_row_is_what_the_tool_does_or_is_named_as_left(before: str, after: str) -> None:
    code = re.search(r"`([^`]*)`", before.replace(NUMBER, "`torch.cuda.current_device()`"))
    assert code is not None
    if any(word in code[1] for word in by_hand()):
        return
    source = code[1].replace("(…", "(rows").replace(", …", "") if "…" in code[1] else code[1]
    if before.startswith("`torch.cuda.current_device()`"):
        source = f"x.to({source})"
    elif before == NUMBER:
        source = "print(torch.cuda.current_device())"
    elif source.startswith("if "):
        source += "\n    pass"
    text, _ = port(source + "\n")
    assert not HARDWARE.search(text.replace('or "CUDA_VISIBLE_DEVICES"', "").replace("pin_memory=", "")), text
    wanted = re.search(r"`([^`]*)`", after)
    if wanted is not None and "…" not in wanted[1] and "leave it out" not in after:
        assert wanted[1] in text


def test_each_rule_has_its_place_in_the_guide_and_each_place_its_rule() -> None:
    codes = set(re.findall(r"ACC\d{3}", GUIDE))
    assert codes == {rule.code for rule in RULES}


def test_the_diff_of_the_readme_is_what_write_does() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    heads = "import torch\nfrom torch.utils.data import DataLoader\n\n"
    sides = {
        sign: "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (" ", sign))
        for sign in "-+"
    }
    result = port_text(heads + sides["-"], Settings())
    assert result.text.partition("DataLoader\n\n")[2] == sides["+"]
    assert all(site.status is Status.CONVERTED for site in result.sites)
