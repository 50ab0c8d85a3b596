"""Agents over ssh, with a script in place of ssh."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import launched

from acclimate.errors import HostUnreachableError
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
    assert sum(connection.ssh is not None for connection in agents.connections) < len(hosts)


LOCAL_SSH = """#!/bin/sh
for command; do :; done
exec sh -c "$command"
"""


def run_on_this_host(program: Path, *command: str) -> tuple[int, str]:
    """Runs a job of one rank, over what is called ssh; returns its exit code and standard error."""
    (program.parent / "hosts").write_text("127.0.0.1 slots=1\n")
    launcher = [sys.executable, "-m", "acclimate", "run", "--launcher", "ssh", "--no_python"]
    path = f"{program.parent}:{os.environ['PATH']}"
    with launched(
        [*launcher, "--hostfile", str(program.parent / "hosts"), *command], variables={"PATH": path}
    ) as job:
        _, stderr = job.read()
        return job.wait(), stderr


def test_a_job_ends_though_ssh_leaves_a_process_that_keeps_its_error_stream_open(tmp_path: Path) -> None:
    """As the master of ControlPersist does where ssh was called with -v."""
    left = tmp_path / "left"
    script = LOCAL_SSH.replace("exec sh", f"sleep 600 & echo $! > {left}\nexec sh")
    try:
        assert run_on_this_host(install(tmp_path / "bin", script), "true")[0] == 0
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_job_ends_though_ssh_closes_its_streams_and_does_not_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.launch.remote.ssh_agents._CLOSED_S", 0.1)
    program = install(tmp_path / "bin", "#!/bin/sh\nexec sleep 600 <&- >&- 2>&-")
    agents = SshAgents(
        JobPlan((HostPlan("host", (0,)),), ("true",), {}, "/", "cpu", grace_s=0.0), str(program)
    )
    with pytest.raises(HostUnreachableError, match='"host" cannot run an agent: ssh was killed by SIGKILL'):
        agents.run()


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
