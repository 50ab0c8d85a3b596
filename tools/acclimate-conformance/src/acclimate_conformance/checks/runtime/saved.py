"""Checks that tensors keep their device, type and gradients in files and on the way to other processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import device_names, equal, require
from acclimate_conformance.checks.check import check


def _saved_and_loaded(things: Any, place: Any = None) -> Any:
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, map_location=place)


def _sent(things: Any) -> Any:
    """As a queue between processes does it; raises if a device cannot share memory with its own process."""
    return pickle.loads(bytes(ForkingPickler.dumps(things)))


@check(
    "device_name", "current_device_name", "current_device",
    promise="Saved, pickled, sent and copied tensors keep values, device, type and requires_grad.",
)  # fmt: skip
def tensors_are_saved(accelerator: Accelerator) -> str | None:
    names = device_names(accelerator)
    ways: dict[str, Callable[[Any], Any]] = {
        "torch.save and torch.load": _saved_and_loaded,
        "pickle": lambda things: pickle.loads(pickle.dumps(things)),
        "copy.deepcopy": copy.deepcopy,
    }
    note = None
    with suppress(Exception):
        _sent(torch.ones(2, device=names[0]))
        ways["torch.multiprocessing"] = _sent
    if "torch.multiprocessing" not in ways:
        note = "a tensor cannot be sent within one process, so its way to another one is not observed"
    for name in names:
        for what, things in _kinds(name).items():
            for how, way in ways.items():
                _require_same_thing(way(things), things, f"{what} on {name} after {how}")
        tensor = torch.arange(6.0, device=name)
        for place in ("cpu", *names):
            loaded = _saved_and_loaded(tensor, place)
            wanted = torch.zeros(1, device=place).device
            require(
                loaded.device == wanted,
                f"a tensor of {name} that torch.load maps to {place} is on {loaded.device}",
            )
            require(equal(loaded, tensor), f"a tensor of {name} that torch.load maps to {place} is changed")
    return note


def _kinds(name: str) -> dict[str, torch.Tensor]:
    base = torch.arange(24.0, device=name).reshape(4, 6)
    return {
        "a tensor": base, "a transposed view": base.t(), "a part": base[1:3, ::2], "nothing": base[:0],
        "a tensor that requires a gradient": base.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(base.clone()),
        "a frozen parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "integers": base.int(), "truth values": base > 3, "a single number": base[1, 1],
    }  # fmt: skip


def _require_same_thing(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    require(type(found) is type(wanted), f"{what} is a {type(found).__name__}")
    require(found.device == wanted.device, f"{what} is on {found.device}")
    require(found.dtype == wanted.dtype, f"{what} is {found.dtype}")
    require(found.requires_grad == wanted.requires_grad, f"{what} has requires_grad={found.requires_grad}")
    require(equal(found, wanted), f"{what} has other values")
