"""The setuptools command that builds native extensions ahead of time; importing it imports setuptools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import BuildExtension


class BuildOps(BuildExtension):
    """torch's ``build_ext`` command, which also builds the extensions of op builders."""

    def build_extension(self, ext: Any) -> None:
        """Builds one extension: with its own ``build_to(path)`` if it has one, else with torch."""
        build_to = getattr(ext, "build_to", None)
        if build_to is None:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        build_to(target)
