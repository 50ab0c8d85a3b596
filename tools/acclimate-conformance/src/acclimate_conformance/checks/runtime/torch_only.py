"""Checks of processes that import torch, and nothing else: what a vendor's plug-in loads is all they know.

Python starts such a process for each worker of a loader, of a pool or of a queue. A program that imports
acclimate hides that they lack the device.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    all_told,
    is_host,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.processes import inherited_path

_LIMIT_S = 270
_Answer: TypeAlias = dict[str, dict[str, Any]]
"""What each process found, and what is right, by what it did."""
_FUNCTIONS = '''
"""What other processes do with a device: this module imports torch, as they do, and nothing else."""

import io
import pickle
import sys

import torch


def kinds(place):
    """Tensors of each kind, by its name."""
    base = torch.arange(12.0).reshape(3, 4).to(place)
    return {
        "a tensor": base, "a transposed view": base.t(), "a part": base[1:, ::2], "nothing": base[:0],
        "a number": base[1, 1], "integers": base.long(), "truth values": base > 3, "halves": base.bfloat16(),
        "a parameter": torch.nn.Parameter(base * 2),
    }


def told(tensor):
    """A tensor as what any process can compare."""
    return [
        type(tensor).__name__, str(tensor.device), str(tensor.dtype), tensor.requires_grad,
        tensor.detach().cpu().tolist(),
    ]


def model(place):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(place)


def steps(place, folder):
    """By its name, what a process does that imports torch only."""
    def unpickled():
        with open(f"{folder}/pickled", "rb") as file:
            return {name: told(t) for name, t in pickle.load(file).items()}

    def loaded(**options):
        return {name: told(t) for name, t in torch.load(f"{folder}/saved.pt", **options).items()}

    def trained():
        layers = model(place)
        with open(f"{folder}/model", "rb") as file:
            layers.load_state_dict(pickle.load(file).state_dict())
        layers(torch.eye(4).to(place)).square().sum().backward()
        with torch.no_grad():  # an optimizer would import a compiler
            for parameter in layers.parameters():
                parameter -= parameter.grad / 2
        return all(bool(p.isfinite().all()) and str(p.device) == place for p in layers.parameters())

    def drawn():
        generator = torch.Generator(place).manual_seed(5)
        return told(torch.rand(3, device=place, generator=generator))

    def autocast():
        kind = torch.device(place).type
        with torch.autocast(kind, torch.bfloat16):
            return str((torch.ones(2, 2, device=place) @ torch.ones(2, 2, device=place)).dtype)

    return {
        "a device's name": lambda: str(torch.device(place)),
        "a new tensor": lambda: told(torch.ones(3, device=place) + 1),
        "Tensor.to": lambda: told(torch.ones(3).to(place)),
        "pickle.loads": unpickled,
        "torch.load": loaded,
        "torch.load(mmap=True)": lambda: loaded(mmap=True),
        "torch.load to the device": lambda: loaded(map_location=place),
        "a step of training": trained,
        "a generator": drawn,
        "torch.autocast": autocast,
        "torch.accelerator": lambda: torch.accelerator.current_accelerator().type,
        "synchronize": lambda: torch.accelerator.synchronize(),
        "what is imported": lambda: "acclimate_conformance" in sys.modules,
    }


def observe(place, folder):
    """What each step gives, or how it raises."""
    found = {}
    for name, step in steps(place, folder).items():
        try:
            found[name] = step()
        except Exception as error:
            found[name] = f"raises {type(error).__name__}: {error}"
    return found


def work(place, folder, given, answers, parameter):
    """The program of another process: it tells what it sees, and what it is sent."""
    found = observe(place, folder)
    try:
        found["an argument"] = told(parameter) if parameter is not None else None
        found["a queue"] = {name: told(t) for name, t in given.get(timeout=60).items()}
    except Exception as error:
        found["a queue"] = f"raises {type(error).__name__}: {error}"
    sends = isinstance(found["a queue"], dict) and found["a queue"]
    answers.put((found, kinds(place) if sends else {}))
    given.get(timeout=60)  # until the other process has what this one sent


def save(place, folder):
    with open(f"{folder}/pickled", "wb") as file:
        pickle.dump(kinds(place), file)
    with open(f"{folder}/model", "wb") as file:
        pickle.dump(model(place), file)
    torch.save(kinds(place), f"{folder}/saved.pt")
'''
_PROGRAM = """
import json
import queue
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as multiprocessing

import functions_of_conformance as functions

if __name__ == "__main__":
    place, folder = sys.argv[1:]
    found = {"the program itself": functions.observe(place, folder)}
    kinds = functions.kinds(place)
    try:
        ForkingPickler.dumps(kinds["a tensor"])
    except Exception:
        kinds = {}
    started = {}
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        given, answers = context.Queue(), context.Queue()
        arguments = (place, folder, given, answers, kinds.get("a parameter"))
        process = context.Process(target=functions.work, args=arguments, daemon=True)
        process.start()
        given.put(kinds)
        started[method] = process, given, answers
    for method, (process, given, answers) in started.items():
        told = {}
        while not told:
            try:
                told, sent = answers.get(timeout=2)
            except queue.Empty:
                if not process.is_alive():
                    told, sent = {"its end": f"ends with exit code {process.exitcode}"}, {}
        told["a queue back"] = {name: functions.told(t) for name, t in sent.items()}
        del sent
        given.put(None)
        process.join(20)
        found[method] = told
    wanted = functions.observe(place, folder)
    wanted["a queue"] = wanted["a queue back"] = {n: functions.told(t) for n, t in kinds.items()}
    wanted["an argument"] = wanted["a queue"].get("a parameter")
    wanted["sends"] = bool(kinds)
    print(json.dumps({"found": found, "wanted": wanted}))
"""


def _is_plugged_in(accelerator: Accelerator) -> bool:
    """Whether importing torch makes the device: torch's own, or one whose vendor's plug-in torch loads."""
    vendors = {kind.__module__.partition(".")[0] for kind in type(accelerator).__mro__}
    plugged = {point.module.partition(".")[0] for point in entry_points(group="torch.backends")}
    is_of_torch = accelerator.device_type != torch._C._get_privateuse1_backend_name()
    return is_of_torch or bool(vendors & plugged)


@check(
    "device_name", "current_device_name",
    promise="A process that imports torch only knows the device, however it is started: it makes, loads, "
    "receives and sends tensors.",
    of="tensors", once=True, timeout_s=300,
)  # fmt: skip
def processes_that_import_torch_only(accelerator: Accelerator) -> str | None:
    place = "cpu" if is_host(accelerator) else accelerator.device_name(0)
    known = _is_plugged_in(accelerator)
    with tempfile.TemporaryDirectory() as folder, all_told() as noted:
        functions = Path(folder, "functions_of_conformance.py")
        functions.write_text(_FUNCTIONS, encoding="utf-8")
        here = runpy.run_path(str(functions))
        here["save"](place, folder)
        wanted_here = here["observe"](place, folder)
        answer = _run(folder, place, accelerator.name, known)
        if answer is None:
            raise NotOfferedError(f"a process that imports torch only does not know {place}")
        _compare(answer, wanted_here, place, noted)
        note = None if answer["wanted"]["sends"] else "its tensors cannot be sent between processes"
    return note


def _run(folder: str, place: str, chosen: str, known: bool) -> _Answer | None:
    """What the processes tell; ``None`` if they need not know the device, and do not."""
    path = Path(folder, "program_of_conformance.py")
    path.write_text(_PROGRAM, encoding="utf-8")
    environment = {
        "ACCLIMATE_ACCELERATOR": chosen, **os.environ, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((folder, inherited_path())),
    }  # fmt: skip
    try:
        run = subprocess.run(
            [sys.executable, str(path), place, folder],
            capture_output=True, text=True, timeout=_LIMIT_S, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BrokenPromiseError(
            f"Process: a program that imports torch only, and starts others with {place}, does not end "
            f"within {_LIMIT_S} s"
        ) from None
    lines = run.stdout.splitlines()
    told: _Answer | None = json.loads(lines[-1]) if run.returncode == 0 and lines else None
    if told is None and not known:
        return None
    if told is None:
        raise BrokenPromiseError(
            f"Process: a program that imports torch only, and uses {place}, raises {run.stderr[-300:]}"
        )
    if isinstance(told["found"]["the program itself"]["a new tensor"], str) and not known:
        return None
    return told


def _compare(
    answer: _Answer, wanted_here: dict[str, object], place: str, noted: Callable[[bool, str], None]
) -> None:
    """Notes what a process sees that differs from what this one sees, which imports acclimate too."""
    wanted = {**answer["wanted"], **json.loads(json.dumps(wanted_here))}
    for process, found in answer["found"].items():
        who = process if " " in process else f"a process started by {process}"
        if "its end" in found:
            noted(False, f"Process: {who} that imports torch only {found['its end']}")
            continue
        for what, seen in found.items():
            if what == "what is imported" or seen == wanted[what]:
                continue
            text = seen if isinstance(seen, str) else f"gives {_first_difference(seen, wanted[what])}"
            noted(False, f"Process: {what} of {place} in {who} that imports torch only {text:.300}")


def _first_difference(seen: object, wanted: object) -> str:
    if isinstance(seen, dict) and isinstance(wanted, dict):
        for name, value in wanted.items():
            if seen.get(name) != value:
                return f"{seen.get(name)} for {name}, not {value}"
    return f"{seen}, not {wanted}"
