"""The device's native library, built from this package's own folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.ops import OpBuilder, Source

if TYPE_CHECKING:
    from acclimate import Accelerator

NAMED_SLOTS = ("cuda", "hpu", "mps", "xpu")
"""torch's own device types whose place the device can take on a torch without support for that hardware."""


class DeviceLibraryBuilder(OpBuilder):
    """Builds the device itself. Not an op: it is loaded before the device type exists."""

    name = "sim_device"
    # A device is made of ATen's internals, which the stable ABI does not offer; so one library per torch.
    stable_abi = False
    slot = ""
    """The device type whose place it takes, one of :data:`NAMED_SLOTS`; any name from outside where empty."""

    @classmethod
    def for_device_type(cls, device_type: str, accelerator: Accelerator) -> DeviceLibraryBuilder:
        """A builder of the device under a name of torch's own or another.

        Args:
            device_type: torch's name for it.
            accelerator: whose compiler builds.
        """
        builder = cls.for_accelerator(accelerator)
        builder.slot = device_type if device_type in NAMED_SLOTS else ""
        return builder

    def sources(self) -> list[str | Source]:
        """Two files, which include the parts."""
        return ["csrc/unit_runtime.cpp", "csrc/unit_operators.cpp"]

    def include_paths(self) -> list[str]:
        """The folder of the parts, whose content then counts in the cache key."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Less optimisation than an op's, and which place it takes."""
        # It hands work to torch's own kernels, so optimising it harder costs build time and gains nothing.
        flags = ["-O1"]
        if self.slot:
            flags.append(f"-DSIM_SLOT={self.slot.upper()}")
        if self.slot == "hpu":
            flags.append("-DSIM_AUTOCAST")  # the vendor's package has the rules, where torch has the others'
        if self.slot == "mps":
            flags.append("-DSIM_NO_COLLECTIVES")  # torch.distributed has none for Metal
        return flags


def open_device_library(accelerator: Accelerator, device_type: str = "") -> None:
    """Loads the library into this process, built now if it was not yet.

    Args:
        accelerator: whose compiler builds.
        device_type: see :meth:`DeviceLibraryBuilder.for_device_type`.

    Raises:
        CompilerNotFoundError: it was not built yet, and there is no compiler.
        OpBuildError: it does not compile.
        OpLockTimeoutError: another process was building it for too long.
    """
    builder = DeviceLibraryBuilder.for_device_type(device_type, accelerator)
    builder.open_library(built_library(builder))


def built_library(builder: DeviceLibraryBuilder) -> Path:
    """The file of the library, built now, and said so, if it was not yet.

    Raises:
        CompilerNotFoundError: it was not built yet, and there is no compiler.
        OpBuildError: it does not compile.
        OpLockTimeoutError: another process was building it for too long.
    """
    return builder.built_library() or _build(builder)


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
