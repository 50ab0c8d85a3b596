"""A team's threads compute each unit once for all to see, and none holds up the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.llm.kernels import builder

sys.path.insert(0, str(Path(__file__).parents[2] / "comm"))

from cpp_programs import cpp_compiler

SOURCE = Path(builder.__file__).parent / "csrc"
PROGRAM = Path(__file__).with_name("team_of_threads.cpp")


def built(folder: Path, *flags: str, pool: str | None = None) -> Path:
    """The program, with the text of another pool.cpp if one is given."""
    source = SOURCE / "pool.cpp"
    if pool is not None:
        source = folder / "pool.cpp"
        source.write_text(pool.replace("../../../ops", str(SOURCE.parents[2] / "ops")))
    program = folder / "team_of_threads"
    command = [cpp_compiler(), "-std=c++20", "-O1", "-g", "-pthread", *flags, f"-I{SOURCE}"]
    done = subprocess.run([*command, str(PROGRAM), str(source), "-o", str(program)], check=False)
    if done.returncode != 0 and flags:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert done.returncode == 0
    return program


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("team"))


@pytest.mark.slow
def test_a_phase_ends_while_a_thread_is_held_up_in_its_unit(program: Path) -> None:
    assert run(program, "late").stdout == "nothing\n"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 9])
def test_each_unit_has_one_result_also_with_more_threads_than_processors(program: Path, threads: int) -> None:
    assert run(program, "often", threads, 1500).stdout == "nothing\n"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 5])
def test_the_threads_have_no_race(tmp_path: Path, threads: int) -> None:
    done = run(built(tmp_path, "-fsanitize=thread"), "often", threads, 600)
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:3000]
    assert done.stdout == "nothing\n"


@pytest.mark.slow
def test_a_missing_order_between_a_phase_and_its_content_is_found(tmp_path: Path) -> None:
    text = (SOURCE / "pool.cpp").read_text()
    ordered = "unit_bits | halves, std::memory_order_seq_cst"
    assert ordered in text
    planted = text.replace(ordered, ordered.replace("seq_cst", "relaxed"))
    done = run(built(tmp_path, "-fsanitize=thread", pool=planted), "often", 3, 100)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
