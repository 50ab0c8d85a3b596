"""The device's native library, built from this package's own folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.ops import OpBuilder, Source

if TYPE_CHECKING:
    from acclimate import Accelerator


class DeviceLibraryBuilder(OpBuilder):
    """Builds the device itself. Not an op: it is loaded before the device type exists."""

    name = "sim_device"
    # A device is made of ATen's internals, which the stable ABI does not offer; so one library per torch.
    stable_abi = False

    def sources(self) -> list[str | Source]:
        """Two files, which include the parts."""
        return ["csrc/unit_runtime.cpp", "csrc/unit_operators.cpp"]

    def include_paths(self) -> list[str]:
        """The folder of the parts, whose content then counts in the cache key."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Less optimisation than an op's."""
        # It hands work to torch's own kernels, so optimising it harder costs build time and gains nothing.
        return ["-O1"]


def open_device_library(accelerator: Accelerator) -> None:
    """Loads the library into this process, built now if it was not yet.

    Raises:
        CompilerNotFoundError: it was not built yet, and there is no compiler.
        OpBuildError: it does not compile.
        OpLockTimeoutError: another process was building it for too long.
    """
    builder = DeviceLibraryBuilder.for_accelerator(accelerator)
    library = builder.built_library() or _build(builder)
    builder.open_library(library)


def _build(builder: DeviceLibraryBuilder) -> Path:
    import torch
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    doing = f"Building the emulated device for torch {torch.__version__}, once (about 30 s)…"
    start = time.monotonic()
    with console.status(doing):  # a terminal shows it while it lasts
        if not console.is_terminal:
            console.print(doing)
        library = builder.build()
    console.print(f"Built in {time.monotonic() - start:.0f} s.")
    assert library is not None  # None is for an op without native source
    return library
