"""Communication between ranks: a ``torch.distributed`` backend on shared memory.

    import acclimate.comm
    torch.distributed.init_process_group("shm")

Importing this package makes the backend known to ``torch.distributed``. Nothing is compiled before a group is
created.
"""

from __future__ import annotations

from acclimate.comm.backend import register

__all__: list[str] = []

register()
