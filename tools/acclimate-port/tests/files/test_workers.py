"""Files that several processes port."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acclimate_port.engine import Settings
from acclimate_port.files import workers
from acclimate_port.files.workers import FileResult, port_files

MOVES = 'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.to("cuda")\n'
STAYS = "def keep{0}(model):\n    return model.cuda()\n"
RUNS = (
    "import torch\nfrom first import keep1\nfrom last import keep2\n\n\n"
    "def run(x):\n    return x.to('cuda' if torch.cuda.is_available() else 'cpu')\n"
)


def ported(folder: Path, files: dict[str, str], jobs: int) -> list[FileResult]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return port_files(sorted(folder.glob("*.py")), Settings(), False, jobs, lambda: None)


def test_a_report_is_the_same_with_any_number_of_processes(tmp_path: Path) -> None:
    # The last file is the longest, so that another process has it, and has it first.
    files = {"first.py": STAYS.format(1), "last.py": STAYS.format(2) + "x = 1\n" * 200, "run.py": RUNS}
    files |= {f"other{number}.py": MOVES for number in range(6)}
    alone, shared = (ported(tmp_path, files, jobs) for jobs in (1, 2))
    assert shared == alone
    reasons = [one.reason for result in alone if result.path.name == "run.py" for one in result.sites]
    assert any("first.py:" in reason for reason in reasons), reasons


def test_a_file_that_kills_its_process_is_named_and_the_others_are_ported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., FileResult] = workers._ported

    def killing(path: Path, *given: Any) -> FileResult:
        if path.name == "kills.py":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, *given)

    monkeypatch.setattr(workers, "_ported", killing)  # the processes are forks of this one
    files = {"kills.py": MOVES + "x = 1\n" * 200} | {f"other{number}.py": MOVES for number in range(9)}
    results = ported(tmp_path, files, 2)
    assert {one.path.name: one.failure for one in results if one.failure} == {
        "kills.py": "its worker process was killed; run again with this file alone"
    }
    assert sum(one.changed for one in results) == 9
