"""What all engines have in common: which one is taken, what travels to a host, and how the two sides talk."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import launched

from acclimate.errors import EngineNotFoundError, LaunchProtocolError, UnknownEngineError
from acclimate.launch.engines import AUTO, ENGINES, choose_engine, engine_names
from acclimate.launch.engines.ssh import MessageDemux
from acclimate.launch.plan.exported import exported_environment
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote import launcher_connection as part
from acclimate.launch.remote import protocol as link
from acclimate.launch.remote.addresses import own_addresses
from acclimate.launch.remote.callback import call_launcher
from acclimate.launch.remote.launcher_connection import LauncherConnection
from acclimate.launch.remote.protocol import Lines, PipeChannel, SocketChannel, decode, encode
from acclimate.launch.remote.slot import Place, read_place
from acclimate.launch.supervise.own_python import own_python
from fresh_process import plain_environment

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


# -- which one ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_missing_engine_says_what_to_install(engine: object, tmp_path: Path) -> None:
    name = engine.name  # type: ignore[attr-defined]
    with pytest.raises(EngineNotFoundError, match=rf"--launcher {name} is not installed here\. Install "):
        choose_engine(name, {"PATH": str(tmp_path)})


def test_without_any_engine_auto_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(EngineNotFoundError, match=r"No way to start ranks .* Install OpenSSH's client"):
        choose_engine(AUTO, {"PATH": str(tmp_path)})
    with pytest.raises(EngineNotFoundError, match="--launcher slurm is not installed here"):
        choose_engine(AUTO, {"PATH": str(tmp_path), **in_allocation()})


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownEngineError, match='--launcher "rsh" is not known; it is one of auto, ssh, pdsh'
    ):
        choose_engine("rsh", os.environ)
    assert engine_names()[0] == AUTO


# -- what travels ------------------------------------------------------------------------------------


def test_carried_are_listed_variables_listed_prefixes_and_the_accelerators() -> None:
    environ = {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "OMP_PROC_BIND": "true",
        "ACME_VISIBLE": "0",
        "HOME": "/nowhere",
        "LS_COLORS": "",
        "HF_HOME": "/models",
    }
    assert exported_environment(environ, ["ACME_"]) == {
        name: environ[name] for name in ("PATH", "PYTHONPATH", "OMP_PROC_BIND", "ACME_VISIBLE", "HF_HOME")
    }


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ACME_API_KEY", "TORCH_PASSWORD", "ACME_CREDENTIALS", "UCX_KEY"],
)
def test_what_is_called_like_a_secret_is_not_carried_by_a_prefix(name: str) -> None:
    assert exported_environment({name: "x"}, ["ACME_", "AWS_"]) == {}


def test_a_name_that_only_contains_the_letters_of_a_secrets_is_carried() -> None:
    assert exported_environment({"OMP_MONKEY": "1", "TORCH_KEYBOARD": "1"})


texts = st.text(max_size=20)
jobs = st.builds(
    JobPlan,
    hosts=st.lists(
        st.builds(
            HostPlan,
            texts,
            st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(
                lambda it: tuple(sorted(it))
            ),
            st.none() | st.integers(1, 65535),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    command=st.lists(texts, max_size=4).map(tuple),
    environment=st.dictionaries(texts, texts, max_size=4),
    directory=texts,
    accelerator=texts,
    master_addr=st.none() | texts,
    master_port=st.none() | st.integers(1, 65535),
    bind_cores=st.booleans(),
    core_list=st.none() | texts,
    grace_s=st.floats(0, 1e6),
    launcher_args=st.lists(texts, max_size=2).map(tuple),
)


@given(jobs)
def test_a_plan_is_read_as_it_was_written_from_one_line(job: JobPlan) -> None:
    assert "\n" not in job.to_json()
    assert JobPlan.from_json(job.to_json()) == job


@given(jobs)
def test_ranks_count_on_from_host_to_host(job: JobPlan) -> None:
    ranks = [
        (node, job.rank_offset(node) + local)
        for node, host in enumerate(job.hosts)
        for local in range(len(host.slots))
    ]
    assert [rank for _, rank in ranks] == list(range(job.world_size))
    assert all(job.node_of(rank) == node for node, rank in ranks)


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"hosts": []}', "\xff"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(LaunchProtocolError, match="Install the same acclimate on all hosts"):
        JobPlan.from_json(text)


def test_a_plan_of_another_release_is_refused() -> None:
    plan = json.loads(JobPlan((HostPlan("a", (0,)),), ("x",), {}, "/", "cpu").to_json())
    with pytest.raises(LaunchProtocolError, match="another release"):
        JobPlan.from_json(json.dumps({**plan, "added_later": 1}))


# -- how the two sides talk --------------------------------------------------------------------------

MARK = b"\x1e1234"
pieces = st.lists(st.binary(max_size=8) | st.sampled_from([b"\x1e", b"\x1e12", b"\n", MARK[:-1]]), max_size=6)


@given(st.lists(st.one_of(st.integers(), pieces.map(b"".join)), max_size=6), st.integers(1, 7))
def test_an_agents_words_are_told_from_what_ranks_write_however_they_are_cut(
    stream: list[int | bytes], cut: int
) -> None:
    """Whatever ranks write (they cannot know the mark), and wherever a read ends."""
    whole = b"".join(part if isinstance(part, bytes) else MARK + encode({"number": part}) for part in stream)
    written = b"".join(part for part in stream if isinstance(part, bytes))
    if MARK in written or whole.count(MARK) != sum(isinstance(part, int) for part in stream):
        return
    demux, shown, heard = MessageDemux(MARK), b"", []
    for start in range(0, len(whole), cut):
        piece, messages = demux.feed(whole[start : start + cut])
        shown += piece
        heard += [message["number"] for message in messages]
    assert heard == [part for part in stream if isinstance(part, int)]
    assert shown + demux.end() == written


@given(st.binary(max_size=50))
def test_what_is_no_message_means_nothing(line: bytes) -> None:
    assert isinstance(decode(line), dict)


@given(st.lists(st.binary(max_size=10), max_size=10))
def test_lines_are_put_together_from_pieces(parts: list[bytes]) -> None:
    lines = Lines()
    found = [line for part in parts for line in lines.feed(part)]
    assert found == b"".join(parts).split(b"\n")[:-1]


# -- slots and agents on their own -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, Place(3, 1)),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}, Place(3, 1)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, Place(3, 1)),
        # mpirun inside an allocation: its own word holds.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}, Place(3, 1)),
    ],
)
def test_a_slotreads_its_place_from_its_engine(environ: Mapping[str, str], place: Place) -> None:
    assert read_place(environ) == place


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
        timeout=60,
        check=False,
    )


def test_a_slot_started_by_hand_says_how_slots_are_started() -> None:
    ended = run_module("acclimate.launch.remote.slot")
    assert ended.returncode == 1
    assert "Slots are started by `acclimate run --launcher" in ended.stderr


def test_a_slot_whose_launcher_is_gone_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = run_module(
        "acclimate.launch.remote.slot",
        PMI_RANK="0",
        MPI_LOCALRANKID="0",
        ACCLIMATE_LAUNCHER=f"k@127.0.0.1:{port}",
    )
    assert ended.returncode == 1
    assert f"cannot reach the launcher on port {port} (127.0.0.1: Connection refused)" in ended.stderr


def test_an_agent_whose_launcher_is_gone_ends() -> None:
    assert run_module("acclimate.launch.remote.agent").returncode == 1


@pytest.mark.parametrize("module", ["remote.agent", "remote.slot", "elastic.worker"])
def test_a_file_of_the_users_takes_the_place_of_no_module(module: str, tmp_path: Path) -> None:
    for name in ("re.py", "selectors.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('the one in the working directory was taken')")
    arguments = [str(os.dup(1))] if module == "elastic.worker" else []
    ended = run_module(f"acclimate.launch.{module}", *arguments, folder=tmp_path)
    assert "No module named" not in ended.stderr
    assert "working directory" not in ended.stderr


def test_a_limit_on_open_files_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    program = install(tmp_path / "bin", "ssh")
    program.write_text("#!/bin/sh\nexec sleep 600")
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


LOCAL_SSH = """#!/bin/sh
for command; do :; done
exec sh -c "$command"
"""


@pytest.mark.slow
def test_nothing_of_a_job_that_failed_is_lost_though_it_is_read_late(tmp_path: Path) -> None:
    """As by a pager: later than a host that cannot be heard would be waited for."""
    program = install(tmp_path / "bin", "ssh")
    program.write_text(LOCAL_SSH)
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


def test_a_message_is_given_up_when_nobodyreads_orspeaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.1)
    monkeypatch.setattr(link, "_LOOK_AGAIN_MS", 10)
    (hears, speaks), (reads, writes) = os.pipe(), os.pipe()
    try:
        os.write(writes, bytes(1 << 16))
        agents = PipeChannel(hears, writes, waits_for_the_living=True)
        agents.send({"failed": "x" * 10_000})  # returns
    finally:
        for descriptor in (hears, speaks, reads, writes):
            os.close(descriptor)


def test_a_launcher_takes_the_first_address_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        call_launcher(f"key@127.0.0.2,127.0.0.1:{port}", {"rank": 3})
        connection, _ = server.accept()
        with connection:
            assert json.loads(connection.recv(1000)) == {"hello": {"key": "key", "rank": 3}}


@pytest.mark.parametrize("where", ["", "key", "key@", "key@host:port", "key@:1", "@host:1", "k@host:1234567"])
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(LaunchProtocolError, match="says nothing of where the launcher is"):
        call_launcher(where, {})


def test_loopback_is_the_last_address_that_others_are_told() -> None:
    addresses = own_addresses(["localhost", socket.gethostname()])
    assert addresses[-1] == "127.0.0.1"
    assert not [address for address in addresses[:-1] if address.startswith("127.")]


# -- a launcher that falls silent --------------------------------------------------------------------


@pytest.fixture
def both_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SocketChannel, LauncherConnection]]:
    """The launcher's end, and a host's that takes it for lost after a short silence."""
    monkeypatch.setattr(part, "SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = SocketChannel(socket.create_connection(server.getsockname()))
        there = SocketChannel(server.accept()[0])
    yield here, LauncherConnection(there)
    here.close()
    there.close()


def is_told_something(launcher: LauncherConnection, within_s: float) -> bool:
    return bool(select.select([launcher], [], [], within_s)[0])


def test_a_launcher_that_says_nothing_for_long_is_taken_for_lost(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"alive": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == part.LAUNCHER_LOST
    assert not is_told_something(launcher, 0.5)  # it is told once


def test_a_launcher_that_a_user_has_suspended_may_be_silent(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"pause": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert not is_told_something(launcher, 1)
    here.send({"alive": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == part.LAUNCHER_LOST


def test_a_launcher_that_is_gone_ends_the_ranks_and_so_does_its_word(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"stop": "Because."})
    assert launcher.reason_to_stop() == "Because."
    here.close()
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == part.LAUNCHER_LOST
