"""Which variables of the launcher's own its ranks on other hosts get: a list, and what the user adds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

EXPORTED = (
    # where programs and modules are found
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    # how text is read and written
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TERM",
    "NO_COLOR",
    "FORCE_COLOR",
    # which accelerator
    "DS_ACCELERATOR",
    # where models are kept
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "XDG_CACHE_HOME",
)
"""Always exported where they are set."""

EXPORTED_PREFIXES = (
    "PYTHON",
    "ACCLIMATE_",
    "TORCH",
    "PYTORCH_",
    "GLOO_",
    "TP_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "UCX_",
    "FI_",
    "LD_BIND_",
    "MALLOC_",
)
"""Settings of what ranks are made of, exported too; the accelerator's record names more."""

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(API_?)?KEY($|_)", re.IGNORECASE)
"""What a variable that holds a secret is called; such a one is exported only when the user names it."""


def exported_environment(environ: Mapping[str, str], prefixes: Iterable[str] = ()) -> dict[str, str]:
    """The variables that ranks on other hosts get, besides those that the user names.

    Args:
        environ: the launcher's.
        prefixes: of the accelerator's own variables.
    """
    wanted = (*EXPORTED_PREFIXES, *prefixes)
    return {
        name: value
        for name, value in environ.items()
        if name in EXPORTED or (name.startswith(wanted) and not _SECRET.search(name))
    }
