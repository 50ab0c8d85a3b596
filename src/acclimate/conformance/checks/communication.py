"""Checks of communication: collectives of the accelerator's own backend between two processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from acclimate.conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    exactly,
    require,
    short,
)
from acclimate.conformance.checks.check import check
from acclimate.conformance.checks.children import Child
from acclimate.conformance.checks.target import Subject, load
from acclimate.imports import describe

_RANK_TIMEOUT_S = 90
# What a program can do without, told by backends that lack it with one of these types.
_LACKING = (NotImplementedError, RuntimeError, ValueError)


@check("communication_backend_name", "communication_backend")
def backend_name(subject: Subject) -> None:
    """The communication backend is a name that torch.distributed knows."""
    accelerator = subject.accelerator
    name = exactly(accelerator.communication_backend_name(), str, "communication_backend_name()")
    declared = accelerator.communication_backend
    require(name == declared, f"communication_backend_name() is {name!r}, communication_backend {declared!r}")
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    require(distributed.is_backend_available(name), f'torch.distributed has no backend "{name}" here')


@check("communication_backend_name", "set_device", "supports_collectives", timeout_s=200)
def collectives(subject: Subject) -> str | None:
    """Two processes reduce, broadcast and gather tensors on their devices with the accelerator's backend."""
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    try:
        lacking = _on_ranks(subject, 2)
    except BrokenPromiseError as broken:
        if len(device_names(subject.accelerator)) > 1 or _is_host(subject):
            raise
        # Many backends refuse two ranks on one device; one rank shows at least that the backend is there.
        _on_ranks(subject, 1)
        raise NotOfferedError(f"there is one device here, which two ranks cannot share: {broken}") from None
    return f"its backend lacks {', '.join(lacking)}" if lacking else None


def _is_host(subject: Subject) -> bool:
    return torch.zeros(1).device.type == subject.accelerator.device_type


def _on_ranks(subject: Subject, count: int) -> list[str]:
    """Runs :func:`rank` in so many processes; what their backend lacks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for number in range(count):
            told = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count}
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment.update({name: str(value) for name, value in told.items()})
            arguments = {"number": number, "count": count, "meeting_point": str(Path(folder) / "store")}
            ranks.append(Child(f"{__name__}:rank", subject.source, arguments, environment))
        try:
            lacking: list[list[str]] = [process.result(_RANK_TIMEOUT_S) for process in ranks]
        finally:
            for process in ranks:
                process.stop()
    return lacking[0]


def rank(source: str, number: int, count: int, meeting_point: str) -> list[str]:
    """What one of the processes does; the names of the collectives that the backend lacks."""
    accelerator = load(source).accelerator
    accelerator.set_device(number % len(device_names(accelerator)))
    distributed.init_process_group(
        accelerator.communication_backend_name(),
        init_method=f"file://{meeting_point}",
        rank=number,
        world_size=count,
    )
    try:
        for dtype in (torch.float32, *accelerator.supported_dtypes(), torch.int64):
            _required(accelerator.current_device_name(), dtype, number, count)
        return _others(accelerator.current_device_name(), number, count)
    finally:
        distributed.destroy_process_group()


def _required(device: str, dtype: torch.dtype, number: int, count: int) -> None:
    """The collectives without which no model is trained or split."""

    def on_device(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def same(tensor: torch.Tensor, expected: list[float], what: str) -> None:
        found = tensor.cpu().double().tolist()
        require(found == expected, f"{what} of {short(dtype)} on {count} ranks gives {found}, not {expected}")

    ranks = range(count)
    total = float(sum(r + 1 for r in ranks))
    reduced = on_device(number + 1, 2)
    distributed.all_reduce(reduced)
    same(reduced, [total, 2.0 * count], "all_reduce")
    highest = on_device(number + 1)
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX)
    same(highest, [float(count)], "all_reduce with MAX")
    later = on_device(number + 1)
    distributed.all_reduce(later, async_op=True).wait()
    same(later, [total], "all_reduce with async_op")
    sent = on_device(number + 5)
    distributed.broadcast(sent, 0)
    same(sent, [5.0], "broadcast")
    gathered = [on_device(0) for _ in ranks]
    distributed.all_gather(gathered, on_device(number + 1))
    same(torch.cat(gathered), [float(r + 1) for r in ranks], "all_gather")
    distributed.barrier()


def _others(device: str, number: int, count: int) -> list[str]:
    """Collectives that some backends lack: right where they are there, named where not."""

    def on_device(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device)

    def all_gather_into_tensor() -> tuple[torch.Tensor, list[float]]:
        whole = on_device(*[0.0] * count)
        distributed.all_gather_into_tensor(whole, on_device(number + 1))
        return whole, [float(r + 1) for r in range(count)]

    def reduce_scatter_tensor() -> tuple[torch.Tensor, list[float]]:
        part = on_device(0)
        distributed.reduce_scatter_tensor(part, on_device(*[float(r + 1) for r in range(count)]))
        return part, [float(count * (number + 1))]

    def all_to_all_single() -> tuple[torch.Tensor, list[float]]:
        received = on_device(*[0.0] * count)
        distributed.all_to_all_single(received, on_device(*[float(10 * number + r) for r in range(count)]))
        return received, [float(10 * r + number) for r in range(count)]

    def send_and_recv() -> tuple[torch.Tensor, list[float]]:
        received = on_device(7)
        if number == 0 and count > 1:
            distributed.send(received, 1)
        elif number == 1:
            received.zero_()
            distributed.recv(received, 0)
        return received, [7.0]

    lacking = []
    for collective in (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, send_and_recv):
        try:
            result, expected = collective()
        except _LACKING as error:
            lacking.append(f"{collective.__name__} ({describe(error, whole=True)})")
            continue
        found: Any = result.cpu().tolist()
        require(found == expected, f"{collective.__name__} on {count} ranks gives {found}, not {expected}")
    return lacking
