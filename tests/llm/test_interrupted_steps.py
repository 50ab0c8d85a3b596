"""A signal that arrives while split models compute: nothing is written after its end, and nothing is lost."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode.description import Share
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeDecoder, NativeStep
from acclimate.llm.decode.share import Exchange
from acclimate.llm.generation import shared_interrupt
from acclimate.llm.kernels.builder import CPUInferenceBuilder
from acclimate.llm.ranks import ModelRanks
from acclimate.llm.split.collectives import ProcessRanks
from rank_processes import RankProcesses

SUMS = 300
COUNT = 64


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2, backend="gloo", models=True) as ranks:
        yield ranks


def count_late_writes(rank: int) -> tuple[int, int]:
    """Returns how many sums a signal ended on rank 0, and after how many of them the memory changed."""
    group: Any = dist.group.WORLD
    exchange = Exchange(Share(ProcessRanks(group), frozenset(), None, None, {}))
    memory = (ctypes.c_float * COUNT)()
    armed, ended, late = [False], 0, 0

    def end(number: int, frame: FrameType | None) -> None:
        if armed[0]:
            armed[0] = False
            raise InterruptedError

    signal.signal(signal.SIGALRM, end)
    chance = random.Random(0)
    for _ in range(SUMS):
        if rank == 1:
            time.sleep(chance.uniform(0, 0.002))  # rank 0 has often been interrupted by then
            exchange._sum(ctypes.addressof(memory), COUNT)
        else:
            ended_here = interrupted_sum(exchange, memory, chance, armed)
            memory[:] = [-7.0] * COUNT  # what is stored here now belongs to someone else
            if ended_here:
                ended += 1
                time.sleep(0.01)
                late += any(entry != -7.0 for entry in memory)
        dist.barrier()
    return ended, late


def interrupted_sum(exchange: Exchange, memory: Any, chance: random.Random, armed: list[bool]) -> bool:
    """Sums once; returns whether the signal ended the sum."""
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    try:
        armed[0] = True
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 150e-6))
        exchange._sum(ctypes.addressof(memory), COUNT)
        armed[0] = False
        exchange.check()
    except InterruptedError:
        if group._get_sequence_number_for_group() != before:
            return True
        exchange._sum(ctypes.addressof(memory), COUNT)  # it had not begun, and rank 1 waits for it
    return False


@pytest.mark.slow
def test_no_rank_writes_to_the_memory_of_a_sum_that_a_signal_has_ended(two: RankProcesses) -> None:
    (ended, late), _ = two.values(count_late_writes)
    assert ended > 20
    assert late == 0


class OneRank:
    """Stands for several ranks whose sums are this rank's."""

    rank, size = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack((tensor, tensor))


def native_step(step: NativeStep) -> None:
    step.cache.length = 0
    step.likeliest(torch.tensor([3]))


@pytest.mark.skipif(not CPUInferenceBuilder().is_compatible(), reason="the kernels cannot be compiled here")
def test_a_ctrl_c_within_a_native_step_of_several_ranks_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = acclimate.init_inference(tiny_model("llama"))
    lean = lean_decoder(model)
    assert lean is not None
    summed = frozenset(layer.mlp.down for layer in lean.decoder.layers)
    share = Share(OneRank(), summed, None, None, {})
    native = NativeDecoder(dataclasses.replace(lean.decoder, share=share))
    starts = torch.zeros(1, dtype=torch.long)
    step = NativeStep(native, lean._cache(starts, 16, 0, None, None), starts)
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    sent, handled, caught, raises = threading.Event(), 0, 0, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled, raises
        if raises:
            raises = False
            handled += 1
            raise KeyboardInterrupt

    def send_some() -> None:
        for _ in range(200):
            time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        sent.set()

    before = signal.signal(signal.SIGINT, handle)
    sender = threading.Thread(target=send_some)
    try:
        sender.start()
        while not sent.is_set():
            try:
                raises = True
                native_step(step)
                raises = False
            except KeyboardInterrupt:
                caught += 1
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
    assert not dropped
    assert caught == handled > 20


def test_ranks_share_a_ctrl_c_that_the_program_handles_itself(two: RankProcesses) -> None:
    assert two.values(stop_together) == [("KeyboardInterrupt", 2), ("SystemExit", 2)]


def test_a_handler_that_raises_nothing_lets_the_ranks_continue(two: RankProcesses) -> None:
    assert two.values(stop_together, raises=False) == [("", 5), ("", 5)]


def stop_together(rank: int, raises: bool = True) -> tuple[str, int]:
    """Returns what ended five steps, in the second of which rank 1 gets SIGINT, and the number of steps."""

    def handle(number: int, frame: FrameType | None) -> None:
        if raises:
            raise SystemExit(3)

    before = signal.signal(signal.SIGINT, handle)
    steps = 0
    try:
        with shared_interrupt(ModelRanks(2, rank, dist.group.WORLD), acclimate.get_accelerator()) as check:
            for steps in range(1, 6):
                if rank == 1 and steps == 2:
                    signal.raise_signal(signal.SIGINT)
                check()
    except (KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__, steps
    finally:
        signal.signal(signal.SIGINT, before)
    return "", steps
