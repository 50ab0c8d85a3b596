"""The kernels that combine the numbers of several ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from acclimate.comm import native

SOURCE = Path(native.__file__).parent / "csrc"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("average") / "average"
    sources = [Path(__file__).with_name("average_of_many.cpp"), SOURCE / "reduce_plain.cpp"]
    subprocess.run(
        [compiler, "-std=c++20", "-O0", f"-I{SOURCE}", *map(str, sources), "-o", str(built)], check=True
    )
    return built


@pytest.mark.parametrize(
    ("ranks", "value", "average"),
    [(2, 100, 50), (127, -127, -1), (128, -128, -1), (200, 100, 0), (256, 1, 0)],
)
def test_an_average_of_int8_divides_by_more_ranks_than_int8_holds(
    program: Path, ranks: int, value: int, average: int
) -> None:
    run = subprocess.run([program, str(ranks), str(value)], capture_output=True, text=True, check=True)
    assert int(run.stdout) == average
