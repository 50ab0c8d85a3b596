"""``init_distributed`` finds the rank that any launcher gave, and chooses the backend."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import acclimate
from acclimate.comm.init import find_place, master_address
from acclimate.errors import InvalidEnvironmentError, InvalidRankError
from ports import free_port
from rank_processes import RankProcesses

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job-7",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
}  # fmt: skip
STEP = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3",
}  # fmt: skip
PMI_ALONE = {"PMI_RANK": "1", "PMI_SIZE": "4"}
BATCH = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4",
    "SLURM_NODEID": "0", "SLURM_JOB_ID": "77",
}  # fmt: skip
"""Of a batch script, as sbatch --ntasks=4 makes them."""
EVERY = {
    "torchrun": TORCHRUN,
    "Open MPI": OPEN_MPI,
    "PMI": PMI,
    "Slurm": SLURM,
    "Slurm's step": STEP,
    "Slurm's PMI-2": {**STEP, **PMI_ALONE, "PMI_JOBID": "77.3"},
    "Slurm's PMIx": {**STEP, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.77.3"},
    "Cray PMI": {**PMI_ALONE, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
    "PALS": {
        **PMI_ALONE, "PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "a-b",
    },
    "MVAPICH2": {
        "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "MVAPICH": {
        "MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "4", "MVP_COMM_WORLD_LOCAL_RANK": "1",
        "MVP_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "jsrun": {
        "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "4", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1",
    },
    "Flux": {
        "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1",
        "FLUX_JOB_ID": "f23", **PMI_ALONE,
    },
    "Horovod": {
        "HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4",
    },
}  # fmt: skip


@pytest.mark.parametrize("environ", EVERY.values(), ids=EVERY)
def test_every_launcher_is_understood(environ: dict[str, str]) -> None:
    place = find_place(environ)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (1, 4, 1, 4)
    assert master_address(place, {**environ, "MASTER_ADDR": "a", "MASTER_PORT": "99"}) == ("a", 99)


@pytest.mark.parametrize("launcher", EVERY)
def test_ranks_of_every_launcher_on_one_host_meet_without_being_told_where(launcher: str) -> None:
    place = find_place(EVERY[launcher])
    assert place is not None
    address, port = master_address(place, EVERY[launcher])
    assert (address, 15_000 <= port < 30_000) == ("127.0.0.1", True)


def test_no_launcher_is_no_place() -> None:
    assert find_place({}) is None
    assert find_place({name: "" for environ in EVERY.values() for name in environ}) is None


@pytest.mark.parametrize(
    "more",
    [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": ""}],
    ids=["no step", "the batch script's", "the interactive shell's", "an empty one"],
)
def test_a_batch_script_of_several_tasks_is_a_process_alone(more: dict[str, str]) -> None:
    assert find_place({**BATCH, **more}) is None


HALVES = {
    "RANK": "WORLD_SIZE is not set",
    "WORLD_SIZE": "RANK is not set",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE is not set",
    "PMI_RANK": "PMI_SIZE is not set",
    "PALS_RANKID": "PMI_SIZE is not set",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE is not set",
    "PMIX_RANK": "nothing gives the number of ranks",
    "ALPS_APP_PE": "nothing gives the number of ranks",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK is not set",
}


@pytest.mark.parametrize("name", HALVES)
def test_half_of_the_variables_is_an_error_that_names_the_missing_one(name: str) -> None:
    with pytest.raises(
        InvalidEnvironmentError, match=f'{name} is "1" .*{HALVES[name]}.*Set RANK, WORLD_SIZE'
    ):
        find_place({name: "1"})


def test_a_step_with_different_numbers_of_tasks_knows_those_of_its_own_node() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_PROCID": "6"}
    sizes = [find_place({**step, "SLURM_NODEID": node}) for node in ("0", "2", "3")]
    assert [place and place.local_size for place in sizes] == [3, 1, None]


def test_two_steps_of_a_slurm_job_meet_at_different_ports() -> None:
    place = find_place(STEP)
    assert place is not None
    ports = {master_address(place, {**STEP, "SLURM_STEP_ID": step})[1] for step in ("3", "4")}
    assert len(ports) == 2


def test_empty_master_variables_count_as_unset() -> None:
    place = find_place(OPEN_MPI)
    assert place is not None
    assert master_address(place, {**OPEN_MPI, "MASTER_ADDR": "", "MASTER_PORT": ""}) == master_address(
        place, OPEN_MPI
    )


@pytest.mark.parametrize("other", ["Open MPI", "PMI", "Slurm"])
def test_launchers_that_agree_are_one(other: str) -> None:
    assert str(find_place({**EVERY[other], **TORCHRUN})) == str(find_place(TORCHRUN))


@pytest.mark.parametrize("other", ["Open MPI", "PMI", "Slurm"])
def test_launchers_that_disagree_are_an_error_that_names_both(other: str) -> None:
    with pytest.raises(InvalidRankError, match=r"two ranks: RANK=0 and WORLD_SIZE=4 .*=1 and .*=4"):
        find_place({**EVERY[other], **TORCHRUN, "RANK": "0"})


def test_torchrun_once_a_host_under_srun_is_no_conflict() -> None:
    nested = {**SLURM, "SLURM_NTASKS": "2", **TORCHRUN, "RANK": "5", "WORLD_SIZE": "8"}
    place = find_place(nested)
    assert place is not None
    assert place.rank == 5


ONCE_A_HOST = {
    **STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0",
}  # fmt: skip
"""A step with a task on each of two hosts, whose second this is."""


@pytest.mark.parametrize(
    "inner",
    [
        {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "8"},
        {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "4"},
    ],
    ids=["hosts in another order", "unequal hosts", "mpirun on a third host", "no local size"],
)
def test_a_launcher_that_slurm_started_once_a_host_is_no_conflict(inner: dict[str, str]) -> None:
    place = find_place({**ONCE_A_HOST, **inner})
    assert place is not None
    assert str(place) == str(find_place(inner))


@pytest.mark.parametrize("tasks", ["3", "8"])
def test_a_job_of_torchrun_in_each_task_of_a_step_is_no_conflict(tasks: str) -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": "2"}
    place = find_place({**step, **TORCHRUN})
    assert place is not None
    assert (place.rank, place.world_size) == (1, 4)


def test_one_rank_alone_in_a_step_of_several_tasks_is_still_a_conflict() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(InvalidRankError):
        find_place({**STEP, **alone})


def test_ranks_of_mpirun_meet_on_the_first_host_of_the_allocation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """mpirun's own host is in no step; its daemons on the others are one."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$3" | tr , "\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    mpirun = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    lists = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_STEP_NODELIST": "b,c"}
    environ = {**ONCE_A_HOST, **mpirun, **lists}
    place = find_place(environ)
    assert place is not None
    assert master_address(place, environ)[0] == "a"
    task = find_place({**ONCE_A_HOST, **lists})
    assert task is not None
    assert master_address(task, {**ONCE_A_HOST, **lists})[0] == "b"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "LOCAL_RANK": "5"}, "LOCAL_RANK is 5, but must be less than LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8, but must be at most WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "-1"}, 'LOCAL_WORLD_SIZE is "-1"'),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "x"}, 'OMPI_COMM_WORLD_LOCAL_SIZE is "x"'),
        ({**PMI, "MPI_LOCALRANKID": "4"}, "MPI_LOCALRANKID is 4, but must be less than MPI_LOCALNRANKS"),
    ],
)
def test_numbers_of_one_host_that_cannot_be_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidEnvironmentError, match=message):
        find_place(environ)


def test_torchrun_in_a_batch_script_is_no_conflict() -> None:
    batch = {**SLURM, "SLURM_PROCID": "0", **TORCHRUN}
    del batch["SLURM_STEP_ID"]
    place = find_place(batch)
    assert place is not None
    assert place.rank == 1


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("WORLD_SIZE", "0"), ("RANK", "4")])
def test_a_variable_that_cannot_be_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(InvalidEnvironmentError, match=f"{name} is .*{value}"):
        find_place({**TORCHRUN, name: value})


def test_ranks_of_one_host_meet_without_being_told_where() -> None:
    for environ in (OPEN_MPI, PMI, SLURM):
        place = find_place(environ)
        assert place is not None
        address, port = master_address(place, environ)
        assert address == "127.0.0.1"
        assert 15_000 <= port < 30_000


def test_several_hosts_without_a_master_address_are_an_error_that_says_what_to_set() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    place = find_place(environ)
    assert place is not None
    with pytest.raises(InvalidEnvironmentError, match="Set MASTER_ADDR to the host of rank 0"):
        master_address(place, environ)


@pytest.mark.parametrize("numbers", [{"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}])
def test_numbers_that_do_not_fit_are_an_error(numbers: dict[str, int]) -> None:
    with pytest.raises(InvalidRankError, match="rank is"):
        acclimate.init_distributed(**numbers)


# -- with processes ----------------------------------------------------------------------------------


def backend_of_host() -> str:
    group: Any = dist.group.WORLD
    return str(group._get_backend(torch.device("cpu")).name())


def start(rank: int, environ: dict[str, str], options: dict[str, Any]) -> tuple[str, str, float, str | None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({name: value.replace("{rank}", str(rank)) for name, value in environ.items()})
    for _ in range(2):  # the second does nothing
        acclimate.init_distributed(**options)
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    result = dist.get_backend(), backend_of_host(), float(tensor), os.environ.get("LOCAL_RANK")
    dist.destroy_process_group()
    return result


def test_open_mpi_ranks_get_shared_memory_and_torchruns_variables() -> None:
    environ = {
        **OPEN_MPI,
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    with RankProcesses(2, backend=None) as processes:
        told = processes.values(start, environ, {})
    assert told == [("shm", "shm", 3.0, "0"), ("shm", "shm", 3.0, "1")]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    "timeout", [timedelta.max, pytest.param(timedelta(days=365 * 300), marks=pytest.mark.slow)]
)
def test_a_timeout_of_centuries_does_not_end_the_meeting(backend: str, timeout: timedelta) -> None:
    environ = {
        "RANK": "{rank}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with RankProcesses(2, backend=None) as processes:
        told = processes.values(start, environ, {"backend": backend, "timeout": timeout})
    assert [answer[2] for answer in told] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        (None, {}, "shm"),
        (None, {"ACCLIMATE_COMM": "gloo"}, "gloo"),
        pytest.param("gloo", {}, "gloo", marks=pytest.mark.slow),
    ],
)
def test_the_backend_is_shared_memory_unless_another_is_asked_for(
    backend: str | None, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    with RankProcesses(2, backend=None) as processes:
        for rank in range(2):
            options = {
                "backend": backend,
                "init_method": f"file://{tmp_path}/store",
                "rank": rank,
                "world_size": 2,
            }
            processes.start(start, environ, options, ranks=[rank])
        assert [processes.hear(rank).value[:3] for rank in range(2)] == [(expected, expected, 3.0)] * 2


def ported(rank: int, store: str) -> tuple[str, float]:
    name = acclimate.get_accelerator().communication_backend_name()
    dist.init_process_group(name, init_method=store, rank=rank, world_size=2)
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return backend_of_host(), float(tensor)


@pytest.mark.parametrize(("chosen", "expected"), [("shm", "shm"), ("", "gloo")])
def test_ported_code_that_passes_the_accelerators_name_gets_what_acclimate_comm_says(
    chosen: str, expected: str, tmp_path: Path
) -> None:
    with RankProcesses(2, backend=None, environment={"ACCLIMATE_COMM": chosen}) as processes:
        assert processes.values(ported, f"file://{tmp_path}/store") == [(expected, 3.0)] * 2


def test_a_name_that_acclimate_comm_cannot_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_COMM", "shmem")
    with pytest.raises(InvalidEnvironmentError, match=r'one of shm, gloo, ccl. Value "shmem"'):
        acclimate.get_accelerator().communication_backend_name()


def alone(rank: int) -> tuple[int, float]:
    acclimate.init_distributed()
    tensor = torch.tensor([5.0])
    dist.all_reduce(tensor)
    dist.barrier()
    return dist.get_world_size(), float(tensor)


def test_a_process_that_no_launcher_started_is_a_group_of_one() -> None:
    with RankProcesses(1, backend=None) as processes:
        assert processes.values(alone) == [(1, 5.0)]


def on_sim(rank: int, store: str) -> tuple[str, float]:
    acclimate.init_distributed(init_method=store, rank=rank, world_size=2)
    device = acclimate.get_accelerator().current_device_name()
    tensor = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    return str(tensor.device.type), float(tensor.cpu()[0])


def test_the_emulated_device_reduces_through_init_distributed(tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim")
    with RankProcesses(2, backend=None, environment={"ACCLIMATE_ACCELERATOR": "sim"}) as processes:
        assert processes.values(on_sim, f"file://{tmp_path}/store") == [("sim", 3.0)] * 2
