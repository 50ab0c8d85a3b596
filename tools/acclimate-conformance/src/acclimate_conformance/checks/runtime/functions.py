"""Checks of what autograd does around operators: functions of the program's own, hooks, modes, threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import REDUCED
from acclimate_conformance.checks.programs import Offered, Program, raised, require_as_on_the_host, there


class _Doubled(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Several(torch.autograd.Function):
    """Returns two results, of which the second has no gradient, and notes what backward() gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        places = x.argmax(-1)
        ctx.mark_non_differentiable(places)
        ctx.factor = factor
        return x * y * factor, x.sum(), places

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        _SEEN.append((ctx.needs_input_grad, [gradient is None for gradient in gradients]))
        first = gradients[0]
        if first is None:
            return torch.zeros_like(x), None, None
        return first * y * ctx.factor, None, first * x * ctx.factor if ctx.needs_input_grad[2] else None


_SEEN: list[Any] = []


class _Once(torch.autograd.Function):
    """Squares its input; its gradient has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = gradient * 2 * x
        return result


class _Forward(torch.autograd.Function):
    """The square, with a derivative forwards, and for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = gradient * 2 * ctx.saved_tensors[0]
        return found

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = tangent * 2 * ctx.saved_tensors[0]
        return found


def _leaf(place: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return there(place, *shape, seed=seed).requires_grad_()


def _in_place(place: str) -> Any:
    x = _leaf(place, 4, 5)
    y = x * 3
    z = _Doubled.apply(y)  # type: ignore[no-untyped-call]
    z.square().sum().backward()
    return [z is y, z, x.grad, y._version, raised(lambda: _Doubled.apply(x))]  # type: ignore[no-untyped-call]


def _several(place: str) -> Any:
    _SEEN.clear()
    x, y = _leaf(place, 4, 5), there(place, 4, 5, seed=1)
    product, total, places = _Several.apply(x, 1.5, y)  # type: ignore[no-untyped-call]
    product.sum().backward()
    _, total, _ = _Several.apply(x, 2.0, y.requires_grad_())  # type: ignore[no-untyped-call]
    total.backward()
    return [x.grad, places, places.requires_grad, list(_SEEN)]


def _once(place: str) -> Any:
    x = _leaf(place, 5)
    (first,) = torch.autograd.grad(_Once.apply(x).sum(), x, create_graph=True)  # type: ignore[no-untyped-call]
    return [first.detach(), raised(lambda: first.sum().backward())]


def _of_functions(place: str) -> Any:
    x = there(place, 5)
    vmapped = torch.func.vmap(_Forward.apply)(x[:, None])
    value, slope, *_ = torch.func.jvp(_Forward.apply, (x,), (torch.ones_like(x) * 3,))
    return [vmapped, value, slope, torch.func.grad(lambda t: _Forward.apply(t).sum())(x)]  # type: ignore[no-untyped-call]


def _forwards(place: str) -> Any:
    x, w = there(place, 3, 4) / 2, there(place, 4, 3, seed=1) / 2
    found = []
    with forward_ad.dual_level():
        # Not of ones, in whose direction a variance does not change: what is left of it is rounding noise.
        dual = forward_ad.make_dual(x, there(place, 3, 4, seed=2))
        for call in _DIFFERENTIABLE.values():
            found.append(forward_ad.unpack_dual(call(dual, w)).tangent)
        inside = forward_ad.unpack_dual(dual * 2).tangent is None
    return [*found, inside]


_DIFFERENTIABLE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a product": lambda x, w: x @ w,
    "linear": lambda x, w: torch.nn.functional.linear(x, w.t(), w[0]),
    "tanh": lambda x, w: x.tanh(),
    "gelu": lambda x, w: torch.nn.functional.gelu(x),
    "silu": lambda x, w: torch.nn.functional.silu(x),
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: x.log_softmax(0),
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, (4,), w[:, 0], w[:, 1]),
    "group_norm": lambda x, w: torch.nn.functional.group_norm(x[None], 1),
    "sum": lambda x, w: x.square().sum(0),
    "a view": lambda x, w: x.t()[1:].square(),
    "cat": lambda x, w: torch.cat([x, w.t()]).square(),
    "exp": lambda x, w: x.exp(),
    "where": lambda x, w: torch.where(x > 0, x, x * 3),
    "clamp": lambda x, w: x.clamp(-0.6, 0.6),
    "index": lambda x, w: x[[0, 2]] * x[1],
    "cumsum": lambda x, w: x.cumsum(0),
    "conv1d": lambda x, w: torch.nn.functional.conv1d(x.t()[None], w.t()[:, :, None]),
    "embedding": lambda x, w: torch.nn.functional.embedding(torch.tensor([1, 0], device=x.device), x),
    "logsumexp": lambda x, w: x.logsumexp(1),
    "var": lambda x, w: x.var(0),
    "norm": lambda x, w: x.norm(),
    "an addition in place": lambda x, w: x.clone().mul_(3).add_(1),
}


def _reverse_over_forward(place: str) -> Any:
    x, v = there(place, 4) / 2, there(place, 4, seed=2)

    def total(t: torch.Tensor) -> torch.Tensor:
        return (t.sin() * t.square()).sum()

    return [
        functional.jacobian(lambda t: t.exp() * t[0], x),
        functional.hessian(total, x),
        functional.vjp(lambda t: t.exp(), x, v),
        functional.jvp(lambda t: t.exp(), x, v),
        functional.hvp(total, x, v),
        functional.vhp(total, x, v),
        functional.jacobian(lambda t: t.exp() * t[0], x, vectorize=True),
        functional.jacobian(lambda t: t.exp() * t[0], x, vectorize=True, strategy="forward-mode"),
    ]


def _anomalies(place: str) -> Any:
    def bad() -> None:
        x = torch.zeros(3, device=place, requires_grad=True)
        (x.sqrt() * 0).sum().backward()

    told = []
    for checks_nan in (True, False):
        with torch.autograd.detect_anomaly(check_nan=checks_nan):
            told.append(raised(bad))
    told += [torch.is_anomaly_enabled(), raised(bad)]
    return told


def _seen_by_hooks(place: str) -> Any:
    seen: list[Any] = []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(place)
    reference = [torch.full_like(p, 0.25) for p in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference, strict=True):
            parameter.copy_(value)

    def before(module: Any, gradients: Any) -> Any:
        seen.append(("before", gradients[0].detach()))
        return (gradients[0] * 2,)

    def after(module: Any, inward: Any, outward: Any) -> Any:
        seen.append(("after", outward[0].detach()))
        return (inward[0] * 3,) if inward[0] is not None else None

    model[2].register_full_backward_pre_hook(before)
    model[2].register_full_backward_hook(after)
    model[0].register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)
    model[1].register_forward_hook(lambda m, a, out: seen.append(("always", out.detach())), always_call=True)

    def everywhere(module: Any, given: Any, result: Any) -> None:
        seen.append((type(module).__name__, result.detach()))

    def backwards(module: Any, inward: Any, outward: Any) -> None:
        seen.append((f"of {type(module).__name__}", outward[0].detach()))

    handles = [
        torch.nn.modules.module.register_module_forward_hook(everywhere),
        torch.nn.modules.module.register_module_full_backward_hook(backwards),
    ]
    try:
        x = _leaf(place, 3, 4)
        model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    count = len(seen)
    model(x.detach())
    gradients = [p.grad for p in model.parameters()]
    return [seen[:count], [name for name, _ in seen[count:]], gradients, x.grad]


def _hooks_of_several(place: str) -> Any:
    seen: list[Any] = []
    x, y, z = (_leaf(place, 3, seed=n) for n in range(3))
    every = torch.autograd.graph.register_multi_grad_hook(
        (x, y, z), lambda grads: seen.append([None if g is None else g.detach() for g in grads])
    )
    any_of = torch.autograd.graph.register_multi_grad_hook(
        (x, y), lambda grad: seen.append(("any", grad.detach())), mode="any"
    )
    (x * y).sum().backward()
    (x * y * z).sum().backward()
    every.remove()
    any_of.remove()
    (x * y).sum().backward()
    middle = x * 2
    middle.retain_grad()
    middle.register_hook(lambda g: g * 5)
    middle.register_hook(lambda g: seen.append(("middle", g.detach())))
    node: Any = middle.grad_fn
    node.register_hook(lambda inward, outward: (inward[0] * 7, *inward[1:]))
    middle.square().sum().backward()
    return [seen, middle.grad, x.grad, y.grad, z.grad]


def _gradients_keep_their_place(place: str) -> Any:
    """Gradients lie as their parameters do, add up in place, and are no one else's memory."""
    told: list[Any] = []
    for x in (_leaf(place, 3, 4), there(place, 4, 3).t().requires_grad_()):
        (x.t() @ x).sum().backward()
        first = x.grad
        x.exp().sum().backward()
        told += [x.grad is first, x.grad.stride() if x.grad is not None else None]
    a, b = _leaf(place, 3), _leaf(place, 3, seed=1)
    (a + b).sum().backward()
    if a.grad is not None and b.grad is not None:
        a.grad.zero_()
        told.append(b.grad)
    given = torch.ones(3, device=place)
    c = _leaf(place, 3)
    (c * 1).backward(given)
    if c.grad is not None:
        c.grad.add_(1)
    return [*told, given]


def _asked_for(place: str) -> Any:
    x, y, z = (_leaf(place, 3, seed=n) for n in range(3))
    (x * y).sum().backward(inputs=[x])
    told: list[Any] = [x.grad, y.grad is None]
    told += torch.autograd.grad((x * y).sum(), [x, z], allow_unused=True, materialize_grads=True)
    told += [raised(lambda: torch.autograd.grad((x * y).sum(), [x, z]))]
    many = torch.eye(3, device=place)
    told += torch.autograd.grad(x * y * 2, x, many, is_grads_batched=True)
    told += [raised((x * y).backward), raised(lambda: x.detach().sum().backward())]
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return [*told, second.detach(), *torch.autograd.grad(second.sum(), x)]


def _twice(place: str) -> Any:
    """A second backward() of one graph gives the same gradients, those of draws too."""
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
        "dropout of bfloat16": lambda x: torch.nn.functional.dropout(x.bfloat16(), 0.25).float(),
        "alpha_dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.5, training=True),
        "dropout1d": lambda x: torch.nn.functional.dropout1d(x[None], 0.5),
        "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
        "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
        "gumbel_softmax": torch.nn.functional.gumbel_softmax,
        "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None] * 2, x[None, None], dropout_p=0.5
        ),
        "an LSTM": _recurrent,
        "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)) * x,
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (16,)),
        "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        "conv1d": lambda x: torch.nn.functional.conv1d(x[None], torch.ones(2, 16, 3, device=x.device)),
        "max_pool1d": lambda x: torch.nn.functional.max_pool1d(x[None], 3),
    }
    told = Offered()
    for name, call in layers.items():
        x = there(place, 16, 16, seed=3).requires_grad_()
        try:
            loss = (call(x) * there(place, 16, 16, seed=4).sum()).square().sum()
            first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
        except NotImplementedError:
            continue
        torch.rand(7, device=place)
        (third,) = torch.autograd.grad(loss, x)
        told[name] = bool(torch.equal(first, second)) and bool(torch.equal(first, third))
    return told


def _recurrent(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    layer = torch.nn.LSTM(16, 4, num_layers=2, dropout=0.5).to(x.device)
    found: torch.Tensor = layer(x[:, None])[0]
    return found


_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones(4, 4)),
    "exp_": lambda x: x.exp_(),
    "clamp_": lambda x: x.clamp_(0, 1),
    "an assignment": lambda x: x.__setitem__(0, 1.0),
    "an assignment to places": lambda x: x.__setitem__([0, 2], 1.0),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1], device=x.device), 2.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1], device=x.device), x[:1].clone()),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1], device=x.device), x[:1].clone()),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.int64, device=x.device), 2.0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "random_": lambda x: x.random_(),
    "relu_": torch.relu_,
    "sort into it": lambda x: torch.sort(
        x.clone(), out=(x, torch.empty(4, 4, dtype=torch.int64, device=x.device))
    ),
    "a product into it": lambda x: torch.mm(x.clone(), x.clone(), out=x),
    "a sum into it": lambda x: torch.add(x, x, out=x),
    "t_": lambda x: x.t_(),
    "detach": lambda x: x.detach(),
    "a list": lambda x: torch._foreach_add_([x, x[0].clone()], 1.0),
    "lists": lambda x: torch._foreach_copy_([x], [x.clone()]),
    "addmm_": lambda x: x.addmm_(x.clone(), x.clone()),
    "tril_": lambda x: x.tril_(),
    "a change of a view": lambda x: x[1:].t()[0].add_(1),
    "a change of a detached one": lambda x: x.detach().add_(1),
    "a change of data": lambda x: x.data.add_(1),
    "requires_grad_": lambda x: x.requires_grad_(False),
    "a conversion": lambda x: x.to(torch.int32),
    "resize_": lambda x: x.resize_(4, 4),
}
"""Calls, of which some change a tensor."""


def _versions(place: str) -> Any:
    """How many changes torch counts of a tensor, by which backward() knows that a saved one changed."""
    told = Offered()
    for what, change in _CHANGES.items():
        x = there(place, 4, 4)
        part = x[:1]
        try:
            change(x)
        except NotImplementedError:
            continue
        told[what] = str((x._version > 0, part._version > 0))
    return told


def _modes(place: str) -> Any:
    x = _leaf(place, 3)

    @torch.no_grad()
    def without() -> bool:
        return (x * 2).requires_grad

    @torch.inference_mode()
    def inferring() -> list[bool]:
        made = x * 2
        return [made.requires_grad, made.is_inference(), made[1:].is_inference()]

    told: list[Any] = [without(), *inferring()]
    with torch.set_grad_enabled(False):
        told += [(x * 2).requires_grad, _elsewhere(lambda: (x * 2).requires_grad)]

    def doubled() -> bool:
        return (x * 2).is_inference()

    with torch.inference_mode():
        made = x.detach() * 2
        told += [_elsewhere(doubled), raised(made.requires_grad_)]
    told += [
        raised(lambda: made.add_(1)),
        made.clone().is_inference(),
        raised(lambda: (made * x).sum().backward()),
    ]
    return told


def _elsewhere(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0] if found else "it raises"


def _one_leaf_of_threads(place: str) -> Any:
    """Several threads add to the gradient of one leaf."""
    x = _leaf(place, 33)
    threads = [
        threading.Thread(target=lambda n=n: [(x * n).sum().backward() for _ in range(5)]) for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return x.grad


def _saved(place: str) -> Any:
    """Hooks on saved tensors see what is saved, may change it, nest, and may be forbidden."""
    x, w = _leaf(place, 4, 4), there(place, 4, 4, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        inner = x * w
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 5):
            both = inner @ w
    both.sum().backward()

    def forbidden() -> None:
        with (
            torch.autograd.graph.disable_saved_tensors_hooks("no"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            (x * w).sum()

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        changed = w.clone()
        y = (x.detach().requires_grad_() * changed).sum()
        changed.zero_()
        y.backward()
    return [x.grad, raised(forbidden)]


def _seen_by_packing(place: str) -> Any:
    """Whether layers save tensors where hooks see them."""
    layers: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
        "Linear": (lambda: torch.nn.Linear(8, 4), (4, 8)),
        "Conv2d": (lambda: torch.nn.Conv2d(2, 3, 3), (2, 2, 6, 6)),
        "LayerNorm": (lambda: torch.nn.LayerNorm(8), (4, 8)),
        "GroupNorm": (lambda: torch.nn.GroupNorm(2, 4), (2, 4, 6)),
        "BatchNorm1d": (lambda: torch.nn.BatchNorm1d(8), (4, 8)),
        "GELU": (torch.nn.GELU, (4, 8)),
        "Softmax": (lambda: torch.nn.Softmax(-1), (4, 8)),
        "LSTM": (lambda: torch.nn.LSTM(8, 4), (3, 2, 8)),
        "MultiheadAttention": (_Attention, (2, 5, 8)),
        "Dropout": (lambda: torch.nn.Dropout(0.5), (4, 8)),
        "RMSNorm": (lambda: torch.nn.RMSNorm(8), (4, 8)),
        "MaxPool2d": (lambda: torch.nn.MaxPool2d(2), (2, 2, 6, 6)),
    }
    told = Offered()
    for name, (make, shape) in layers.items():
        packed: list[int] = []
        unpacked: list[int] = []

        def pack(t: torch.Tensor, packed: list[int] = packed) -> torch.Tensor:
            packed.append(t.numel())
            return t.clone()

        def unpack(t: torch.Tensor, unpacked: list[int] = unpacked) -> torch.Tensor:
            unpacked.append(t.numel())
            return t

        layer, x = make().to(place), there(place, *shape).requires_grad_()
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                result = layer(x)
                result = result[0] if isinstance(result, tuple) else result
            result.sum().backward()
        except NotImplementedError:
            continue
        told[name] = [bool(packed), bool(unpacked)]
    return [name for name, seen in told.items() if not all(seen)]


class _Attention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x[None] * 2, x[None], x[None], is_causal=True)


def _recomputed(place: str) -> Any:
    """Checkpoints with options: nested, with keywords, with what is no tensor, of several results."""
    w = _leaf(place, 4, 4, seed=1)

    def block(
        x: torch.Tensor, factor: float = 1.0, part: Any = None
    ) -> tuple[torch.Tensor, str, torch.Tensor]:
        inner = checkpoint(lambda t: (t @ w).tanh(), x, use_reentrant=False)
        return inner * factor, "text", x.sum() if part is None else part["a"] * x.sum()

    found: list[Any] = []
    for reentrant in (False,):
        x, own = _leaf(place, 3, 4), _leaf(place, 1, seed=2)
        w.grad = None
        one, text, two = checkpoint(block, x, factor=2.0, part={"a": own}, use_reentrant=reentrant)
        (one.sum() + two.sum()).backward()
        found += [text, x.grad, own.grad, None if w.grad is None else w.grad.clone()]

    calls: list[int] = []

    def inconstant(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x[: len(calls)] * 2).sin()

    x = _leaf(place, 3, 4)
    result = checkpoint(inconstant, x, use_reentrant=False)
    return [*found, raised(lambda: result.sum().backward())]


def _recomputed_under_autocast(dtype: torch.dtype, place: str) -> Any:
    """A block that is computed again is computed in the dtypes of the first time."""
    kind = torch.device(place).type
    if not torch.amp.is_autocast_available(kind):
        raise NotImplementedError(f"autocast on {kind}")
    seen: list[str] = []
    x = _leaf(place, 4, 4)

    def block(t: torch.Tensor) -> torch.Tensor:
        product = t @ t
        seen.append(str(product.dtype))
        return product.float().sin()

    for reentrant in (False, True):
        with torch.autocast(kind, dtype):
            result = checkpoint(block, x, use_reentrant=reentrant)
        result.sum().backward()
    return [seen, str((x @ x).dtype)]


def _moved_with_gradients(place: str) -> Any:
    """Moves are differentiable twice, and forwards."""
    x = there("cpu", 4).bfloat16().requires_grad_()
    found: list[Any] = []
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "to() in another dtype": lambda t: t.to(place, torch.float32),
        "to()": lambda t: t.to(place),
        "to() and back": lambda t: t.to(place).cpu(),
        "copy_()": lambda t: torch.zeros(4, device=place).copy_(t),
        "another dtype there": lambda t: t.to(place).float(),
    }
    for move in ways.values():
        (first,) = torch.autograd.grad(move(x).float().pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found += [str(first.dtype), first.tolist(), str(second.dtype), second.tolist(), first.requires_grad]
        value, tangent, *_ = torch.func.jvp(move, (x.detach(),), (torch.ones_like(x) * 3,))
        found += [value.tolist(), tangent.tolist(), str(tangent.dtype)]
    return found


def _saved_elsewhere(place: str) -> Any:
    """What is saved on the host has its elements in their order, whatever the layout."""
    x = there(place, 4, 6)
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t(), "every second column": lambda t: t[:, ::2],
        "flipped": lambda t: t.flip(0),
        "expanded": lambda t: t[:1].expand(3, 6), "a column": lambda t: t[:, 2], "as it lies": lambda t: t,
        "bfloat16": lambda t: t.t().bfloat16(),
    }  # fmt: skip
    found = []
    for view in layouts.values():
        for pinned in (False, True) if place != "cpu" else (False, False):
            w = torch.full_like(view(x), 0.5).requires_grad_()
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned, device_type=torch.device(place).type):
                loss = (w * view(x)).sum()
            loss.backward()
            found.append(w.grad)
    return found


_PROGRAMS: dict[str, Program] = {
    "moves with gradients": _moved_with_gradients,
    "tensors saved on the host": _saved_elsewhere,
    "a function that changes its input": _in_place,
    "a function with several results": _several,
    "a function that is differentiable once": _once,
    "a function for torch.func": _of_functions,
    "derivatives forwards": _forwards,
    "torch.autograd.functional": _reverse_over_forward,
    "detect_anomaly": _anomalies,
    "hooks of modules": _seen_by_hooks,
    "hooks of several tensors and of nodes": _hooks_of_several,
    "where gradients lie": _gradients_keep_their_place,
    "gradients that are asked for": _asked_for,
    "backward() of one graph again": _twice,
    "versions of tensors": _versions,
    "no_grad and inference_mode": _modes,
    "one leaf in several threads": _one_leaf_of_threads,
    "hooks of saved tensors": _saved,
    "layers that save tensors unseen": _seen_by_packing,
    "checkpoints with options": _recomputed,
}


@check(
    "current_device_name", "supported_dtypes",
    promise="Functions, hooks, modes and checkpoints of autograd do on the device what they do on the host.",
    of="operators",
)  # fmt: skip
def autograd_is_torchs(accelerator: Accelerator) -> str | None:
    programs = dict(_PROGRAMS)
    for dtype in [d for d in REDUCED if d in accelerator.supported_dtypes()][:1]:
        programs["a checkpoint within autocast"] = functools.partial(_recomputed_under_autocast, dtype)
    return require_as_on_the_host(accelerator, programs)
