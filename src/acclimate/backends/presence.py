"""Whether a package is installed, told without importing it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether a top-level package could be imported; a folder that only has its name does not count."""
    return not is_bare_folder(locate(package))


def locate(package: str) -> ModuleSpec | None:
    """Where Python would import a top-level package from; ``None`` where there is none."""
    try:
        return find_spec(package)
    except Exception:  # noqa: BLE001 - a stand-in in sys.modules has no spec, or an import hook fails
        return None


def is_bare_folder(spec: ModuleSpec | None) -> bool:
    """Whether there is nothing to import: no package, or a "namespace package".

    Python makes one of any folder on ``sys.path``, such as a clone of the package's repository in the
    current folder.
    """
    return spec is None or (spec.origin is None and spec.submodule_search_locations is not None)
