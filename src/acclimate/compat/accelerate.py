"""Hugging Face Accelerate on an accelerator that it has no name for.

Accelerate finds hardware by a list of names. For any other it has an environment variable for the device,
uses a process group that was started before, and takes a number in a device map for a device of torch's
current accelerator. This module says these three for this process, and changes nothing of Accelerate.
"""

from __future__ import annotations

import os

from acclimate.selection import get_accelerator

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""Names the device of a process to Accelerate, and to the ``Trainer`` of transformers."""

ON_A_CPU = {"cpu": True}
"""Of ``accelerate.Accelerator``: take no accelerator by name, and gloo or the process group that there is."""

FOUND_BY_NAME: dict[str, dict[str, bool]] = {
    "cpu": ON_A_CPU,
    **{name: {} for name in ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xla", "xpu")},
}
"""The device types that Accelerate 1.x finds by itself, and what it has to be told for each."""


def accelerator_options() -> dict[str, bool]:
    """Arguments of ``accelerate.Accelerator``, with which it works on the accelerator of this process.

    For a device that Accelerate has no name for, sets ``ACCELERATE_TORCH_DEVICE``. In a launched rank also
    makes the rank's device the current one, and starts the default process group where it was not started.

    Returns:
        ``{"cpu": True}`` on a CPU, and in a launched rank on a device without a name there, where it only
        keeps Accelerate from choosing a backend of its own; else ``{}``.
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
    """The argument of that name for ``device_map="auto"``: the free bytes of each device and of the host.

    Returns:
        ``None``, its default, for a device that Accelerate finds by itself.
    """
    accelerator = get_accelerator()
    if accelerator.device_type in FOUND_BY_NAME:
        return None
    import psutil

    free: dict[int | str, int] = {
        index: accelerator.available_memory(index) for index in range(accelerator.device_count())
    }
    return {**free, "cpu": psutil.virtual_memory().available}
