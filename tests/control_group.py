"""A control group of this machine, for tests of what a process in it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acclimate.host.topology.control_groups import own_groups


@pytest.fixture
def own_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new control group of this machine for the controller that the test names; needs a writable one."""
    controller, needed = request.param
    for chain in own_groups(Path("/"), controller):
        group = Path(chain[-1]) / f"acclimate-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / needed[0]).exists() or (group / needed[1]).exists():
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip(
        f"no control group for {controller} can be made here (needs root and a writable /sys/fs/cgroup)"
    )
