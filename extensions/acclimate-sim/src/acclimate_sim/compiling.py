"""``torch.compile`` on sim: inductor generates no code for this device, so what was traced runs as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

_logger = logging.getLogger("acclimate")
_warned = False


def register(device_type: str) -> None:
    """Makes ``torch.compile`` run graphs with tensors of the device in them unchanged, and say so once.

    torch looks a compiler up by its name alone, "inductor", so which device a graph is for has to be asked
    here. Other backends ("eager", "aot_eager") need nothing.
    """
    inductor: Any = torch._TorchCompileInductorWrapper
    compile_graph = inductor.__call__

    def compile_unless_on_device(
        self: Any, model_: torch.fx.GraphModule, inputs_: list[Any], **options: Any
    ) -> Callable[..., Any]:
        if not _is_on(device_type, model_, inputs_):
            compiled: Callable[..., Any] = compile_graph(self, model_, inputs_, **options)
            return compiled
        _warn_once()
        return model_.forward

    inductor.__call__ = compile_unless_on_device


def _is_on(device_type: str, graph: torch.fx.GraphModule, inputs: list[Any]) -> bool:
    made = (node.meta.get("example_value") for node in graph.graph.nodes)
    tensors = (value for value in (*inputs, *made) if isinstance(value, torch.Tensor))
    return any(tensor.device.type == device_type for tensor in tensors)


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        _logger.warning(
            "torch.compile does not generate code for the emulated accelerator: compiled functions run as "
            "they are, with the same results. This is said once."
        )
