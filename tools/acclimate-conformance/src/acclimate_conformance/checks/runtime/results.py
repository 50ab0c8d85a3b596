"""Checks of what methods return: it belongs to the caller, and does not change afterwards."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import CATEGORIES, Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import CompilerNotFoundError, UnsupportedError
from acclimate_conformance.checks.assertions import NotOfferedError, equal, in_thread, is_host, require
from acclimate_conformance.checks.check import check

_MUTABLE = ("list", "dict", "torch.Tensor")


def _returning_mutable() -> tuple[str, ...]:
    """The methods that return something that can be changed and that need no argument."""
    return tuple(
        name
        for category in CATEGORIES
        for name, member in vars(category).items()
        if not name.startswith("_")
        and inspect.isfunction(member)
        and str(inspect.signature(member).return_annotation).startswith(_MUTABLE)
        and all(
            parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
            for parameter in list(inspect.signature(member).parameters.values())[1:]
        )
    )


@check(
    *_returning_mutable(),
    promise="A returned list, dict or tensor stays as it is, and changing it changes no later result.",
)  # fmt: skip
def results_are_the_callers(accelerator: Accelerator) -> None:
    for name in _returning_mutable():
        try:
            _require_own(accelerator, name, getattr(accelerator, name))
        except (UnsupportedError, CompilerNotFoundError, NotOfferedError):
            continue


def _require_own(accelerator: Accelerator, name: str, method: Callable[[], Any]) -> None:
    kept = method()
    contents = copy.deepcopy(kept)
    held = torch.rand(1 << 16, device=accelerator.current_device_name())
    again = method()
    require(again is not kept, f"{name}() returns the same {type(kept).__name__} each time")
    require(_same(kept, contents), f"what {name}() returned changes with the next call")
    if isinstance(again, list):
        again.append("changed")
        require("changed" not in map(str, method()), f"changing what {name}() returned changes the next one")
    elif isinstance(again, dict):
        again["changed"] = 1
        require("changed" not in method(), f"changing what {name}() returned changes the next one")
    del held


def _same(kept: Any, contents: Any) -> bool:
    if isinstance(kept, torch.Tensor):
        return equal(kept, contents)
    if isinstance(kept, list) and len(kept) == len(contents):
        return all(map(_same, kept, contents))
    return bool(kept == contents)


@check(
    "get_compile_backend", "set_compile_backend",
    promise="The backend that one thread sets with set_compile_backend is every thread's.",
    once=True,
)  # fmt: skip
def compile_backend_of_all_threads(accelerator: Accelerator) -> None:
    before = accelerator.get_compile_backend()
    try:
        for backend in ("eager", "aot_eager"):
            accelerator.set_compile_backend(backend)
            told = in_thread(accelerator.get_compile_backend)
            require(
                told == backend, f'after set_compile_backend("{backend}") it is "{told}" in another thread'
            )
            in_thread(lambda: accelerator.set_compile_backend("eager"))
            told = accelerator.get_compile_backend()
            require(told == "eager", f'after set_compile_backend("eager") in a thread it is "{told}" here')
        if not is_host(accelerator):
            told = CPUAccelerator().get_compile_backend()
            require(
                told == CPUAccelerator.compile_backend,
                f'set_compile_backend("eager") makes "{told}" that of the CPU\'s accelerator too',
            )
    finally:
        accelerator.set_compile_backend(before)
