"""Which engine a job takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acclimate.errors import EngineNotFoundError, HostfileError, LaunchOptionError
from acclimate.launch.engines import mpi
from acclimate.launch.engines.engine import Engine
from acclimate.launch.engines.registry import AUTO, ENGINES, allocating_engine, choose_engine, engine_names

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 4.1.4\n",
    "mpich": "HYDRA build details:\n    Version: 4.0\n",
    "impi": "Intel(R) MPI Library for Linux* OS, Version 2021.18\n",
}


def install(folder: Path, program: str, says: str = "") -> Path:
    """A program on somebody's PATH, with something to say."""
    folder.mkdir(exist_ok=True)
    path = folder / program
    path.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    path.chmod(0o755)
    return path


def in_allocation(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", **more}


def test_auto_takes_the_first_that_is_installed(tmp_path: Path) -> None:
    """In this order: ssh, pdsh, Open MPI, MPICH, Intel MPI."""
    programs = {"impi": "mpirun", "mpich": "mpiexec", "openmpi": "mpirun", "pdsh": "pdsh", "ssh": "ssh"}
    path = ""
    for name, program in programs.items():
        install(tmp_path / name, program, VERSIONS.get(name, ""))
        path = f"{path}:{tmp_path / name}"
        engine, found = choose_engine(AUTO, {"PATH": path})
        assert (engine.name, found) == (name, str(tmp_path / name / program))


def test_mpis_are_told_apart_by_what_they_say_and_not_by_their_names(tmp_path: Path) -> None:
    for name, says in VERSIONS.items():
        install(tmp_path / name, "mpirun", says)
        install(tmp_path / name, "mpiexec", says)
    for name in VERSIONS:
        others = [str(tmp_path / other) for other in VERSIONS if other != name]
        engine, found = choose_engine(name, {"PATH": ":".join([*others, str(tmp_path / name)])})
        assert engine.name == name
        assert Path(found).parent == tmp_path / name


def test_auto_takes_slurm_inside_an_allocation_of_several_nodes(tmp_path: Path) -> None:
    install(tmp_path, "ssh")
    srun = install(tmp_path, "srun")
    path = str(tmp_path)
    assert choose_engine(AUTO, {"PATH": path, **in_allocation()})[1] == str(srun)
    assert choose_engine(AUTO, {"PATH": path})[0].name == "ssh"
    assert choose_engine(AUTO, {"PATH": path, **in_allocation(SLURM_JOB_NUM_NODES="1")})[0].name == "ssh"
    # A task of somebody's own srun.
    assert choose_engine(AUTO, {"PATH": path, **in_allocation(SLURM_STEP_ID="0")})[0].name == "ssh"


@pytest.mark.parametrize("nodes", ["", "0", "1", "two", "²", "-3", "9" * 5000])
def test_what_is_no_number_of_several_nodes_is_no_allocation(nodes: str, tmp_path: Path) -> None:
    install(tmp_path, "ssh")
    environ = {"PATH": str(tmp_path), **in_allocation(SLURM_JOB_NUM_NODES=nodes)}
    assert choose_engine(AUTO, environ)[0].name == "ssh"


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({}, (8, 8, 8)),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, (2, 2, 1)),
        ({"SLURM_NTASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "3(x3)"}, (3, 3, 3)),
        ({"SLURM_TASKS_PER_NODE": "3(x3)"}, (8, 8, 8)),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x999999999)"}, (8, 8, 8)),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "nonsense"}, (8, 8, 8)),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2)"}, (8, 8, 8)),
    ],
)
def test_slots_of_an_allocation_are_the_tasks_that_were_asked_for(
    variables: dict[str, str], counts: tuple[int, ...], tmp_path: Path
) -> None:
    install(tmp_path, "scontrol", "a\nb\nc\n")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "[a-c]", **variables}
    engine = allocating_engine("slurm", environ)
    assert engine is not None
    assert [(host.name, host.slots) for host in engine.hosts(environ, 8)] == list(
        zip("abc", counts, strict=True)
    )


def test_an_allocation_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), **in_allocation(SLURM_JOB_NODELIST="[a-c]")}
    engine = allocating_engine(AUTO, environ)
    assert engine is not None
    with pytest.raises(HostfileError, match=r"allocation \[a-c\] cannot be read .* Give a hostfile"):
        engine.hosts(environ, 1)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_missing_engine_says_what_to_install(engine: Engine, tmp_path: Path) -> None:
    name = engine.name
    with pytest.raises(EngineNotFoundError, match=rf"--launcher {name} is not installed here\. Install "):
        choose_engine(name, {"PATH": str(tmp_path)})


def test_without_any_engine_auto_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        EngineNotFoundError, match=r"No program that starts ranks .* Install OpenSSH's client"
    ):
        choose_engine(AUTO, {"PATH": str(tmp_path)})
    with pytest.raises(EngineNotFoundError, match="--launcher slurm is not installed here"):
        choose_engine(AUTO, {"PATH": str(tmp_path), **in_allocation()})


def test_a_program_that_does_not_answer_is_named_and_the_next_engine_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "VERSION_TIMEOUT_S", 0.3)
    silent = install(tmp_path / "silent", "mpiexec")
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(EngineNotFoundError, match=f"{silent} --version did not answer within 0.3 s"):
        choose_engine("mpich", {"PATH": f"{silent.parent}:{os.defpath}"})
    answering = install(tmp_path / "answering", "mpiexec", VERSIONS["mpich"])
    _, program = choose_engine("mpich", {"PATH": f"{silent.parent}:{answering.parent}:{os.defpath}"})
    assert program == str(answering)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        LaunchOptionError, match='--launcher "rsh" is not known; it is one of auto, ssh, pdsh'
    ):
        choose_engine("rsh", os.environ)
    assert engine_names()[0] == AUTO
