"""Checks that a call gives what the calls before it gave, for faults that only some calls have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import device_names, note_of_lacks, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers
from acclimate_conformance.checks.dtypes.operators import require_alike

_CALLS = 300
_THREADS, _TURNS = 4, 12
_INPUTS = 7
"""How many inputs take turns; a prime, so that no period of 2, 4, 8 or 10 calls falls on one of them."""

_functional = torch.nn.functional


def _gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad((leaf.tanh() @ leaf.t()).square().sum(), leaf)
    return gradient


_OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + x,
    "add_": lambda x: x.clone().add_(x),
    "a sum with a number": lambda x: x + 2,
    "mul": lambda x: x * x,
    "a product of matrices": lambda x: x @ x.t(),
    "a linear layer": lambda x: _functional.linear(x, x, x[:, 0]),
    "a product of batches": lambda x: torch.bmm(x[None], x.t()[None]),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: _functional.layer_norm(x, (x.shape[-1],)),
    "gelu": _functional.gelu,
    "relu": torch.relu,
    "exp": torch.exp,
    "sum": lambda x: x.sum(),
    "a sum of rows": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: x.amax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "a comparison": lambda x: x > 0.5,
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 3),
    "a conversion to int32": lambda x: (x * 4).to(torch.int32),
    "a conversion to bfloat16": lambda x: x.to(torch.bfloat16),
    "cat": lambda x: torch.cat([x, x], 1),
    "a transposed copy": lambda x: x.t().contiguous(),
    "clone": lambda x: x.clone(),
    "fill_": lambda x: torch.empty_like(x).fill_(3),
    "zeros_like": torch.zeros_like,
    "sort": lambda x: x.sort(-1).values,
    "embedding": lambda x: _functional.embedding((x[:, 0] * 4).abs().long(), x),
    "index_add": lambda x: x.index_add(0, torch.zeros(len(x), dtype=torch.int64, device=x.device), x),
    "attention": lambda x: _functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "backward": _gradient,
}
"""What programs call most."""
_OF_MANY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sort of many": lambda x: x.repeat(90, 1).flatten().sort().values[::1009],
    "the order of many": lambda x: _many(x).argsort()[::1009],
    "topk of many": lambda x: _many(x).topk(9).values,
    "a running sum of many": lambda x: _many(x).cumsum(0)[::1009],
    "a sum of many": lambda x: _many(x).sum(),
    "the places of many": lambda x: (_many(x) > 40_000).nonzero()[::1009],
    "unique numbers of many": lambda x: (_many(x) % 1009).unique(),
    "a product of larger matrices": lambda x: (x.repeat(9, 9) @ x.t().repeat(9, 9))[::9, ::9],
    "a convolution": lambda x: _functional.conv2d(x.repeat(4, 3)[None, None], x[:3, :3][None, None])[
        ..., ::9
    ],
}
"""For which a device takes memory beside that of its result."""


def _many(x: torch.Tensor) -> torch.Tensor:
    """About 50,000 whole numbers that are all different, in another order for other numbers."""
    start = int(x.sum().abs() * 4) % 1009
    return ((torch.arange(50_021, device=x.device) + start) * 7919 % 50_021).float()


_COPIES: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "to()": lambda x, target: x.to(target, copy=True),
    "copy_()": lambda x, target: torch.empty_like(x, device=target).copy_(x),
    "copy_() to a column": lambda x, target: torch.zeros(*x.shape, 2, device=target)[..., 1].copy_(x),
}


@check(
    "supported_dtypes",
    promise="The result of an operator or a copy does not depend on how often it was called before.",
    once=True,
)  # fmt: skip
def every_call_counts(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    here = [numbers(9, 13, seed=seed).float() for seed in range(_INPUTS)]
    there = [values.to(device) for values in here]
    lacking = []
    for name, operator in _OPERATORS.items():
        try:
            found = torch.stack([operator(there[turn % _INPUTS]) for turn in range(_CALLS)]).cpu()
        except NotImplementedError:
            lacking.append(name)
            continue
        _require_each(found, [operator(values) for values in here], name)
    places = ["cpu", *device_names(accelerator)[:2]]
    for source in places:
        for target in places:
            given = [values.to(source) for values in here]
            for how, copied in _COPIES.items():
                found = torch.stack([copied(given[turn % _INPUTS], target) for turn in range(_CALLS)]).cpu()
                _require_each(found, here, f"{how} from {source} to {target}")
    weight = torch.nn.Parameter(torch.zeros(5, device=device))
    weight.grad = torch.ones(5, device=device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(_CALLS):
        optimizer.step()
    moved = weight.detach().cpu().tolist()
    require(moved == [-float(_CALLS)] * 5, f"{_CALLS} steps of SGD by 1 change 0 to {moved[0]}")
    return f"it has no {', '.join(lacking)}" if lacking else None


def _require_each(found: torch.Tensor, wanted: list[torch.Tensor], what: str) -> None:
    if torch.equal(found, torch.stack([wanted[turn % _INPUTS] for turn in range(_CALLS)])):
        return  # mostly, and much faster
    for turn, actual in enumerate(found):
        require_alike(actual, wanted[turn % _INPUTS], f"call {turn + 1} of {what}", by_element=False)


@check(
    "supported_dtypes",
    promise="Operators and their gradients are right in several threads at once.",
    once=True,
)  # fmt: skip
def operators_in_several_threads(accelerator: Accelerator) -> str | None:
    device, index = accelerator.current_device_name(), accelerator.current_device()
    here = [numbers(9, 13, seed=seed).float() for seed in range(_THREADS)]
    lacking: set[str] = set()
    operators = {**_OPERATORS, **_OF_MANY}
    wanted = {name: [operator(values) for values in here] for name, operator in operators.items()}

    def work(number: int) -> dict[str, list[torch.Tensor]]:
        there, found = here[number].to(device), {}
        with accelerator.device(index):
            for name, operator in operators.items():
                try:
                    found[name] = [operator(there) for _ in range(_TURNS)]
                except NotImplementedError:
                    lacking.add(name)
            accelerator.synchronize()
        return found

    with ThreadPoolExecutor(_THREADS) as threads:
        for number, found in enumerate(threads.map(work, range(_THREADS))):
            for name, results in found.items():
                for result in results:
                    what = f"{name} in one of {_THREADS} threads"
                    require_alike(result, wanted[name][number], what, by_element=False)
    return note_of_lacks(lacking)
