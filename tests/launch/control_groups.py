"""Control groups that allow little, for what becomes of a job in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import wait_until

CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMITS = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}
"""By controller: what the limit is called in version 1, and in version 2."""


@contextmanager
def limited_group(controller: str, limit: int, *, nested: bool = False) -> Iterator[list[str]]:
    """Gives words to put before a command that is to run in such a group; skips where none can be made.

    If ``nested``, the command runs in a group without a limit inside it.
    """
    is_version_1 = (CONTROL_GROUPS / controller).exists()
    above = CONTROL_GROUPS / controller if is_version_1 else CONTROL_GROUPS
    group = above / f"acclimate-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / LIMITS[controller][not is_version_1]).write_text(str(limit))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a limit on {controller} can be made here: {error}")
    swap = group / ("memory.swappiness" if is_version_1 else "memory.swap.max")
    if swap.exists():
        swap.write_text("0")
    joined = group / "inner" if nested else group
    joined.mkdir(exist_ok=True)
    try:
        yield ["sh", "-c", f'echo $$ > {joined}/cgroup.procs; exec "$@"', "sh"]
    finally:
        wait_until(lambda: not (joined / "cgroup.procs").read_text(), "the group to be empty")
        for folder in {joined: None, group: None}:
            folder.rmdir()
