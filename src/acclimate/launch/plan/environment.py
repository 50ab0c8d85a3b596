"""The environment variables of a rank, and those that the launcher exports to other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from acclimate.host.rank_variables import TORCHRUN


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in its job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int


SET_BY_LAUNCHER: Mapping[str, str] = {
    TORCHRUN.rank: "rank",
    TORCHRUN.local_rank: "local_rank",
    TORCHRUN.world_size: "world_size",
    TORCHRUN.local_size: "local_world_size",
    "LOCAL_SIZE": "local_world_size",  # the name that MPI's users and DeepSpeed know
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
"""The variables that only the launcher sets, each with the field of :class:`RankPlace` that it has."""


def rank_environment(
    inherited: Mapping[str, str], place: RankPlace, *, threads: int, devices: Mapping[str, str]
) -> dict[str, str]:
    """Returns all variables of a rank.

    Of ``inherited``, the user's ``OMP_NUM_THREADS`` and ``PYTHONUNBUFFERED`` are kept. ``threads`` is the
    number of the rank's own cores; ``devices`` has the accelerator's visible-devices variable, if there is
    one.
    """
    # torchrun's variables, if it started this launcher, would send torch to the outer job's rendezvous.
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    return {
        **kept,
        **{name: value for name, value in defaults.items() if not kept.get(name, "").strip()},
        **devices,
        **{name: str(getattr(place, field)) for name, field in SET_BY_LAUNCHER.items()},
    }


EXPORTED = (
    # where programs and modules are found
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    # how text is read and written
    "LANG", "LC_ALL", "LC_CTYPE", "TERM", "NO_COLOR", "FORCE_COLOR",
    # which accelerator
    "DS_ACCELERATOR",
    # where models are kept
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that are always exported if set."""

EXPORTED_PREFIXES = (
    "PYTHON", "ACCLIMATE_", "TORCH", "PYTORCH_", "GLOO_", "TP_", "OMP_", "MKL_", "OPENBLAS_", "UCX_", "FI_",
    "LD_BIND_", "MALLOC_",
)  # fmt: skip
"""Prefixes of exported settings of libraries; the accelerator's record adds more.

A record may repeat one: DeepSpeed's launcher asks ``export_envs()``, and does not know this list.
"""

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(API_?)?KEY($|_)", re.IGNORECASE)
"""Names of variables with secrets, which are exported only if the user names them."""


def exported_environment(environ: Mapping[str, str], prefixes: Iterable[str] = ()) -> dict[str, str]:
    """Returns the launcher's variables that are exported unasked; the accelerator's own have the prefixes."""
    wanted = (*EXPORTED_PREFIXES, *prefixes)
    return {
        name: value
        for name, value in environ.items()
        if name in EXPORTED or (name.startswith(wanted) and not _SECRET.search(name))
    }
