"""Compares a step with a model layer by layer, and follows the model's routers near a tie.

Two right computations round in another order, so their routers choose otherwise between experts whose logits
nearly tie. Then their results differ far more than by rounding, and more so with each layer. So each layer of
a step in a proof gets the model's input of that layer and uses the experts that the model has chosen, and its
result is compared with the model's. The model's choice must be one that the step's own logits allow, if each
is changed by a little, and the step's own choice must be one that they make.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import Decoder, Experts, Matrix, Router

# Of scores in float32, relative to the largest: exponentials of the host's own differ in the last digits.
_ROUNDING = 1e-5
_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Trace:
    """What layers of a step get in a proof, and what they leave.

    The tensors stay where they are: native code and graphs have their addresses.

    Args:
        decoder: the description.
        rows: the most tokens of a call.
        device: that of the step.
        gives_inputs: whether layers get other inputs than the results of the layers before.
        forces: whether layers use other experts than their routers choose.

    Attributes:
        given: by layer, rows x hidden in float32: the inputs that layers get; empty: their own.
        inputs: by layer, rows x hidden in float32: the inputs that they would have had.
        forced: by layer with experts, rows x used: the experts that are used; empty: the router's choices.
        chosen: by layer with experts, rows x used: the router's choices.
        logits: by layer with experts, rows x experts in float32: those of the router.
    """

    def __init__(
        self, decoder: Decoder, rows: int, device: torch.device, *, gives_inputs: bool, forces: bool
    ) -> None:
        self.given: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.forced: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}
        for index, layer in enumerate(decoder.layers):
            if gives_inputs:
                self.given[index] = torch.zeros((rows, decoder.hidden), device=device)
                self.inputs[index] = torch.zeros((rows, decoder.hidden), device=device)
            if isinstance(layer.mlp, Experts):
                logits, used = layer.mlp.router.logits, layer.mlp.router.used
                count = len(logits.weight) if isinstance(logits, Matrix) else logits.count
                if forces:
                    self.forced[index] = torch.zeros((rows, used), dtype=torch.long, device=device)
                self.chosen[index] = torch.zeros((rows, used), dtype=torch.long, device=device)
                self.logits[index] = torch.zeros((rows, count), device=device)

    def addresses(self, index: int) -> list[int]:
        """Returns where native code finds the tensors of a layer; 0: there is none."""
        parts = (self.given, self.inputs, self.forced, self.chosen, self.logits)
        tensors = (part.get(index) for part in parts)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def route(self, index: int, router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of the experts that a layer uses, as a router does."""
        logits, dtype = router.logits_of(x), x.dtype
        scores = router.scores_of(logits, dtype)
        chosen = router.choose(router.biased(scores))
        self.logits[index][: len(x)] = logits
        self.chosen[index][: len(x)] = chosen
        if index in self.forced:
            chosen = self.forced[index][: len(x)]
        return router.weigh(scores, chosen, dtype), chosen


@dataclass(frozen=True)
class Noted:
    """What a call of a model has shown.

    Attributes:
        inputs: of each layer, tokens x hidden; empty: not all were found.
        choices: by layer, tokens x used.
    """

    inputs: list[Tensor]
    choices: dict[int, Tensor]


class Watched:
    """A model whose calls are noted and compared with a step's; without experts, none is.

    Args:
        model: the model.
        decoder: its description.
        limit: by how much a layer's result may differ, relative to what the layer adds; the logits of a near
            tie differ by a quarter of it, relative to the largest of a token's.

    Attributes:
        faults: what steps have computed otherwise.
    """

    def __init__(self, model: nn.Module, decoder: Decoder, limit: float) -> None:
        self.faults: list[str] = []
        self._decoder, self._limit = decoder, limit
        self._routers = {
            index: layer.mlp.router
            for index, layer in enumerate(decoder.layers)
            if isinstance(layer.mlp, Experts)
        }
        self._layers = _layers(model, decoder) if self._routers else {}
        self._inputs: dict[int, Tensor] = {}
        self._choices: dict[int, list[Tensor]] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what the model's modules get from this thread while the ``with`` block runs."""
        own = threading.get_ident()
        with contextlib.ExitStack() as hooks:

            def watch(module: nn.Module, hook: _Hook) -> None:
                def note(module: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
                    if threading.get_ident() == own:  # others may use the model meanwhile
                        hook(module, args, others)

                hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)

            for index, module in self._layers.items():
                watch(module, self._note_input(index))
            for index, layer in enumerate(self._decoder.layers):
                if isinstance(layer.mlp, Experts):
                    watch(layer.mlp.down.module, self._note_choice(index))
            yield

    def _note_input(self, index: int) -> _Hook:
        def note(_: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
            for given in (*args, *others.values()):
                if isinstance(given, Tensor) and given.shape[2:] == (self._decoder.hidden,):
                    self._inputs[index] = given.detach().flatten(0, 1).float()
                    return

        return note

    def _note_choice(self, index: int) -> _Hook:
        def note(_: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
            for given in (*args, *others.values()):
                if isinstance(given, Tensor) and given.dtype == torch.long and given.dim() == 2:
                    self._choices.setdefault(index, []).append(given.detach().clone())

        return note

    def take(self) -> Noted:
        """Returns what has been noted since the last call."""
        found = [self._inputs[i] for i in range(len(self._decoder.layers)) if i in self._inputs]
        choices = {index: torch.cat(some) for index, some in self._choices.items()}
        self._inputs.clear()
        self._choices.clear()
        return Noted(found if len(found) == len(self._decoder.layers) else [], choices)

    def trace(self, rows: int, noted: Noted, device: torch.device) -> Trace:
        """Returns what a step needs that follows the model for up to so many tokens."""
        routers = self._routers
        forces = all(
            i in noted.choices and noted.choices[i].shape[-1] == router.used for i, router in routers.items()
        )
        return Trace(self._decoder, rows, device, gives_inputs=bool(noted.inputs), forces=forces)

    @contextlib.contextmanager
    def followed(self, trace: Trace, noted: Noted, mask: Tensor) -> Iterator[None]:
        """Lets a step follow the model in the ``with`` block, and compares their layers.

        Args:
            trace: the step's.
            noted: what the model has computed for the same tokens.
            mask: batch x length; 0: padding.
        """
        seen = mask.flatten().bool()
        for index, given in trace.given.items():
            given[: len(seen)] = noted.inputs[index]
        last = len(self._decoder.layers) - 1
        for index, forced in trace.forced.items():
            choice = noted.choices[index].view(*mask.shape, -1)
            # The last layer computes only the last token of a prompt.
            choice = (choice[:, -1:] if index == last else choice).flatten(0, 1)
            # Native code would read beyond the weights of the last expert.
            forced[: len(choice)] = choice.clamp(0, trace.logits[index].shape[1] - 1)
        yield
        for index in trace.inputs:
            self._compare_inputs(index, trace.inputs[index], noted.inputs, seen)
        for index in trace.chosen:
            self._compare_choices(index, trace, mask[:, -1].bool() if index == last else seen)

    def _compare_choices(self, index: int, trace: Trace, seen: Tensor) -> None:
        """Checks that a router's logits make its choice, and that they nearly make the model's."""
        router, dtype = self._routers[index], self._decoder.dtype
        logits = trace.logits[index][: len(seen)][seen]
        choices = [(trace.chosen[index], _ROUNDING)]
        if index in trace.forced:
            choices.append((trace.forced[index], self._limit / 4))
        for choice, nudge in choices:
            if not bool(allows(router, logits, choice[: len(seen)][seen], nudge, dtype).all()):
                self.faults.append(f"the router of layer {index} chooses other experts")

    def _compare_inputs(self, index: int, found: Tensor, expected: list[Tensor], seen: Tensor) -> None:
        """Compares the result of the layer before."""
        own, model = found[: len(seen)][seen], expected[index][seen]
        added = model - expected[index - 1][seen] if index > 0 else model
        rounding = 2 * torch.finfo(self._decoder.dtype).eps
        most = self._limit * added.abs().amax(-1) + rounding * model.abs().amax(-1)
        if not bool(((own - model).abs().amax(-1) <= most).all()):
            name = f"layer {index - 1}" if index > 0 else "the embedding"
            self.faults.append(f"the results of {name} differ from a step's")


def allows(router: Router, logits: Tensor, choice: Tensor, nudge: float, dtype: torch.dtype) -> Tensor:
    """Returns for each token whether a router makes a choice if its logits are changed by a little.

    Args:
        router: the router.
        logits: tokens x experts in float32.
        choice: tokens x used.
        nudge: the change of a logit, relative to the largest magnitude of a token's.
        dtype: the model's.
    """
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, choice, True)
    change = nudge * logits.abs().amax(-1, keepdim=True)
    scores = router.biased(router.scores_of(torch.where(is_chosen, logits + change, logits - change), dtype))
    groups, of_groups = router.groups, None
    if groups is not None:
        # Which groups are used does not show if none of a group is chosen. One is not, if it has a better
        # expert than the worst that is chosen.
        least = scores.masked_fill(~is_chosen, math.inf).amin(-1, keepdim=True)
        is_better = ((scores > least) & ~is_chosen).unflatten(-1, (groups.count, -1)).any(-1)
        lowered = router.biased(router.scores_of(logits - 3 * change, dtype))
        of_groups = torch.where(is_better, groups.scores(lowered), groups.scores(scores))
    found = router.choose(scores, of_groups)
    return torch.zeros_like(is_chosen).scatter(-1, found, True).eq(is_chosen).all(-1)


def _layers(model: nn.Module, decoder: Decoder) -> dict[int, nn.Module]:
    """Returns the module of each layer: the largest with a mixer's output projection of that layer alone."""
    outputs = {layer.mixer.output: index for index, layer in enumerate(decoder.layers)}
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # parents come first
        inside = {outputs[part] for part in module.modules() if part in outputs}
        if len(inside) == 1:
            found.setdefault(inside.pop(), module)
    return found
