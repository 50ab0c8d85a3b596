"""Groups on shared memory: in forked processes, during their creation, and the location of their memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from acclimate.comm.rendezvous import Offer, Rendezvous
from acclimate.errors import GroupCreationError
from rank_processes import RankProcesses


def add(rank: int) -> float:
    tensor = torch.full((10,), float(rank + 1))
    dist.all_reduce(tensor)
    return float(tensor[-1])


# -- fork --------------------------------------------------------------------------------------------


def in_child(body: Callable[[], object]) -> str:
    """What a forked child says of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(body()).encode())
        except BaseException as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        answers, _, _ = select.select([said], [], [], 60)
        answer = said.read() if answers else b"it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer.decode()


def use_in_child(rank: int) -> str:
    said = in_child(lambda: dist.all_reduce(torch.ones(3)))
    dist.barrier()  # the parent goes on
    return said


def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    with RankProcesses(2) as processes:
        for said in processes.values(use_in_child):
            assert "this process is a fork of process" in said
            assert "which had already created the group. Create groups after the fork" in said
        assert processes.values(add) == [3.0] * 2


def fork_during_a_call(rank: int) -> str:
    if rank == 1:
        dist.recv(torch.zeros(1), 0)  # the child has ended
    work = dist.all_reduce(torch.ones(9), async_op=True)
    said = in_child(lambda: dist.all_reduce(torch.ones(3))) if rank == 0 else ""
    if rank == 0:
        dist.send(torch.zeros(1), 1)
    work.wait()
    return said


def test_a_child_forked_during_a_call_is_refused() -> None:
    with RankProcesses(2) as processes:
        assert "this process is a fork of process" in processes.values(fork_during_a_call)[0]
        assert processes.values(add) == [3.0] * 2


def destroy_in_child(rank: int) -> str:
    # The group's two threads wait for work when the process forks.
    dist.all_reduce(torch.ones(9), async_op=True).wait()
    message = dist.isend(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)
    message.wait()
    return in_child(dist.destroy_process_group)


def test_a_forked_child_can_destroy_its_copy_of_the_group() -> None:
    with RankProcesses(2) as processes:
        assert processes.values(destroy_in_child) == ["None"] * 2
        assert processes.values(add) == [3.0] * 2


# -- groups that not all ranks create ----------------------------------------------------------------


def create_group(rank: int) -> None:
    dist.new_group(backend="shm", timeout=timedelta(seconds=1))


def test_a_rank_that_waits_for_others_to_create_a_group_gives_up_and_names_who_is_missing() -> None:
    with RankProcesses(2) as processes:
        told = processes.run(create_group, ranks=[0])[0]
        assert told.error.startswith("GroupCreationError: Rank 0 gave up after 1 s: rank 1 did not join"), (
            told
        )


def test_a_rank_that_ends_while_a_group_is_created_is_named() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    meeting = Rendezvous(dist.HashStore(), 0, 2, timedelta(minutes=5))
    offer = Offer("host", os.getpid(), (0,), 1.0, 1 << 22, "")
    with pytest.raises(
        GroupCreationError, match=rf"Rank 1 \(process {ended.pid}\) ended while rank 0 waited"
    ):
        meeting.join((offer, replace(offer, process=ended.pid)), lambda *_: 1 << 20, lambda *_: None)


# -- background work ---------------------------------------------------------------------------------


def ask_for_futures(rank: int) -> None:
    tensor = torch.zeros(1)
    for _ in range(20_000):
        dist.all_reduce(tensor, async_op=True).get_future().wait()


def test_a_future_of_work_that_ends_just_now_is_settled() -> None:
    with RankProcesses(1) as processes:
        processes.start(ask_for_futures)
        assert not processes.hear(0, 120).error


def call_from_callback(rank: int) -> float:
    def call_and_wait(first: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work = dist.all_reduce(first.value()[0], async_op=True)
        return work.get_future().wait()[0]

    work = dist.all_reduce(torch.ones(1), async_op=True)
    return float(work.get_future().then(call_and_wait).wait())


def test_a_callback_of_a_future_can_wait_for_a_collective_that_it_calls() -> None:
    with RankProcesses(2) as processes:
        processes.start(call_from_callback)
        assert [processes.hear(rank, 60).value for rank in range(2)] == [4.0] * 2


# -- where the memory lies ---------------------------------------------------------------------------


def memory_policies(rank: int) -> list[str]:
    with open("/proc/self/numa_maps") as file:
        return [line.split()[1] for line in file if "acclimate-comm" in line]


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="a kernel without NUMA")
def test_a_rank_places_its_own_part_of_the_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syscall") or platform.machine() != "x86_64":
        pytest.skip("the number of the system call is that of x86_64")
    page = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if libc.syscall(237, ctypes.c_void_p(address), 4096, 4, None, 0, 0) != 0:  # mbind, MPOL_LOCAL
        pytest.skip(f"the kernel refuses mbind: {os.strerror(ctypes.get_errno())}")
    with RankProcesses(2) as processes:
        for policies in processes.values(memory_policies):
            # Slots, and messages that it sends; what lies between them is others'.
            assert len(policies) - policies.count("default") == 2, policies


# -- ranks that the scheduler has put on one processor ------------------------------------------------


def sum_on_one_processor(rank: int, rounds: int) -> float:
    """The processor time of each call, in seconds, where both ranks may only run on the same processor."""
    tensor = torch.ones(4096)
    dist.all_reduce(tensor)  # the group was made with a processor for each
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.all_reduce(tensor)
    before = time.process_time()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    return (time.process_time() - before) / rounds


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a processor for each rank")
def test_ranks_on_one_processor_do_not_spin_for_each_other() -> None:
    with RankProcesses(2) as processes:
        for seconds in processes.values(partial(sum_on_one_processor, rounds=300)):
            assert seconds < 150e-6  # a rank that spins takes about 400 us
