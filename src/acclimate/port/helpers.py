"""Functions that an edit adds to a file, where no library has them."""

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
    """Only CUDA's devices can share a batch; elsewhere the device of the module takes all of it."""
    if {device_type} != "cuda":  # acclimate: ignore
        parallel.device_ids = []
        parallel.register_forward_pre_hook(_move_inputs, with_kwargs=True)
    return parallel


def _move_inputs(parallel: torch.nn.Module, inputs: tuple, options: dict) -> tuple[tuple, dict]:
    """What a DataParallel is called with, on its device."""
    device = next(parallel.parameters()).device

    def moved(value):
        if isinstance(value, (list, tuple)):
            return getattr(type(value), "_make", type(value))(map(moved, value))
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return moved(inputs), moved(options)
'''
"""For both targets; ``{device_type}`` is how the target asks for the type."""
