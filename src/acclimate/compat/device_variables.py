"""The environment variables from which test suites of other projects read their device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from acclimate.compat.accelerate import DEVICE_VARIABLE, FOUND_BY_NAME

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator

TEST_DEVICE_VARIABLES = (
    "TRANSFORMERS_TEST_DEVICE",
    "DIFFUSERS_TEST_DEVICE",
    "TORCH_DEVICE",  # timm
)


def tell_libraries(accelerator: Accelerator) -> dict[str, str]:
    """Sets those of the variables that are unset, for this process and its children.

    Returns:
        The variables that were set.
    """
    wanted = dict.fromkeys(TEST_DEVICE_VARIABLES, accelerator.device_type)
    if accelerator.device_type not in FOUND_BY_NAME:
        wanted[DEVICE_VARIABLE] = (
            accelerator.device_type
        )  # without an index: each process has its own current one
    told = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(told)
    return told
