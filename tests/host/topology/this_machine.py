"""What tests on this machine share: fresh interpreters, and control groups to put them in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate.host import topology

SRC = Path(topology.__file__).parents[3]


needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the live /sys and /proc of Linux"
)


def assert_consistent(read: topology.Topology) -> None:
    by_node = [cpu for node in read.usable_nodes for cpu in node.cpus if cpu in read.allowed_cpus]
    assert sorted(by_node) == sorted(read.allowed_cpus)
    by_core = [cpu for core in read.usable_cores() for cpu in core.cpus]
    assert sorted(by_core) == sorted(read.allowed_cpus)
    everywhere = [cpu for node in read.nodes for cpu in node.cpus]
    assert len(everywhere) == len(set(everywhere)), "a CPU is in two nodes"
    for core in read.cores:
        assert set(core.cpus) <= set(read.node(core.node).cpus), "a core reaches outside its node"


def run_python(code: str, before: Callable[[], None] | None = None) -> list[str]:
    """The words that a fresh interpreter prints; ``before`` runs in it first."""
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, preexec_fn=before, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def join(group: Path) -> Callable[[], None]:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
