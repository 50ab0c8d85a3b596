"""Agents, started as an engine would and by hand."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from acclimate.errors import LaunchProtocolError
from acclimate.launch.remote.agent import read_rank
from acclimate.launch.supervise.processes import own_python
from fresh_process import plain_environment


def run_module(
    module: str, *arguments: str, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        own_python(module, *arguments),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**plain_environment(), **environment},
        timeout=240,
        check=False,
    )


OF_RANK = ("--rank_variable", "PMI_RANK", "--local_rank_variable", "MPI_LOCALRANKID")


@pytest.mark.parametrize("value", [None, "", "two", "-1", "9" * 5000, "٣"])
def test_an_agent_of_a_rank_that_its_engine_does_not_name_says_how_agents_are_started(
    value: str | None,
) -> None:
    environment = {} if value is None else {"PMI_RANK": value}
    with pytest.raises(LaunchProtocolError, match=r"PMI_RANK is .* `acclimate run .*` starts agents"):
        read_rank(environment, "PMI_RANK")


def test_an_agent_whose_launcher_is_gone_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = run_module(
        "acclimate.launch.remote.agent",
        *OF_RANK,
        PMI_RANK="0",
        MPI_LOCALRANKID="0",
        ACCLIMATE_LAUNCHER=f"k@127.0.0.1:{port}",
    )
    assert ended.returncode == 1
    assert f"cannot reach the launcher on port {port} (127.0.0.1: Connection refused)" in ended.stderr


def test_an_agent_whose_standard_input_ends_ends() -> None:
    assert run_module("acclimate.launch.remote.agent").returncode == 1


@pytest.mark.parametrize("module", ["remote.agent", "elastic.worker"])
def test_a_file_of_the_users_takes_the_place_of_no_module(module: str, tmp_path: Path) -> None:
    for name in ("re.py", "selectors.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('the one in the working directory was taken')")
    arguments = [str(os.dup(1))] if module == "elastic.worker" else []
    ended = run_module(f"acclimate.launch.{module}", *arguments, folder=tmp_path)
    assert "No module named" not in ended.stderr
    assert "working directory" not in ended.stderr
