"""A made-up vendor's package: a device for torch, and the records that tell acclimate of it."""

from __future__ import annotations

from dataclasses import replace

from acclimate import Backend


def probe() -> str | None:
    """Adds the device to torch."""
    from acme_torch import device

    return device.missing()


ACME = Backend(
    name="acme",
    target="acme_torch.accelerator:AcmeAccelerator",
    probe=probe,
    rank=85,
    device_count=lambda: 1,
    remedy="Insert an Acme card",
)
ONLY_BY_NAME = replace(ACME, auto_detect=False)
