from __future__ import annotations

import re

import pytest
from sim_process import TESTS, run_python

pytest.importorskip("expecttest", reason="torch's operator tests import it")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [("1", "--once"), ("8",)])
def test_at_least_690_operators_equal_the_hosts_and_their_gradients(options: tuple[str, ...]) -> None:
    result = run_python(str(TESTS / "operators.py"), "--samples", *options, timeout_s=850)
    counts = re.search(r"forward (\d+) of \d+ .* backward (\d+) of (\d+)", result.stdout)
    assert counts is not None, result.stdout + result.stderr
    assert int(counts[1]) >= 690, result.stdout
    assert int(counts[3]) - int(counts[2]) <= 3, result.stdout  # those that make sparse tensors
