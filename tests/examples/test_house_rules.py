"""The examples keep the rule that they are about: no hardware name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from test_house import Source, hardware_names, name_comparisons

EXAMPLES = Path(__file__).parents[2] / "examples"


def breaches(name: str, code: str) -> list[str]:
    source = Source(Path(name), ast.parse(code))
    return [*hardware_names(source), *name_comparisons(source)]


def test_no_example_names_hardware() -> None:
    files = sorted(EXAMPLES.rglob("*.py"))
    assert files
    assert [breach for path in files for breach in breaches(path.name, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "code", ["x.to('cuda:0')", "import torch_npu", "torch.cuda.synchronize()", "b = 'nccl'"]
)
def test_a_hardware_name_in_an_example_would_be_found(code: str) -> None:
    assert breaches("train_gpt.py", code)
