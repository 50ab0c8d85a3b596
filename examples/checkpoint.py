"""Checkpoints: written whole or not at all, found again, and true to the last bit.

A checkpoint is one file with the whole model and optimizer, however they are spread over ranks. So a run can
go on with another number of ranks, sharded or not, and on another accelerator.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from acclimate import Accelerator

State = dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit the run that should go on from it."""


class Checkpoints:
    """The checkpoints of one run, of which the newest are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def newest_first(self) -> list[Path]:
        """The checkpoints there are."""
        return sorted(self.folder.glob("step_*.pt"), reverse=True)

    def save(self, step: int, state: State) -> Path:
        """Writes a checkpoint, and only then drops the oldest.

        It gets its name once it has reached the disk: whoever is killed while writing leaves the others.

        Raises:
            CheckpointError: the disk is full or refuses it. The others are still there.
        """
        path = self.folder / f"step_{step:08d}.pt"
        partial = path.with_suffix(".partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.partial"):  # of a writer that was killed
                leftover.unlink()
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            left = self.newest_first()
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to {self.folder}: {cause(error)}. "
                + (f"{left[0].name} is still there." if left else "There is none before it.")
            ) from error
        for old in self.newest_first()[self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def load_newest(self, say: Callable[[str], None]) -> tuple[Path, State] | None:
        """The newest checkpoint that can be read; None where there is none at all.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        found = self.newest_first()
        for path in found:
            try:
                damaged = zipfile.ZipFile(path).testzip()  # torch.load compares no checksums
                if damaged is None:
                    return path, torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
                damaged = cause(error)
            say(f"{path} is damaged ({damaged}); trying the one before it.")
        if found:
            raise CheckpointError(f"None of the {len(found)} checkpoints in {self.folder} can be read.")
        return None


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder reach the disk."""
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cause(error: BaseException) -> str:
    """The first line of the error at the root: torch's writer wraps what the file system answered."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def collect(acc: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What decides how a run goes on: weights, optimizer and all ranks' random numbers.

    Every rank must call it. The weights are complete on rank 0 only.
    """
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    mine = {"host": torch.get_rng_state(), "accelerator": acc.get_rng_state()}
    everyones = [mine]
    if dist.is_initialized():
        everyones *= dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    return {"model": weights, "optimizer": moments, "random": everyones}


def restore(acc: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> bool:
    """Puts back what :func:`collect` gave; every rank must call it, with the weights on rank 0.

    Returns:
        Whether random numbers go on too. They cannot where the number of ranks is another.
    """
    spread = dist.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=spread)
    # Not set_state_dict: it leaves out what is empty, and so does nothing on the ranks that are sent all.
    set_model_state_dict(model, state.get("model", {}), options=options)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)
    everyones = state["random"]
    if len(everyones) != (dist.get_world_size() if spread else 1):
        return False
    mine = everyones[dist.get_rank() if spread else 0]
    torch.set_rng_state(mine["host"])
    acc.set_rng_state(mine["accelerator"])
    return True
