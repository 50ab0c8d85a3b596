"""Checks of graphs of optimizers and modules, of graphs that are gone, and of what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, require, require_close
from acclimate_conformance.checks.capturing import captured, new_graph, replay, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers

_LENGTH = 5003


@check(
    "capture_to_graph",
    "replay_graph",
    "create_graph",
    promise="Results of a graph stay as they are when it is gone; graphs that replay in turn pass on their "
    "results.",
)
def results_outlive_graphs(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    given = torch.ones(_LENGTH, device=device)
    graph, result = captured(accelerator, lambda: given * 3 + 1)
    given.fill_(2)
    replay(accelerator, graph)
    view = result[1:]
    del graph, result
    gc.collect()
    accelerator.empty_cache()
    later = [torch.full((_LENGTH,), -1.0, device=device) for _ in range(8)]
    require(
        equal(view, torch.full((_LENGTH - 1,), 7.0)) and len(later) == 8,
        "a result of replay_graph() changes once the graph is gone",
    )
    first, doubled = captured(accelerator, lambda: given * 2)
    second, raised = captured(accelerator, lambda: doubled + 5)
    held = torch.zeros(_LENGTH, device=device)
    third, _ = captured(accelerator, lambda: held.copy_(raised * 10))
    for turn in (1.0, 4.0):
        given.fill_(turn)
        for graph in (first, second, third):
            accelerator.replay_graph(graph)
        given.fill_(-7)
        accelerator.synchronize()
        require(
            equal(held, torch.full((_LENGTH,), (turn * 2 + 5) * 10)),
            f"replay_graph() of three graphs in a row, each on the results of the one before, gives "
            f"{float(held[0])}",
        )
    second.reset()
    given.fill_(3)
    accelerator.replay_graph(first)
    accelerator.synchronize()
    require(
        equal(doubled, torch.full((_LENGTH,), 6.0)), "a replay after Graph.reset() of another graph is wrong"
    )
    require(
        equal(raised, torch.full((_LENGTH,), 13.0)),
        "after Graph.reset() a result of the graph changes with another's replay",
    )


def _model(device: str, kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: dict[str, Callable[[], list[torch.nn.Module]]] = {
        "linear layers": lambda: [torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)],
        "normalised layers": lambda: [torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)],
        "a batch norm": lambda: [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)],
    }
    return torch.nn.Sequential(*layers[kind]()).to(device)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "SGD of lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1, foreach=True),
    "Adam(capturable=True)": lambda p: torch.optim.Adam(p, lr=0.05, capturable=True, foreach=False),
    "AdamW(capturable=True) of lists": lambda p: torch.optim.AdamW(p, lr=0.05, capturable=True, foreach=True),
    "RMSprop(capturable=True)": lambda p: torch.optim.RMSprop(p, lr=0.05, capturable=True, foreach=False),
}
_KINDS = {"SGD with momentum": "a batch norm", "Adam(capturable=True)": "normalised layers"}


@check(
    "capture_to_graph",
    "replay_graph",
    promise="A whole step of training in a graph, with torch's modules and optimizers, trains as without a "
    "graph, "
    "though the batch and the rate change.",
    once=True,
)
def optimizers_train_in_graphs(accelerator: Accelerator) -> str | None:
    new_graph(accelerator)
    device = accelerator.current_device_name()
    lacking: list[str] = []
    for name, make in _OPTIMIZERS.items():
        kind = _KINDS.get(name, "linear layers")
        model = _model(device, kind)
        reference = copy.deepcopy(model).cpu()
        x, y = torch.zeros(4, 6, device=device), torch.zeros(4, 3, device=device)
        optimizer = make(model.parameters())

        def step(
            model: torch.nn.Module = model, optimizer: Any = optimizer, x: torch.Tensor = x, y: Any = y
        ) -> Any:
            optimizer.zero_grad(set_to_none=False)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        state = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            warm_up(accelerator, step)
            graph = new_graph(accelerator)
            with accelerator.capture_to_graph(graph):
                loss = step()
        except (AssertionError, NotImplementedError) as error:  # torch lists the devices of capturable
            lacking.append(f"{name}: {error}")
            continue
        accelerator.synchronize()
        with torch.no_grad():
            for key, value in model.state_dict().items():
                value.copy_(state[key])
            for held in optimizer.state.values():
                for value in held.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        plain = make(reference.parameters()) if "capturable" not in name else _plain(name, reference)
        for turn in range(3):
            batch, target = numbers(4, 6, seed=turn).float(), numbers(4, 3, seed=9 + turn).float()
            x.copy_(batch)
            y.copy_(target)
            accelerator.replay_graph(graph)
            plain.zero_grad()
            wanted = torch.nn.functional.mse_loss(reference(batch), target)
            wanted.backward()
            plain.step()
            accelerator.synchronize()
            what = f"of {name} and {kind} in a graph, after replay {turn + 1},"
            require_close(loss, wanted, torch.float32, f"replay_graph(): the loss {what}")
        for (key, ours), theirs in zip(
            model.state_dict().items(), reference.state_dict().values(), strict=True
        ):
            if key.endswith("num_batches_tracked"):
                continue
            require_close(ours, theirs, torch.float32, f"replay_graph(): {key} {what}")
    return f"it has no {lacking[0]}" if lacking else None


def _plain(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name.partition("(")[0])
    made: torch.optim.Optimizer = kind(model.parameters(), lr=0.05, foreach=False)
    return made
