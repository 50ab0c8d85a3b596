"""Agents over ssh, where what is called ssh is a script."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import launched

from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.ssh_agents import SshAgents


def install(folder: Path, script: str) -> Path:
    """What is called ssh on somebody's PATH."""
    folder.mkdir()
    path = folder / "ssh"
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_a_limit_on_open_files_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    program = install(tmp_path / "bin", "#!/bin/sh\nexec sleep 600")
    hosts = "".join(f"host{number} slots=1\n" for number in range(20))
    (tmp_path / "hosts").write_text(hosts)
    limited = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", sys.executable, "-m", "acclimate", "run"]
    options = ["--launcher", "ssh", "--hostfile", str(tmp_path / "hosts"), "--no_python", "true"]
    path = f"{program.parent}:{os.environ['PATH']}"
    with launched([*limited, *options], variables={"PATH": path}) as job:
        _, stderr = job.read()
        assert (job.wait(), job.living()) == (2, {})
    assert "cannot be started: Too many open files" in stderr
    assert "Traceback" not in stderr


def test_a_signal_ends_a_job_while_it_still_connects_to_its_many_hosts(tmp_path: Path) -> None:
    program = install(tmp_path / "bin", "#!/bin/sh\nkill -TERM $PPID\nexec sleep 600")
    hosts = tuple(HostPlan(f"host{number}", (0,)) for number in range(250))
    agents = SshAgents(JobPlan(hosts, ("true",), {}, "/", "cpu", grace_s=0.0), str(program))
    assert agents.run().code == -signal.SIGTERM
    assert sum(connection.process is not None for connection in agents.connections) < len(hosts)


LOCAL_SSH = """#!/bin/sh
for command; do :; done
exec sh -c "$command"
"""


@pytest.mark.slow
def test_nothing_of_a_job_that_failed_is_lost_though_it_is_read_late(tmp_path: Path) -> None:
    """As by a pager: later than a host that cannot be heard would be waited for."""
    program = install(tmp_path / "bin", LOCAL_SSH)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    # The launcher keeps 1 MiB, a pipe 64 KiB: what the agent says of the last lines does not fit any more.
    code = """
import os, sys
if os.environ["RANK"] == "0":
    sys.stdout.buffer.write((b"y" * 1000 + b"\\n") * 1080 + (b"\\1" * 1990 + b"\\n") * 20)
    sys.exit(5)
"""
    (tmp_path / "script.py").write_text(code)
    launcher = [sys.executable, "-m", "acclimate", "run", "--launcher", "ssh"]
    command = [*launcher, "--hostfile", str(tmp_path / "hosts"), str(tmp_path / "script.py")]
    with launched(command, variables={"PATH": f"{program.parent}:{os.environ['PATH']}"}) as job:
        time.sleep(25)
        stdout, stderr = job.read()
        assert job.wait() == 5, stderr
    assert [line for line in stdout.splitlines() if not line.startswith("[rank 0] ")] == []
    assert (stdout.count("y" * 1000), stdout.count("\1" * 1990)) == (1080, 20)
    assert "ended with exit code 5." in stderr
