"""The setuptools extension of an op, which is built when a package is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from setuptools import Extension

from acclimate.ops.build.compile import build_library
from acclimate.ops.build.recipe import Recipe


class OpExtension(Extension):  # type: ignore[misc]
    """A library of one op, installed beside the module of its builder.

    Its name has the key of its source, so ``load()`` takes it only as long as the source is the same.

    Args:
        recipe: what the library is made of.
        package: of the builder's module; empty where it is in none.
    """

    def __init__(self, recipe: Recipe, package: str) -> None:
        self.recipe = recipe
        super().__init__(
            name=".".join(part for part in (package, recipe.full_name) if part),
            sources=[str(unit.path) for unit in recipe.units],
        )

    def build_to(self, target: Path) -> None:
        """Compiles the op as ``load()`` would. An accelerator's ``build_extension()`` calls this."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(build_library(self.recipe, Path(folder)), target)
