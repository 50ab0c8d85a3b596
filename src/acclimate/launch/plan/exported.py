"""Chooses the launcher's variables to export to ranks on other hosts: a list, and the user's additions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

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
    """Returns the exported variables, without those that the user names.

    Args:
        environ: the launcher's variables.
        prefixes: the prefixes of the accelerator's own variables.
    """
    wanted = (*EXPORTED_PREFIXES, *prefixes)
    return {
        name: value
        for name, value in environ.items()
        if name in EXPORTED or (name.startswith(wanted) and not _SECRET.search(name))
    }
