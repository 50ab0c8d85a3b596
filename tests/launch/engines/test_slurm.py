"""`--launcher slurm`: a process per slot on two hosts of a cluster with a controller and two daemons."""

from __future__ import annotations

import ast
import subprocess
import sys
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
from hosts import SRC, Hosts
from slurm_cluster import SlurmCluster

SLURM = ("--launcher", "slurm")


@pytest.fixture
def slurm_jobs(hosts: Hosts, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs on a cluster of the hosts."""
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    # A short name: a batch step's socket in it may have 108 bytes.
    cluster = SlurmCluster(hosts, tmp_path_factory.mktemp("slurm"))
    yield Jobs(hosts, tmp_path, environment=cluster.environment)
    cluster.close()


def test_ranks_on_two_hosts_reduce_together(slurm_jobs: Jobs) -> None:
    check_all_reduce(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_ranks_on_two_hosts_reduce_together_with_torch(slurm_jobs: Jobs) -> None:
    check_all_reduce(slurm_jobs, *SLURM, code=WITH_TORCH)


@pytest.mark.slow
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


def settings(slurm_jobs: Jobs) -> list[str]:
    """Returns words for env(1)."""
    variables = {**slurm_jobs.environment, "PYTHONPATH": str(SRC)}
    return [f"{name}={value}" for name, value in variables.items()]


_PLACE = """
import os
from acclimate.comm.init import find_place, master_address
place = find_place(os.environ)
numbers = place and (place.rank, place.world_size, place.local_rank, place.local_size)
print(numbers and (*numbers, *master_address(place, os.environ)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_tasks_of_srun_know_their_place_whatever_interface_it_offers(slurm_jobs: Jobs, mpi: str) -> None:
    command = ["srun", f"--mpi={mpi}", "--nodes=2", "--ntasks=4", sys.executable, "-c", _PLACE]
    done = slurm_jobs.hosts.head.run(["env", *settings(slurm_jobs), *command])
    places = sorted(ast.literal_eval(line) for line in done.stdout.splitlines())
    assert [place[:5] for place in places] == [(rank, 4, rank % 2, 2, "alpha") for rank in range(4)], done
    assert len({place[5] for place in places}) == 1


@pytest.mark.slow
def test_python_in_a_batch_script_of_several_tasks_is_a_process_alone(slurm_jobs: Jobs) -> None:
    script = slurm_jobs.folder / "batch.sh"
    script.write_text(f"#!/bin/sh\nenv | grep SLURM_NTASKS\n{sys.executable} {slurm_jobs.script(_PLACE)}\n")
    output = slurm_jobs.folder / "batch.out"
    command = ["sbatch", "--wait", "--ntasks=4", f"--output={output}", str(script)]
    done = slurm_jobs.hosts.head.run(["env", *settings(slurm_jobs), *command])
    assert (done.returncode, output.read_text().split()) == (0, ["SLURM_NTASKS=4", "None"]), done


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_of_all_hosts(slurm_jobs: Jobs) -> None:
    check_interrupt(slurm_jobs, *SLURM)


@pytest.mark.slow
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(slurm_jobs: Jobs) -> None:
    check_killed_launcher(slurm_jobs, *SLURM)


@pytest.mark.slow
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
