"""Tensors of the device in queues between processes, as the workers of a ``DataLoader`` use them."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import reduce_tensor

_given: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()
"""The copies among the arguments of a process that starts: it opens their memory after they are pickled."""


def register(device_type: str) -> None:
    """Sends the device's tensors through shared memory of the host.

    torch shares memory between processes for CUDA and the host only. For any other device its worker fails in
    the thread that feeds the queue, and the process that reads the queue waits without end.
    """

    def reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
        # torch refuses a tensor with a history on every device.
        if tensor.device.type != device_type or (tensor.requires_grad and not tensor.is_leaf):
            reduced: tuple[Any, ...] = reduce_tensor(tensor)
            return reduced
        on_host = tensor.detach().cpu()
        if (started := get_spawning_popen()) is not None:
            _given.setdefault(started, []).append(on_host)
        return _rebuild, (on_host, tensor.device, type(tensor), tensor.requires_grad)

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce)


def _rebuild(
    on_host: torch.Tensor, device: torch.device, kind: type[torch.Tensor], requires_grad: bool
) -> torch.Tensor:
    tensor = on_host.to(device)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
