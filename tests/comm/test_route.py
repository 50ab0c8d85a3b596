"""Transfers use the stores that are faster on the machine: ordinary ones, or ones that bypass the caches."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from cpp_programs import compiled

SHORT, LONG = (65536, 1), (1 << 23, 16)
"""Bytes and parts."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("route"), Path(__file__).with_name("route_choices.cpp"))


def way(program: Path, transfer: tuple[int, int], around_us: int, through_us: int, transfers: int) -> str:
    """The way that seven of nine runs choose: other work may interrupt the faster way in a single one."""
    command = [str(program), *map(str, (*transfer, around_us, through_us, transfers))]
    chosen = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
              for _ in range(9)]  # fmt: skip
    way, count = Counter(chosen).most_common(1)[0]
    return way if count >= 7 else f"{count} times {way}"


@pytest.mark.parametrize("transfer", [SHORT, LONG])
def test_transfers_go_through_the_caches_where_that_is_faster(
    program: Path, transfer: tuple[int, int]
) -> None:
    assert way(program, transfer, around_us=400, through_us=50, transfers=20) == "through"


@pytest.mark.parametrize("transfer", [SHORT, LONG])
def test_transfers_stay_around_the_caches_where_that_is_faster(
    program: Path, transfer: tuple[int, int]
) -> None:
    assert way(program, transfer, around_us=50, through_us=400, transfers=20) == "around"


def test_transfers_stay_around_the_caches_until_both_ways_were_tried(program: Path) -> None:
    assert way(program, SHORT, around_us=400, through_us=50, transfers=1) == "around"


def test_a_transfer_smaller_than_what_is_streamed_is_not_tried(program: Path) -> None:
    assert way(program, (1024, 1), around_us=400, through_us=50, transfers=20) == "around"
