"""Adds the device to the places where torch has a fixed list of device names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_leaves, tree_map

from acclimate_sim.after_import import after_import


def register(device_type: str, device_module: Any) -> None:
    """Adds the device to flex attention, RNG state in compiled checkpoints, DLPack, and predicted strides.

    Args:
        device_type: torch's name for the device.
        device_module: ``torch.<device_type>``.
    """
    after_import("torch.nn.attention.flex_attention", functools.partial(_add_to_flex_attention, device_type))
    after_import("torch._prims.rng_prims", functools.partial(_add_to_random, device_type, device_module))
    after_import("torch._subclasses.fake_impls", functools.partial(_add_to_predictions, device_type))
    _add_to_dlpack(device_type)


def _add_to_flex_attention(device_type: str, module: Any) -> None:
    theirs = module._validate_device

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != device_type:
            theirs(query, key, value)

    module._validate_device = validate_device


def _add_to_random(device_type: str, device_module: Any, module: ModuleType) -> None:
    """Makes a compiled checkpoint save the generator's state in forward and restore it in backward."""

    def run_and_save(op: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        return device_module.get_rng_state(), op(*args, **options)

    def run_again(state: torch.Tensor, op: Any, *args: Any, **options: Any) -> Any:
        before = device_module.get_rng_state()
        device_module.set_rng_state(state.cpu())
        try:
            return op(*args, **options)
        finally:
            device_module.set_rng_state(before)

    def choose(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            # The first tensor may be a state on the host. torch 2.10's own function knows four devices only.
            given = args[1:] if options.get("device") is None else (torch.device(options["device"]),)
            kinds = [getattr(value, "device", value) for value in given]
            on = next((kind.type for kind in kinds if isinstance(kind, torch.device)), None)
            return (ours if on == device_type else theirs)(*args, **options)

        return run

    for name, ours in (("run_and_save_rng_state", run_and_save), ("run_with_rng_state", run_again)):
        operator = getattr(module, name)
        kernels = operator.py_kernels
        kernels[DispatchKey.BackendSelect] = choose(ours, kernels[DispatchKey.BackendSelect])
        operator._dispatch_cache.clear()


def _add_to_dlpack(device_type: str) -> None:
    theirs = torch.Tensor.__dlpack_device__

    @functools.wraps(theirs)
    def dlpack_device(self: torch.Tensor) -> Any:
        if self.device.type != device_type:
            return theirs(self)
        from torch.utils.dlpack import DLDeviceType

        return DLDeviceType.kDLExtDev, self.device.index

    torch.Tensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]


def _add_to_predictions(device_type: str, module: Any) -> None:
    """Makes torch predict an operator's results as for the CPU, whose kernels the device runs.

    For these operators the prediction depends on the device, and is wrong for one that torch does not know.
    """
    aten = torch.ops.aten
    for operator in (
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._embedding_bag.default,
    ):
        theirs = module.op_implementations_dict.get(operator)
        module.op_implementations_dict[operator] = _predict_as_on_host(device_type, theirs)
    backward = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    if not torch._C._dispatch_has_kernel_for_dispatch_key(backward.name(), "Meta"):  # as in torch 2.10
        module.op_implementations_dict[backward] = _predict_gradients_of_attention


def _predict_gradients_of_attention(
    fake_mode: Any,
    operator: Any,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The results of attention's backward: each is like the tensor that it is the gradient of."""
    with fake_mode:
        given = (query, key, value, attn_bias)
        return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in given)


def _predict_as_on_host(device_type: str, theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    def predict(fake_mode: Any, operator: Any, *args: Any, **options: Any) -> Any:
        def is_ours(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and value.device.type == device_type

        def on(device: torch.device | str, value: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

        ours = [value for value in tree_leaves((args, options)) if is_ours(value)]
        if not ours:
            return NotImplemented if theirs is None else theirs(fake_mode, operator, *args, **options)
        with fake_mode:
            args, options = tree_map(lambda v: on("cpu", v) if is_ours(v) else v, (args, options))
            results = operator(*args, **options)
            return tree_map(lambda v: on(ours[0].device, v) if isinstance(v, torch.Tensor) else v, results)

    return predict
