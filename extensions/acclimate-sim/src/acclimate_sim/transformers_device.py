"""The device specification for transformers' own tests, which need one for a device that they do not know.

The tests import it by its file name from their working directory, so create a file there that imports this::

    echo 'from acclimate_sim.transformers_device import *' > sim_device.py
    ACCLIMATE_ACCELERATOR=sim TRANSFORMERS_TEST_DEVICE_SPEC=sim_device.py pytest tests/models/llama
"""

from __future__ import annotations

import torch

from acclimate import get_accelerator

__all__ = ["DEVICE_COUNT_FN", "DEVICE_NAME", "EMPTY_CACHE_FN", "MANUAL_SEED_FN"]

_accelerator = get_accelerator()

DEVICE_NAME = _accelerator.device_type
MANUAL_SEED_FN = torch.manual_seed  # seeds the device too
EMPTY_CACHE_FN = _accelerator.empty_cache
DEVICE_COUNT_FN = _accelerator.device_count
