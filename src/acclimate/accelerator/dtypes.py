"""Data types: the dtypes a device computes in, tensors of a given type, and mixed precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from acclimate.accelerator.devices import Devices
from acclimate.accelerator.mixed_precision import MixedPrecision


class TensorType:
    """Makes tensors of one dtype on one kind of device, for devices without torch's ``FloatTensor`` classes.

    ``FloatTensor(2, 3)`` is an uninitialised tensor of that shape, ``FloatTensor([1.0, 2.0])`` holds the
    data, ``FloatTensor()`` is empty, and ``isinstance(x, FloatTensor)`` checks dtype and device type.

    Args:
        dtype: the dtype of the tensors.
        device_type: their device type; they are made on its current device.
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type

    def __call__(self, *data: Any) -> torch.Tensor:
        """Returns a tensor of the given sizes (ints, or one ``torch.Size``), or with the given data."""
        if all(isinstance(size, int) for size in data):
            return torch.empty(data or (0,), dtype=self.dtype, device=self.device_type)
        if len(data) > 1:
            raise TypeError(f"{self!r} takes sizes, or one sequence of data, not {len(data)} values.")
        if isinstance(data[0], torch.Size):
            return torch.empty(data[0], dtype=self.dtype, device=self.device_type)
        return torch.as_tensor(data[0], dtype=self.dtype, device=self.device_type).clone()

    def __instancecheck__(self, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype == self.dtype
            and instance.device.type == self.device_type
        )

    def __repr__(self) -> str:
        return f"TensorType({self.dtype}, {self.device_type!r})"


def _tensor_class(name: str, dtype: torch.dtype) -> Any:
    """A property with the class that makes tensors of a dtype."""

    def get(self: DataTypes) -> Any:
        return self._tensor_type(name, dtype)

    made = str(dtype).removeprefix("torch.")
    doc = f"""Makes {made} tensors on this accelerator, from sizes or from data; see :class:`TensorType`.

        Delegates to: ``torch.<device>.{name}``, else :class:`TensorType`.
        CPU: ``torch.{name}``.
        CUDA: ``torch.cuda.{name}``.
        """
    return property(get, doc=doc)


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has this parameter; false if it has no signature, as some functions written in C."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class DataTypes(Devices):
    """Data types of a device."""

    def _amp_dtypes(self) -> Iterable[torch.dtype] | None:
        """Returns the reduced-precision dtypes that a device reports, or None if it reports none.

        torch's autocast calls ``get_amp_supported_dtype`` on every out-of-tree device.
        """
        told = getattr(self.torch_module, "get_amp_supported_dtype", None)
        dtypes: Iterable[torch.dtype] | None = told() if told is not None else None
        return dtypes

    def _computes_in(self, dtype: torch.dtype) -> bool:
        """Whether the device adds and multiplies two matrices of a dtype correctly.

        The last resort, for a device that reports nothing. Each device has its own error for a missing
        dtype, so every error counts as no.
        """
        try:
            ones = torch.ones(2, 2, dtype=dtype, device=self.device_type)
            return bool((ones @ ones + ones).float().sum().item() == 12.0)
        except Exception:  # noqa: BLE001 - the type differs between devices
            return False

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        """Whether the device computes in bfloat16 in hardware.

        Args:
            including_emulation: whether a device that emulates bfloat16 counts too, as it does by default in
                ``torch.cuda``. It has no effect on a device that does not distinguish the two.

        Delegates to: ``torch.<device>.is_bf16_supported``, with the argument where it takes one; else its
            autocast dtypes, else a trial.
        CPU: true; torch computes in bfloat16 on every processor.
        CUDA: from compute capability 8.0, and on ROCm; with emulation, on older devices too. True without a
            device, so that a login node can prepare a run.
        """
        told = getattr(self.torch_module, "is_bf16_supported", None)
        if told is not None:
            # By default torch's functions count emulation and Ascend's does not; others take no argument.
            takes = _takes(told, "including_emulation")
            return bool(told(including_emulation=including_emulation) if takes else told())
        dtypes = self._amp_dtypes()
        return torch.bfloat16 in dtypes if dtypes is not None else self._computes_in(torch.bfloat16)

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16 in hardware.

        Delegates to: the device's autocast dtypes, else a trial.
        CPU: what oneDNN reports (AVX-512 FP16, AMX FP16 or Arm's FP16).
        CUDA: from compute capability 7.0, from 6.0 with ``DS_ALLOW_DEPRECATED_FP16=1``, and on ROCm;
            true without a device.
        """
        dtypes = self._amp_dtypes()
        return torch.float16 in dtypes if dtypes is not None else self._computes_in(torch.float16)

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in float64.

        Delegates to: a trial.
        CPU: true.
        CUDA: true.
        """
        return self._computes_in(torch.float64)

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating-point types to compute in, float32 first.

        Delegates to: :meth:`is_bf16_supported`, :meth:`is_fp16_supported`, :meth:`is_fp64_supported`.
        CPU: float32, bfloat16, float16 where oneDNN has it, float64.
        CUDA: float32, bfloat16 and float16 by compute capability, float64.
        """
        offered = {
            torch.float32: True,
            torch.bfloat16: self.is_bf16_supported(),
            torch.float16: self.is_fp16_supported(),
            torch.float64: self.is_fp64_supported(),
        }
        return [dtype for dtype, supported in offered.items() if supported]

    @property
    def amp(self) -> MixedPrecision:
        """Mixed precision on this device: ``amp.autocast(…)``, ``amp.GradScaler(…)``.

        Delegates to: ``torch.amp`` with this device type.
        CPU: ``torch.amp`` with ``"cpu"``.
        CUDA: same as ``torch.cuda.amp``.
        """
        return MixedPrecision(self.device_type)

    def _tensor_type(self, name: str, dtype: torch.dtype) -> Any:
        # torch's own classes also work with Tensor.type(), which old code calls.
        offered = getattr(self.torch_module, name, None)
        return offered if offered is not None else TensorType(dtype, self.device_type)

    BFloat16Tensor = _tensor_class("BFloat16Tensor", torch.bfloat16)
    ByteTensor = _tensor_class("ByteTensor", torch.uint8)
    DoubleTensor = _tensor_class("DoubleTensor", torch.float64)
    FloatTensor = _tensor_class("FloatTensor", torch.float32)
    HalfTensor = _tensor_class("HalfTensor", torch.float16)
    IntTensor = _tensor_class("IntTensor", torch.int32)
    LongTensor = _tensor_class("LongTensor", torch.int64)
