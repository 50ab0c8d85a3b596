"""Mixed precision on one device type: ``torch.amp`` without the device argument."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from acclimate.errors import AutocastArgumentError, excerpt


class MixedPrecision:
    """``torch.amp`` for one device type, like ``torch.cuda.amp`` for CUDA."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
    ) -> torch.amp.autocast:
        """``torch.amp.autocast`` on this device: a context manager and a decorator.

        The arguments have the order of ``torch.cuda.amp.autocast``.

        Args:
            enabled: whether autocasting is on.
            dtype: the dtype to compute in; ``None``: the device's default.
            cache_enabled: whether casts of weights are cached in the block.

        Raises:
            AutocastArgumentError: ``enabled`` is not a bool, but the name of a device, as in torch.autocast.
        """
        if not isinstance(enabled, bool):
            raise AutocastArgumentError(
                f"enabled must be a bool. Value {excerpt(repr(enabled))} is not. If it is a device, leave it "
                f"out: this is {self._device_type}'s autocast. Give a dtype by name: autocast(dtype=…)."
            )
        return torch.amp.autocast(self._device_type, dtype, enabled, cache_enabled)

    @property
    def GradScaler(self) -> type[torch.amp.GradScaler]:
        """``torch.amp.GradScaler`` with this device as its default: a class, which annotations and
        ``isinstance`` can use.

        Unlike torch's, it also works on devices without float64 and with gradients on the host.
        """
        return _grad_scaler(self._device_type)

    @property
    def custom_fwd(self) -> functools.partial[Any]:
        """``torch.amp.custom_fwd`` on this device, a decorator for an autograd function's ``forward``."""
        return functools.partial(torch.amp.custom_fwd, device_type=self._device_type)

    @property
    def custom_bwd(self) -> functools.partial[Any]:
        """``torch.amp.custom_bwd`` on this device, a decorator for an autograd function's ``backward``."""
        return functools.partial(torch.amp.custom_bwd, device_type=self._device_type)


class _GradScaler(torch.amp.GradScaler):
    """The scaler of every device type; each type has a subclass, from :func:`_grad_scaler`."""

    _type: ClassVar[str]

    # The parameters of torch.cuda.amp.GradScaler, which has no device.
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(self._type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle looks a class up by its name, and those of the device types have none in the module.
        if type(self) is not _grad_scaler(self._type):
            return super().__reduce_ex__(protocol)
        return _without_state, (self._type,), self.__getstate__()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        # The scale must stay on the device: torch copies found_inf to a scale on the host asynchronously,
        # and does not wait.
        if self._scale is not None and not _inverts_in_float64(self._scale):
            self._scale = self._scale.as_subclass(_Float32Scale)

    def scale(self, outputs: Any) -> Any:
        with _HostCopiesWait():
            return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        with self._waiting_for(optimizer):
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        # Only an optimizer that applies the scale itself copies it; others get unscaled gradients.
        takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        with self._waiting_for(optimizer) if takes_scale else nullcontext():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        with _HostCopiesWait():
            super().update(new_scale)

    def _waiting_for(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Makes copies to the host block if the scale and a parameter are on different kinds of device.

        Otherwise nothing is copied, and the mode would cost a little for each parameter.
        """
        scale = self._scale if self._enabled else None
        if scale is None:
            return nullcontext()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        alike = all(parameter.device.type == scale.device.type for parameter in parameters)
        return nullcontext() if alike else _HostCopiesWait()


@functools.cache
def _grad_scaler(device_type: str) -> type[_GradScaler]:
    return type("GradScaler", (_GradScaler,), {"_type": device_type, "__module__": __name__})


def _without_state(device_type: str) -> _GradScaler:
    """A scaler whose attributes :mod:`pickle` sets afterwards."""
    made = _grad_scaler(device_type)
    return made.__new__(made)


class _Float32Scale(torch.Tensor):
    """A scale that torch's scaler inverts in float32, as on Apple's GPUs, instead of float64."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def double(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _inverts_in_float64(scale: torch.Tensor) -> bool:
    try:
        scale.double().reciprocal().float()
    except (RuntimeError, TypeError):  # the type differs between devices
        return False
    return True


class _HostCopiesWait(TorchFunctionMode):
    """Makes ``Tensor.to(…, non_blocking=True)`` block.

    torch's scaler makes such copies between the devices of the scale and of the gradients, and reads a copy
    on the host before it is complete.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.to and "non_blocking" in options:
            options["non_blocking"] = False
        return func(*args, **options)
