"""Makes Hugging Face Accelerate work on accelerators that it does not know.

Accelerate detects hardware from a list of names. For other hardware it reads an environment variable for the
device, uses an existing process group, and interprets a number in a device map as a device of torch's current
accelerator. This module uses these three ways, and patches nothing in Accelerate.
"""

from __future__ import annotations

import os

from acclimate.selection import get_accelerator

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""Names the device of a process to Accelerate, and to the ``Trainer`` of transformers."""

ON_A_CPU = {"cpu": True}
"""The argument of ``accelerate.Accelerator`` that skips detection, and uses gloo or an existing group."""

FOUND_BY_NAME: dict[str, dict[str, bool]] = {
    "cpu": ON_A_CPU,
    **{name: {} for name in ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xla", "xpu")},
}
"""The device types that Accelerate 1.x detects, and the arguments that it needs for each."""


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
