"""Creates the device when torch is imported, if ``ACCLIMATE_ACCELERATOR`` is ``sim``.

torch calls this at the end of its own import (entry point ``torch.backends``). So a child process that gets a
tensor, or a function that makes one, knows the device without importing acclimate.
"""

from __future__ import annotations

import logging
import os
import sys

_VARIABLES = ("ACCLIMATE_ACCELERATOR", "DS_ACCELERATOR")
_logger = logging.getLogger("acclimate")


def make_device_if_chosen() -> None:
    """Creates the device if ``ACCLIMATE_ACCELERATOR`` is ``sim``; does nothing otherwise.

    An error is logged, and raised only when acclimate selects the accelerator: importing torch still works.
    """
    if "sim" not in (os.environ.get(name) for name in _VARIABLES):
        return
    if "acclimate_sim.accelerator" in sys.modules:  # acclimate is making it, and has only now imported torch
        return
    from acclimate import AcclimateError

    try:
        from acclimate_sim.accelerator import SimAccelerator

        SimAccelerator()
    except AcclimateError as error:
        _logger.warning("The emulated device cannot be created: %s", error)
