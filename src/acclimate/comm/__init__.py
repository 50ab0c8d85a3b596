"""Communication between ranks: a ``torch.distributed`` backend on shared memory.

    import acclimate.comm
    torch.distributed.init_process_group("shm")

or, with the rank found and the backend chosen::

    acclimate.init_distributed()

Importing this package makes the backend known to ``torch.distributed``. Nothing is compiled before a group is
created.
"""

from __future__ import annotations

from acclimate.comm.backend import register
from acclimate.comm.init import init_distributed

__all__ = ["init_distributed"]

register()
