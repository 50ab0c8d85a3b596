"""Locates NVIDIA's CUDA toolkit and chooses architectures, without running a program."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from acclimate.errors import CompilerNotFoundError, InvalidEnvironmentError, excerpt

_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_ARCHITECTURE = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def nvcc() -> str:
    """Returns the absolute path of CUDA's compiler.

    Raises:
        CompilerNotFoundError: there is none; the message says where it was looked for.
    """
    if torch.version.hip:
        raise CompilerNotFoundError("this torch is built for ROCm, but the op's source needs CUDA")
    named = (Path(os.environ[name]) / "bin" / "nvcc" for name in _VARIABLES if os.environ.get(name))
    candidates = [*map(str, named), "nvcc", *(str(home / "bin" / "nvcc") for home in _usual_homes())]
    found = (path for path in map(shutil.which, candidates) if path is not None)
    path = next(found, None)
    if path is None:
        raise CompilerNotFoundError(
            "there is no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda. "
            "Install the CUDA toolkit, or set CUDA_HOME to its folder"
        )
    return os.path.abspath(path)


def home() -> Path | None:
    """Returns the toolkit's folder, with its headers and libraries; ``None`` if there is none."""
    on_path = shutil.which("nvcc")
    candidates = [
        *(Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name)),
        # A distribution's nvcc can be a script in a folder without headers.
        *([Path(on_path).resolve().parents[1]] if on_path else []),
        *_usual_homes(),
    ]
    return next((folder for folder in candidates if (folder / "include" / "cuda_runtime.h").is_file()), None)


def _usual_homes() -> Iterator[Path]:
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)


def runtime_folder(toolkit: Path) -> Path | None:
    """Returns the folder of the static runtime, or ``None``."""
    folders = (
        toolkit / name for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    )
    return next((folder for folder in folders if (folder / "libcudart_static.a").is_file()), None)


def architecture_flags(capabilities: Sequence[tuple[int, int]]) -> list[str]:
    """Returns nvcc's flags for the architectures to compile for.

    Args:
        capabilities: the compute capabilities of the GPUs present; if there are none, all common
            architectures are used. ``TORCH_CUDA_ARCH_LIST`` overrides both.

    Raises:
        InvalidEnvironmentError: ``TORCH_CUDA_ARCH_LIST`` contains something other than an architecture.
    """
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not chosen:
        chosen = [f"{major}.{minor}" for major, minor in sorted(set(capabilities))] or _common_architectures()
    flags: dict[str, None] = {}
    for text in chosen:
        match = _ARCHITECTURE.fullmatch(text)
        if match is None:
            raise InvalidEnvironmentError(
                f'TORCH_CUDA_ARCH_LIST has "{excerpt(text)}", which is not an architecture. It must be a '
                'list such as "8.0;9.0+PTX".'
            )
        number = match[1] + match[2] + match[3]
        flags[f"-gencode=arch=compute_{number},code=sm_{number}"] = None
        if match[4]:
            flags[f"-gencode=arch=compute_{number},code=compute_{number}"] = None
    return list(flags)


def _common_architectures() -> list[str]:
    """Returns one architecture of each generation of this CUDA; the PTX of the newest serves later GPUs."""
    version = _cuda_version()
    oldest = ["7.5"] if version >= (13, 0) else ["7.0", "7.5"]
    newest = ["9.0", "10.0", "12.0+PTX"] if version >= (12, 8) else ["9.0+PTX"]
    return [*oldest, "8.0", "8.6", *newest]


def _cuda_version() -> tuple[int, int]:
    """Returns the version of CUDA that torch was built with, else the toolkit's."""
    if torch.version.cuda is not None:
        major, minor = torch.version.cuda.split(".")[:2]
        return int(major), int(minor)
    folder = home()
    header = folder / "include" / "cuda.h" if folder is not None else Path()
    text = header.read_text(errors="replace") if header.is_file() else ""
    match = re.search(r"#define CUDA_VERSION (\d+)", text)
    number = int(match[1]) if match is not None else 12000
    return number // 1000, number % 1000 // 10
