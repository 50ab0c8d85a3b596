"""A move that makes new Parameters says which weights it untied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from acclimate import get_accelerator

acc = get_accelerator()


def tied_model() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


MOVES: list[Callable[[Any], Any]] = [
    lambda model: model.to("sim"),
    lambda model: model.sim(),
    lambda model: model.to_empty(device="sim"),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_move_that_unties_weights_names_both_once(move: Callable[[Any], Any]) -> None:
    model = nn.Sequential(tied_model())
    with pytest.warns(UserWarning, match="no longer tied") as said:
        move(model)
    assert len(said) == 1
    assert '"0.head.weight" is no longer tied to "0.embed.weight"' in str(said[0].message)


def test_the_warning_points_at_the_line_that_moves() -> None:
    with pytest.warns(UserWarning, match="no longer tied") as said:
        tied_model().to("sim")
    assert said[0].filename == __file__


def test_weights_tied_after_the_move_raise_no_warning() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)}).to("sim")
    model["head"].weight = model["embed"].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.Linear(2, 2).to("sim")
        torch.nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("sim")
    assert model["head"].weight is model["embed"].weight
