"""NVIDIA's CUDA toolkit: where it is, and for which GPUs it compiles. Nothing here runs a program."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from acclimate.errors import CompilerNotFoundError, InvalidEnvironmentError

_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_ARCHITECTURE = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def nvcc() -> str:
    """The path of CUDA's compiler.

    Raises:
        CompilerNotFoundError: there is none; the message says where it was looked for.
    """
    if torch.version.hip:
        raise CompilerNotFoundError("this torch is built for ROCm, and the op's source is CUDA's")
    named = (Path(os.environ[name]) / "bin" / "nvcc" for name in _VARIABLES if os.environ.get(name))
    candidates = [*map(str, named), "nvcc", *(str(home / "bin" / "nvcc") for home in _usual_homes())]
    found = (path for path in map(shutil.which, candidates) if path is not None)
    path = next(found, None)
    if path is None:
        raise CompilerNotFoundError(
            "there is no nvcc: not in CUDA_HOME, not on PATH, not in /usr/local/cuda. "
            "Install the CUDA toolkit, or set CUDA_HOME to where it is"
        )
    return os.path.abspath(path)


def home() -> Path | None:
    """The folder of the toolkit, with its headers and libraries; ``None`` where there is none."""
    on_path = shutil.which("nvcc")
    candidates = [
        *(Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name)),
        # A distribution's nvcc can be a script elsewhere; then its folder has no headers.
        *([Path(on_path).resolve().parents[1]] if on_path else []),
        *_usual_homes(),
    ]
    return next((folder for folder in candidates if (folder / "include" / "cuda_runtime.h").is_file()), None)


def _usual_homes() -> Iterator[Path]:
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)


def runtime_folder(toolkit: Path) -> Path | None:
    """Where the static runtime is."""
    folders = (
        toolkit / name for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    )
    return next((folder for folder in folders if (folder / "libcudart_static.a").is_file()), None)


def architecture_flags(capabilities: Sequence[tuple[int, int]]) -> list[str]:
    """nvcc's flags for the architectures to compile for.

    Args:
        capabilities: compute capabilities of the GPUs present; where there are none, all common
            architectures are compiled for. ``TORCH_CUDA_ARCH_LIST`` goes before both.

    Raises:
        InvalidEnvironmentError: ``TORCH_CUDA_ARCH_LIST`` holds what is no architecture.
    """
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not chosen:
        chosen = [f"{major}.{minor}" for major, minor in sorted(set(capabilities))] or _common_architectures()
    flags: dict[str, None] = {}
    for text in chosen:
        match = _ARCHITECTURE.fullmatch(text)
        if match is None:
            raise InvalidEnvironmentError(
                f'TORCH_CUDA_ARCH_LIST has "{text}", which is no architecture. It has to be a list such as '
                '"8.0;9.0+PTX".'
            )
        number = match[1] + match[2] + match[3]
        flags[f"-gencode=arch=compute_{number},code=sm_{number}"] = None
        if match[4]:
            flags[f"-gencode=arch=compute_{number},code=compute_{number}"] = None
    return list(flags)


def _common_architectures() -> list[str]:
    """One of each generation that this CUDA compiles for; the newest one's PTX serves those to come."""
    version = _cuda_version()
    oldest = ["7.5"] if version >= (13, 0) else ["7.0", "7.5"]
    newest = ["9.0", "10.0", "12.0+PTX"] if version >= (12, 8) else ["9.0+PTX"]
    return [*oldest, "8.0", "8.6", *newest]


def _cuda_version() -> tuple[int, int]:
    """CUDA's version: torch's, which is the same where there is no toolkit; else the toolkit's."""
    if torch.version.cuda is not None:
        major, minor = torch.version.cuda.split(".")[:2]
        return int(major), int(minor)
    folder = home()
    header = folder / "include" / "cuda.h" if folder is not None else Path()
    text = header.read_text(errors="replace") if header.is_file() else ""
    match = re.search(r"#define CUDA_VERSION (\d+)", text)
    number = int(match[1]) if match is not None else 12000
    return number // 1000, number % 1000 // 10
