"""A group on shared memory raises the cause of a failure on every rank, and leaves nothing behind."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acclimate.comm import memory
from rank_processes import RankProcesses, named_memory, wait_no_longer_than

_warnings: list[str] = []


def add(rank: int, elements: int = 10) -> float:
    tensor = torch.full((elements,), float(rank + 1))
    dist.all_reduce(tensor)
    return float(tensor[-1])


def cpu_backend() -> Any:
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cpu"))


def wait_for_others(rank: int) -> None:
    dist.barrier()


# -- different calls ---------------------------------------------------------------------------------


def differ(rank: int, how: str) -> None:
    x = torch.ones(
        8 + (rank if how == "size" else 0), dtype=torch.float64 if rank and how == "dtype" else None
    )
    if how == "collective" and rank == 2:
        dist.broadcast(x, 0)
    elif how == "root":
        dist.broadcast(x, min(rank, 1))
    elif how == "barrier" and rank == 1:
        dist.barrier()
    elif how == "split" and rank == 1:
        dist.all_to_all_single(x, x.clone(), [4, 2, 2], [4, 2, 2])
    elif how == "split":
        dist.all_to_all_single(torch.empty(8), x, [2, 4, 2], [2, 4, 2])
    elif how == "list":
        dist.all_gather([torch.empty(8 if rank else 9) for _ in range(3)], torch.ones(8))
    else:
        dist.all_reduce(x, dist.ReduceOp.MAX if how == "op" and rank else dist.ReduceOp.SUM)


DIFFERENCES = {
    "size": ("all_reduce(SUM) of 8 float32", "all_reduce(SUM) of 9 float32"),
    "dtype": ("all_reduce(SUM) of 8 float32", "all_reduce(SUM) of 8 float64"),
    "op": ("all_reduce(SUM)", "all_reduce(MAX)"),
    "collective": ("Rank 0 called all_reduce(SUM) of 8", "rank 2 called broadcast of 8 float32 from rank 0"),
    "root": ("broadcast of 8 float32 from rank 0", "broadcast of 8 float32 from rank 1"),
    "barrier": ("Rank 0 called all_reduce", "rank 1 called barrier"),
}


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    with RankProcesses(3) as processes:
        yield processes


@pytest.mark.parametrize("how", ["size", "dtype", "op", "collective", "root", "barrier"])
def test_different_calls_are_an_error_on_every_rank_that_names_both_sides(
    three: RankProcesses, how: str
) -> None:
    for told in three.run(differ, how):
        assert told.error.startswith("DistBackendError"), told
        assert all(side in told.error for side in DIFFERENCES[how]), told.error
    assert three.values(add) == [6.0] * 3  # the group can still be used


def test_different_splits_are_an_error_on_every_rank(three: RankProcesses) -> None:
    for told in three.run(differ, "split"):
        assert "Rank 1 called all_to_all with 2 elements for rank 2" in told.error
        assert "rank 2 expects 4 elements from rank 1" in told.error
    assert three.values(add) == [6.0] * 3


def test_wrong_arguments_of_one_rank_are_an_error_on_every_rank(three: RankProcesses) -> None:
    told = three.run(differ, "list")
    assert "each output must have 8 elements" in told[0].error
    for other in told[1:]:
        assert "Rank 0 got wrong arguments for all_gather of 8 float32" in other.error
    assert three.values(add) == [6.0] * 3


def several_at_once(rank: int) -> None:
    second = torch.ones(4).to_sparse() if rank == 0 else torch.ones(4)
    cpu_backend().allreduce_coalesced([torch.ones(3), second], dist.AllreduceCoalescedOptions()).wait()


def test_a_wrong_tensor_among_several_of_one_call_is_an_error_on_every_rank(three: RankProcesses) -> None:
    told = three.run(several_at_once)
    assert "got one with layout Sparse" in told[0].error
    for other in told[1:]:
        assert "Rank 0 got wrong arguments for all_reduce(SUM) of 4 float32" in other.error
    assert three.values(add) == [6.0] * 3


def send_different(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=3)
    elif rank == 1:
        dist.recv(torch.ones(5), 0, tag=3)


def test_messages_of_different_sizes_are_an_error_on_both_sides(three: RankProcesses) -> None:
    told = three.run(send_different)
    for one in told[:2]:
        assert "Rank 0 called send of 4 float32 with tag 3 to rank 1" in one.error, one
        assert "rank 1 called recv of 5 float32" in one.error
    assert three.values(add) == [6.0] * 3


# -- ranks that end ----------------------------------------------------------------------------------


def reduce_for_ever(rank: int, elements: int) -> None:
    tensor = torch.zeros(elements)
    while True:
        dist.all_reduce(tensor)


def reduce_in_background(rank: int) -> None:
    tensors = [torch.zeros(1 << 18) for _ in range(4)]
    while True:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def receive_for_ever(rank: int) -> None:
    dist.recv(torch.zeros(3), 1)


def within_2_s(attempt: Callable[[], float]) -> bool:
    """Whether something takes less than 2 s in one of a few attempts: the processors may be busy."""
    return any(attempt() < 2 for _ in range(4))


@pytest.mark.parametrize(("ranks", "elements"), [(2, 1), (4, 1 << 20)])
def test_others_raise_within_2_s_when_a_rank_is_killed(ranks: int, elements: int) -> None:
    def kill_one() -> float:
        with RankProcesses(ranks) as processes:
            processes.start(reduce_for_ever, elements)
            time.sleep(0.2)  # they are at work
            pid = processes.processes[1].pid
            processes.kill(1)
            start = time.monotonic()
            told = [processes.hear(rank) for rank in range(ranks) if rank != 1]
            took_s = time.monotonic() - start
            for one in told:
                assert f"Rank 1 (process {pid}) ended while rank" in one.error, one
            again = processes.run(add, ranks=[0])[0]
            assert "This group cannot be used any more" in again.error
        return took_s

    assert within_2_s(kill_one)


@pytest.mark.parametrize("function", [reduce_in_background, receive_for_ever])
def test_waits_for_background_work_and_messages_end_when_a_rank_is_killed(function: Any) -> None:
    def kill_one() -> float:
        with RankProcesses(2) as processes:
            processes.start(function, ranks=[0, 1] if function is reduce_in_background else [0])
            time.sleep(0.2)  # they are at work
            processes.kill(1)
            start = time.monotonic()
            assert "Rank 1 (process" in processes.hear(0).error
            return time.monotonic() - start

    assert within_2_s(kill_one)


def leave(rank: int) -> None:
    dist.destroy_process_group()


def destroy_in_another_thread(rank: int) -> str:
    said: list[str] = []

    def wait() -> None:
        try:
            add(rank)
        except RuntimeError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while cpu_backend()._get_sequence_number_for_group() == 0:
        time.sleep(0.01)
    dist.destroy_process_group()
    waiting.join(30)
    return said[0] if said else "it still waits"


def test_a_wait_ends_when_another_thread_of_the_rank_destroys_the_group() -> None:
    with RankProcesses(2) as processes:
        told = processes.run(destroy_in_another_thread, ranks=[0])[0]
        assert "Rank 0 destroyed the group while it waited for rank 1 in all_reduce(SUM) of 10" in told.value


def test_a_wait_for_a_rank_that_destroyed_its_group_ends() -> None:
    with RankProcesses(2) as processes:
        processes.run(leave, ranks=[1])
        told = processes.run(add, ranks=[0])[0]
        assert "Rank 1" in told.error
        assert "left the group while rank 0 waited for it in all_reduce(SUM) of 10 float32" in told.error


def test_a_timeout_is_honoured_and_names_who_was_missing() -> None:
    with RankProcesses(3) as processes:
        processes.values(wait_no_longer_than, 1)  # joining may take longer
        told = processes.run(add, ranks=[0, 2])
        for one in told:
            assert "gave up after 1 s: rank 1 (process" in one.error, one
            assert "did not take part in all_reduce(SUM) of 10 float32" in one.error
            assert one.seconds < 10
        # The first to give up ends the wait of all, so only who began first waits for all of the time.
        assert max(one.seconds for one in told) > 0.9
        late = processes.run(add, ranks=[1])[0]
        assert "gave up after 1 s" in late.error


def wait_two_seconds(rank: int) -> float:
    if rank == 1:
        time.sleep(2)
        dist.barrier()
        return 0.0
    start = time.process_time()
    dist.barrier()
    return time.process_time() - start


def test_a_rank_that_waits_uses_no_processor_time() -> None:
    with RankProcesses(2) as processes:
        assert processes.values(wait_two_seconds)[0] < 0.5


# -- what stays behind -------------------------------------------------------------------------------


def raise_something(rank: int) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("end", ["normal", "exception", "SIGTERM", "SIGKILL of one", "SIGKILL of all"])
def test_nothing_stays_in_dev_shm_or_in_memory(end: str) -> None:
    with RankProcesses(2) as processes:
        processes.values(add, 100_000)
        if end == "exception":
            processes.run(raise_something)
        elif end == "SIGTERM":
            processes.kill(0, signal.SIGTERM)
            processes.kill(1, signal.SIGTERM)
        elif end.startswith("SIGKILL"):
            processes.kill(1)
            if end == "SIGKILL of all":
                processes.kill(0)
        pids = [process.pid for process in processes.processes]
    assert named_memory(pids) == []
    # The memory has no name, so it goes with the last process that maps it.
    assert not [pid for pid in pids if Path(f"/proc/{pid}/maps").exists() and holders(pid)]


def holders(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "acclimate-comm" in line]


def shared_memory(rank: int) -> tuple[list[str], list[str]]:
    descriptors = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if
                   os.path.lexists(f"/proc/self/fd/{number}")]  # fmt: skip
    return holders(os.getpid()), [name for name in descriptors if "acclimate-comm" in name]


def test_the_memory_is_an_anonymous_file_that_no_rank_keeps_open() -> None:
    with RankProcesses(2) as processes:
        for mapped, opened in processes.values(shared_memory):
            assert mapped
            assert all("/memfd:acclimate-comm" in line for line in mapped)
            assert opened == []
        # Other programs use the folder too.
        assert named_memory([]) == []


def test_another_user_cannot_open_the_memory() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    made = memory.make(memory.geometries(2, 1 << 30, lambda ranks, slot, ring: 1 << 20))
    try:
        path = f"/proc/{os.getpid()}/fd/{made.descriptor}"
        child = os.fork()
        if child == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.close(made.descriptor)
            try:
                os.open(path, os.O_RDWR)
                os._exit(0)
            except OSError as error:
                os._exit(error.errno or 255)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EACCES
        # Nobody, its owner included, can cut it under the ranks that map it.
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, 10)
    finally:
        made.close()


def test_memory_of_another_group_is_not_taken() -> None:
    made = memory.make(memory.geometries(2, 1 << 30, lambda ranks, slot, ring: 1 << 20))
    try:
        with pytest.raises(OSError, match="it belongs to another group"):
            memory.open_made(made.process, made.descriptor, "00" * 16, made.geometry)
    finally:
        made.close()


def test_two_jobs_with_the_same_port_do_not_meet() -> None:
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    with RankProcesses(2, environment=same) as one, RankProcesses(3, environment=same) as other:
        for _ in range(20):
            one.start(add)
            other.start(add)
            assert [one.hear(rank).value for rank in range(2)] == [3.0] * 2
            assert [other.hear(rank).value for rank in range(3)] == [6.0] * 3


# -- too little of something -------------------------------------------------------------------------


def backend_name(rank: int) -> str:
    return str(cpu_backend().name())


def mapped_bytes(rank: int) -> int:
    ranges = [line.split()[0].split("-") for line in holders(os.getpid())]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


class _Keeper(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _warnings.append(record.getMessage())


def keep_warnings(rank: int) -> None:
    logging.getLogger("acclimate").addHandler(_Keeper(logging.WARNING))


def kept_warnings(rank: int) -> list[str]:
    return [warning for warning in _warnings if "gloo" in warning]


def small_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))


def tiny_files(rank: int) -> None:
    keep_warnings(rank)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


def test_buffers_are_smaller_where_there_is_little_memory() -> None:
    with RankProcesses(2, before=small_files) as processes:
        assert processes.values(backend_name) == ["shm"] * 2
        assert max(processes.values(mapped_bytes)) <= 600_000
        assert processes.values(add, 300_000) == [3.0] * 2


def test_gloo_takes_over_with_one_warning_where_there_is_too_little_memory() -> None:
    with RankProcesses(2, before=tiny_files) as processes:
        assert processes.values(backend_name) == ["gloo"] * 2
        assert processes.values(add) == [3.0] * 2
        said, other = processes.values(kept_warnings)
        assert len(said) == 1
        assert not other
        assert "rank 0: its buffers do not fit into memory" in said[0]


def test_gloo_takes_over_with_one_warning_where_there_is_no_compiler(tmp_path: Path) -> None:
    nothing = {"ACCLIMATE_CACHE": str(tmp_path), "CXX": "", "PATH": str(tmp_path)}
    with RankProcesses(2, environment=nothing, before=keep_warnings) as processes:
        assert processes.values(backend_name) == ["gloo"] * 2
        assert processes.values(add) == [3.0] * 2
        said, other = processes.values(kept_warnings)
        assert len(said) == 1
        assert not other
        assert "there is no C++ compiler" in said[0]
