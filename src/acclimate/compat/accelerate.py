"""Makes Hugging Face Accelerate work on accelerators that it does not know.

Accelerate detects hardware from a list of names. For other hardware it reads an environment variable for the
device, uses an existing process group, and interprets a number in a device map as a device of torch's current
accelerator. This module uses these three ways, and patches nothing in Accelerate.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


_logger = logging.getLogger("acclimate")

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""Names the device of a process to Accelerate, and to the ``Trainer`` of transformers."""

ON_A_CPU = {"cpu": True}
"""The argument of ``accelerate.Accelerator`` that skips detection, and uses gloo or an existing group."""

FOUND_BY_NAME: dict[str, dict[str, bool]] = {
    "cpu": ON_A_CPU,
    **{name: {} for name in ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xla", "xpu")},
}
"""The device types that Accelerate 1.x detects, and the arguments that it needs for each.

Not the records': Accelerate knows devices without a record, and does not know those of a new record.
"""


def accelerator_options() -> dict[str, bool]:
    """Returns the arguments with which ``accelerate.Accelerator`` works on this process's accelerator.

    For a device that Accelerate does not know, sets ``ACCELERATE_TORCH_DEVICE``. In a launched rank, also
    makes the rank's device the current one, and creates the default process group unless it exists.

    Returns:
        ``{"cpu": True}`` on a CPU; also in a launched rank on a device that Accelerate does not know, where
        it only keeps Accelerate from choosing a process-group backend; else ``{}``.
    """
    accelerator = get_accelerator()
    found = FOUND_BY_NAME.get(accelerator.device_type)
    if found is not None:
        return dict(found)
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None:
        import torch.distributed as dist

        accelerator.set_device(int(rank))
        if not dist.is_initialized():
            dist.init_process_group(accelerator.communication_backend_name())
    os.environ[DEVICE_VARIABLE] = accelerator.current_device_name()
    return {} if rank is None else dict(ON_A_CPU)


def max_memory() -> dict[int | str, int] | None:
    """Returns the ``max_memory`` argument for ``device_map="auto"``: free bytes of each device and the host.

    Returns:
        ``None``, the argument's default, for a device that Accelerate detects itself.
    """
    accelerator = get_accelerator()
    if accelerator.device_type in FOUND_BY_NAME:
        return None
    import psutil

    free: dict[int | str, int] = {
        index: accelerator.available_memory(index) for index in range(accelerator.device_count())
    }
    return {**free, "cpu": psutil.virtual_memory().available}


def keep_random_state(trainer: Any) -> None:
    """Makes ``save_state`` and ``load_state`` include the random numbers of this process's devices.

    Accelerate itself keeps those of the host and of some devices that it knows. Each rank writes a file
    of its own into the checkpoint's folder. A checkpoint without the file is loaded with a warning.

    Args:
        trainer: the ``accelerate.Accelerator``.
    """
    accelerator = get_accelerator()

    def file(folder: str) -> Path:
        return Path(folder) / f"acclimate_random_states_{trainer.process_index}.pt"

    def save(models: Any, weights: Any, folder: str) -> None:
        import torch

        torch.save(accelerator.get_rng_state_all(), file(folder))

    def restore(models: Any, folder: str) -> None:
        import torch

        if not file(folder).exists():
            _logger.warning(
                "%s does not exist, so the random numbers of %s continue instead of those of the checkpoint. "
                "Call keep_random_state() before save_state().",
                file(folder),
                accelerator.device_name(),
            )
            return
        states = torch.load(file(folder), weights_only=True)
        accelerator.set_rng_state_all(states[: accelerator.device_count()])

    trainer.register_save_state_pre_hook(save)
    trainer.register_load_state_pre_hook(restore)


# -- test suites of other projects ------------------------------------------------------------------

TEST_DEVICE_VARIABLES = ("TRANSFORMERS_TEST_DEVICE", "DIFFUSERS_TEST_DEVICE", "TORCH_DEVICE")
"""The last one is timm's."""


def tell_libraries(accelerator: Accelerator) -> dict[str, str]:
    """Sets variables from which test suites read their device, if unset, for this process and its children.

    Returns:
        The variables that were set.
    """
    wanted = dict.fromkeys(TEST_DEVICE_VARIABLES, accelerator.device_type)
    if accelerator.device_type not in FOUND_BY_NAME:
        # Without an index: each process has its own current one.
        wanted[DEVICE_VARIABLE] = accelerator.device_type
    told = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(told)
    return told
