"""Builds ops when a package is built: the setuptools extension and command that use the same compilation."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import Extension
from torch.utils.cpp_extension import BuildExtension

if TYPE_CHECKING:
    from acclimate.ops.build.builder import OpBuilder


class OpExtension(Extension):  # type: ignore[misc]
    """A library of one op, installed beside the module of its builder.

    Its name has the key of its source, so ``load()`` takes it only as long as the source is the same.
    """

    def __init__(self, builder: OpBuilder) -> None:
        self.recipe = builder.recipe()
        package = type(builder).__module__.rpartition(".")[0]
        super().__init__(
            name=".".join(part for part in (package, self.recipe.full_name) if part),
            sources=[str(unit.path) for unit in self.recipe.units],
        )


class BuildOps(BuildExtension):
    """torch's ``build_ext`` command, which also builds :class:`OpExtension`."""

    def build_extension(self, ext: Any) -> None:
        """Builds one extension: an op as ``load()`` would, any other as torch does."""
        if not isinstance(ext, OpExtension):
            super().build_extension(ext)
            return
        from acclimate.ops.build.compile import build_library

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(build_library(ext.recipe, Path(folder)), target)
