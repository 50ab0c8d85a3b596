"""Page-locked host memory, which a device copies asynchronously."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from acclimate.accelerator.devices import Devices
from acclimate.errors import InvalidDeviceError, excerpt


class Pinning(Devices):
    """Page-locked ("pinned") host memory."""

    def _pins_host_memory(self) -> bool:
        """Whether torch can page-lock host memory for this device."""
        if not (self._is_torch_accelerator() and self.is_available()):
            return False
        try:
            torch.empty(1, device="cpu", pin_memory=True)  # whatever the default device is
        except NotImplementedError:  # the device has registered no such allocator
            return False
        return True

    def pin_memory(
        self,
        tensor: torch.Tensor,
        make_copy: bool | int = True,
        match_shape: bool = True,
        *,
        align_bytes: int | None = None,
    ) -> torch.Tensor:
        """A page-locked copy of a host tensor.

        Args:
            tensor: a host tensor of any dtype and shape.
            make_copy: whether to copy the data; if not, the result is uninitialised. A number that is not a
                ``bool`` is ``align_bytes``, the second argument of older releases of DeepSpeed.
            match_shape: without ``make_copy``, whether the result has the tensor's shape, or a single
                dimension with as many elements.
            align_bytes: accepted for programs written for older releases of DeepSpeed, without effect:
                torch's allocators align memory.

        Delegates to: ``Tensor.pin_memory``; without a copy, :meth:`pin_empty`.
        CPU: locks nothing, since nothing is copied to a device: returns the tensor itself, or a new one.
        CUDA: ``Tensor.pin_memory``.
        """
        if make_copy is False:  # 0 equals False, but is a number of bytes
            shape = tensor.shape if match_shape else (tensor.numel(),)
            return self.pin_empty(*shape, dtype=tensor.dtype)
        return tensor.pin_memory() if self._pins_host_memory() else tensor

    def pin_empty(
        self, *size: int | Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """An uninitialised page-locked tensor; the shape is given as ints or as one sequence.

        Delegates to: ``torch.empty(…, pin_memory=True)``.
        CPU: an ordinary tensor.
        CUDA: ``torch.empty(…, pin_memory=True)``.

        Raises:
            InvalidDeviceError: ``device`` is not the host.
        """
        _require_host(device)
        return torch.empty(_shape(size), dtype=dtype, device="cpu", pin_memory=self._pins_host_memory())

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An uninitialised page-locked tensor with another's shape, and its dtype unless one is given.

        Delegates to: :meth:`pin_empty`.
        CPU: an ordinary tensor.
        CUDA: as :meth:`pin_empty`.

        Raises:
            InvalidDeviceError: ``device`` is not the host.
        """
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory.

        Delegates to: ``Tensor.is_pinned``.
        CPU: false.
        CUDA: ``Tensor.is_pinned``.
        """
        return bool(tensor.is_pinned())

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Marks a pinned tensor as no longer needed; its memory is unlocked when it is freed.

        Delegates to: no call; torch's host allocator owns the lock.
        CPU: does nothing.
        CUDA: does nothing.
        """

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-locks memory that torch did not allocate; returns whether the device supports that.

        Args:
            address: the address of the first byte.
            num_bytes: the size in bytes.

        Delegates to: no call; torch has no device-independent one.
        CPU: false.
        CUDA: ``cudaHostRegister``.
        """
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Unlocks memory that :meth:`register_host_memory` locked.

        Delegates to: no call of torch.
        CPU: does nothing.
        CUDA: ``cudaHostUnregister``.
        """

    def pin_memory_alignment(self) -> int:
        """The alignment in bytes that :meth:`register_host_memory` needs; 1 means none.

        Delegates to: no call of torch.
        CPU: 1.
        CUDA: 1.
        """
        return 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device.

        Delegates to: ``Tensor.device``.
        CPU: whether it is on the host.
        CUDA: same as ``Tensor.is_cuda``.
        """
        return tensor.device.type == self.device_type


def _require_host(device: str | torch.device) -> None:
    try:
        is_host = torch.device(device).type == "cpu"
    except RuntimeError:  # torch knows no such type
        is_host = False
    if not is_host:
        raise InvalidDeviceError(
            f'Pinned memory is host memory, so its device must be "cpu", not "{excerpt(str(device))}".'
        )


def _shape(size: tuple[int | Sequence[int], ...]) -> list[int]:
    """Turns ``(2, 3)`` and ``([2, 3],)`` into ``[2, 3]``."""
    return [length for part in size for length in ([part] if isinstance(part, int) else part)]
