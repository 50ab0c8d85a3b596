"""A small GPT: rotary position embeddings, RMS norm, fused attention, tied input and output embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.read = nn.Linear(config.width, 3 * config.width, bias=False)
        self.write = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention: each position attends to itself and earlier ones."""
        heads = self.read(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        written: Tensor = self.write(mixed.transpose(1, 2).flatten(2))
        return written


class Block(nn.Module):
    """Attention, then an MLP; each is added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.perceptron_norm = nn.RMSNorm(config.width)
        self.perceptron = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after this block."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        out: Tensor = x + self.dropout(self.perceptron(self.perceptron_norm(x)))
        return out


class GPT(nn.Module):
    """Takes tokens of shape (batch, length); returns the logits of the tokens that follow."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        angles = rotation_angles(config.width // config.heads, config.context)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The last matrix of each branch starts smaller, since 2 * layers branches add up.
                last = name.endswith(("write.weight", "perceptron.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits at each position."""
        length = tokens.shape[1]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        # The embedding's own weight, not a second Parameter tied to it: Module.to() of some vendors makes new
        # Parameters, which unties them.
        return F.linear(self.norm(x), self.tokens.weight)


def rotation_angles(head_width: int, length: int) -> Tensor:
    """The angle by which each pair of a head's elements is rotated at each position (arXiv:2104.09864)."""
    speeds = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    return torch.outer(torch.arange(length), speeds)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to heads of shape (…, length, width)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
