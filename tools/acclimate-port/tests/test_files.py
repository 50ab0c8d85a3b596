"""The files that are read and written: regular ones in the tree, as they were when they were read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate_port import __main__ as program
from acclimate_port.engine import Settings, port_text
from acclimate_port.files import text_files, workers

SOURCE = 'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.to("cuda")\n'


def run(*arguments: object) -> int:
    return program.main([str(argument) for argument in arguments])


def test_a_link_out_of_the_tree_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text(SOURCE)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").symlink_to(outside)
    (tree / "b.py").write_text(SOURCE)
    assert run(tree, "--write") == 0
    assert outside.read_text() == SOURCE
    assert "cuda" not in (tree / "b.py").read_text()


def test_a_pipe_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "b.py").write_text(SOURCE)
    command = [sys.executable, "-m", "acclimate_port", str(tmp_path), "--write"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    assert "cuda" not in (tmp_path / "b.py").read_text()
    assert run(tmp_path / "pipe.py") == 2
    assert "not a regular file" in capsys.readouterr().out


def test_a_pipe_that_takes_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert workers.port_file(tmp_path / "pipe.py", Settings()).failure == text_files.NOT_REGULAR


def test_a_file_that_changed_since_it_was_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(SOURCE)
    result = workers.port_file(path, Settings())
    path.write_text(SOURCE + "# edited\n")
    written = workers._written(result)
    assert "changed" in written.failure
    assert not written.written
    assert path.read_text() == SOURCE + "# edited\n"


def test_a_run_lists_the_edits_of_each_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(SOURCE)
    told: list[str] = []

    def stop(result: workers.FileResult) -> None:
        told.append(str(result.path))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.port_files(sorted(tmp_path.glob("*.py")), Settings(), True, 1, lambda: None, stop)
    changed = [path for path in sorted(tmp_path.glob("*.py")) if path.read_text() != SOURCE]
    assert told == [str(path) for path in changed]


def test_written_edits_are_listed_with_unsafe_ones_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    path.write_text(SOURCE + '\n\ndef g(y, device):\n    return device == "cuda"\n')
    assert run(path, "--write", "--unsafe", "--statistics") == 0
    out = capsys.readouterr().out
    assert "wrote 2 edits" in out
    assert "ACC204" in out
    assert "(unsafe: other accelerators" in out
    assert "in 1 of 1 file;" in out
    assert "device-comparison" in out


def test_the_page_shows_what_an_unsafe_edit_would_give(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import torch\n\n\ndef g(y):\n    return y.cuda()\n")
    assert run(path, "--report", tmp_path / "page.html") == 0
    assert "return y.to(get_accelerator().device_name())" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "form", ["x.y({})", *(pytest.param(form, marks=pytest.mark.slow) for form in ("f({})", "[{}]"))]
)
def test_work_grows_with_the_number_of_calls_and_not_with_its_square(form: str) -> None:
    def calls(count: int) -> int:
        body = "".join(
            f"    x = x.cuda().half().cuda({index})\n    y = {form.format('torch.cuda.current_device()')}\n"
            for index in range(count)
        )
        seen = 0

        def look(frame: object, event: str, _: object) -> None:
            nonlocal seen
            seen += event == "call"

        source = f"import torch\n\n\ndef g(x: torch.Tensor, f):\n{body}"
        sys.setprofile(look)
        try:
            port_text(source, Settings(unsafe=True))
        finally:
            sys.setprofile(None)
        return seen

    assert calls(40) < 3 * calls(20)
