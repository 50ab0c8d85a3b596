"""The setuptools command that builds native extensions ahead of time; importing it imports setuptools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import BuildExtension


class BuildOps(BuildExtension):
    """torch's ``build_ext`` command, which also builds extensions that know how: those of op builders."""

    def build_extension(self, ext: Any) -> None:
        """Builds one extension: by its own ``build_to(path)`` where it has one, else as torch does."""
        build_to = getattr(ext, "build_to", None)
        if build_to is None:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        build_to(target)
