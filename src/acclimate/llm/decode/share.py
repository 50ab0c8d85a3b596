"""One rank's part of a split model in a decoder step, and the collectives of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import NotRepresentedError, Share, SharedRow, SharedTable

if TYPE_CHECKING:
    from acclimate.llm.split.collectives import Ranks
    from acclimate.llm.split.plan import Change


def share_of(model: Any) -> Share | None:
    """Returns this rank's share of a model of ``init_inference``; ``None`` if the model is not split.

    All ranks have the same plan, so they get the same kind of result.

    Raises:
        NotRepresentedError: a description cannot express the split.
    """
    plan = getattr(model, "tp_plan_applied", None)
    if plan is None or plan.size == 1:
        return None
    from acclimate.llm.split.collectives import ranks_of

    ranks = ranks_of(model.model_ranks.group)
    modules = dict(model.named_modules(remove_duplicate=False))
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    summed = []
    shared: SharedTable | None = None
    widths: tuple[int, ...] | None = None
    rows: dict[Tensor, SharedRow] = {}
    for name, change in plan.modules.items():
        module = modules[name]
        has_all = all(change.parts) if change.parts else True
        if any(change.expands) or change.arguments or not has_all:
            raise NotRepresentedError(f"{name} is not split evenly enough")
        if change.role == "vocabulary" and module is table:
            start, stop = change.parts[ranks.rank][0]
            shared = SharedTable(range(start, stop), max(parts[-1][1] for parts in change.parts if parts))
        elif change.role == "head" and module is head:
            widths = tuple(sum(stop - start for start, stop in parts) for parts in change.parts)
        elif change.role in ("rows", "experts"):
            summed.append(module)
        elif change.role == "norm":
            rows[module.weight] = _shared_row(name, change, ranks)
        elif change.role not in ("columns", "block", "whole"):
            raise NotRepresentedError(f"a step does not support the split of {name}")
    return Share(ranks, frozenset(summed), shared, widths, rows)


def _shared_row(name: str, change: Change, ranks: Ranks) -> SharedRow:
    """Returns which part of its rows a rank's normalization has."""
    own, earlier = change.parts[ranks.rank], change.parts[: ranks.rank]
    counts = own not in earlier
    counted = {place for parts in earlier for part in parts for place in range(*part)}
    if change.norm not in ("rms", "rms+1") or change.sees_all:
        raise NotRepresentedError(f"a step does not support the split of {name}")
    if counts and counted & {place for part in own for place in range(*part)}:
        raise NotRepresentedError(f"{name} is not split evenly enough")
    return SharedRow(ranks, change.width, counts)


def whole_logits(share: Share | None, logits: Tensor) -> Tensor:
    """Gathers the logits of all tokens from all ranks."""
    if share is None or share.head_widths is None:
        return logits
    padded = logits.new_zeros((len(logits), max(share.head_widths)))
    padded[:, : logits.shape[1]] = logits
    found = share.ranks.all_gather(padded)
    return torch.cat([part[:, :width] for part, width in zip(found, share.head_widths, strict=True)], -1)


def likeliest_token(
    ranks: Ranks, head_widths: Sequence[int], largest: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns for each sequence the token with the largest logit of all ranks, and that logit.

    Of equal logits it takes the first. A logit that is NaN counts as the largest.

    Args:
        ranks: the ranks that share the vocabulary.
        head_widths: the number of tokens on each rank.
        largest: this rank's largest logit, for each sequence.
        tokens: the index of that logit among this rank's tokens.
    """
    first = sum(head_widths[: ranks.rank])
    # float64 holds tokens exactly, because they are integers far below 2^53.
    found = ranks.all_gather(torch.stack((largest.double(), (tokens + first).double())))
    rank = found[:, 0].argmax(0)
    largest, best = (found[:, index].gather(0, rank[None])[0] for index in (0, 1))
    return best.long(), largest


class Exchange:
    """A function that native code calls to sum floats over the ranks."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._error: BaseException | None = None
        self._tensors: dict[tuple[int, int], Tensor] = {}
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self._function = kind(self._sum)

    @property
    def address(self) -> int:
        """The function's address, which is valid as long as this object exists."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _sum(self, address: int, count: int) -> None:
        # Exceptions cannot pass through native code, so after an error the step runs to its end.
        if self._error is not None:
            return
        try:
            key = address, count
            if key not in self._tensors:
                values = (ctypes.c_float * count).from_address(address)
                self._tensors[key] = torch.frombuffer(values, dtype=torch.float32)
            self._share.ranks.all_reduce(self._tensors[key])
        except BaseException as error:  # noqa: BLE001 - raised by check
            self._error = error

    def check(self) -> None:
        """Raises the error that the function caught since the last check, if any."""
        error, self._error = self._error, None
        # Another batch may use other memory.
        if len(self._tensors) > 64:
            self._tensors.clear()
        if error is not None:
            raise error
