"""A device that torch knows and no record here names: mtia, or any that a package adds to torch.

torch's conventions for out-of-tree devices say enough for every method to have a default, so there is
nothing to write for it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import UnsupportedError


class GenericAccelerator(Accelerator):
    """The device that ``torch.accelerator`` says is this process's.

    Raises:
        UnsupportedError: torch has no accelerator in this process.
    """

    def __init__(self) -> None:
        current = torch.accelerator.current_accelerator()
        if current is None:
            raise UnsupportedError("torch has no accelerator in this process.")
        self._device_type = current.type

    @property
    def device_type(self) -> str:
        return self._device_type

    @property
    def communication_backend(self) -> str:
        """What was registered with ``torch.distributed`` for the device; gloo where nothing was."""
        if not torch.distributed.is_available():
            return "gloo"
        return str(torch.distributed.Backend.default_device_backend_map.get(self.device_type, "gloo"))


def unnamed_device(named: Collection[str]) -> str | None:
    """The type of the device that torch knows in this process, unless it is one of ``named``."""
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None and current.type not in named else None
