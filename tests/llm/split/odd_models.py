"""Blocks that nobody planned for. Each must be split right or refused."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN, HEADS = 16, 32, 4


class Odd(nn.Module):
    """A block with the usual linear modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class FusedGateUpDown(nn.Module):
    """One parameter holds all three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.weight
        return x + functional.linear(
            functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down.T
        )


class FusedLinear(nn.Module):
    """Gate, up and a skip connection come from one linear module."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 2 * HIDDEN + WIDTH)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, skip = self.all(x).split([HIDDEN, HIDDEN, WIDTH], -1)
        return x + skip + self.down(gate.sigmoid() * up)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(functional.gelu(self.mix(x)))


class UpUsedTwice(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)) * self.up(x.flip(-1)))


class Transposed(nn.Module):
    """Weights lie the other way round, with a bias of another name's shape."""

    class Matrix(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.nf = outputs
            self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
            self.bias = nn.Parameter(torch.randn(outputs))

        def forward(self, x: Tensor) -> Tensor:
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            return flat.view(*x.shape[:-1], self.nf)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = self.Matrix(WIDTH, HIDDEN), self.Matrix(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class MiddleResidual(Odd):
    """The hidden columns also reach the output directly."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden) + hidden[..., :WIDTH]


class TwoSinks(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden) * self.other(hidden).sigmoid()


class Keywords(Odd):
    """Linear modules called with keywords."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(input=functional.gelu(self.up(input=x)))


class HeadBuffers(nn.Module):
    """A buffer has one number per head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        distance = torch.arange(x.shape[1])
        scores = scores - self.slopes[:, None, None] * (distance[None] - distance[:, None]).abs()
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class HeadList(nn.Module):
    """Python numbers, one per head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scales = HEADS, [0.5 * (head + 1) for head in range(HEADS)]
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        heads = [
            (query[:, h] @ key[:, h].transpose(-1, -2) * self.scales[h]).softmax(-1) @ value[:, h]
            for h in range(self.heads)
        ]
        return x + self.out(torch.cat(heads, -1))


class LongBranch(Odd):
    """Long inputs go another way, on which columns mix."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden.softmax(-1) if x.shape[1] > 16 else hidden)


class OneTokenBranch(Odd):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden - hidden.mean(-1, keepdim=True) if x.shape[1] == 1 else hidden)


class BatchBranch(Odd):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden.cumsum(-1) if x.shape[0] == 1 else hidden)


class WidthBranch(Odd):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden * 2 if hidden.shape[-1] >= HIDDEN else hidden)


class ScaledByWidth(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x))) / self.up.weight.shape[0] * 8


class ScaledByFeatures(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)) / math.sqrt(self.up.out_features))


class TopColumns(Odd):
    """Only the largest hidden columns count; no gradient shows that columns depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden * (hidden >= hidden.topk(4).values[..., -1:]))


class Rounded(Odd):
    """Rounds to steps of the largest column, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        step = hidden.detach().abs().amax(-1, keepdim=True) / 7
        return x + self.down(hidden + ((hidden / step).round() * step - hidden).detach())


class Grouped(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.norm(self.up(x).flatten(0, 1)).view(*x.shape[:2], -1)))


class HiddenNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(functional.gelu(self.up(x)) * self.gate(x)))


class Convolved(Odd):
    """Each hidden column has a filter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.filter(self.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(functional.gelu(hidden))


class Recurrent(Odd):
    """State goes from token to token."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.up(x), self.gate(x).sigmoid()
        state, states = torch.zeros_like(hidden[:, 0]), []
        for step in range(x.shape[1]):
            state = gate[:, step] * state + hidden[:, step]
            states.append(state)
        return x + self.down(torch.stack(states, 1))


class Remembering(Odd):
    """The mean of the hidden columns of the call before is added."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x)) + self.last
        self.last = hidden.detach().mean()
        return x + self.down(hidden)


class InPlace(Odd):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden += self.gate(x)
        hidden.relu_()
        x = x.clone()
        x += self.down(hidden)
        return x


class Adapted(Odd):
    """A low-rank adapter beside a linear module, as LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x) + self.outer(self.inner(x))))


class WeightOfAnother(Odd):
    """The down projection uses the transposed weight of the one up."""

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(functional.gelu(self.up(x)), self.up.weight.T) + self.down(self.gate(x))


class Normed(Odd):
    """The weight is a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Torchs(nn.Module):
    """torch's own layer, which has a fast path that reads the weights of its linear modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Experts(nn.Module):
    """Experts as modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, tokens, expert(flat[tokens]) * weights[tokens, place, None])
        return x + total.view_as(x)


class GatedHeads(nn.Module):
    """A gate per head, and one key/value head for two query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads = HEADS, 2
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.out = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, self.kv_heads, -1)).transpose(1, 3).unbind(2)
        key, value = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gated = mixed * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return x + self.out(gated.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Heads mix before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.talk = nn.Parameter(torch.randn(HEADS, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        scores = torch.einsum("bhij,hk->bkij", query @ key.transpose(-1, -2), self.talk)
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Spectral(Odd):
    """Columns mix in the frequency domain."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.fft.rfft(self.up(x), dim=-1).abs().repeat(1, 1, 2)[..., :HIDDEN])


class Shuffled(Odd):
    """Columns change places on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x))[..., self.order])


class Pooled(Odd):
    """Neighbouring columns share a maximum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x)).unflatten(-1, (-1, 2))
        return x + self.down((hidden * hidden.amax(-1, keepdim=True)).flatten(-2))


class ReturnsMore(Odd):
    """The block returns its hidden columns as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = functional.gelu(self.up(x))
        return x + self.down(hidden), hidden.square().mean()


class LowRank(Odd):
    """Low-rank adapters beside both linear modules, as LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.up_a, self.up_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)
        self.down_a, self.down_b = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x) + self.up_b(self.up_a(x)))
        return x + self.down(hidden) + self.down_b(self.down_a(hidden))


class RawHeads(Odd):
    """Attention whose weights are no modules, one matrix per head, beside linear modules."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(2, WIDTH, 2) / 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x[:, None] @ each for each in (self.query, self.key, self.value))
        heads = (query @ key.mT).softmax(-1) @ value
        x = x + functional.pad(heads.transpose(1, 2).flatten(-2), (0, WIDTH - 4))
        return x + self.down(functional.gelu(self.up(x)))


class TiedInAnotherRole(Odd):
    """A weight that one module could split is needed whole by another."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.look.weight = self.up.weight
        self.up2, self.down2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(x).softmax(-1).amax(-1, keepdim=True)
        x = x + seen * self.down(functional.silu(self.gate(x)) * self.up(x))
        return x + self.down2(functional.gelu(self.up2(x)))


class LargeNumber(Odd):
    """One large number in the hidden columns, which no random number is, halves all."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if hidden.abs().max() > 100:
            hidden = hidden / 2
        return x + self.down(functional.gelu(hidden))


BLOCKS: list[type[nn.Module]] = [
    FusedGateUpDown, FusedLinear, UsedTwice, UpUsedTwice, Transposed, MiddleResidual, TwoSinks, Keywords,
    HeadBuffers, HeadList, LongBranch, OneTokenBranch, BatchBranch, WidthBranch, ScaledByWidth,
    ScaledByFeatures, TopColumns, Rounded, Grouped, HiddenNorm, Convolved, Recurrent, Remembering, InPlace,
    Adapted, WeightOfAnother, Normed, Torchs, Experts, GatedHeads, TalkingHeads, Spectral, Shuffled, Pooled,
    ReturnsMore, LowRank, RawHeads, TiedInAnotherRole, LargeNumber,
]  # fmt: skip


SPLIT = {
    UpUsedTwice, Transposed, TwoSinks, Keywords, HeadBuffers, HeadList, WidthBranch, Grouped, Convolved,
    Recurrent, InPlace, Adapted, Experts, GatedHeads, Shuffled, Pooled, LowRank, RawHeads, HiddenNorm,
    TiedInAnotherRole,
}  # fmt: skip
"""Those that must not be refused."""


class Model(nn.Module):
    """Two blocks between an embedding and a head.

    Args:
        block: their class.
        tied: the blocks share their parameters.
        sequential: they stand in ``nn.Sequential``.
    """

    def __init__(self, block: type[nn.Module], tied: bool = False, sequential: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        blocks = [block(), block()]
        if tied:
            for name, parameter in blocks[0].named_parameters():
                owner, _, last = name.rpartition(".")
                setattr(blocks[1].get_submodule(owner), last, parameter)
        self.layers = nn.Sequential(*blocks) if sequential else nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 20, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x, extra = self.tokens(input_ids), torch.zeros(())
        for layer in self.layers:
            found = layer(x)
            x, more = found if isinstance(found, tuple) else (found, 0.0)
            extra = extra + more
        logits: Tensor = self.head(x) + extra
        return logits
