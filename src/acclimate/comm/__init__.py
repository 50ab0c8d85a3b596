"""Communication between ranks: a ``torch.distributed`` backend on shared memory.

    import acclimate.comm
    torch.distributed.init_process_group("shm")

or, to detect the rank and choose the backend::

    acclimate.init_distributed()

Importing this package registers the backend with ``torch.distributed``. The first group that is created
compiles its library.
"""

from __future__ import annotations

from acclimate.comm.backend import register
from acclimate.comm.init import init_distributed

__all__ = ["init_distributed"]

register()
