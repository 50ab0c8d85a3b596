"""An edit needs names that have a value where it stands."""

from __future__ import annotations

import textwrap

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET


def statuses(source: str) -> list[Status]:
    """What becomes of the sites of a program with ``--to torch``."""
    return [site.status for site in port_text(textwrap.dedent(source), Settings(target="torch")).sites]


@pytest.mark.parametrize(
    "inside", ["import torch", "import torch.nn", "import numpy as torch", "from lazy import torch"]
)
def test_code_before_a_functions_own_import_of_a_name_that_it_needs_is_left(inside: str) -> None:
    source = f"""
        def f(rank, flag):
            device = f"cuda:{{rank}}"
            if flag:
                {inside}
            return device
    """
    assert statuses(source) == [Status.LEFT]


def test_code_of_an_inner_function_is_left_too() -> None:
    source = """
        def f(flag):
            def g(rank):
                return f"cuda:{rank}"
            device = g(0)
            if flag:
                import torch
            return device
    """
    assert statuses(source) == [Status.LEFT]


def test_code_after_the_import_in_its_block_or_one_around_is_ported() -> None:
    source = """
        def f(rank, flag):
            import torch
            if flag:
                torch.cuda.set_device(rank)
    """
    assert statuses(source) == [Status.CONVERTED]


def test_an_import_of_another_function_makes_no_difference() -> None:
    source = """
        import torch

        def f():
            import torch

        def g(rank):
            torch.cuda.set_device(rank)
    """
    assert statuses(source) == [Status.CONVERTED]


@EACH_TARGET
def test_code_of_a_function_that_gets_torch_is_reported_and_unsafe(target: str) -> None:
    source = "def f(torch):\n    if torch.cuda.is_available():\n        return torch.ones(2).cuda()\n    return torch.ones(2)\n"
    sites = port_text(source, Settings(target)).sites
    assert [site.status for site in sites] == [Status.UNSAFE, Status.UNSAFE]


def test_a_functions_own_name_for_torch_is_the_one_that_edits_use() -> None:
    source = """
        def count():
            import torch as th
            return th.cuda.device_count(), th.ones(2, device="cuda")
    """
    assert statuses(source) == [Status.CONVERTED, Status.CONVERTED]
    text = port_text(textwrap.dedent(source), Settings("torch")).text
    assert "th.accelerator.device_count()" in text
    assert "    import torch as th\n\n    accelerator = th." in text
