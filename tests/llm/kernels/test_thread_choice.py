"""A step takes as many threads as make it fastest beside what else runs on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.llm.kernels import builder

sys.path.insert(0, str(Path(__file__).parents[2] / "comm"))

from cpp_programs import compiled

PROGRAM = Path(__file__).with_name("steps_of_threads.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(builder.__file__).parent / "csrc"
    return compiled(tmp_path_factory.mktemp("choice"), PROGRAM, flags=("-O1", f"-I{source}"))


def taken(
    program: Path, processors: int, *neighbours: str, shared: float = 0.8, slept: float = 0
) -> list[dict[int, int]]:
    """How many of the last 200 steps each number of threads took, for each number of other threads."""
    command = [str(program), str(processors), str(shared), str(slept), *neighbours]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [
        {int(threads): int(steps) for threads, steps in (pair.split(":") for pair in line.split(",")[:-1])}
        for line in done.stdout.splitlines()
    ]


@pytest.mark.parametrize("slept", [0, 0.5])
def test_alone_every_step_takes_all_threads_also_if_some_have_nothing_to_do(
    program: Path, slept: float
) -> None:
    assert taken(program, 2, "0:1000", slept=slept) == [{2: 200}]
    assert taken(program, 48, "0:1000", slept=slept) == [{48: 200}]


@pytest.mark.parametrize("others", [1, 2])
def test_a_second_thread_that_saves_little_rests_beside_busy_programs(program: Path, others: int) -> None:
    (steps,) = taken(program, 2, f"{others}:1500", shared=0.3)
    assert steps[1] >= 180


@pytest.mark.parametrize("others", [2, 4])
def test_a_second_thread_that_halves_the_time_works_beside_busy_programs(program: Path, others: int) -> None:
    (steps,) = taken(program, 2, f"{others}:1500", shared=1)
    assert steps[2] >= 180


def test_all_threads_are_back_when_the_busy_programs_end(program: Path) -> None:
    _, after = taken(program, 2, "2:1500", "0:1500", shared=0.3)
    assert after == {2: 200}
    _, after = taken(program, 8, "30:3000", "0:3000", shared=0.3)
    assert after == {8: 200}


def test_of_many_processors_one_busy_program_idles_none(program: Path) -> None:
    (steps,) = taken(program, 16, "1:3000")
    assert steps.get(16, 0) + steps.get(8, 0) == 200
    assert steps[16] >= 180
