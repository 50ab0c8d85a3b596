"""Stops building a model as soon as it is larger than its files.

A config can ask for a million layers in a few bytes. torch calls a hook for each parameter, buffer and module
that is registered while a model is built. So this module compares the model's size with its files during the
build, independent of the names of config fields.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from acclimate.errors import CorruptModelError

# One tensor in a file can hold all experts or heads of a layer, each of which is a parameter of the model.
_PARAMETERS_PER_TENSOR, _MODULES_PER_TENSOR = 64, 256
# Added to the limit, for models of a few tensors.
_FEW, _FEW_VALUES = 1_000, 1 << 20
# Some models have attention masks over all pairs of positions, which are not in the files.
_BUFFER_VALUES = 1 << 26


@dataclass(frozen=True)
class WeightTotals:
    """The numbers of tensors and values in a model's files."""

    source: str
    """The file or folder, for messages."""
    tensors: int
    values: int
    """The largest number of values that the tensors can represent."""


@contextlib.contextmanager
def bounded_model(totals: WeightTotals) -> Iterator[None]:
    """Raises :class:`CorruptModelError` if a model that is being built is much larger than its files.

    Only models built in the ``with`` block and by this thread are checked.
    """
    from torch.nn.modules import module as registration

    thread = threading.get_ident()
    counts = {"modules": 0, "parameters": 0, "values": 0, "values in buffers": 0}
    limits = {
        "modules": _MODULES_PER_TENSOR * totals.tensors + _FEW,
        "parameters": _PARAMETERS_PER_TENSOR * totals.tensors + _FEW,
        "values": 4 * totals.values + _FEW_VALUES,  # tied weights count twice
        "values in buffers": 4 * totals.values + _BUFFER_VALUES,
    }

    def add(kind: str, amount: int) -> None:
        counts[kind] += amount
        if counts[kind] > limits[kind]:
            raise CorruptModelError(
                f"the config asks for a model far larger than {totals.source}, which holds "
                f"{totals.tensors:,} tensors: it has more than {limits[kind]:,} {kind}"
            )

    def on_module(_module: Any, _name: str, _submodule: Any) -> None:
        if threading.get_ident() == thread:
            add("modules", 1)

    def on_parameter(_module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None and threading.get_ident() == thread:
            add("parameters", 1)
            add("values", prod(parameter.shape))

    def on_buffer(_module: Any, _name: str, buffer: Any) -> None:
        if buffer is not None and threading.get_ident() == thread:
            add("values in buffers", prod(buffer.shape))

    handles = [
        registration.register_module_module_registration_hook(on_module),
        registration.register_module_parameter_registration_hook(on_parameter),
        registration.register_module_buffer_registration_hook(on_buffer),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
