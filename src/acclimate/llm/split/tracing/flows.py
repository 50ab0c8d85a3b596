"""Finds which modules feed which, from gradients of the inputs that a run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from acclimate.llm.split.tracing.calls import Call
from acclimate.llm.split.tracing.random_inputs import Numbers

MODEL = ""
"""Stands for the whole model's outputs, among the names of stand-ins."""


class Flows:
    """The modules and parameters on which the inputs of stand-ins depend, without another stand-in between.

    Args:
        calls: the calls of each stand-in.
        entries: the tensors that enter the model: outputs of embeddings, and inputs with gradients.
        outputs: the model's outputs.
        parameters: the parameters of the modules that run unchanged.
        numbers: makes random numbers.
    """

    def __init__(
        self,
        calls: Mapping[str, Sequence[Call]],
        entries: Sequence[Tensor],
        outputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        numbers: Numbers,
    ) -> None:
        self.sources: dict[str, set[str]] = {}
        """Per stand-in, the stand-ins whose outputs its input depends on."""
        self.sinks: dict[str, set[str]] = {name: set() for name in calls}
        """Per stand-in, the stand-ins whose inputs depend on its output."""
        self.uses: dict[str, set[str]] = {}
        """Per stand-in, the parameters that its input depends on."""
        self.from_entry: set[str] = set()
        """The stand-ins whose input depends on an entry."""
        self._numbers = numbers
        self._parameters = parameters
        self._entries = {id(entry) for entry in entries}
        self._leaves = [call.output for recorded in calls.values() for call in recorded]
        self._names = [name for name, recorded in calls.items() for _ in recorded]
        for tensor in entries:
            if all(tensor is not leaf for leaf in self._leaves):
                self._leaves.append(tensor)
                self._names.append(MODEL)
        for name, each_calls in calls.items():
            self._follow(name, [call.input for call in each_calls])
        self._follow(MODEL, outputs)

    def _follow(self, target: str, tensors: Sequence[Tensor]) -> None:
        """Records the leaves and parameters that a stand-in's inputs depend on."""
        sources = self.sources.setdefault(target, set())
        uses = self.uses.setdefault(target, set())
        for tensor in tensors:
            if not (tensor.requires_grad and tensor.is_floating_point()):
                continue
            gradients = torch.autograd.grad(
                tensor,
                [*self._leaves, *self._parameters.values()],
                self._numbers(*tensor.shape).to(tensor.dtype),
                retain_graph=True,
                allow_unused=True,
            )
            reached = [gradient is not None and bool(gradient.any()) for gradient in gradients]
            count = len(self._leaves)
            for leaf, name, is_reached in zip(self._leaves, self._names, reached[:count], strict=True):
                if not is_reached:
                    continue
                if id(leaf) in self._entries:
                    self.from_entry.add(target)
                else:
                    sources.add(name)
                    self.sinks[name].add(target)
            uses.update(
                name for name, is_used in zip(self._parameters, reached[count:], strict=True) if is_used
            )
