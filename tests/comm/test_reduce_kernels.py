"""The kernels that combine the numbers of several ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cpp_programs import SOURCE, compiled

PLAIN = ("-DACCLIMATE_FIND_REDUCE=find_reduce_plain", "-DACCLIMATE_EVERY_DTYPE")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    average = Path(__file__).with_name("average_of_many.cpp")
    folder = tmp_path_factory.mktemp("average")
    return compiled(folder, average, SOURCE / "reduce_kernels.cpp", flags=("-O0", *PLAIN))


@pytest.mark.parametrize(
    ("ranks", "value", "average"),
    [(2, 100, 50), (127, -127, -1), (128, -128, -1), (200, 100, 0), (256, 1, 0)],
)
def test_an_average_of_int8_divides_by_more_ranks_than_int8_holds(
    program: Path, ranks: int, value: int, average: int
) -> None:
    run = subprocess.run([program, str(ranks), str(value)], capture_output=True, text=True, check=True)
    assert int(run.stdout) == average
