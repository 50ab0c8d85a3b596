"""Arithmetic in torch that rounds like the hardware."""

from __future__ import annotations

from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """Returns the float32 square root, correctly rounded on the host.

    On the host torch's own comes from a vector library and can be off by one unit in the last place. The
    float64 root has more than twice the digits, so rounding it to float32 gives the correct result.
    """
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()
