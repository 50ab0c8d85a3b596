"""Detects code between split modules that reads tensor values into Python, as it may branch on values that a
rank does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.accelerator.recorded_graph import READS_IN_PLACE, reads_data


class _Following(TorchDispatchMode):
    """Follows all tensors computed from the given ones, by their storage."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_read: bool = False
        self._kept: list[Tensor] = []
        """References that keep the storage from being reused by another tensor."""
        self._places: set[int] = set()
        for tensor in tensors:
            self._follow(tensor)

    def _follow(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._places.add(tensor.untyped_storage()._cdata)

    def see_reading(self, tensor: Tensor) -> None:
        """Records a read if the tensor is followed."""
        self.is_read = self.is_read or tensor.untyped_storage()._cdata in self._places

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        depends = any(tensor.untyped_storage()._cdata in self._places for tensor in given)
        found = func(*args, **(kwargs or {}))
        if depends:
            self.is_read = self.is_read or reads_data(func, given)
            changed = given[:1] if func._schema.is_mutable else []
            for result in (*changed, *pytree.tree_leaves(found)):
                if isinstance(result, Tensor):
                    self._follow(result)
        return found


class _FollowingMethods(TorchFunctionMode):
    """Sees the methods that read followed tensors without an operator."""

    def __init__(self, following: _Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in READS_IN_PLACE and args and isinstance(args[0], Tensor):
            self._following.see_reading(args[0])
        return func(*args, **(kwargs or {}))


def reads_numbers(run: Callable[[Mapping[str, Tensor]], object], outputs: Mapping[str, Tensor]) -> bool:
    """Whether a run reads a value that depends on the given outputs into Python."""
    given = {name: output.detach().clone() for name, output in outputs.items()}
    following = _Following(given.values())
    with torch.no_grad(), following, _FollowingMethods(following):
        run(given)
    return following.is_read
