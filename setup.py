"""Adds the native libraries of the CPU to a wheel, if ``ACCLIMATE_PREBUILT=1`` is set (docs/ops.md).

Without it, the wheel is pure Python, and a machine compiles each library once, when it first needs it.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import setup


def prebuilt() -> dict[str, Any]:
    """Returns the arguments of ``setup`` for a wheel with libraries: one wheel for all releases of Python."""
    sys.path.insert(0, str(Path(__file__).parent / "src"))
    os.environ["ACCLIMATE_ACCELERATOR"] = "cpu"
    from setuptools.command.bdist_wheel import bdist_wheel

    from acclimate import get_accelerator
    from acclimate.ops.build.recipe import target_machine

    cpu = get_accelerator()
    builders = [cpu.create_op_builder(name) for name in sorted(cpu.op_builders)]
    extensions = {
        builder.absolute_name(): builder.builder()
        for builder in builders
        if builder.sources() and builder.stable_abi and builder.incompatibility() is None
    }

    class BuildOps(cpu.build_extension()):  # type: ignore[misc]
        def get_ext_filename(self, fullname: str) -> str:
            return fullname.replace(".", os.sep) + ".so"  # torch loads it, whichever Python runs

    class PlatformWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            library, version = platform.libc_ver()
            system = f"manylinux_{version.replace('.', '_')}" if library == "glibc" else "linux"
            return "py3", "none", f"{system}_{target_machine()}"

    return {
        "ext_modules": list(extensions.values()),
        "cmdclass": {"build_ext": BuildOps, "bdist_wheel": PlatformWheel},
    }


setup(**(prebuilt() if os.environ.get("ACCLIMATE_PREBUILT") == "1" else {}))
