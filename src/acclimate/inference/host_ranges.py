"""Ranges of numbers on the host while a model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

MOST = 1 << 16
"""Values of the longest range that is made: a damaged configuration may ask for any number."""

_NAMES = ("start", "end", "step")
_Model = TypeVar("_Model")


def build_with_host_ranges(build: Callable[[], _Model]) -> _Model:
    """Returns what ``build`` makes, with short ranges on the host where its code allows that."""
    try:
        with HostRanges():
            return build()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
    # Some code mixes a range with another tensor of the meta device.
    return build()


class HostRanges(TorchFunctionMode):
    """Makes ``torch.arange`` on the meta device on the host instead, where it is short.

    Rotary embeddings are computed from such ranges when a model is built. On the meta device, torch does that
    in Python code that imports its compiler and sympy: about a tenth of a small model's start. For the same
    reason, ``torch.empty_like`` of a tensor there becomes ``torch.empty`` on the device that is asked for.
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
    if given.get("out") is not None or not all(type(each) in (int, float) for each in limits):
        return False
    step = given.get("step", args[2] if len(args) > 2 else 1)
    return bool(step) and sum(map(abs, limits)) <= MOST * min(1, abs(step))
