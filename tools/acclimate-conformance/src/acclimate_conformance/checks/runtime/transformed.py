"""Checks of what torch makes of functions and tensors: vmap, sparse and nested tensors, scripts."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.programs import (
    Offered,
    Program,
    moves_parameters,
    raised,
    require_as_on_the_host,
    there,
)

# -- vmap ----------------------------------------------------------------------------------------

_DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(64, device=x.device) + x * 0,
    "randn": lambda x: torch.randn(64, device=x.device) + x * 0,
    "randint": lambda x: torch.randint(0, 1 << 20, (64,), device=x.device) + x * 0,
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(torch.ones_like(x), 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "randperm": lambda x: torch.randperm(64, device=x.device) + x * 0,
    "multinomial": lambda x: torch.multinomial(x * 0 + 1, 32).float(),
    "normal": lambda x: torch.normal(x, x.abs() + 1),
}


def _drawn_by_vmap(place: str) -> Any:
    """Whether samples draw different numbers, the same ones, or none, as randomness says."""
    told = Offered()
    for name, draw in _DRAWS.items():
        x = torch.zeros(3, 64, device=place)

        def mapped(draw: Any = draw, x: torch.Tensor = x, **options: Any) -> Any:
            try:
                transform: Any = torch.func.vmap
                y = transform(draw, **options)(x)
            except NotImplementedError:
                raise
            except RuntimeError:
                return "refused"
            return [torch.equal(y[a], y[b]) for a, b in ((0, 1), (1, 2), (0, 2))]

        with suppress(NotImplementedError):
            told[name] = [
                mapped(),
                mapped(randomness="same"),
                mapped(randomness="different"),
                mapped(randomness="different", chunk_size=2),
            ]
    return told


def _mapped(place: str) -> Any:
    x, w = there(place, 3, 4, 5), there(place, 5, 2, seed=1)
    vmap = torch.func.vmap
    norm = nn.LayerNorm(5).to(place)
    return [
        vmap(lambda t: t @ w)(x),
        vmap(lambda t: t @ w, 1, 1)(x),
        vmap(vmap(lambda t: t.sum()))(x),
        vmap(functional.linear, (0, None))(x, w.t()),
        vmap(norm)(x),
        vmap(lambda t: t.softmax(-1), 2, -1)(x),
        vmap(lambda t: t.clone().mul_(2))(x),
        vmap(lambda t: (t.max(-1).values, t.argmax(0)))(x),
        vmap(lambda t: t[1:].sum(0), chunk_size=2)(x),
        vmap(lambda t: functional.conv1d(t[None], t.t()[:, :, None][:3].mT.reshape(3, 4, 1)))(x),
        vmap(lambda t: torch.where(t > 0, t, 0.0))(x),
        vmap(lambda t, i: t[i], (0, 0))(x, torch.tensor([1, 0, 3], device=place)),
        vmap(lambda t: t.sort().values)(x),
        vmap(lambda d: d["a"] * 2)({"a": x}),
        raised(lambda: vmap(lambda t: t.item())(x)),
        raised(lambda: vmap(lambda t, v: t + v)(x, x[:2])),
        vmap(lambda t: functional.scaled_dot_product_attention(t[None], t[None], t[None]))(x),
        torch.func.jacrev(lambda t: t.sin().sum(-1))(x[0]),
        torch.func.jacfwd(lambda t: t.sin().sum(-1), randomness="same")(x[0]),
        torch.func.linearize(lambda t: t.exp(), x)[1](x),
        vmap(lambda t: functional.batch_norm(t, None, None, training=True))(x),
        torch.func.functionalize(lambda t: t.clone().add_(1).view(-1))(x),
        vmap(lambda t: functional.embedding(t.argmax(-1), w))(x),
        torch.func.grad_and_value(lambda t: t.square().sum())(x),
        vmap(lambda t: functional.cross_entropy(t, t.argmax(-1)))(x),
    ]


_BROADCAST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse_loss": lambda t, u: functional.mse_loss(t[:, None], u[None]),
    "l1_loss": lambda t, u: functional.l1_loss(t[:, None], u[None], reduction="sum"),
    "smooth_l1_loss": lambda t, u: functional.smooth_l1_loss(t[:, None], u[None], reduction="none"),
    "huber_loss": lambda t, u: functional.huber_loss(t[:, None], u[None]),
    "where": lambda t, u: torch.where(t[:, None] > 0, u, t[:, None]),
    "addcmul": lambda t, u: torch.addcmul(t[:, None], u, t[:, None], value=2),
    "lerp": lambda t, u: torch.lerp(t[:, None], u, 0.25),
    "clamp": lambda t, u: torch.clamp(t[:, None], u - 1, u[0]),
    "atan2": lambda t, u: torch.atan2(t[:, None], u[None] + 3),
    "maximum of a number": lambda t, u: torch.maximum(t, u[0]),
    "a product of a number": lambda t, u: t * u[1] + u[2] * t[0],
    "a product in place": lambda t, u: (t[:, None] + u * 0).mul_(u),
    "cdist": lambda t, u: torch.cdist(t[:, None], u[:, None]),
    "dot": lambda t, u: t.dot(u),
    "outer": torch.outer,
    "baddbmm": lambda t, u: torch.baddbmm(t[None, None], u[None, :, None], t[None, None]),
    "gather": lambda t, u: t.gather(0, u.argsort()),
    "index_put": lambda t, u: t.index_put((u.argsort()[:2],), u[:2], accumulate=True),
    "cat": lambda t, u: torch.cat([t, u[:2], t[0].reshape(1)]),
    "cosine_similarity": lambda t, u: functional.cosine_similarity(t[None], u[None] + 1),
    "conv1d": lambda t, u: functional.conv1d(t[None, None], u[None, None, :3]),
    "linear": lambda t, u: functional.linear(t, u[None], u[:1]),
    "layer_norm": lambda t, u: functional.layer_norm(t, t.shape, u, u),
}
"""Functions of two vectors of one length, in which one is broadcast to the other."""
_IN_DIMS: tuple[tuple[int | None, int | None], ...] = ((0, None), (None, 0), (1, 0))


def _mapped_and_broadcast(place: str) -> Any:
    """Functions whose samples, or one of whose operands, are broadcast; also twice, and with gradients."""
    told = Offered()
    for name, function in _BROADCAST.items():
        try:
            _mapped_in_each_way("cpu", function)
        except (NotImplementedError, RuntimeError):  # torch does not map it so
            continue
        with suppress(NotImplementedError):
            for way, found in _mapped_in_each_way(place, function).items():
                told[way.format(name)] = found
    return told


def _mapped_in_each_way(place: str, function: Callable[..., torch.Tensor]) -> dict[str, Any]:
    vmap: Any = torch.func.vmap
    x, y = there(place, 5, 5), there(place, 5, 5, seed=1)
    grad = torch.func.grad(lambda t, u: function(t, u).sum())
    return {
        "{}": [
            vmap(function, dims)(*(t if d is not None else t[0] for t, d in zip((x, y), dims, strict=True)))
            for dims in _IN_DIMS
        ],
        "{} of all pairs": vmap(vmap(function, (None, 0)), (0, None))(x, y),
        "a gradient of {}": vmap(grad)(x, y),
    }


def _mapped_in_mixed_precision(place: str) -> Any:
    """Within autocast, vmap and gradients give what samples one by one give."""
    x, w = there(place, 6, 8, 8) / 8, there(place, 8, 8, seed=1) / 8
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a product": lambda t: t @ w,
        "linear": lambda t: functional.linear(t, w, w[0]),
        "a sum": lambda t: t.sum(-1),
        "softmax": lambda t: (t @ w).softmax(-1),
        "exp": lambda t: (t @ w).exp(),
        "mse_loss": lambda t: functional.mse_loss(t @ w, t),
        "conv1d": lambda t: functional.conv1d(t[None], w[:, :, None]),
        "layer_norm": lambda t: functional.layer_norm(t @ w, (8,)),
        "attention": lambda t: functional.scaled_dot_product_attention(t[None], t[None], t[None]),
        "addmm": lambda t: torch.addmm(t, t, w),
        "a product that is not cast": lambda t: _outside(place, lambda: t.float() @ w),
    }
    transform: Any = torch.func
    told = Offered()
    for name, function in functions.items():
        for dtype in (torch.bfloat16, torch.float16)[: 2 if name == "a product" else 1]:
            with suppress(NotImplementedError), torch.autocast(torch.device(place).type, dtype=dtype):
                try:
                    alone = torch.stack([function(t) for t in x])
                    slopes = [transform.grad(lambda t, f=function: f(t).float().sum())(t) for t in x]
                except RuntimeError:  # it has no such dtype
                    continue
                ways = {
                    "vmap": (transform.vmap(function)(x), alone),
                    "vmap in chunks": (transform.vmap(function, chunk_size=4)(x), alone),
                    "vmap of grad": (
                        transform.vmap(transform.grad(lambda t, f=function: f(t).float().sum()))(x),
                        torch.stack(slopes),
                    ),
                    "vjp": (transform.vjp(function, x[0])[0], alone[0]),
                }
                for way, (found, wanted) in ways.items():
                    told[f"{way} of {name} in {dtype}"] = [
                        name != "a product" or found.dtype == wanted.dtype,  # torch maps others in any dtype
                        bool(torch.allclose(found.float(), wanted.float(), rtol=0.05, atol=0.02)),
                    ]
    return told


def _outside(place: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autocast(torch.device(place).type, enabled=False):
        return call()


# -- sparse and nested tensors -------------------------------------------------------------------


def _sparse(place: str) -> Any:
    places = torch.tensor([[0, 2, 0, 1], [1, 0, 1, 3]], device=place)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], device=place)
    given = torch.sparse_coo_tensor(places, values, (3, 4))
    whole = given.coalesce()
    dense = there(place, 4, 2)
    return [
        given.to_dense(),
        whole.indices(),
        whole.values(),
        (given * 2).to_dense(),
        (given + given).to_dense(),
        torch.sparse.mm(whole, dense),
        torch.sparse.sum(whole, 1).to_dense(),
        there(place, 3, 4).to_sparse().to_dense(),
        whole.t().to_dense(),
        whole.is_coalesced(),
        given.is_coalesced(),
        str(whole.device),
        whole.cpu().to_dense().tolist(),
        there(place, 3, 4).sparse_mask(whole).to_dense(),
    ]


def _sparse_gradients(place: str) -> Any:
    table = there(place, 5, 3).requires_grad_()
    found = functional.embedding(torch.tensor([1, 4, 1], device=place), table, sparse=True)
    (found * there(place, 3, 3, seed=1)).sum().backward()
    gradient: Any = table.grad
    x = there(place, 3, 4).requires_grad_()
    x.gather(
        1, torch.tensor([[1, 1], [3, 0], [2, 2]], device=place), sparse_grad=True
    ).square().sum().backward()
    layer = nn.Embedding(5, 3, sparse=True).to(place)
    with torch.no_grad():
        layer.weight.copy_(there(place, 5, 3))
    optimizer = torch.optim.SparseAdam(list(layer.parameters()), lr=0.1)
    for turn in range(2):
        optimizer.zero_grad()
        layer(torch.tensor([turn, 3, 3], device=place)).square().sum().backward()
        optimizer.step()
    return [
        gradient.to_dense(),
        gradient.is_sparse,
        x.grad.to_dense() if x.grad is not None else None,
        layer.weight.detach(),
    ]


def _compressed(place: str) -> Any:
    given = there(place, 4, 6).to_sparse_csr()
    return [
        given.crow_indices(),
        given.col_indices(),
        given.values(),
        given.to_dense(),
        given @ there(place, 6, 2),
    ]


def _nested(place: str) -> Any:
    rows = [there(place, length, 3, seed=length) for length in (2, 4, 1)]
    given = torch.nested.nested_tensor(rows)
    return [
        given.to_padded_tensor(-1.0),
        given.to_padded_tensor(-1.0, (3, 6, 3)),
        list(given.unbind()),
        (given * 2).to_padded_tensor(0.0),
        given.size(0),
    ]


def _jagged(place: str) -> Any:
    rows = [there(place, length, 3, seed=length).requires_grad_() for length in (2, 4, 1)]
    given = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    doubled = functional.gelu(given * 2)
    doubled.values().square().sum().backward()
    plain: Any = torch.nested.nested_tensor([row.detach() for row in rows], layout=torch.jagged)
    whole = there(place, 3, 6, 2)
    part = torch.nested.narrow(whole, 1, 0, torch.tensor([2, 6, 1], device=place), layout=torch.jagged)
    return [
        [row.grad for row in rows],
        plain.offsets(),
        plain.to_padded_tensor(-1.0),
        plain.to_padded_tensor(-1.0, (3, 7, 3)),
        plain.sum(-1).values(),
        functional.linear(plain, there(place, 2, 3)).values(),
        plain.sum(1),
        plain.mean(1),
        functional.layer_norm(plain, (3,)).values(),
        [t.clone() for t in part.unbind()],
        (plain @ there(place, 3, 2)).values(),
        plain.unbind()[1],
        (plain + plain).values(),
        torch.cat([plain, plain], -1).values(),
        plain.softmax(-1).values(),
    ]


# -- scripts -------------------------------------------------------------------------------------


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.arange(3.0))

    def forward(self, x: torch.Tensor, twice: bool) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.counts
        if twice:
            y = y * 2
        return y.relu() + torch.ones(3, device=x.device)


def _scripts(place: str) -> Any:
    model = _Scripted()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(there("cpu", *parameter.shape))
    model = model.to(place)
    x = there(place, 2, 4)
    scripted = torch.jit.script(model)
    model.requires_grad_(False)
    traced = torch.jit.trace(lambda t: model(t, True), (x,))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    told: list[Any] = [scripted(x, True), scripted(x, False), traced(x * 2)]
    for where in (place, torch.device(place), "cpu"):
        file.seek(0)
        again = torch.jit.load(file, map_location=where)
        told.append(str(next(again.parameters()).device) == str(torch.device(where)) or place == "cpu")
        told.append([p.tolist() for p in again.parameters()])
        told.append(
            again.to(place)(x, True) if moves_parameters(place) else again(x.to(where), True).to(place)
        )
    return told


def _exported(place: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU()).to(place)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(there(place, *parameter.shape))
    exported = torch.export.export(model, (there(place, 2, 4),))
    return [exported.module()(there(place, 2, 4, seed=1)), list(map(str, exported.state_dict))]


def _checkpointed_by_parts(place: str) -> Any:
    """torch.distributed.checkpoint, in one process; it asks for a device's stream also on the host."""
    if not hasattr(torch.get_device_module(), "current_stream"):
        raise NotImplementedError("torch's module for the device has no streams")
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    state: dict[str, Any] = {
        "w": there(place, 5, 3),
        "n": torch.arange(7, device=place),
        "half": there(place, 3).bfloat16(),
        "step": 4,
    }
    into: dict[str, Any] = {
        "w": torch.zeros(5, 3, device=place),
        "n": torch.zeros(7, dtype=torch.int64, device=place),
        "half": torch.zeros(3, dtype=torch.bfloat16, device=place),
        "step": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
        state_dict_loader.load(into, checkpoint_id=folder, no_dist=True)
    return into


def _flexible_attention(place: str) -> Any:
    """flex_attention with changed scores and a mask of blocks; on the host the same by its formula."""
    q, k, v = (there(place, 1, 2, 16, 8, seed=n).requires_grad_() for n in range(3))
    apart = torch.arange(16.0, device=place)[:, None] - torch.arange(16.0, device=place)
    if place == "cpu":  # where torch has no gradients of it
        scores = q @ k.transpose(-1, -2) / 8**0.5 + apart / 8
        found = scores.masked_fill(apart < 0, float("-inf")).softmax(-1) @ v
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device=place)
        found = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) / 8, block_mask=mask)
    found.square().sum().backward()
    return [found.detach(), q.grad, k.grad, v.grad]


_PROGRAMS: dict[str, Program] = {
    "draws of vmap": _drawn_by_vmap,
    "mapped functions": _mapped,
    "mapped functions of operands that are broadcast": _mapped_and_broadcast,
    "mapped functions in mixed precision": _mapped_in_mixed_precision,
    "sparse tensors": _sparse,
    "sparse gradients": _sparse_gradients,
    "compressed rows": _compressed,
    "nested tensors": _nested,
    "jagged tensors": _jagged,
    "scripts": _scripts,
    "an exported model": _exported,
    "a checkpoint in parts": _checkpointed_by_parts,
    "flexible attention": _flexible_attention,
}
_OPTIONAL = (
    "sparse tensors",
    "sparse gradients",
    "compressed rows",
    "nested tensors",
    "jagged tensors",
    "an exported model",
    "flexible attention",
)
"""What many devices lack, which then refuse it with any error."""


@check(
    "current_device_name",
    promise="vmap draws as its randomness says; sparse and nested tensors, scripts and checkpoints in "
    "parts are "
    "the host's, where they are offered.",
    of="operators",
    once=True,
)
def transformed_programs(accelerator: Accelerator) -> str | None:
    return require_as_on_the_host(accelerator, _PROGRAMS, _OPTIONAL)
