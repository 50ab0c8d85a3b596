"""Checks of models on several devices, and of the record that registers a vendor's devices."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN, Backend
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    all_told,
    device_names,
    distance,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers
from acclimate_conformance.checks.target import record_of
from acclimate_conformance.processes import inherited_path

_Noted = Callable[[bool, str], None]


def _layers() -> list[nn.Module]:
    made: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 3)]
    with torch.no_grad():
        for layer in made:
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=number).float() / 4)
    return made


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return distance(found, wanted) < 4e-3


@check(
    "device_name", "current_device", "set_device",
    promise="A model whose layers are on several devices trains as on one, whichever device is current; so "
    "do "
    "models that torch copies to each device, where that is offered.",
    of="operators",
)  # fmt: skip
def models_on_several_devices(accelerator: Accelerator) -> str | None:
    names = several_devices(accelerator)[:2]
    layers = _layers()
    reference = nn.Sequential(*copy.deepcopy(layers))
    x, y = numbers(7, 6).float(), numbers(7, 3, seed=3).float()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        plain.zero_grad()
        loss = nn.functional.mse_loss(reference(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
        plain.step()
        losses.append((float(loss.detach()), float(norm)))
    with all_told() as noted:
        for current in range(len(names)):
            for options in ({"foreach": True}, {"foreach": False}):
                for recomputes in (False, True):
                    accelerator.set_device(current)
                    split = [copy.deepcopy(layer) for layer in layers]
                    for number, layer in enumerate(split):
                        layer.to("cpu" if number == len(split) - 1 else names[number % 2])
                    made: list[Any] = list(split)
                    parameters = [p for layer in made for p in layer.parameters()]
                    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)  # type: ignore[arg-type]
                    for turn in range(3):
                        optimizer.zero_grad()
                        given = x.to(names[0])
                        for number, layer in enumerate(made):
                            given = given.to("cpu" if number == len(made) - 1 else names[number % 2])
                            given = (
                                checkpoint(layer, given, use_reentrant=False) if recomputes else layer(given)
                            )
                        loss = nn.functional.mse_loss(given, y)
                        loss.backward()
                        norm = nn.utils.clip_grad_norm_(parameters, 0.25)
                        optimizer.step()
                        told = f"a model on {' and '.join(names)} and the host, with {options}"
                        found = (float(loss.detach()), float(norm))
                        noted(
                            all(
                                abs(a - b) <= 4e-3 * max(1, abs(b))
                                for a, b in zip(found, losses[turn], strict=True)
                            ),
                            f"{told} has the loss and the norm {found} in step {turn + 1}, not "
                            f"{losses[turn]}",
                        )
                    for ours, theirs in zip(parameters, reference.parameters(), strict=True):
                        noted(_near(ours, theirs), f"a parameter on {ours.device} of {told} is off")
                    now = accelerator.current_device()
                    noted(now == current, f"training {told} makes {now} the current device")
        note = _note_copied(accelerator, names, layers, noted)
    return note


def _note_copied(
    accelerator: Accelerator, names: list[str], layers: list[nn.Module], noted: _Noted
) -> str | None:
    """torch.nn.DataParallel, and the functions that it calls."""
    x = numbers(7, 6).float()
    reference = nn.Sequential(*copy.deepcopy(layers))
    reference(x).square().sum().backward()
    try:
        accelerator.set_device(0)
        model = nn.Sequential(*copy.deepcopy(layers)).to(names[0])
        together = nn.DataParallel(model, device_ids=[0, 1])
        found = together(x.to(names[0]))
        found.square().sum().backward()
    except Exception as error:  # noqa: BLE001 - torch offers it for some types of devices only
        return f"it has no DataParallel: {describe(error)}"
    noted(_near(found, reference(x)), "DataParallel gives another result")
    noted(str(found.device) == names[0], f"DataParallel gives a result on {found.device}")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        right = ours.grad is not None and theirs.grad is not None and _near(ours.grad, theirs.grad)
        noted(right, "a gradient of DataParallel is off, or absent")
    return None


# -- the record ----------------------------------------------------------------------------------


@check(
    "name", "device_type", "visible_devices_variable", "exported_variable_prefixes", "device_count",
    promise="The record says of the device what the accelerator says, each time, and without importing "
    "torch.",
)  # fmt: skip
def record_agrees(accelerator: Accelerator) -> None:
    record = record_of(accelerator)
    if record is None or record in BUILTIN:
        raise NotOfferedError("it has no record of its own")
    told = dict.fromkeys(("probe", "is_installed", "visible_devices_variable", "device_count"))
    for _ in range(2):
        for field in told:
            found = getattr(record, field)()
            require(
                told[field] in (None, found),
                f"the {field}() of its record is {found!r}, and was {told[field]!r}",
            )
            told[field] = found
    require(told["probe"] is None, f"the probe() of its record says {told['probe']!r}, and it is in use")
    require(told["is_installed"] is True, f"the is_installed() of its record is {told['is_installed']!r}")
    variable = accelerator.visible_devices_variable
    require(
        told["visible_devices_variable"] == variable,
        f"the visible_devices_variable() of its record is {told['visible_devices_variable']!r}, not "
        f"{variable!r}",
    )
    kind = record.torch_type
    require(kind == accelerator.device_type, f"the device_type of its record is {kind!r}")
    if f"{type(accelerator).__module__}:{type(accelerator).__qualname__}" == record.target:
        require(accelerator.name == record.name, f"the name of its record is {record.name!r}")
        require(
            accelerator.exported_variable_prefixes == tuple(record.exported_variable_prefixes),
            f"exported_variable_prefixes is {accelerator.exported_variable_prefixes}, of its record "
            f"{record.exported_variable_prefixes}",
        )
    environment = {**os.environ, "PYTHONPATH": inherited_path()}
    _require_no_torch(record, told, environment)
    last = len(device_names(accelerator)) - 1
    # As the launcher is started on a host whose devices are shared out. A record that counts files finds none
    # in a container without them.
    if variable and last > 0 and told["device_count"] == last + 1:
        accelerator.set_visible_devices_envs(environment, [last])
        limit = f", with {variable}={environment.get(variable)!r},"
        _require_no_torch(record, {**told, "device_count": 1}, environment, limit)


_ASKS = """
import json, sys
from acclimate.selection import find_backends
record = next(r for r in find_backends()[0] if (r.name, r.target) == tuple(json.loads(sys.argv[1])))
fields = ("is_installed", "visible_devices_variable", "device_count")
found = {field: getattr(record, field)() for field in fields}
print(json.dumps({"found": found, "torch": "torch" in sys.modules}))
"""
"""A program that asks a record as the launcher does."""


def _require_no_torch(
    record: Backend, told: dict[str, Any], environment: dict[str, str], limit: str = ""
) -> None:
    """Fails the check if the record imports torch, which a launcher has no time for, or counts otherwise."""
    run = subprocess.run(
        [sys.executable, "-c", _ASKS, json.dumps([record.name, record.target])],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    with suppress(ValueError, IndexError):
        answer = json.loads(run.stdout.splitlines()[-1])
        require(not answer["torch"], "the device_count() of its record, or another field, imports torch")
        for field, found in answer["found"].items():
            require(
                found == told[field],
                f"in a new process{limit} the {field}() of its record is {found!r}, not {told[field]!r}",
            )
        return
    require(
        run.returncode == 0, f"in a new process{limit} a function of its record raises: {run.stderr[-300:]}"
    )
