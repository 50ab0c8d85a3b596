"""Source of the functions that an edit adds to a file."""

from __future__ import annotations

ACCELERATOR_TYPE = '''\
def accelerator_type() -> str:
    """The type of the device to use: the accelerator's, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
'''
"""For ``--to torch``."""

ON_ANY_DEVICE = '''\
def on_any_device(parallel: torch.nn.DataParallel) -> torch.nn.DataParallel:
    """torch splits a batch over CUDA devices only; elsewhere the module's device gets the whole batch."""
    if {device_type} not in ("cuda", "cpu"):  # acclimate: ignore
        parallel.device_ids = []
        parallel.register_forward_pre_hook(_move_inputs, with_kwargs=True)
    return parallel


def _move_inputs(parallel: torch.nn.Module, inputs: tuple, options: dict) -> tuple[tuple, dict]:
    """Moves the arguments of a DataParallel to its device."""
    device = next((each.device for each in parallel.parameters()), torch.device({device_type}))

    def moved(value):
        if isinstance(value, (list, tuple)):
            return getattr(type(value), "_make", type(value))(map(moved, value))
        if isinstance(value, dict):
            return type(value)((key, moved(each)) for key, each in value.items())
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return moved(inputs), moved(options)
'''
"""For both targets; ``{device_type}`` is the target's expression for the device type."""
