"""Tests that expect the numbers which a seed gives on CUDA: each device draws others."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.source.tree import called_name, keyword, walk
from acclimate_port.source_file import SourceFile, kept

_RANDOM = re.compile(r"^(rand|randn|randint|randperm|normal|uniform|Generator)(_like)?$")
_EXACT = re.compile(r"\d*\.\d{3,}")
"""A number that nobody writes by hand: it was copied from a result."""
_FEW = 2


def reason_against_numbers(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a test must run on CUDA alone; ``""`` if a node is in no such test."""
    around = next((one for one in file.tree.ancestors(node) if one in _tests(file)), None)
    if around is None:
        return ""
    line = file.tree.line(file.span(_tests(file)[around]).start)
    return f"line {line} expects numbers that a seed gives on CUDA, and each device draws others"


@kept
def _tests(file: SourceFile) -> dict[cst.CSTNode, cst.CSTNode]:
    """The tests that draw numbers on a device and expect some, each with those."""
    if _EXACT.search(file.tree.text) is None:
        return {}
    found: dict[cst.CSTNode, cst.CSTNode] = {}
    for test in file.tree.of_type(cst.FunctionDef):
        if not test.name.value.startswith("test"):
            continue
        parts = [*walk(test.body)]
        calls = [one for one in parts if isinstance(one, cst.Call)]
        draws = any(_RANDOM.match(called_name(one) or "") and keyword(one, "device") for one in calls)
        lists = (one for one in parts if isinstance(one, (cst.List, cst.Tuple)))
        expected = next((one for one in lists if _has_results(one)), None)
        if draws and expected is not None:
            found[test] = expected
    return found


def _has_results(listed: cst.List | cst.Tuple) -> bool:
    numbers = (part for part in walk(listed) if isinstance(part, cst.Float))
    return sum(_EXACT.match(one.value) is not None for one in numbers) >= _FEW
