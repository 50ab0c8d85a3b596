"""The ranks that share one model; an error of one rank is raised on all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acclimate import errors
from acclimate.errors import AcclimateError, InvalidRankError, RankFailedError

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that share one model, and this process's rank among them."""

    size: int = 1
    rank: int = 0
    group: Any = None
    """Their process group; ``None`` for one rank."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRanks:
        """Returns itself: a copy of a model is split over the same ranks."""
        return self

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Gathers a value from every rank; returns them by rank."""
        import torch.distributed as dist

        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Returns rank 0's value."""
        return self.exchange(value if self.is_first else None)[0]

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raises an error of one rank in the ``with`` block on all ranks."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            failure = error
        self.raise_together(failure)

    def raise_together(self, failure: BaseException | None) -> None:
        """Raises on all ranks the errors that some of them pass; returns if none passes one."""
        told = self.exchange(None if failure is None else (type(failure).__name__, str(failure)))
        failed = [rank for rank, answer in enumerate(told) if answer is not None]
        if not failed:
            return
        if failure is None:
            failure = _rebuilt(told[failed[0]], failed[0])
        if isinstance(failure, AcclimateError):
            failure.is_of_all_ranks = True
        raise failure


def _rebuilt(told: tuple[str, str], rank: int) -> AcclimateError:
    """Returns another rank's error from its type name and message."""
    kind, message = told
    own = getattr(errors, kind, None)
    if isinstance(own, type) and issubclass(own, AcclimateError):
        # A type with further arguments, such as a module of the other rank, is rebuilt as its base.
        plain = next(base for base in own.__mro__ if "__init__" not in vars(base))
        rebuilt: AcclimateError = plain(message)
        return rebuilt
    return RankFailedError(f"rank {rank} failed with {kind}: {message}")


def join_model_ranks(accelerator: Accelerator, tp_size: int | None) -> ModelRanks:
    """Returns the ranks that share a model; joins the job's default process group if there are several.

    With fewer ranks to a model than the job has, ranks 0 to ``tp_size - 1`` share the first copy of the
    model, and so on.

    Raises:
        InvalidRankError: ``tp_size`` ranks cannot be taken from this job.
    """
    import torch.distributed as dist

    from acclimate.comm import init_distributed
    from acclimate.comm.init import find_place

    started = dist.is_available() and dist.is_initialized()
    place = None if started else find_place(os.environ)
    world = dist.get_world_size() if started else place.world_size if place is not None else 1
    size = world if tp_size is None else tp_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidRankError(f"tp_size must be an integer of 1 or more; it is {size!r}")
    if size > world:
        raise InvalidRankError(
            f"tp_size is {size}, and this job has {world} rank{'s'[: world != 1]}. Start {size}: "
            f"acclimate run --num_accelerators {size} --bind_cores_to_rank …"
        )
    if world % size:
        raise InvalidRankError(
            f"tp_size is {size}, and the job's {world} ranks cannot be divided into groups of {size}"
        )
    if size == 1:
        return ModelRanks()
    if not started:
        count = accelerator.device_count()
        if place is not None and place.local_rank is not None and count > 0:
            accelerator.set_device(place.local_rank % count)
        init_distributed()
    rank = dist.get_rank()
    if size == world:
        return ModelRanks(size, rank, dist.group.WORLD)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ModelRanks(size, rank % size, groups[rank // size])


def is_lost_rank(error: Exception) -> bool:
    """Whether an error means that ranks cannot communicate, for example because one has ended."""
    import torch.distributed as dist

    if not dist.is_available():
        return False
    # torch raises Gloo's errors as RuntimeError; their text begins with the line of Gloo that raised them.
    is_of_gloo = type(error) is RuntimeError and "/gloo/transport/" in str(error)
    return is_of_gloo or isinstance(error, dist.DistError)
