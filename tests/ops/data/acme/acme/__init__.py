"""A third party's accelerator with a native op of its own, in a package elsewhere."""

from acclimate import Backend

BACKEND = Backend(
    name="acme", target="acme.accelerator:AcmeAccelerator", probe=lambda: None, rank=900, auto_detect=False
)
