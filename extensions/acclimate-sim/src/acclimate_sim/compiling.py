"""``torch.compile`` on sim: inductor generates no code for this device, so traced graphs run eagerly."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from acclimate_sim.after_import import after_import
from acclimate_sim.errors import CodeGenerationError

_logger = logging.getLogger("acclimate")
_warned = False


def register(device_type: str) -> None:
    """Registers the device with ``torch.compile``, and makes graphs with its tensors run eagerly.

    Every call of inductor reaches a function of ``torch._inductor.compile_fx``: from ``torch.compile`` with
    any mode and options, dynamo's registry of backends, ``torch._inductor.compile``, or a backend that wraps
    inductor. So those functions check the device of a graph. The backends "eager" and "aot_eager" run graphs
    eagerly anyway. The device's name is a backend too.
    """

    def add_interface(module: ModuleType) -> None:
        from acclimate_sim.dynamo_interface import register_interface

        register_interface(device_type)

    def add_backend(module: ModuleType) -> None:
        module.register_backend(compiler_fn=run_as_it_is, name=device_type)

    def replace_entries(module: Any) -> None:
        for name, instead in _INSTEAD.items():
            setattr(module, name, _unless_on_device(device_type, getattr(module, name), instead))

    after_import("torch._dynamo.device_interface", add_interface)
    after_import("torch._dynamo.backends.registry", add_backend)
    after_import("torch._inductor.compile_fx", replace_entries)


def run_as_it_is(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """The device's backend of ``torch.compile``, which runs graphs eagerly."""
    if _has_checkpoints(graph):  # torch leaves it to AOTAutograd to draw the same random numbers again
        from torch._dynamo.backends.registry import lookup_backend

        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return compiled
    return graph.forward


def _has_checkpoints(graph: torch.fx.GraphModule) -> bool:
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    graphs = (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    return any(node.target is checkpoint for module in graphs for node in module.graph.nodes)


def _run_boxed(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Runs a graph of AOTAutograd, which takes one list of all arguments."""

    def run(arguments: list[Any]) -> Any:
        return graph.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined] # torch's mark of such a function
    return run


def _warn_and_run(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    _warn_once()
    return run_as_it_is(graph, inputs)


def _refuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise CodeGenerationError(
        "torch cannot compile ahead of time for the emulated accelerator, which has no code generator. "
        "Export the program and run it as it is, or compile it for the CPU."
    )


_INSTEAD: dict[str, Callable[[torch.fx.GraphModule, Any], Any]] = {
    "compile_fx": _warn_and_run,
    "compile_fx_inner": _run_boxed,
    "compile_fx_aot": _refuse,
}
"""The replacements of inductor's functions for a graph on the device."""


def _unless_on_device(
    device_type: str, compile_graph: Callable[..., Any], instead: Callable[[torch.fx.GraphModule, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(compile_graph)
    def compile_unless_on_device(*args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        graph = next((value for value in given if isinstance(value, torch.fx.GraphModule)), None)
        if graph is not None and _is_on(device_type, graph, given):
            inputs = next((value for value in given if isinstance(value, list | tuple)), [])
            return instead(graph, inputs)
        return compile_graph(*args, **options)

    return compile_unless_on_device


def _is_on(device_type: str, graph: torch.fx.GraphModule, given: Sequence[Any]) -> bool:
    """Whether a graph takes, holds or creates a tensor of the device."""
    found = [value for values in given if isinstance(values, list | tuple) for value in values]
    found += [*graph.parameters(), *graph.buffers()]
    for node in graph.graph.nodes:
        found += [node.meta.get("example_value"), node.meta.get("val"), node.kwargs.get("device")]
    return any(_device_type_of(value) == device_type for value in found)


def _device_type_of(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return value.device.type
    return torch.device(value).type if isinstance(value, str | torch.device) else None


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        _logger.warning(
            "torch.compile does not generate code for the emulated accelerator: compiled functions run "
            "eagerly, with the same results. This warning is shown once."
        )
