"""The made-up vendor's device: tensors that hold a host tensor and compute with it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class AcmeTensor(torch.Tensor):
    """A tensor on the device ``acme``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> AcmeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=torch.device("acme", 0)
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = torch.device(kwargs.pop("device", None) or "acme")
        result = func(*tree_map(held, args), **tree_map(held, kwargs))
        if target.type != "acme":
            return result
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, result)


def held(value: Any) -> Any:
    """The host tensor of an acme tensor; anything else as it is."""
    return value.held if isinstance(value, AcmeTensor) else value


def empty(size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> AcmeTensor:
    """What ``torch.empty(…, device="acme")`` calls."""
    return AcmeTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def missing() -> str | None:
    """Why there is no device."""
    return None if os.environ.get("ACME_CARDS", "1") != "0" else "no Acme card is inserted."


_setup_privateuseone_for_python_backend("acme")
library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", empty, "PrivateUse1")
