"""Creates ``torch.arange`` tensors on the CPU while a model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

MOST = 1 << 16
"""The longest range that is created on the CPU; a damaged configuration may ask for any length."""

_NAMES = ("start", "end", "step")
_Model = TypeVar("_Model")


def build_with_host_ranges(build: Callable[[], _Model]) -> _Model:
    """Returns ``build``'s model, built with short ranges on the CPU if its code allows that."""
    try:
        with HostRanges():
            return build()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
    # Some code mixes a range with another tensor of the meta device.
    return build()


class HostRanges(TorchFunctionMode):
    """Creates a short ``torch.arange`` on the CPU instead of the meta device.

    Models compute rotary embeddings from such ranges when they are built. On the meta device, torch runs
    Python code for that, which imports its compiler and sympy: 10 % of a small model's start. For the same
    reason, ``torch.empty_like`` of a meta tensor becomes ``torch.empty`` on the requested device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function."""
        given = dict(kwargs or {})
        if func is torch.arange and _is_meta(given.get("device")) and _is_short(args, given):
            given["device"] = "cpu"
        if func is torch.empty_like and set(given) == {"device"} and _is_plain_meta(args):
            return torch.empty(args[0].shape, dtype=args[0].dtype, **given)
        return func(*args, **given)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_plain_meta(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and args[0].device.type == "meta" and args[0].is_contiguous()


def _is_short(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    limits = [*args, *(given[name] for name in _NAMES if name in given)]
    if given.get("out") is not None or not all(type(limit) in (int, float) for limit in limits):
        return False
    step = given.get("step", args[2] if len(args) > 2 else 1)
    return bool(step) and sum(map(abs, limits)) <= MOST * min(1, abs(step))
