"""ThreadSanitizer sees no race in the transport, and sees one that is planted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cpp_programs import SOURCE, cpp_compiler

from acclimate.comm import backend as shm

HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{SOURCE}")


def build(folder: Path, replaced: dict[str, Path]) -> Path:
    """The program of threads, with some of the transport's files replaced."""
    compiler = cpp_compiler()
    objects = []
    sources: list[tuple[Path, tuple[str, ...]]] = [
        (HERE / "thread_ranks.cpp", ()),
        (SOURCE / "messages.cpp", ()),
    ]
    for source in shm.TRANSPORT:
        path = SOURCE.parent / (source if isinstance(source, str) else source.path)
        flags = () if isinstance(source, str) else source.flags
        sources.append((replaced.get(path.name, path), flags))
    for number, (path, flags) in enumerate(sources):
        objects.append(folder / f"{number}.{path.stem}.o")
        command = [compiler, *FLAGS, *flags, "-c", str(path), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    program = folder / "thread_ranks"
    linked = subprocess.run([compiler, *FLAGS, *map(str, objects), "-o", str(program)], check=False)
    if linked.returncode != 0:
        pytest.skip("this compiler has no ThreadSanitizer")
    return program


def run(program: Path, ranks: int, rounds: int, has_spare_cores: bool) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(ranks), str(rounds), str(int(has_spare_cores))]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "has_spare_cores"), [(2, True), (3, False), (5, False)])
def test_the_transport_has_no_race(tmp_path: Path, ranks: int, has_spare_cores: bool) -> None:
    done = run(build(tmp_path, {}), ranks, 200, has_spare_cores)
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:3000]
    assert (done.returncode, done.stdout) == (0, "0 wrong\n")


@pytest.mark.slow
def test_a_missing_order_between_stamp_and_content_is_found(tmp_path: Path) -> None:
    text = (SOURCE / "group.cpp").read_text()
    ordered = "stamp.load(std::memory_order_acquire) >= round_"
    assert ordered in text
    planted = tmp_path / "group.cpp"
    planted.write_text(text.replace(ordered, ordered.replace("acquire", "relaxed")))
    done = run(build(tmp_path, {"group.cpp": planted}), 3, 20, False)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
