"""Faults planted where memory, sizes, groups and processes are at an end: full, beyond 16 bits, alone."""

# ruff: noqa: RUF012

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from acclimate.accelerator import Accelerator
from acclimate_sim.accelerator import SimAccelerator
from operator_mutants import SentOtherwise, _there, _WithKernels


def _in_another_way(theirs: Any) -> Any:
    """An operator whose result that does not fit raises what an allocation does not raise."""

    def call(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        try:
            room = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the device has no memory for a result") from error
        del room
        return _there(theirs(x.cpu(), *args, **options), x)

    return call


class ResultsRaiseAnotherError(_WithKernels):
    """The result of exp that does not fit raises a plain RuntimeError."""

    kernels = {"exp": _in_another_way(torch.exp)}


class ViewsRecordNoStream(_WithKernels):
    """record_stream() is refused for a tensor that does not begin its storage."""

    @staticmethod
    def _record(x: torch.Tensor, stream: Any) -> None:
        if x.storage_offset():
            raise RuntimeError("the tensor does not begin a block")

    kernels = {"record_stream": _record}


class StridedDrawsIgnoreTheirGenerator(_WithKernels):
    """normal_() with a generator draws from the default one where elements do not lie side by side."""

    @staticmethod
    def _normal(
        x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        given = generator if x.is_contiguous() else None
        drawn = torch.rand(x.shape, dtype=torch.float32, device=x.device, generator=given)
        return x.copy_(drawn * std + mean)

    kernels = {"normal_": _normal}


class ShiftsByNumbersReadTheirAddress(_WithKernels):
    """A shift by a tensor without dimensions, of the same dtype and on the device, shifts by 1."""

    @staticmethod
    def _shift(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        by = torch.ones_like(other) if not other.dim() and x.dim() and other.dtype == x.dtype else other
        return _there(x.cpu() >> by.cpu(), x)

    kernels = {"bitwise_right_shift.Tensor": _shift}


class SentTensorsAreKept(SentOtherwise):
    """A tensor that is sent a second time arrives with the numbers of the first."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Any = WeakIdKeyDictionary()

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it was when it was sent first."""
        if tensor not in self._first:
            self._first[tensor] = tensor.detach().clone()
        kept: torch.Tensor = self._first[tensor]
        return kept


class PlacesOfPoolsHave15Bits(_WithKernels):
    """The places that max_pool2d tells begin again after 32,768."""

    @staticmethod
    def _pool(x: torch.Tensor, *args: Any) -> Any:
        values, places = torch.ops.aten.max_pool2d_with_indices(x.cpu(), *args)
        return _there(values, x), _there(places % (1 << 15), x)

    kernels = {"max_pool2d_with_indices": _pool}


class PlacesHave24Bits(_WithKernels):
    """argmax finds a place in float32, which holds 24 bits."""

    @staticmethod
    def _argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        return _there(x.cpu().argmax(dim, keepdim).float().long(), x)

    kernels = {"argmax": _argmax}


class ChildrenLackTheDevice(SimAccelerator):
    """A process that multiprocessing starts does not load the plug-ins of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "sitecustomize.py").write_text(
            "import os, sys\n"
            "if '--multiprocessing-fork' in sys.orig_argv or 'multiprocessing' in ' '.join(sys.orig_argv):\n"
            "    os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n",
            encoding="utf-8",
        )
        sys.path.insert(0, self._folder.name)

    def uninstall(self) -> None:
        """Removes what other processes read."""
        sys.path.remove(self._folder.name)
        self._folder.cleanup()


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        ResultsRaiseAnotherError: "memory/a_full_device_says_so",
        PlacesOfPoolsHave15Bits: "dtypes/places_and_counts_of_many_elements",
        PlacesHave24Bits: "dtypes/places_and_counts_of_many_elements",
        ViewsRecordNoStream: "runtime/storages_hold_their_bytes",
        StridedDrawsIgnoreTheirGenerator: "random/draws_in_every_layout",
        ShiftsByNumbersReadTheirAddress: "dtypes/operators_on_other_operands",
        SentTensorsAreKept: "runtime/tensors_are_saved",
        ChildrenLackTheDevice: "runtime/processes_that_import_torch_only",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
