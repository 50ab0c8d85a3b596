"""`--launcher slurm`: a process per slot on two hosts of a cluster with a controller and two daemons."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from engine_jobs import (
    ACCLIMATE,
    SLEEP,
    WITH_TORCH,
    Jobs,
    check_all_reduce,
    check_failing_rank,
    check_interrupt,
    check_killed_launcher,
    check_lost_host,
    check_much_output,
    check_reader_that_exits,
)
from hosts import Hosts
from slurm_cluster import SlurmCluster

SLURM = ("--launcher", "slurm")


@pytest.fixture
def slurm_jobs(hosts: Hosts, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs on a cluster of the hosts."""
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    folder.mkdir()
    cluster = SlurmCluster(hosts, folder)
    yield Jobs(hosts, tmp_path, environment=cluster.environment)
    cluster.close()


def test_ranks_on_two_hosts_reduce_together(slurm_jobs: Jobs) -> None:
    check_all_reduce(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_ranks_on_two_hosts_reduce_together_with_torch(slurm_jobs: Jobs) -> None:
    check_all_reduce(slurm_jobs, *SLURM, code=WITH_TORCH)


def test_a_failing_rank_ends_the_other_hosts_ranks_with_its_exit_code(slurm_jobs: Jobs) -> None:
    check_failing_rank(slurm_jobs, *SLURM)


def test_inside_an_allocation_auto_takes_slurm_and_its_hosts(slurm_jobs: Jobs) -> None:
    code = "import os, socket; print(socket.gethostname(), *map(os.getenv, ('SLURM_PROCID', 'WORLD_SIZE')))"
    run = [*ACCLIMATE, str(slurm_jobs.script(code))]
    with slurm_jobs.hosts.head.popen(
        ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *run],
        directory=slurm_jobs.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=slurm_jobs.environment,
    ) as job:
        stdout, stderr = job.communicate(timeout=240)
    expected = {f"[rank {rank}] {('alpha', 'beta')[rank // 2]} {rank} 4" for rank in range(4)}
    assert (job.returncode, set(stdout.splitlines())) == (0, expected), stderr


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_of_all_hosts(slurm_jobs: Jobs) -> None:
    check_interrupt(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(slurm_jobs: Jobs) -> None:
    check_killed_launcher(slurm_jobs, *SLURM)


def test_much_output_comes_through_in_whole_lines(slurm_jobs: Jobs) -> None:
    check_much_output(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_the_job_ends_when_nobody_reads_its_output_any_more(slurm_jobs: Jobs) -> None:
    check_reader_that_exits(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_a_host_that_goes_away_ends_the_job_and_is_named(slurm_jobs: Jobs) -> None:
    check_lost_host(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_a_host_that_slurm_does_not_know_is_said_in_slurms_words(slurm_jobs: Jobs) -> None:
    ended = slurm_jobs.run(SLEEP, *SLURM, hosts=["alpha", "gamma"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "srun: error: Unable to allocate resources: Invalid node name specified" in ended.stderr
    assert 'no answer from "alpha", "gamma": srun ended with exit code 1.' in ended.stderr


def test_without_a_hostfile_and_an_allocation_there_is_nothing_to_start_on(slurm_jobs: Jobs) -> None:
    command = [*ACCLIMATE, *SLURM, str(slurm_jobs.script(SLEEP))]
    ended = slurm_jobs.hosts.head.run(command, env=slurm_jobs.environment)
    assert ended.returncode == 2
    assert "there is no Slurm allocation and no --hostfile" in ended.stderr
