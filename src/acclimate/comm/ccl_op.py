"""``CCLCommBuilder``: DeepSpeed's op that sums a tensor over ranks with Intel's oneCCL."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

from acclimate.comm import ccl_op_functions
from acclimate.errors import OpBuildError
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source


class CCLCommBuilder(OpBuilder):
    """``load()`` gives ``initialize(size, rank)`` and ``inference_all_reduce(tensor)``."""

    name = "ccl_comm"

    def sources(self) -> list[str | Source]:
        """The operator's C++ source."""
        return ["csrc/ccl_op.cpp"]

    def cxx_args(self) -> list[str]:
        """The path of oneCCL's headers, and its version, so that another version builds another library."""
        folder = oneccl_folder()
        if folder is None:
            return []
        return [
            f"-isystem{folder / 'include'}",
            f'-DACCLIMATE_ONECCL="{_version(folder)}"',
            "-fvisibility=hidden",
        ]

    def link_args(self) -> list[str]:
        """The path of oneCCL's library and of the libraries that it needs."""
        folder = oneccl_folder()
        if folder is None:
            return []
        # oneCCL's own dependencies are found through this path too: DT_RPATH does that, DT_RUNPATH does not.
        libraries = folder / "lib"
        return [f"-L{libraries}", "-lccl", f"-Wl,--disable-new-dtags,-rpath,{libraries}"]

    def incompatibility(self) -> str | None:
        """The reason is a missing oneCCL or a missing compiler."""
        if oneccl_folder() is None:
            return (
                "oneCCL's headers (oneapi/ccl.hpp) and library are neither in this Python environment nor "
                "under CCL_ROOT; install the packages oneccl and oneccl-devel"
            )
        return super().incompatibility()

    def load(self, verbose: bool = False) -> ModuleType:
        """Loads the op, building its library first if needed.

        Raises:
            OpBuildError: :meth:`incompatibility` says why it cannot be built.
        """
        reason = self.incompatibility()
        if reason is not None:
            raise OpBuildError(f'The op "{self.name}" cannot be built: {reason}.')
        return super().load(verbose)

    def define(self) -> None:
        """Defines the operators that the library implements."""
        ccl_op_functions.define()

    def module(self) -> ModuleType:
        """:mod:`acclimate.comm.ccl_op_functions`."""
        return ccl_op_functions


def oneccl_folder() -> Path | None:
    """The folder with oneCCL's ``include`` and ``lib``; ``None`` where there is no oneCCL."""
    named = os.environ.get("CCL_ROOT")
    for folder in (Path(named),) if named else (Path(sys.prefix),):
        if (folder / "include/oneapi/ccl.hpp").exists() and (folder / "lib/libccl.so").exists():
            return folder
    return None


def _version(folder: Path) -> str:
    text = (folder / "include/oneapi/ccl/config.h").read_text(errors="replace")
    numbers = [
        re.search(rf"define CCL_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "UPDATE")
    ]
    return ".".join(number[1] for number in numbers if number is not None)
