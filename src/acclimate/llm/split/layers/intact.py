"""Notices changes to a split model that its split does not survive, such as a replaced module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from acclimate.errors import PlanError
from acclimate.llm.split.plan import Change

_KEPT = "_acclimate_split"


@dataclass
class _Place:
    """A module at its place in the model."""

    name: str
    owner: nn.Module
    module: nn.Module
    is_split: bool
    shapes: dict[str, tuple[int, ...] | None]
    """The shapes of its parameters; ``None`` for one that is ``None``, such as a bias of another rank."""
    hooks: tuple[set[int], set[int]]
    """The keys of the hooks that run its collectives, before and after the forward."""


class IntactSplit:
    """What a model was when it was split. Each forward compares, so that a change never gives wrong results.

    It compares the split modules, and the modules beside them, which work with a rank's columns. A block may
    be wrapped, as ``torch.compile`` and activation checkpointing do, or left out.
    """

    def __init__(self, model: nn.Module, changes: Mapping[str, Change], size: int) -> None:
        self.size = size
        self._places: list[_Place] = []
        modules = dict(model.named_modules(remove_duplicate=False))
        split = {name for name, change in changes.items() if change.role not in ("block", "whole")}
        beside = {
            f"{owner}.{child}" if owner else child
            for owner in {name.rpartition(".")[0] for name in split if changes[name].region}
            for child, module in modules[owner].named_children()
            if not any(id(modules[part]) in set(map(id, module.modules())) for part in split)
        }
        for name in sorted(split | beside):
            if name:  # the model itself has no place
                module, owner = modules[name], modules[name.rpartition(".")[0]]
                shapes = {n: None if p is None else tuple(p.shape) for n, p in module._parameters.items()}
                hooks = set(module._forward_pre_hooks), set(module._forward_hooks)
                self._places.append(_Place(name, owner, module, name in split, shapes, hooks))
        setattr(model, _KEPT, self)
        model.register_forward_pre_hook(self._check)

    def _check(self, *_: object) -> None:
        # torch.compile would compile the comparison into the graph.
        if not torch.compiler.is_compiling() and (found := self.change()) is not None:
            raise PlanError(found)

    def change(self) -> str | None:
        """Returns a message about the first change that the split does not survive, or ``None``."""
        for place in self._places:
            now = place.owner._modules.get(place.name.rpartition(".")[2])
            if now is not place.module:
                kind = type(now)
                what = "removed" if now is None else f"replaced by a {kind.__module__}.{kind.__qualname__}"
            elif place.is_split:
                what = _change_within(place)
            else:
                continue
            if what:
                return (
                    f"{place.name} was {what} after the model was split over {self.size} ranks, which gives "
                    "wrong results. Change the whole model first, and split the changed model"
                )
        return None


def _change_within(place: _Place) -> str:
    module = place.module
    if "parametrizations" in module._modules or not module._parameters.keys() <= place.shapes.keys():
        return "parametrized"
    for name, shape in place.shapes.items():
        own = module._parameters.get(name)  # a packed module has none
        if own is not None and shape is None:
            return f"given a {name}, which it did not have on this rank,"
        # A sharded parameter of FSDP or ZeRO is flat outside of the forward.
        if own is not None and own.dim() == len(shape or ()) > 1 and tuple(own.shape) != shape:
            return f"given a {name} of the shape {tuple(own.shape)} in place of {shape}"
    before, after = place.hooks
    if not (before <= module._forward_pre_hooks.keys() and after <= module._forward_hooks.keys()):
        return "robbed of the hooks that run its collectives"
    return ""


def split_of(model: nn.Module) -> IntactSplit | None:
    """Returns what a model, or a model within it, was when it was split; ``None`` if it is whole."""
    return next((vars(module)[_KEPT] for module in model.modules() if _KEPT in vars(module)), None)
