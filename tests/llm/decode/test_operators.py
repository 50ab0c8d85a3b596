"""Activations that a program writes with several operators."""

from __future__ import annotations

import math
from typing import Any

import torch

from acclimate.llm.decode.operators import activation_of
from acclimate.llm.decode.program import Value

X = Value("linear", None, (), {}, 0, (2, 8), torch.float32, 0)


def made(op: str, *args: Any) -> Value:
    return Value(op, None, args, {}, 0, (2, 8), torch.float32, 0)


def gelu(factor: float = 0.044715) -> Value:
    """Returns 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), as GPT-2's program computes it."""
    inner = made("mul", made("add", X, made("mul", made("pow", X, 3.0), factor)), math.sqrt(2 / math.pi))
    return made("mul", made("mul", X, 0.5), made("add", made("tanh", inner), 1.0))


def test_gelu_is_found_however_it_is_written() -> None:
    cube = made("mul", made("mul", X, X), made("mul", X, 0.044715))
    inner = made("mul", 0.7978845608, made("add", cube, X))
    assert activation_of(gelu()) == ("gelu_tanh", X)
    assert activation_of(made("mul", made("add", 1.0, made("tanh", inner)), made("mul", X, 0.5))) is not None


def test_what_only_resembles_gelu_is_not_taken_for_it() -> None:
    assert activation_of(gelu(0.04)) is None
    assert activation_of(made("mul", gelu(), 2.0)) is None
    assert activation_of(made("mul", gelu(), made("pow", X, 0.5))) is None
    assert activation_of(made("mul", gelu(), made("sigmoid", X))) is None
