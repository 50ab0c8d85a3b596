"""Ranks as processes that compare one architecture after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("rank_process.py")


class RankGroup:
    """Some rank processes, which live until the block ends."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> RankGroup:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(self.size), store],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(self.size)
        ]  # fmt: skip
        return self

    def compare(self, name: str, **changes: Any) -> dict[str, Any]:
        """Returns what the ranks found about one architecture."""
        for each in self._ranks:
            assert each.stdin is not None
            each.stdin.write(json.dumps([name, changes]) + "\n")
            each.stdin.flush()
        assert self._ranks[0].stdout is not None
        line = self._ranks[0].stdout.readline()
        if not line:
            return {"name": name, "failed": "a rank ended"}
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._ranks:
            assert each.stdin is not None
            each.stdin.close()
        for each in self._ranks:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        if self._ranks[0].stdout is not None:
            self._ranks[0].stdout.close()
        self._folder.cleanup()
