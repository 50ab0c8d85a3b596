"""The setuptools extension that builds an op together with a package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import Extension

from acclimate.ops.build import store
from acclimate.ops.build.recipe import Recipe


class OpExtension(Extension):  # type: ignore[misc]
    """The library of one op, installed beside its builder's module.

    Its name contains the key of its source, so ``load()`` ignores it once the source has changed.
    """

    def __init__(self, recipe: Recipe, package: str) -> None:
        self.recipe = recipe
        super().__init__(
            name=".".join(part for part in (package, recipe.full_name) if part),
            sources=[_relative(unit.path) for unit in recipe.units],
        )

    def build_to(self, target: Path) -> None:
        """Compiles the op into the cache, as ``load()`` would, and copies it.

        The command of ``build_extension()`` calls this.
        """
        shutil.copy(store.obtain(self.recipe, self.recipe.key(store.versions(self.recipe))), target)


def _relative(path: Path) -> str:
    """Returns the path as setuptools wants it: relative, if it is below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
