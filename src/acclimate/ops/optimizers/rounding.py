"""Arithmetic in torch that rounds as the hardware does."""

from __future__ import annotations

from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """The float32 square root, correctly rounded on the host.

    torch's own comes from a vector library there and can be off by one unit in the last place. That of a
    float64 has more than twice the digits, so rounding it again gives the correctly rounded one.
    """
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()
