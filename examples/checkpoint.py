"""Checkpoints: written atomically, checked when loaded, and exact, so that a resumed run is the same.

A checkpoint is one file with the whole model and optimizer, whatever their split over ranks. So a run can
continue with another number of ranks, sharded or not, and on another accelerator.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from acclimate import Accelerator
from acclimate.llm.split import Plan, gather_tensors, shard

if TYPE_CHECKING:
    from ranks import SpreadModel

State = dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit the run that should continue from it."""


class Checkpoints:
    """The checkpoints of one run; only the newest are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def newest_first(self) -> list[Path]:
        """The existing checkpoints, newest first."""
        return sorted(self.folder.glob("step_*.pt"), reverse=True)

    def save(self, step: int, state: State) -> Path:
        """Writes a checkpoint, and then removes the oldest.

        The file gets its name once it has reached the disk, so a run that is killed while writing leaves the
        other checkpoints intact.

        Raises:
            CheckpointError: the file cannot be written, as on a full disk. The others are still there.
        """
        path = self.folder / f"step_{step:08d}.pt"
        partial = path.with_suffix(".partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.partial"):  # from a run that was killed
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
        """The newest checkpoint that can be read; None if there are no checkpoints.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        found = self.newest_first()
        for path in found:
            try:
                damaged = zipfile.ZipFile(path).testzip()  # torch.load does not compare checksums
                if damaged is None:
                    return path, torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
                damaged = cause(error)
            say(f"{path} is damaged ({damaged}); trying the one before it.")
        if found:
            raise CheckpointError(f"None of the {len(found)} checkpoints in {self.folder} can be read.")
        return None


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cause(error: BaseException) -> str:
    """The first line of the original error: torch's writer wraps the file system's error in its own."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def collect(acc: Accelerator, spread: SpreadModel, optimizer: torch.optim.Optimizer) -> State:
    """The state from which a run continues: weights, optimizer, and the random states of all ranks.

    Every rank must call this. The weights are complete only on rank 0.
    """
    # Offloading keeps the weights on rank 0 only, but if tensors are split, all ranks have parts of them.
    options = StateDictOptions(full_state_dict=True, cpu_offload=spread.plan is None)
    weights, moments = get_state_dict(spread.module, optimizer, options=options)
    if spread.plan is not None:
        weights, moments = put_together(spread.plan, spread.sharers, weights, moments)
    mine = {"host": torch.get_rng_state(), "accelerator": acc.get_rng_state()}
    everyones = [mine]
    if dist.is_initialized():
        everyones *= dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    return {"model": weights, "optimizer": moments, "random": everyones}


def put_together(plan: Plan, sharers: Any, weights: State, moments: State) -> tuple[State, State]:
    """The whole model's weights and optimizer, from the parts of the ranks that share a copy."""

    def whole(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in gather_tensors(plan, parts, sharers)}

    own: dict[str, State] = moments["state"]
    together: dict[str, State] = {name: {} for name in own}
    for key in next(iter(own.values())):
        parts = {name: tensor[key] for name, tensor in own.items()}
        if next(iter(parts.values())).dim() > 0:  # a number, such as the count of steps, is not split
            parts = whole(parts)
        for name, part in parts.items():
            together.setdefault(name, {})[key] = part
    return whole(weights), {**moments, "state": together}


def restore(acc: Accelerator, spread: SpreadModel, optimizer: torch.optim.Optimizer, state: State) -> bool:
    """Restores the state from :func:`collect`; every rank must call this, with the weights on rank 0.

    Returns:
        Whether random states were restored too, which needs the same number of ranks.
    """
    is_spread = dist.is_initialized()
    weights, moments = state.get("model", {}), state.get("optimizer", {})
    if spread.plan is not None:
        weights, moments = take_apart(spread.plan, spread.sharers, weights, moments)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_spread and spread.plan is None)
    # Not set_state_dict: it skips empty states, and so does nothing on ranks that receive theirs from rank 0.
    set_model_state_dict(spread.module, weights, options=options)
    set_optimizer_state_dict(spread.module, optimizer, moments, options=options)
    everyones = state["random"]
    if len(everyones) != (dist.get_world_size() if is_spread else 1):
        return False
    mine = everyones[dist.get_rank() if is_spread else 0]
    torch.set_rng_state(mine["host"])
    acc.set_rng_state(mine["accelerator"])
    return True


def take_apart(plan: Plan, sharers: Any, weights: State, moments: State) -> tuple[State, State]:
    """This rank's parts of the whole weights and optimizer that rank 0 has."""
    told = [weights, moments]
    dist.broadcast_object_list(told)
    weights, moments = told
    rank = dist.get_rank(sharers)

    def part(name: str, tensor: Tensor) -> Tensor:
        return shard(tensor, plan.splits[name], rank).clone() if tensor.dim() > 0 else tensor

    parts = {
        name: {key: part(name, value) for key, value in kept.items()}
        for name, kept in moments["state"].items()
    }
    return {name: part(name, tensor) for name, tensor in weights.items()}, {**moments, "state": parts}
