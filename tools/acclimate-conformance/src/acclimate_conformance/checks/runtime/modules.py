"""Checks of modules, optimizers, schedules and loaders of data: what torch makes of a device's tensors."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.prune import custom_from_mask, l1_unstructured, remove
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.optim import lr_scheduler, swa_utils
from torch.utils import data

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.programs import (
    Program,
    moves_parameters,
    raised,
    require_as_on_the_host,
    there,
)
from acclimate_conformance.checks.target import Subject, load


def _filled(module: nn.Module, place: str) -> nn.Module:
    """The module on a place, with weights that do not depend on its random numbers."""
    moved = module.to(place)
    with torch.no_grad():
        for number, parameter in enumerate(moved.parameters()):
            parameter.copy_(there(place, *parameter.shape, seed=number) / 4)
    return moved


def _model(place: str) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)), place)


def _parametrized(place: str) -> Any:
    torch.manual_seed(1)
    told: list[Any] = []
    x = there(place, 3, 4)
    for make in (parametrizations.weight_norm, parametrizations.spectral_norm):
        layer = make(_filled(nn.Linear(4, 4), "cpu")).to(place)
        told.append(layer(x))
        layer(x).sum().backward()
        told += [p.grad for p in layer.parameters()]
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        told += [layer.weight, [name for name, _ in layer.named_parameters()]]
    return told


def _pruned(place: str) -> Any:
    layer: Any = _filled(nn.Linear(4, 4), place)
    with torch.no_grad():  # no two weights are as near to zero: which of them goes first is not said
        layer.weight.add_(torch.arange(16.0, device=place).view(4, 4) / 1024)
    l1_unstructured(layer, "weight", amount=5)
    custom_from_mask(layer, "bias", torch.tensor([1, 0, 1, 1], device=place))
    found = [layer(there(place, 3, 4)), layer.weight_mask, dict(layer.named_buffers())]
    layer.to(place)
    remove(layer, "weight")
    return [*found, layer.weight]


def _functional(place: str) -> Any:
    model = _model(place)
    other = {key: value * 2 for key, value in model.state_dict().items()}
    found = torch.func.functional_call(model, other, (there(place, 3, 4),))
    models = [_filled(nn.Linear(4, 2), place) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(p: Any, b: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(base, (p, b), (x,))

    every = torch.func.vmap(call, (0, 0, None))(parameters, buffers, there(place, 3, 4))
    return [found, every, dict(parameters)]


def _averaged(place: str) -> Any:
    model = _model(place)
    plain = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        plain.update_parameters(model)
        moving.update_parameters(model)
    swa_utils.update_bn([there("cpu", 5, 4, seed=n) for n in range(2)], plain, device=torch.device(place))
    # torch itself leaves the count of the averaged models on the host.
    return [
        {key: value for key, value in averaged.state_dict().items() if key != "n_averaged"}
        for averaged in (plain, moving)
    ]


def _as_a_vector(place: str) -> Any:
    model = _model(place)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    parts: list[Any] = [_filled(layer, place).eval() for layer in (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))]
    fused = nn.utils.fuse_conv_bn_eval(*parts)
    return [vector, model.state_dict(), fused(there(place, 1, 2, 5, 5))]


def _converted(place: str) -> Any:
    told: list[Any] = []
    for convert in ("half", "bfloat16", "float"):
        model = _model(place)
        getattr(model, convert)()
        told.append(
            [(name, str(value.dtype), str(value.device)) for name, value in model.state_dict().items()]
        )
    model = _model(place).type(torch.float32).to(torch.bfloat16).requires_grad_(False)
    told += [[(p.dtype == torch.bfloat16, p.requires_grad) for p in model.parameters()]]
    images: Any = _filled(nn.Conv2d(3, 4, 2), place)
    images.to(memory_format=torch.channels_last)
    told += [images.weight.stride(), images(there(place, 2, 3, 5, 5))]
    tied = nn.Module()
    tied.one, tied.two = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.two.weight = tied.one.weight
    tied.to(place).to(torch.bfloat16)
    told.append(len(list(tied.parameters())) if moves_parameters(place) else 3)
    model = _model(place)
    model(there(place, 3, 4)).sum().backward()
    model.zero_grad(set_to_none=False)
    told.append([p.grad for p in model.parameters()])
    model.zero_grad()
    return [*told, [p.grad is None for p in model.parameters()]]


def _states(place: str) -> Any:
    model = _model(place)
    state = model.state_dict(prefix="a.", keep_vars=True)
    told: list[Any] = [state, [value.requires_grad for value in state.values()]]
    other = _model(place)
    plain = model.state_dict()
    changes: list[dict[str, Any]] = [
        {"more": torch.zeros(1)}, {"0.weight": torch.zeros(5, 5)}, {"0.weight": 3},
    ]  # fmt: skip
    told += [raised(partial(other.load_state_dict, {**plain, **change})) for change in changes]
    told.append(raised(partial(other.load_state_dict, {"0.weight": plain["0.weight"]})))
    told += [str(other.load_state_dict({"0.bias": torch.ones(6)}, strict=False)), other.state_dict()]
    other.load_state_dict(
        {
            key: value.double() if value.is_floating_point() else value
            for key, value in _model("cpu").state_dict().items()
        }
    )
    told.append(other.state_dict())
    before = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(plain)
    return [*told, before == [p.data_ptr() for p in other.parameters()]]


def _sequences(place: str) -> Any:
    rows = [there(place, length, 3, seed=length) for length in (2, 5, 1)]
    padded = pad_sequence(rows, batch_first=True, padding_value=-1.0)
    packed = pack_padded_sequence(padded, torch.tensor([2, 5, 1]), batch_first=True, enforce_sorted=False)
    layer = _filled(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), place)
    found, (last, cell) = layer(packed)
    whole, lengths = pad_packed_sequence(found, batch_first=True, padding_value=9.0, total_length=6)
    whole.sum().backward()
    left = pad_sequence(rows, padding_side="left") if hasattr(torch, "_pad_sequence_side") else padded
    plain: Any = pack_sequence(rows, enforce_sorted=False)
    return [
        padded,
        packed.data,
        packed.batch_sizes.tolist(),
        packed.sorted_indices,
        packed.unsorted_indices,
        whole,
        lengths.tolist(),
        last,
        cell,
        [p.grad for p in layer.parameters()],
        left,
        plain.data,
        packed.is_cuda == packed.data.is_cuda,
        plain.to(torch.bfloat16).data,
        plain.to("cpu").data.tolist(),
        nn.utils.rnn.unpad_sequence(padded, lengths, batch_first=True),
        *_moved_packed(place),
    ]


def _moved_packed(place: str) -> Any:
    packed: Any = pack_sequence([torch.arange(2.0), torch.arange(4.0)], enforce_sorted=False)
    found: list[Any] = []
    for moved in (packed.to(place), packed.to(device=place, dtype=torch.bfloat16, non_blocking=True)):
        found += [moved.data, str(moved.batch_sizes.device.type == "cpu"), moved.batch_sizes.tolist()]
        found += [moved.sorted_indices, moved.unsorted_indices, *pad_packed_sequence(moved)[:1]]
    return found


def _lazy(place: str) -> Any:
    model = nn.Sequential(nn.LazyLinear(3, device=place), nn.LazyBatchNorm1d(device=place))
    found = model(there(place, 4, 5))
    shapes = [list(p.shape) for p in model.parameters()]
    moved = nn.LazyLinear(2).to(place) if moves_parameters(place) else nn.LazyLinear(2, device=place)
    moved(there(place, 2, 7))
    made = nn.utils.skip_init(nn.Linear, 3, 2, device=place)
    return [list(found.shape), shapes, str(moved.weight.device), str(made.weight.device)]


def _initialised(place: str) -> Any:
    w = torch.empty(4, 6, device=place)
    kernel = torch.empty(4, 2, 3, device=place)
    init = nn.init
    fixed = [
        init.constant_(w, 0.5).clone(),
        init.eye_(w).clone(),
        init.zeros_(w).clone(),
        init.ones_(w).clone(),
        init.dirac_(kernel).clone(),
        init.dirac_(kernel, 2).clone(),
    ]
    rows = init.orthogonal_(w)
    limits = []
    for fill in (init.xavier_uniform_, init.kaiming_uniform_, init.xavier_normal_, init.trunc_normal_):
        drawn = fill(torch.empty(64, 32, device=place))
        limits.append(bool(0 < float(drawn.abs().max()) < 4) and not drawn.requires_grad)
    return [*fixed, rows @ rows.t(), limits, float((init.sparse_(w, 0.5) == 0).sum()) >= 12]


_MODULES: dict[str, Program] = {
    "parametrizations": _parametrized,
    "pruned weights": _pruned,
    "functional_call": _functional,
    "averaged models": _averaged,
    "parameters as a vector": _as_a_vector,
    "converted modules": _converted,
    "states of modules": _states,
    "packed sequences": _sequences,
    "lazy modules": _lazy,
    "initial weights": _initialised,
}


@check(
    "current_device_name",
    promise="What torch makes of modules, such as averages, conversions and packed sequences, is the host's.",
    of="tensors",
)
def modules_are_torchs(accelerator: Accelerator) -> str | None:
    return require_as_on_the_host(accelerator, _MODULES)


# -- optimizers ----------------------------------------------------------------------------------

_KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW of lists": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam of one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "Adam with a rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}

_ON_THE_HOST = ("step", "mu_product", "eta", "mu")
"""Numbers that optimizers keep on the host."""


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, place: str, turns: range) -> None:
    for turn in turns:
        optimizer.zero_grad()
        model(there(place, 5, 4, seed=turn)).square().sum().backward()
        optimizer.step()


def _resumed(place: str) -> Any:
    """An optimizer that is saved, restored, copied or pickled goes on as the one that was not."""
    told = {}
    for name, make in _KINDS.items():
        model = _filled(nn.Linear(4, 2), place)
        optimizer = make(model.parameters())
        _steps(model, optimizer, place, range(3))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        state = torch.load(file, map_location="cpu")
        again = nn.Linear(4, 2).to(place)
        again.load_state_dict(state[0])
        its_own = make(again.parameters())
        its_own.load_state_dict(state[1])
        twin, its_twin = copy.deepcopy((model, optimizer))
        pickled, its_pickled = pickle.loads(pickle.dumps((model, optimizer)))
        pairs = [(model, optimizer), (again, its_own), (twin, its_twin), (pickled, its_pickled)]
        for one, its in pairs:
            _steps(one, its, place, range(3, 5))
        told[name] = [one.state_dict() for one, _ in pairs]
        told[f"the states of {name}"] = [
            {key: value for key, value in its.state[p].items() if key not in _ON_THE_HOST}
            for one, its in pairs
            for p in one.parameters()
        ]
    return told


def _groups(place: str) -> Any:
    one, two = _filled(nn.Linear(4, 4), place), _filled(nn.Linear(4, 4), place)
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5)
    both = nn.Sequential(one, two)
    _steps(both, optimizer, place, range(2))
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.01, "maximize": True})
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda o, a, k: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append("after"))
    _steps(both, optimizer, place, range(2, 4))
    before.remove()
    _steps(both, optimizer, place, range(4, 5))
    bucket = torch.ones(3, 4, device=place)
    one.weight.grad = None
    first, second = nn.Parameter(there(place, 3)), nn.Parameter(there(place, 3, 2))
    first.grad, second.grad = bucket[:, 1], bucket[:, 2:]
    plain = torch.optim.SGD([first, second], lr=0.5)
    plain.step()
    second.grad = bucket[:, 3:].expand(3, 2)
    first.grad.zero_()
    plain.zero_grad(set_to_none=False)
    gaps = [there(place, 4, 6)[:, ::2], there(place, 6, 4).t()[1:3]]
    torch._foreach_zero_(gaps)
    return [both.state_dict(), seen, bucket, first.detach(), gaps, [gap._base for gap in gaps]]


def _with_closures(place: str) -> Any:
    model = _filled(nn.Linear(4, 2), place)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.25, max_iter=4, line_search_fn="strong_wolfe")
    x = there(place, 6, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    return [[float(loss) for loss in losses], model.state_dict()]


def _schedules(place: str) -> Any:
    told = {}
    makers: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.75**step),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=7),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=2, cycle_momentum=False),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
        "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 3),
    }
    for name, make in makers.items():
        for in_tensor in (False, True):
            model = _filled(nn.Linear(4, 2), place)
            rate: Any = torch.tensor(0.1, device=place) if in_tensor else 0.1
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
            try:
                schedule = make(optimizer)
                rates = []
                for turn in range(5):
                    _steps(model, optimizer, place, range(turn, turn + 1))
                    schedule.step()
                    rates.append(float(optimizer.param_groups[0]["lr"]))
            except (RuntimeError, ValueError, TypeError):  # not of a rate in a tensor
                continue
            told[f"{name}{' of a rate in a tensor' * in_tensor}"] = [rates, model.state_dict()]
    model = _filled(nn.Linear(4, 2), place)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(plain, patience=0, factor=0.5)
    rates = []
    for loss in (3.0, 2.0, 2.5, 2.6, 1.0):
        plateau.step(torch.tensor(loss, device=place))
        rates.append(plain.param_groups[0]["lr"])
    return {**told, "ReduceLROnPlateau": rates}


def _of_mixed_parameters(place: str) -> Any:
    """Parameters of several dtypes, frozen ones, ones without a gradient, and a tensor of nothing."""
    told: list[Any] = []
    kinds: tuple[dict[str, Any], ...] = ({"foreach": True}, {"foreach": False})
    for options in kinds:
        made = [
            nn.Parameter(there(place, 3, 4)),
            nn.Parameter(there(place, 5).bfloat16()),
            nn.Parameter(there(place, 2), requires_grad=False),
            nn.Parameter(there(place, 2, 2)),
            nn.Parameter(torch.zeros(0, device=place)),
            nn.Parameter(there(place, 1)[0].clone()),
        ]
        optimizer = torch.optim.AdamW(made, lr=0.1, **options)
        for turn in range(3):
            for number, parameter in enumerate(made):
                if number not in (2, 3 if turn else 2):
                    parameter.grad = torch.ones_like(parameter) * (turn + 1)
            optimizer.step()
        told += [p.detach() for p in made]
    return told


_OPTIMIZERS: dict[str, Program] = {
    "optimizers that are saved and go on": _resumed,
    "groups and hooks of optimizers": _groups,
    "LBFGS": _with_closures,
    "schedules": _schedules,
    "optimizers of mixed parameters": _of_mixed_parameters,
}


@check(
    "current_device_name",
    promise="Optimizers go on as before after they were saved, copied or given more parameters, and obey "
    "schedules.",
    of="operators",
    once=True,
)
def optimizers_go_on(accelerator: Accelerator) -> str | None:
    return require_as_on_the_host(accelerator, _OPTIMIZERS)


# -- data ----------------------------------------------------------------------------------------


class _Streamed(data.IterableDataset[torch.Tensor]):
    def __init__(self, place: str) -> None:
        self.place = place

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(there(self.place, 7, 2))


class _OfHost(data.Dataset[Any]):
    """Samples of the host, for workers."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.arange(3.0) + index, "y": index, "name": f"n{index}"}


def _batches(place: str) -> Any:
    x, y = there(place, 7, 3), torch.arange(7, device=place)
    told: list[Any] = []
    pairs = data.TensorDataset(x, y)
    order = torch.Generator().manual_seed(3)
    for options in (
        {"batch_size": 3},
        {"batch_size": 2, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "shuffle": True, "generator": order},
    ):
        told.append([list(batch) for batch in data.DataLoader(pairs, **options)])
    told.append(list(data.DataLoader(_Streamed(place), batch_size=3)))
    joined: Any = data.ConcatDataset([pairs, data.Subset(pairs, [1, 3])])
    told.append([list(batch) for batch in data.DataLoader(joined, batch_size=4)])
    told.append(
        [
            list(batch)
            for batch in data.DataLoader(
                pairs, batch_sampler=data.BatchSampler(data.SequentialSampler(pairs), 4, False)
            )
        ]
    )
    weights: Any = torch.tensor([0.0, 0, 0, 1, 0, 0, 0], device=place)
    told.append(list(data.WeightedRandomSampler(weights, 4)))
    halves = data.random_split(pairs, [0.5, 0.5], torch.Generator().manual_seed(1))
    told.append([list(batch) for half in halves for batch in data.DataLoader(half, batch_size=7)])
    collated = data.default_collate(
        [{"a": x[n], "b": [y[n], 1.5], "c": "t", "d": (x[n, 0], n)} for n in range(3)]
    )
    return [
        *told,
        collated["a"],
        collated["b"][0],
        collated["d"][0],
        collated["c"],
        collated["d"][1].tolist(),
    ]


def _from_workers(place: str) -> Any:
    """Batches that other processes make, though the device is in use, in their order."""
    torch.ones(3, device=place).sum().item()
    told = []
    for batch in data.DataLoader(_OfHost(), batch_size=4, num_workers=2, timeout=60):
        told.append([batch["x"].to(place, non_blocking=True) * 2, batch["y"].tolist(), batch["name"]])
    for seed in (None, 5):  # without a generator, the seeds of workers are drawn from the host's
        loader = data.DataLoader(
            _DrawsOnTheHost(), batch_size=2, num_workers=2, timeout=60, persistent_workers=True,
            worker_init_fn=_begun, shuffle=True, prefetch_factor=3,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )  # fmt: skip
        for _ in range(2):
            told += [[batch.to(place) + 1] for batch in loader]
    return [*told, torch.ones(3, device=place) * 2]


class _DrawsOnTheHost(data.Dataset[torch.Tensor]):
    """Numbers that a worker draws on the host, and the one with which it began."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.rand(2), torch.tensor([float(index), float(os.environ[_BEGUN])])])


_BEGUN = "ACCLIMATE_WORKER_HAS_BEGUN"


def _begun(number: int) -> None:
    os.environ[_BEGUN] = str(number)
    torch.rand(number)


class _Draws(data.Dataset[Any]):
    """Numbers of the device that a worker draws, those that it draws when its seed is set again, and tensors.

    Args:
        source: of the accelerator.
        place: the device.
        sends: whether the worker also returns tensors of the device.
    """

    def __init__(self, source: str, place: str, sends: bool) -> None:
        self.source, self.place, self.sends = source, place, sends

    def __setstate__(self, state: dict[str, str]) -> None:
        """In a new process the device is there before the loader sets the worker's seed."""
        self.__dict__.update(state)
        load(self.source)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        seed = torch.initial_seed()
        torch.ones(3, device=self.place)
        told = []
        for _ in range(2):
            told += [draw(9, device=self.place).cpu() for draw in (torch.rand, torch.randn)]
            torch.manual_seed(seed)
        return told + (list(_kinds_of(self.place, index).values()) if self.sends else [])


def _kinds_of(place: str, number: int) -> dict[str, torch.Tensor]:
    base = torch.arange(24.0, device=place).reshape(4, 6) + number
    return {
        "a tensor": base, "a transposed view": base.t(), "a part": base[1:3, ::2], "nothing": base[:0],
        "a single number": base[1, 1], "integers": base.int(), "truth values": base > 3,
        "a parameter": torch.nn.Parameter(base * 2),
        "70,001 numbers": torch.arange(70_001.0, device=place) + number,
    }  # fmt: skip


def _sends(place: str) -> bool:
    """Whether a device's tensors can be sent between processes."""
    try:
        ForkingPickler.dumps(torch.ones(2, device=place))
    except Exception:  # noqa: BLE001 - torch shares memory of few types of devices
        return False
    return True


def _require_sent(workers: list[list[torch.Tensor]], place: str, when: str) -> None:
    for number, worker in enumerate(workers):
        kinds = _kinds_of(place, number)
        for (what, wanted), found in zip(kinds.items(), worker[_DRAWN:], strict=True):
            told = f"{what} on {place} that a worker of a loader made"
            require(type(found) is type(wanted), f"{told} is a {type(found).__name__} {when}")
            require(found.device == wanted.device, f"{told} is on {found.device} {when}")
            same = found.dtype == wanted.dtype and torch.equal(found.detach().cpu(), wanted.detach().cpu())
            require(same, f"{told} has other values {when}")


_DRAWN = 4


@check(
    "manual_seed_all", "manual_seed",
    promise="Workers of a loader of data draw on the device, each its own numbers, which follow from its "
    "seed; tensors that they send arrive as they are, and stay so while the worker runs.",
    once=True,
)  # fmt: skip
def workers_draw_their_own_numbers(subject: Subject) -> None:
    place = subject.accelerator.current_device_name()
    sends = _sends(place)
    here, state = subject.accelerator.current_device(), subject.accelerator.get_rng_state()
    loader = data.DataLoader(
        _Draws(subject.source, place, sends), batch_size=None, num_workers=2, timeout=120,
        multiprocessing_context="spawn", generator=torch.Generator().manual_seed(4), persistent_workers=True,
    )  # fmt: skip
    workers, later = list(loader), list(loader)
    if sends:
        _require_sent(workers, place, "after another pass over the loader")
        _require_sent(later, place, "in a second pass over the loader")
    # Some are dropped before their worker ends, which may own their memory, and others after it.
    del later
    del loader
    gc.collect()
    require(subject.accelerator.current_device() == here, "workers of a loader change the current_device()")
    require(
        torch.equal(subject.accelerator.get_rng_state(), state), "workers of a loader change get_rng_state()"
    )
    names = ("torch.rand", "torch.randn")
    for name, first, second in zip(names, *(worker[:2] for worker in workers), strict=True):
        require(
            not torch.equal(first, second),
            f"{name} on {place} draws the same numbers in two workers of a loader",
        )
    for number, worker in enumerate(workers):
        for name, first, again in zip(names, worker[:2], worker[2:_DRAWN], strict=True):
            require(
                torch.equal(first, again),
                f"in worker {number} of a loader {name} on {place} draws other numbers than after "
                "torch.manual_seed() of the worker's seed",
            )


_DATA: dict[str, Program] = {"loaders of a device's tensors": _batches, "loaders with workers": _from_workers}


@check(
    "current_device_name",
    promise="Loaders of data take samples of the device, and of other processes while the device is used.",
    of="tensors",
    once=True,
)
def data_is_loaded(accelerator: Accelerator) -> str | None:
    return require_as_on_the_host(accelerator, _DATA)
