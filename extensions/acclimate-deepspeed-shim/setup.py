"""Adds the file that Python reads at its start, which setuptools has no setting for."""

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "acclimate_deepspeed_shim.pth"


class BuildWithStart(build_py):
    """Puts the file beside the module."""

    def run(self) -> None:
        """Copies the file after the modules."""
        super().run()
        self.copy_file(str(Path("src", NAME)), str(Path(self.build_lib, NAME)))

    def get_source_files(self) -> Any:
        """Returns what goes into a source distribution."""
        return [*super().get_source_files(), str(Path("src", NAME))]


setup(cmdclass={"build_py": BuildWithStart})
