"""Ranks as processes that compare one architecture after the other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("rank_process.py")


class RankGroup:
    """Some rank processes, which live until the block ends.

    Args:
        size: how many.
        program: what each is, before its rank, their number and the path of their store.
        options: what comes after these.
        timeout_s: how long one architecture may take.
    """

    def __init__(
        self,
        size: int,
        program: Sequence[str] = (sys.executable, str(SCRIPT)),
        options: Sequence[str] = (),
        timeout_s: float = 600,
    ) -> None:
        self.size = size
        self.program, self.options, self.timeout_s = program, options, timeout_s

    def restart(self) -> None:
        """Ends the ranks, of which one may be stuck, and starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self.__exit__(None, None, None)
        self.__enter__()

    def __enter__(self) -> RankGroup:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._ranks = [
            subprocess.Popen(
                [*self.program, str(rank), str(self.size), store, *self.options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(self.size)
        ]  # fmt: skip
        return self

    def compare(self, name: str, **changes: Any) -> dict[str, Any]:
        """Returns what the ranks found about one architecture."""
        for rank in self._ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(json.dumps([name, changes]) + "\n")
                rank.stdin.flush()
            except BrokenPipeError:
                return {"name": name, "failed": "a rank ended"}
        assert self._ranks[0].stdout is not None
        if not select.select([self._ranks[0].stdout], [], [], self.timeout_s)[0]:
            return {"name": name, "failed": f"no answer within {self.timeout_s:.0f} s"}
        line = self._ranks[0].stdout.readline()
        if not line:
            return {"name": name, "failed": "a rank ended"}
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(30 if kind is None else 1)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        if self._ranks[0].stdout is not None:
            self._ranks[0].stdout.close()
        self._folder.cleanup()
