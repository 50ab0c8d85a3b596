"""A device that torch knows but no record names: mtia, or one that a package adds to torch.

torch's conventions for out-of-tree devices are enough for the defaults of all methods.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends.staged import staged_for
from acclimate.errors import UnsupportedError

_DEVICES_OF_INDUCTOR = ("mtia",)
"""Devices without a record that torch generates code for; others register, or have ``Scheduling``."""


class GenericAccelerator(Accelerator):
    """The current device of ``torch.accelerator``.

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
        """The backend registered with ``torch.distributed`` for the device, else ``"staged"``."""
        if torch.distributed.is_available():
            registered = torch.distributed.Backend.default_device_backend_map
            if self.device_type in registered:
                return str(registered[self.device_type])
        return staged_for(self.device_type)

    def get_compile_backend(self) -> str:
        """Returns the one that was set; else ``"inductor"`` if it has code for the device, or ``"eager"``."""
        inductor = sys.modules.get("torch._inductor.codegen.common")  # not imported: that takes seconds
        known = {*_DEVICES_OF_INDUCTOR, *getattr(inductor, "device_codegens", ())}
        has_code = self.device_type in known or hasattr(self.torch_module, "Scheduling")
        return self._chosen_compile_backend or ("inductor" if has_code else "eager")


def unnamed_device(named: Collection[str]) -> str | None:
    """Returns the type of torch's current device, unless it is one of ``named``."""
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None and current.type not in named else None
