"""What a device's numbers are compared with: the host's in the same dtype, or those of exact arithmetic.

A host is no oracle. In 16 bits it rounds after each step, some of its vector functions give NaN at infinity,
and a product overflows where one in float32 does not. A device that gives what float64 gives is right.
"""

from __future__ import annotations

import torch

_AS_INEXACT = 4
"""How many times the largest error of the host a device may be off."""


def nearest(
    found: torch.Tensor, on_host: torch.Tensor, exact: torch.Tensor, by_element: bool = True
) -> torch.Tensor:
    """For each number of the device, the host's or float64's, whichever it is nearer to.

    Args:
        found: the numbers of the device.
        on_host: the host's, in the same dtype.
        exact: the host's, from the same inputs in float64.
        by_element: whether each number is compared by itself. If not, a number that is off by not much more
            than the host's largest error is as good as exact: the error shows how far large terms cancel.
    """
    inexact = on_host.is_floating_point() or on_host.is_complex()
    if not inexact or found.shape != on_host.shape or exact.shape != on_host.shape:
        return on_host
    if found.dtype != on_host.dtype or on_host.layout != torch.strided or on_host.is_nested:
        return on_host
    if on_host.is_complex():
        ours, theirs, parts = (
            torch.view_as_real(t.detach().resolve_conj().cpu()) for t in (found, on_host, exact)
        )
        return torch.view_as_complex(nearest(ours, theirs, parts, by_element).contiguous())
    ours, theirs = (t.detach().resolve_neg().cpu().double() for t in (found, on_host))
    rounded = exact.detach().resolve_neg().to(on_host.dtype)
    other = rounded.double()
    same = (ours == other) | (ours.isnan() & other.isnan())
    nearer = same | ((ours - other).abs() < (ours - theirs).abs()) | (theirs.isnan() & ~ours.isnan())
    chosen = torch.where(nearer, rounded, on_host.detach().resolve_neg())
    errors = (theirs - exact).abs()
    known = errors[errors.isfinite()]
    if by_element or not known.numel():
        return chosen
    noise = (ours - exact).abs() <= _AS_INEXACT * known.max()
    return torch.where(noise, ours.to(on_host.dtype), chosen)
