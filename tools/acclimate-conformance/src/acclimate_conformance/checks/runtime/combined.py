"""Checks of programs in which features meet: default devices, numbers of the host, lists of tensors.

What users meet is often two features at once: a device that is the default while a model is made, a number of
the host beside a tensor, many tensors of unequal sizes in one call, a class of tensors of their own.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.programs import (
    Offered,
    Program,
    raised,
    require_as_on_the_host,
    there,
)

# -- a default device ----------------------------------------------------------------------------


@contextmanager
def _default_device(place: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(place)
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


def _made_by_default(place: str) -> Any:
    with _default_device(place):
        layers = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Embedding(5, 4), nn.LSTM(4, 3), nn.Conv1d(2, 2, 3)]
        loader = DataLoader(
            TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True, generator=torch.Generator(place)
        )
        order = RandomSampler(range(5), generator=torch.Generator(place).manual_seed(1))
        told = [
            {str(t.device) for layer in layers for t in (*layer.parameters(), *layer.buffers())},
            sorted(t for (batch,) in loader for t in batch.tolist()),
            sorted(order),
            torch.tensor([1.0, 2.0]) * torch.arange(2),
            torch.as_tensor([3, 4]),
            torch.ones(2, 2).new_zeros(3),
            str(torch.from_numpy(torch.ones(2, device="cpu").numpy()).device),
            torch.randperm(5).sort().values,
            torch.nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(1)]),
            torch.triu_indices(3, 3),
            torch.scalar_tensor(3.0),
            torch.hann_window(4),
            torch.block_diag(torch.ones(1, 1), torch.ones(2, 2)),
            str(torch.empty(2, device="cpu").device),
        ]
        with torch.device("meta"):
            told.append(str(nn.Linear(2, 2).weight.device))
        with torch.device("cpu"):
            told.append(str(torch.ones(2).device))
        told.append(torch.ones(2))
    told.append(str(torch.ones(1).device))
    with torch.device(place):
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=False)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        told.append([str(t.device) for state in optimizer.state.values() for t in state.values() if t.dim()])
    told[0] = sorted(told[0])
    return told


# -- numbers of the host beside tensors of the device -----------------------------------------------


def _beside_numbers(place: str) -> Any:
    """A number of the host may be a view that begins anywhere, in any dtype, negated or conjugated."""
    of_many = torch.arange(1.0, 9.0)
    numbers = {
        "a view": of_many[5],
        "float64": of_many.double()[6],
        "an integer": torch.arange(8)[3],
        "a truth value": torch.tensor([False, True])[1],
        "float16": of_many.half()[2],
        "the real part of a conjugate": torch.tensor([1j, 2 - 3j]).conj()[1].imag,
        "negated": torch._neg_view(of_many)[4],
        "expanded": of_many[2:3].expand(4)[3],
    }
    x = there(place, 4, 5)
    told = Offered()
    for name, n in numbers.items():
        told[name] = [
            x + n,
            n * 2 - x,
            x * n,
            x / n,
            n / (x + 9),
            x.pow(2) // n,
            x.remainder(n + 1),
            torch.maximum(x, n.to(x.dtype)),
            x > n,
            x == n,
            torch.where(x > 0, x, n),
            torch.where(x > 0, n, x),
            x.clone().add_(n),
            x.clone().mul_(n),
            x.clone().fill_(n),
            x.masked_fill(x > 0, n),
            x.clamp(max=n.item()),
            torch.add(x, n, alpha=1),
            torch.add(x, n, out=torch.empty_like(x)),
            torch.full((2,), n.item(), device=x.device),
            x.t()[1:].mul(n),
        ]
    x = there(place, 4, 5)
    x[1] = of_many[5]
    x[:, 2] = of_many[1]
    x[x > 1.5] = of_many[3]
    x[torch.tensor([0, 3])] = of_many[6]
    x.index_put_((torch.tensor([2]), torch.tensor([4])), of_many[7].to(x.device))
    told["assigned"] = x
    told["indices of the host"] = [
        x[torch.tensor([3, 0, 3])],
        x[:, torch.tensor([True, False, True, False, True])],
        x[torch.arange(8)[1]],
        x[torch.arange(8)[1:3], torch.arange(8)[3]],
        x[[2, 1]],
    ]
    told["lists"] = [
        torch._foreach_mul([x, x[0]], of_many[2].to(x.device)),
        torch._foreach_add([x, x.t()], [1.5, 2.0]),
    ]
    return told


# -- many tensors of unequal sizes in one call -----------------------------------------------------


def _many_in_one_call(place: str) -> Any:
    shapes: list[tuple[int, ...]] = [(n % 7, (n * 5) % 11) if n % 3 else (n * n % 400,) for n in range(130)]
    shapes[40], shapes[90] = (70_001,), (0, 3)
    lists = [[there(place, *shape, seed=seed) for shape in shapes] for seed in (0, 1)]
    xs, ys = lists
    xs[7], ys[7] = (t.t() for t in (xs[7], ys[7]))  # one in another order, one that begins elsewhere
    xs[60] = there(place, xs[60].numel() + 3)[3:].view(xs[60].shape)
    norms = torch._foreach_norm([x for x in xs if x.numel()])
    told: list[Any] = [
        torch.stack(list(norms)),
        [t.abs().sum() for t in torch._foreach_mul(xs, ys)],
        [t.abs().sum() for t in torch._foreach_addcmul(xs, ys, ys, value=0.5)],
        [t.abs().sum() for t in torch._foreach_lerp(xs, ys, 0.25)],
        [t.abs().sum() for t in torch._foreach_maximum(xs, ys)],
        [t.abs().sum() for t in torch._foreach_div(xs, [float(n + 1) for n in range(len(xs))])],
    ]
    torch._foreach_copy_(xs, ys)
    told.append([torch.equal(a, b) for a, b in zip(xs, ys, strict=True)])
    torch._foreach_zero_(xs[::2])
    told.append([int(x.count_nonzero()) for x in xs])
    told += [
        torch.cat([x.flatten() for x in ys]),
        torch.stack([y.abs().sum() for y in ys]),
        [t.abs().sum() for t in torch.cat([y.flatten() for y in ys]).split([y.numel() for y in ys])],
        nn.utils.parameters_to_vector(ys[1:50]),
    ]
    parameters = [nn.Parameter(y.clone()) for y in ys if y.numel()]
    for number, p in enumerate(parameters):
        p.grad = torch.full_like(p, number / 8)
    told.append(nn.utils.clip_grad_norm_(parameters, 1.0))
    torch.optim.AdamW(parameters, lr=0.5, foreach=True).step()
    told.append([p.detach().abs().sum() for p in parameters])
    with suppress(RuntimeError):  # a device may have no fused optimizers
        torch.optim.SGD(parameters, lr=0.5, momentum=0.5, fused=True).step()
        return [*told, [p.detach().abs().sum() for p in parameters]]
    return told


# -- dtypes that are only moved ----------------------------------------------------------------------


def _moved_only(place: str) -> Any:
    """Numbers of 8 bits and unsigned ones: views, copies and joins, by their bytes."""
    told = Offered()
    kinds = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    for name in (kind for kind in kinds if hasattr(torch, kind)):
        dtype = getattr(torch, name)
        of_bytes = torch.arange(1, 49 * dtype.itemsize, dtype=torch.uint8)[: 48 * dtype.itemsize]
        x = (of_bytes % 100).clone().resize_(48 * dtype.itemsize).view(dtype).view(6, 8).to(place)

        def bytes_of(t: torch.Tensor) -> torch.Tensor:
            return t.contiguous().view(torch.uint8)

        moved: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "transposed": lambda t: t.t(),
            "every second": lambda t: t[:, ::2],
            "copied": lambda t: t.clone(),
            "joined": lambda t: torch.cat([t, t[1:3]]),
            "stacked": lambda t: torch.stack([t, t]),
            "expanded": lambda t: t[:1].expand(3, 8),
            "filled": lambda t: torch.empty_like(t).copy_(t),
            "a part is set": lambda t: t.clone().index_copy_(
                0, torch.tensor([4], device=t.device), t[:1].clone()
            ),
            "zeros": torch.zeros_like,
            "from the host": lambda t: t.cpu().t().to(t.device),
        }
        for what, move in moved.items():
            with suppress(RuntimeError):
                told[f"{name}, {what}"] = bytes_of(move(x))
    return told


# -- models that are loaded and made otherwise --------------------------------------------------------


def _model(place: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(there("cpu", *parameter.shape, seed=number))
    return model.to(place)


def _loaded_otherwise(place: str) -> Any:
    state = _model("cpu").state_dict()
    file = io.BytesIO()
    torch.save(_model(place).state_dict(), file)
    x = there(place, 3, 4)
    made: list[nn.Sequential] = []
    assigned = _model(place)
    file.seek(0)
    assigned.load_state_dict(torch.load(file, map_location=place), assign=True)
    made.append(assigned)
    copied = _model(place)
    copied.load_state_dict({key: value * 2 for key, value in state.items()})
    made.append(copied)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    filled = empty.to_empty(device=place)
    filled.load_state_dict(state)
    made.append(filled)
    made.append(copy.deepcopy(_model(place)))
    made.append(_model(place).half().cpu().to(place).float())
    told: list[Any] = []
    for model in made:
        model.train()
        loss = model(x).square().sum()
        loss.backward()
        # A norm subtracts what the bias before it adds: that bias's gradient is rounding noise.
        grads = [p.grad for name, p in model.named_parameters() if name != "0.bias"]
        told.append([loss, grads, list(model.buffers())])
        told.append(sorted({str(t.device) for t in model.state_dict().values()}))
    parameter: Any = made[0][0].weight
    twin = copy.deepcopy(parameter)
    told += [twin.grad is not None and torch.equal(twin.grad, parameter.grad), twin.is_leaf]
    swapped, other = torch.ones(3, device=place), torch.zeros(2, device=place)
    torch.utils.swap_tensors(swapped, other)
    told += [swapped, other]
    stateless: Any = torch.func.functional_call(made[1], dict(made[0].state_dict()), (x,))
    ensemble, buffers = torch.func.stack_module_state([_model(place).eval(), _model(place).eval()])
    base = _model(place).eval()

    def called(parameters: dict[str, torch.Tensor], its_buffers: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(base, (parameters, its_buffers), (x,))

    of_both: Any = torch.func.vmap(called)
    return [*told, stateless, of_both(ensemble, buffers)]


# -- classes of tensors of a program's own ------------------------------------------------------------


class _Tagged(torch.Tensor):
    """A tensor that counts the functions that are called on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Tagged.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _of_another_class(place: str) -> Any:
    x = there(place, 3, 4).as_subclass(_Tagged)
    _Tagged.calls = 0
    results = [x + 1, x @ x.t(), x[1:], x.clone(), x.to(place), torch.cat([x, x]), x.sum()]
    told: list[Any] = [type(r).__name__ for r in results]
    told += [r.as_subclass(torch.Tensor) for r in results]
    told.append(_Tagged.calls > len(results))
    parameter: Any = nn.Parameter(x)
    layer = nn.Linear(4, 3, bias=False).to(place)
    layer.weight = parameter
    layer(there(place, 2, 4).as_subclass(torch.Tensor)).sum().backward()
    told += [type(parameter.detach()).__name__, torch.Tensor.as_subclass(parameter.grad, torch.Tensor)]
    return told


# -- deterministic algorithms -------------------------------------------------------------------------


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _repeated(place: str) -> Any:
    """A model trains to the same bits twice, and as without; graphs of gradients add up in one order."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(3)
        table = nn.Parameter(there(place, 50, 8))
        places = (torch.arange(3000) * 7 % 50).to(place)
        model = nn.Sequential(nn.Conv1d(8, 6, 3, padding=1), nn.ReLU()).to(place)
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(there(place, *p.shape, seed=number))
        found = functional.embedding(places, table).view(30, 100, 8).transpose(1, 2)
        sums = torch.zeros(50, 8, device=place).index_add_(0, places, there(place, 3000, 8))
        put = torch.zeros(50, device=place).index_put_((places,), there(place, 3000), accumulate=True)
        scattered = torch.zeros(50, device=place).scatter_add_(0, places, there(place, 3000))
        loss = model(found).square().mean()
        loss.backward()
        grads = [p.grad for p in (table, *model.parameters()) if p.grad is not None]
        return [loss.detach(), *grads, sums, put, scattered, put.cumsum(0)]

    plain = trained()
    with _deterministic():
        first, second = trained(), trained()
    return [plain, first, all(torch.equal(a, b) for a, b in zip(first, second, strict=True))]


# -- storages -----------------------------------------------------------------------------------------


def _storages(place: str) -> Any:
    x = there(place, 4, 6)
    part = x[1:, 2:]
    other = torch.empty(0, device=place).set_(x.untyped_storage(), 5, (3, 2), (6, 2))
    other.mul_(2)
    told: list[Any] = [x.clone(), part.clone(), other.clone(), part.storage_offset(), other.is_set_to(x)]
    grown = there(place, 5)
    view = grown[:2]
    grown.resize_(9)[5:] = 7
    told += [grown.clone(), view.clone()]
    grown.resize_(3)
    told += [grown.clone(), grown.untyped_storage().nbytes() >= 36]
    told.append(raised(lambda: there(place, 3).requires_grad_().resize_(5)))
    wide = there(place, 4, 6)
    told += [
        wide.view(torch.int32).view(torch.float32),
        wide.view(torch.uint8)[1, 4:8].clone().view(torch.float32),
        wide.t().storage_offset(),
        wide[2].as_strided((2,), (3,)),
        wide[2].as_strided((2,), (3,), 1),
        wide.swapaxes(0, 1)[1].as_strided((2, 2), (6, 1)),
        wide[1:].unfold(1, 2, 3),
        wide.resize_as_(there(place, 2, 3)).clone(),
        raised(lambda: there(place, 4, 6).t().view(24)),
        raised(lambda: there(place, 3, 3)[:, 1].view(torch.float64)),
    ]
    return told


_PROGRAMS: dict[str, Program] = {
    "a default device": _made_by_default,
    "numbers of the host beside tensors": _beside_numbers,
    "many tensors in one call": _many_in_one_call,
    "dtypes that are only moved": _moved_only,
    "models that are loaded otherwise": _loaded_otherwise,
    "a class of tensors": _of_another_class,
    "deterministic algorithms": _repeated,
    "views of storages": _storages,
}


@check(
    "current_device_name",
    promise="Programs do the host's where features meet: default devices, numbers of the host, lists of many "
    "tensors, models that are loaded otherwise, classes of tensors, deterministic algorithms.",
    of="operators",
    once=True,
)
def features_meet(accelerator: Accelerator) -> str | None:
    return require_as_on_the_host(accelerator, _PROGRAMS)
