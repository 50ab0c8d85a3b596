"""`--launcher openmpi`, `mpich` and `impi`: a process per slot on two hosts, which MPI reaches with ssh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_jobs import (
    ENGINES_FOLDER,
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

from quick_parameters import quick

MPIS = quick(("openmpi", "mpich", "impi"), "openmpi")
"""Intel MPI is started as MPICH is, but for three settings."""
SETTINGS = {
    # Open MPI refuses to be run by root unless told so twice.
    "openmpi": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
}
pytestmark = pytest.mark.parametrize("mpi", MPIS)


@pytest.fixture
def mpi_jobs(mpi: str, hosts: Hosts, tmp_path: Path) -> Jobs:
    """Jobs with this MPI on PATH."""
    programs = ENGINES_FOLDER / mpi / "bin"
    if not programs.is_dir():
        pytest.skip(f"{mpi} is not in .engines (make engines)")
    return Jobs(hosts, tmp_path, [programs], SETTINGS.get(mpi))


def test_ranks_on_two_hosts_reduce_together(mpi: str, mpi_jobs: Jobs) -> None:
    check_all_reduce(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_ranks_on_two_hosts_reduce_together_with_torch(mpi: str, mpi_jobs: Jobs) -> None:
    check_all_reduce(mpi_jobs, "--launcher", mpi, code=WITH_TORCH)


@pytest.mark.slow
def test_a_failing_rank_ends_the_other_hosts_ranks_with_its_exit_code(mpi: str, mpi_jobs: Jobs) -> None:
    check_failing_rank(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_of_all_hosts(mpi: str, mpi_jobs: Jobs) -> None:
    check_interrupt(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(mpi: str, mpi_jobs: Jobs) -> None:
    check_killed_launcher(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_much_output_comes_through_in_whole_lines(mpi: str, mpi_jobs: Jobs) -> None:
    check_much_output(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_the_job_ends_when_nobody_reads_its_output_any_more(mpi: str, mpi_jobs: Jobs) -> None:
    check_reader_that_exits(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_a_host_that_goes_away_ends_the_job_and_is_named(mpi: str, mpi_jobs: Jobs) -> None:
    check_lost_host(mpi_jobs, "--launcher", mpi)


@pytest.mark.slow
def test_an_unreachable_host_is_named_with_sshs_own_words(mpi: str, mpi_jobs: Jobs) -> None:
    ended = mpi_jobs.run(SLEEP, "--launcher", mpi, hosts=["alpha", "gamma"])
    assert (ended.returncode, "] up" in ended.stdout) == (2, False)
    assert 'host "gamma" cannot be reached: ssh: Could not resolve hostname gamma' in ended.stderr


@pytest.mark.slow
def test_a_host_that_never_answers_is_named(mpi: str, mpi_jobs: Jobs) -> None:
    address = mpi_jobs.hosts.swallow_packets()
    ended = mpi_jobs.run(SLEEP, "--launcher", mpi, hosts=["alpha", address])
    assert ended.returncode == 2
    assert f'host "{address}" cannot be reached: ssh: connect to host {address} port 22: ' in ended.stderr


@pytest.mark.slow
def test_ranks_may_use_this_mpi_themselves_and_it_has_bound_them_to_nothing(mpi: str, mpi_jobs: Jobs) -> None:
    code = """
import ctypes, os
mpi = ctypes.CDLL(os.environ["LIBMPI"], ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
world = ctypes.c_int(0x44000000)  # MPICH's and Intel MPI's handle; Open MPI's is an address
if hasattr(mpi, "ompi_mpi_comm_world"):
    world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
rank, size = ctypes.c_int(), ctypes.c_int()
assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == 0
assert mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0
print("MPI", rank.value, size.value, len(os.sched_getaffinity(0)))
assert mpi.MPI_Finalize() == 0
"""
    cores = len(os.sched_getaffinity(0))
    library = next(path for path in (ENGINES_FOLDER / mpi / "lib").glob("libmpi.so.[0-9]*"))
    ended = mpi_jobs.run(code, "--launcher", mpi, "--env", f"LIBMPI={library}", hosts=["alpha"])
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.splitlines()) == {f"[rank {rank}] MPI {rank} 2 {cores}" for rank in range(2)}


@pytest.mark.slow
def test_an_ipv6_address_is_refused(mpi: str, mpi_jobs: Jobs) -> None:
    hostfile = mpi_jobs.folder / "other-hosts"
    hostfile.write_text("[fd00:77::3] slots=1\nalpha slots=1\n")
    ended = mpi_jobs.run(SLEEP, "--launcher", mpi, "--hostfile", str(hostfile))
    assert ended.returncode == 2
    assert (
        "MPI takes no IPv6 address such as [fd00:77::3]. Give a name, or use --launcher ssh." in ended.stderr
    )


@pytest.mark.slow
def test_ranks_that_mpi_places_otherwise_than_the_hostfile_are_refused(mpi: str, mpi_jobs: Jobs) -> None:
    options = {"openmpi": "--map-by node", "mpich": "-ppn 1", "impi": "-ppn 1"}
    ended = mpi_jobs.run(SLEEP, "--launcher", mpi, f"--launcher_args={options[mpi]}")
    assert (ended.returncode, "] up" in ended.stdout) == (2, False)
    assert "no rank was started" in ended.stderr
