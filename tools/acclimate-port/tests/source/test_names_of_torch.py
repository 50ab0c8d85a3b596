"""The names by which a module knows torch and its parts."""

from __future__ import annotations

import ast

import pytest

from acclimate_port.source.names_of_torch import names_of_torch

BOUND = {
    "a part by its whole name": ("import torch.nn.functional", {}),
    "a part by another name": ("import torch.nn.functional as F", {"F": "torch.nn.functional"}),
    "a name of a part": ("from torch.nn import functional as F", {"F": "torch.nn.functional"}),
    "torch by another name": ("import torch as th", {"th": "torch"}),
    "a module of the project": ("from .torch import nn", {}),
    "another package": ("import torchvision as tv\nfrom torchvision import ops", {}),
}


@pytest.mark.parametrize("kind", BOUND)
def test_names_are_those_of_imports_from_torch_and_torch_itself(kind: str) -> None:
    statement, bound = BOUND[kind]
    assert names_of_torch(ast.parse(statement)) == {"torch": "torch", **bound}
