"""Checks of native ops: builders are found by name, build, and give right numbers."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    distance,
    exactly,
    refused,
    require,
)
from acclimate.conformance.checks.check import check
from acclimate.conformance.checks.target import Subject
from acclimate.errors import CompilerNotFoundError

_LR, _BETA1, _BETA2, _EPS, _DECAY = 0.01, 0.9, 0.99, 1e-8, 0.1
_STEPS = 3
_ROUNDING = 1e-5  # of float32 over so many steps, relative to the largest element
_SOURCE = """\
#include <cstdint>
extern "C" __attribute__((visibility("default"))) std::int64_t twice(std::int64_t number) {
    return 2 * number;
}
"""


@check("op_builders", "get_op_builder", "create_op_builder", "op_builder_dir", "op_builder_package")
def builders_found(subject: Subject) -> None:
    """Every op builder is found by its name, as a class and as an object; an unknown name gives None."""
    accelerator = subject.accelerator
    package = exactly(accelerator.op_builder_dir(), str, "op_builder_dir()")
    require(package == accelerator.op_builder_package, f"op_builder_dir() is {package!r}")
    importlib.import_module(package)
    for name in accelerator.op_builders:
        builder = accelerator.get_op_builder(name)
        require(isinstance(builder, type), f'get_op_builder("{name}") is {builder!r}, no class')
        made = accelerator.create_op_builder(name)
        require(builder is not None and isinstance(made, builder), f'create_op_builder("{name}") is {made!r}')
        exactly(_builder(accelerator, name).is_compatible(verbose=False), bool, f"is_compatible() of {name}")
    for find in (accelerator.get_op_builder, accelerator.create_op_builder):
        absent = find("NoSuchBuilder")
        require(absent is None, f'{find.__name__}("NoSuchBuilder") is {absent!r} and not None')


@check("toolkit_version")
def toolkit(subject: Subject) -> str:
    """The version of the vendor's software is a word, or None where there is none."""
    version = subject.accelerator.toolkit_version()
    if version is None:
        raise NotOfferedError("it names no version of any vendor's software")
    require(len(exactly(version, str, "toolkit_version()").split()) == 1, f"it is {version!r}")
    return version


@check("create_op_builder", "op_builders", timeout_s=600)
def builders_load(subject: Subject) -> str | None:
    """Every op that says it is compatible builds and loads."""
    accelerator = subject.accelerator
    if not accelerator.op_builders:
        raise NotOfferedError("it names no op builders")
    incompatible = []
    for name in accelerator.op_builders:
        builder = _builder(accelerator, name)
        if builder.is_compatible(verbose=False):
            require(builder.load() is not None, f"load() of {name} gives nothing")
        else:
            why = getattr(builder, "incompatibility", lambda: None)()
            incompatible.append(f"{name} ({why})" if why else name)
    if len(incompatible) == len(accelerator.op_builders):
        raise NotOfferedError(f"none of its ops can be built here: {'; '.join(incompatible)}")
    return f"cannot be built here: {'; '.join(incompatible)}" if incompatible else None


@check("create_op_builder", timeout_s=600)
def optimizer_ops_compute(subject: Subject) -> None:
    """The optimizer ops that it has update parameters as the same rule written in plain torch does."""
    accelerator = subject.accelerator
    device = accelerator.current_device_name()
    found = [name for name in _OPTIMIZERS if name in accelerator.op_builders]
    usable = [name for name in found if _builder(accelerator, name).is_compatible(verbose=False)]
    if not usable:
        raise NotOfferedError(f"it has none of {', '.join(_OPTIMIZERS)}")
    for name in usable:
        update, rule, on_device = _OPTIMIZERS[name]
        module = _builder(accelerator, name).load()
        generator = torch.Generator().manual_seed(7)
        start = torch.randn(1037, generator=generator)
        gradients = [torch.randn(1037, generator=generator) for _ in range(_STEPS)]
        place = device if on_device else "cpu"
        state = [start.clone().to(place), torch.zeros(1037, device=place), torch.zeros(1037, device=place)]
        wanted = [start.double(), torch.zeros(1037).double(), torch.zeros(1037).double()]
        for step, gradient in enumerate(gradients, 1):
            update(module, step, gradient.clone().to(place), *state)
            rule(step, gradient.double(), *wanted)
        for what, actual, expected in zip(("parameter", "first state"), state, wanted, strict=False):
            apart = distance(actual, expected)
            require(apart <= _ROUNDING, f"the {what} after {_STEPS} steps of {name} is off by {apart:.1e}")


@check("op_compiler", "op_compile_flags", "op_include_paths", "op_link_flags", timeout_s=120)
def toolchain(subject: Subject) -> None:
    """What op_compiler and the flags name compiles and links C++ source into a library that works."""
    accelerator = subject.accelerator
    with refused('op_compiler(".no such kind")', CompilerNotFoundError):
        accelerator.op_compiler(".no such kind")
    try:
        compiler = accelerator.op_compiler()
    except CompilerNotFoundError as error:
        raise NotOfferedError(f"there is no compiler here: {error}") from error
    flags, links = accelerator.op_compile_flags(), accelerator.op_link_flags()
    folders = accelerator.op_include_paths()
    named = {
        "op_compiler": compiler,
        "op_compile_flags": flags,
        "op_link_flags": links,
        "op_include_paths": folders,
    }
    for what, words in named.items():
        require(
            isinstance(words, list) and all(isinstance(word, str) for word in words), f"{what}() is {words!r}"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "twice.cpp", Path(folder) / "twice.so"
        source.write_text(_SOURCE)
        includes = [argument for path in folders for argument in ("-isystem", path)]
        command = [*compiler, *flags, *includes, "-shared", str(source), *links, "-o", str(library)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        require(made.returncode == 0, f"{' '.join(command)} fails: {made.stderr[-400:]}")
        twice = ctypes.CDLL(str(library)).twice
        twice.restype, twice.argtypes = ctypes.c_int64, [ctypes.c_int64]
        require(twice(21) == 42, f"a function that was compiled gives {twice(21)} instead of 42")


@check("build_extension")
def ahead_of_time(subject: Subject) -> None:
    """build_extension is a kind of the setuptools command that torch builds extensions with."""
    from torch.utils.cpp_extension import BuildExtension

    command = subject.accelerator.build_extension()
    require(
        isinstance(command, type) and issubclass(command, BuildExtension), f"build_extension() is {command!r}"
    )


def _builder(accelerator: Accelerator, name: str) -> Any:
    builder = accelerator.create_op_builder(name)
    if builder is None:
        raise BrokenPromiseError(f'op_builders has "{name}", and create_op_builder("{name}") gives None')
    return builder


# -- the optimizer ops that DeepSpeed names, called as DeepSpeed calls them, and their rules -------------

_Update = Callable[[Any, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_Rule = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_ID = 1_000_003  # of the optimizer among those that a program may have made


def _cpu_adam(
    module: Any, step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    module.create_adam(_ID, _LR, _BETA1, _BETA2, _EPS, _DECAY, True, False)
    module.adam_update(_ID, step, _LR, _BETA1, _BETA2, _EPS, _DECAY, True, p, g, m, v)
    module.destroy_adam(_ID)


def _fused_adam(
    module: Any, step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=p.device)
    module.multi_tensor_adam(
        2048 * 32, flag, [[g], [p], [m], [v]], _LR, _BETA1, _BETA2, _EPS, step, 1, 1, _DECAY
    )


def _cpu_lion(
    module: Any, step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    module.create_lion(_ID, _LR, _BETA1, _BETA2, _DECAY, False)
    module.lion_update(_ID, step, _LR, _BETA1, _BETA2, _DECAY, p, g, m)
    module.destroy_lion(_ID)


def _fused_lion(
    module: Any, step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=p.device)
    module.multi_tensor_lion(2048 * 32, flag, [[g], [p], [m]], _LR, _BETA1, _BETA2, step, _DECAY)


def _cpu_adagrad(
    module: Any, step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    module.create_adagrad(_ID, _LR, _EPS, _DECAY, False)
    module.adagrad_update(_ID, step, _LR, _EPS, _DECAY, p, g, m)
    module.destroy_adagrad(_ID)


def _adam_rule(step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.lerp_(g, 1 - _BETA1)
    v.lerp_(g * g, 1 - _BETA2)
    p.mul_(1 - _LR * _DECAY)
    p.sub_(_LR * (m / (1 - _BETA1**step)) / ((v / (1 - _BETA2**step)).sqrt() + _EPS))


def _lion_rule(step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    p.mul_(1 - _LR * _DECAY).sub_(_LR * (_BETA1 * m + (1 - _BETA1) * g).sign())
    m.lerp_(g, 1 - _BETA2)


def _adagrad_rule(step: int, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    g = g + _DECAY * p
    m.add_(g * g)
    p.sub_(_LR * g / (m.sqrt() + _EPS))


_OPTIMIZERS: dict[str, tuple[_Update, _Rule, bool]] = {
    "CPUAdamBuilder": (_cpu_adam, _adam_rule, False),
    "FusedAdamBuilder": (_fused_adam, _adam_rule, True),
    "CPULionBuilder": (_cpu_lion, _lion_rule, False),
    "FusedLionBuilder": (_fused_lion, _lion_rule, True),
    "CPUAdagradBuilder": (_cpu_adagrad, _adagrad_rule, False),
}
"""By builder: a call of its module, the rule, and whether it works on the device (else on the host)."""
