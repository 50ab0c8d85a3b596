"""The builder of the device's native library, whose source is in this package."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate.ops import OpBuilder, Source

if TYPE_CHECKING:
    from acclimate import Accelerator

NAMED_SLOTS = ("cuda", "hpu", "mps", "xpu")
"""Device types of torch that the device can replace, if this torch is built without that hardware."""


class DeviceLibraryBuilder(OpBuilder):
    """Builds the device itself. Not an op: it is loaded before the device type exists."""

    name = "sim_device"
    # A device needs ATen's internals, which the stable ABI lacks: each torch release needs its own library.
    stable_abi = False
    slot = ""
    """The device type to replace, one of :data:`NAMED_SLOTS`; empty: PrivateUse1, under any name."""

    @classmethod
    def for_device_type(cls, device_type: str, accelerator: Accelerator) -> DeviceLibraryBuilder:
        """Returns a builder of the device with this name.

        Args:
            device_type: one of :data:`NAMED_SLOTS`, or any other name.
            accelerator: the accelerator whose compiler builds.
        """
        builder = cls.for_accelerator(accelerator)
        builder.slot = device_type if device_type in NAMED_SLOTS else ""
        return builder

    def sources(self) -> list[str | Source]:
        """Returns two files, which include all others."""
        return ["csrc/unit_runtime.cpp", "csrc/unit_operators.cpp"]

    def include_paths(self) -> list[str]:
        """Returns the folder of the included files, so that they are part of the cache key."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Returns flags with less optimisation than an op's, and with the device type to replace."""
        # torch's own kernels do the work, so more optimisation would cost build time and gain nothing.
        flags = ["-O1"]
        if self.slot:
            flags.append(f"-DSIM_SLOT={self.slot.upper()}")
        if self.slot == "hpu":
            flags.append(
                "-DSIM_AUTOCAST"
            )  # torch lacks this device's autocast rules, which the vendor's package has
        if self.slot == "mps":
            flags.append("-DSIM_NO_COLLECTIVES")  # torch.distributed has none for Metal
        return flags


def open_device_library(accelerator: Accelerator, device_type: str = "") -> None:
    """Loads the library into this process, after building it if needed.

    Args:
        accelerator: the accelerator whose compiler builds.
        device_type: see :meth:`DeviceLibraryBuilder.for_device_type`.

    Raises the errors of :func:`built_library`.
    """
    builder = DeviceLibraryBuilder.for_device_type(device_type, accelerator)
    builder.open_library(built_library(builder))


def built_library(builder: DeviceLibraryBuilder) -> Path:
    """Returns the path of the library; if it is missing, builds it and prints a note.

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
