"""Checks of what the launcher relies on: visible devices, launched ranks, a fork after selection."""

from __future__ import annotations

import io
import locale
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN
from acclimate.host.process_status import how_it_ended
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    exactly,
    in_thread,
    is_host,
    require,
)
from acclimate_conformance.checks.calls import raised_by
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.children import Child, in_fork
from acclimate_conformance.checks.endings import ends_in_any_state
from acclimate_conformance.checks.runtime.types import OF_ONE_HOST as _OF_ONE_HOST
from acclimate_conformance.checks.target import Subject, load, record_of

_FORK_TIMEOUT_S = 120


@check(
    "set_visible_devices_envs", "visible_devices_envs", "visible_devices_variable", "device_count",
    promise="A process that is limited to some devices sees that many, from index 0 on, and computes "
    "on them.",
    timeout_s=320, once=True,
)  # fmt: skip
def visible_devices(subject: Subject) -> str | None:
    accelerator = subject.accelerator
    _begun(subject)  # the checks that follow wait for it
    variables = exactly(accelerator.visible_devices_envs(), list, "visible_devices_envs()")
    declared = accelerator.visible_devices_variable
    require(
        declared in variables if declared else not variables,
        f"visible_devices_envs() is {variables}, visible_devices_variable {declared!r}",
    )
    environment = dict(os.environ)
    ours = dict(os.environ)
    last = len(device_names(accelerator)) - 1
    accelerator.set_visible_devices_envs(environment, [last])
    require(dict(os.environ) == ours, "set_visible_devices_envs() changes the environment of this process")
    if not variables:
        require(
            environment == ours,
            "set_visible_devices_envs() changes variables that visible_devices_envs() does not list",
        )
        raise NotOfferedError("no variable limits which devices a process sees")
    for ids in ([last], [last, 0]):
        told = dict.fromkeys(variables, "")
        accelerator.set_visible_devices_envs(told, iter(ids))
        for variable, value in told.items():
            # A vendor may write devices in another form, or renumber them within a limit that is already set.
            plain = [word.strip() for word in value.split(",")]
            require(
                variable in os.environ
                or not all(word.isdecimal() for word in plain)
                or plain == list(map(str, ids))
                or (variable in _ASCENDING and sorted(plain) == sorted(map(str, ids))),
                f"set_visible_devices_envs(…, {ids}) sets {variable} to {value!r}",
            )
    _require_any_iterable(accelerator, variables, last)
    strings = dict(os.environ)
    accelerator.set_visible_devices_envs(strings, [str(last)])
    require(strings == environment, "set_visible_devices_envs() treats 0 and '0' differently")
    limited = [_Limited(subject, environment, variables, 1)]
    if last:
        environment = dict(environment)
        accelerator.set_visible_devices_envs(environment, [last, 0])
        limited.append(_Limited(subject, environment, variables, 2))
    for child in limited:  # two at a time
        child.require_seen()
    return None if last else "with only one device here, a limit cannot be observed"


_ASCENDING = ("ASCEND_RT_VISIBLE_DEVICES",)
"""Variables of drivers that take devices in ascending order only."""


class _Limited:
    """A child that begins at once, and that a limit leaves so many devices."""

    def __init__(
        self, subject: Subject, environment: Mapping[str, str], variables: Sequence[str], wanted: int
    ) -> None:
        self._limit = " ".join(f"{variable}={environment.get(variable)}" for variable in variables)
        self._wanted = wanted
        self._child = Child(f"{__name__}:count_devices", subject.source, environment=environment)

    def require_seen(self) -> None:
        """Fails the check unless it counts and uses as many devices."""
        try:
            seen = self._child.result()
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"with {self._limit}, which leaves {self._wanted}, {broken}") from None
        told = f"with {self._limit} the device_count() of a child is {seen}, not {self._wanted}"
        require(seen == self._wanted, told)


def _require_any_iterable(accelerator: Accelerator, variables: Sequence[str], last: int) -> None:
    """Fails the check if the variables depend on the kind of iterable, or if no device means all of them."""
    for ids in ([last], [0, last] if last else [0], []):
        environments: dict[str, dict[str, str]] = {}
        kinds: dict[str, Iterable[int | str]] = {
            "list": ids, "tuple": tuple(ids), "iterator": iter(ids), "generator": (i for i in ids),
            "dict": dict.fromkeys(ids), "list of strings": [str(i) for i in ids], "map": map(str, ids),
        }  # fmt: skip
        for kind, given in kinds.items():
            environments[kind] = dict.fromkeys(variables, "7")
            accelerator.set_visible_devices_envs(environments[kind], given)
            require(
                environments[kind] == environments["list"],
                f"set_visible_devices_envs() sets {environments[kind]} for a {kind} of {ids}, and "
                f"{environments['list']} for a list",
            )
        if not ids:
            for variable, value in environments["list"].items():
                shown = any(word.strip().isdecimal() for word in value.split(","))
                require(not shown, f"set_visible_devices_envs(…, []) sets {variable} to {value!r}")
            unset: dict[str, str] = {}
            accelerator.set_visible_devices_envs(unset, [])
            require(bool(unset), "set_visible_devices_envs(…, []) sets no variable, which means all devices")


def count_devices(source: str) -> int:
    """Computes on each device; returns how many there are."""
    accelerator = load(source).accelerator
    count = accelerator.device_count()
    for name in device_names(accelerator):
        try:
            total = float(torch.ones(4, device=name).sum())
        except Exception as error:
            raise BrokenPromiseError(
                f"device_count() is {count}, but {name} cannot be used: {describe(error, whole=True)}"
            ) from error
        require(total == 4.0, f"a sum on {name} is wrong")
    return count


@check(
    "export_envs", "exported_variable_prefixes",
    promise="export_envs lists prefixes of the variables that ranks on other hosts need.",
)  # fmt: skip
def exported_variables(accelerator: Accelerator) -> None:
    prefixes = exactly(accelerator.export_envs(), list, "export_envs()")
    for prefix in prefixes:
        require(
            bool(exactly(prefix, str, "an entry of export_envs()")),
            'export_envs() has "", which matches all',
        )
    declared = exactly(accelerator.exported_variable_prefixes, tuple, "exported_variable_prefixes")
    require(
        tuple(prefixes) == declared, f"export_envs() is {prefixes}, exported_variable_prefixes {declared}"
    )
    prefixes.append("changed")
    require(
        "changed" not in accelerator.export_envs(),
        "changing the list that export_envs() returned changes the next one",
    )


@check(
    "current_device", "device_count", "current_device_name", "set_device",
    promise="In a launched rank the current device exists before one is set; on a host it is LOCAL_RANK. The "
    "process ends with the exit code of its program.",
    timeout_s=320, once=True, of="tensors",
)  # fmt: skip
def launched_rank(subject: Subject) -> None:
    told = _launched(subject)["rank"]
    require(
        told["types"] == ["int", "int", "str"],
        f"current_device(), device_count() and current_device_name() are of the types {told['types']}",
    )
    require(
        0 <= told["current"] < told["count"], f"current_device() is {told['current']} among {told['count']}"
    )
    if is_host(subject.accelerator):  # which has no devices of its own to choose from
        require(
            (told["current"], told["count"]) == (1, 2),
            f"with LOCAL_RANK=1 and LOCAL_WORLD_SIZE=2 current_device() is {told['current']} and "
            f"device_count() {told['count']}; the launcher says 1 and 2",
        )
        for given, found, wanted in told["later"]:
            for name, is_told, said in zip(
                ("current_device()", "device_count()"), found, wanted, strict=True
            ):
                require(is_told == said, f"with {given} {name} is {is_told}, the launcher says {said}")
    require(told["initialized"], "is_initialized() is False in a process that made a tensor on the device")
    ended = _launched(subject)["ended"]
    require(
        ended == _EXIT_CODE,
        f"a process that used {told['used']}, and calls sys.exit({_EXIT_CODE}), {how_it_ended(ended)}",
    )


_EXIT_CODE = 7


@check(
    "manual_seed_all", "default_stream", "init", "is_initialized", "exported_variable_prefixes",
    promise="The first use of a device leaves the process's signals, children and floating-point numbers "
    "as they "
    "were, and follows the seed that was set before; the record exports the variables that its package "
    "reads.",
    timeout_s=320, once=True, of="tensors",
)  # fmt: skip
def first_use(subject: Subject) -> None:
    told = _launched(subject)["first"]
    require(not told, "; ".join(told[:6]))


@check(
    "stream", "device", "capture_to_graph", "pin_memory", "set_stream", "range_push", "replay_graph",
    promise="A process ends as it is asked to, by itself, an error or a signal, whatever is in flight, open "
    "or held on the device.",
    timeout_s=320, once=True, of="tensors",
)  # fmt: skip
def processes_end(subject: Subject) -> None:
    if not hasattr(os, "fork"):
        raise NotOfferedError("this system does not fork")
    told = _launched(subject)["ends"]
    require(not told, "; ".join(told[:4]))


def _describe_rank(source: str) -> dict[str, Any]:
    """Reads the accelerator's device, then sets one, as programs do."""
    accelerator = load(source).accelerator
    found = (accelerator.current_device(), accelerator.device_count(), accelerator.current_device_name())
    torch.ones(1, device=found[2])
    initialized = accelerator.is_initialized()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]) % found[1])
    return {
        "types": [type(value).__name__ for value in found],
        "current": found[0],
        "count": found[1],
        "initialized": initialized,
        "used": _use_all(accelerator),
        "later": _later_ranks(accelerator) if is_host(accelerator) else [],
    }


def _use_all(accelerator: Accelerator) -> str:
    """Uses a stream, an event and a graph, which end with the process; names those that are offered."""
    in_thread(lambda: _use_streams(accelerator))
    ones = _use_streams(accelerator)
    _KEPT.append(accelerator.pin_memory(torch.ones(4)))
    held = threading.Thread(target=_hold, args=(torch.ones(4, device=ones.device),), daemon=True)
    held.start()
    with suppress(Exception):  # other checks are about graphs
        graph = accelerator.create_graph()
        _KEPT.append(graph)
        with accelerator.capture_to_graph(graph):
            ones.mul_(2)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        return "a stream, an event and a graph, also in another thread"
    return "a stream and an event, also in another thread"


def _use_streams(accelerator: Accelerator) -> torch.Tensor:
    """Uses a stream and an event in each way, which end with the process; returns a tensor of theirs."""
    ones = torch.ones(4, device=accelerator.current_device_name())
    stream = accelerator.Stream()
    events = accelerator.Event(), accelerator.Event(enable_timing=True)
    accelerator.synchronize()
    for event in events:
        with accelerator.stream(stream):
            ones.mul_(2)
            event.record()
        accelerator.current_stream().wait_event(event)
        event.query()
        event.synchronize()
    stream.synchronize()
    accelerator.synchronize()
    _KEPT.extend((ones, stream, *events))
    return ones


_KEPT: list[Any] = []
"""What a process holds until it ends."""


def _hold(tensor: torch.Tensor) -> None:
    """Keeps a tensor in a thread until the process ends."""
    threading.Event().wait()
    del tensor


_LAUNCHES: tuple[tuple[dict[str, int], list[int]], ...] = (
    ({"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 5, "RANK": 13, "WORLD_SIZE": 17}, [3, 5]),
    ({"LOCAL_RANK": 2, "LOCAL_SIZE": 7, "RANK": 9, "WORLD_SIZE": 21}, [2, 7]),
    ({"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "LOCAL_SIZE": 6, "RANK": 8, "WORLD_SIZE": 12}, [0, 4]),
)
"""The variables of a launched rank, each with another number; the current device and the device count."""


def _later_ranks(accelerator: Accelerator) -> list[tuple[str, list[int], list[int]]]:
    """Reads the accelerator's device if a worker's variables are set after the accelerator was made."""
    seen = []
    for variables, wanted in _LAUNCHES:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update({name: str(value) for name, value in variables.items()})
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        seen.append((given, [accelerator.current_device(), accelerator.device_count()], wanted))
    os.environ["LOCAL_RANK"] = "0"
    return seen


@check(
    "is_available", "device_count", "is_initialized",
    promise="A process can fork after it has selected its accelerator and counted devices; the child "
    "computes.",
    timeout_s=320, once=True,
)  # fmt: skip
def fork_after_selection(subject: Subject) -> None:
    if not hasattr(os, "fork"):
        raise NotOfferedError("this system does not fork")
    broken = _launched(subject)["fork"]
    require(not broken, broken)


@check(
    "manual_seed_all", "torch_module",
    promise="A child that is forked after the device was used, such as a worker of a loader, seeds and uses "
    "the host, and leaves the device of its parent as it was.",
    timeout_s=320, once=True,
)  # fmt: skip
def forked_children_use_the_host(subject: Subject) -> None:
    if not hasattr(os, "fork"):
        raise NotOfferedError("this system does not fork")
    broken = _launched(subject)["host"]
    require(not broken, "; ".join(broken[:3]))


@lru_cache(maxsize=1)
def _begun(subject: Subject) -> Child:
    """The process for the checks above, which begins at once."""
    environment = {**os.environ, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    return Child(f"{__name__}:launched", subject.source, environment=environment)


@lru_cache(maxsize=1)
def _launched(subject: Subject) -> dict[str, Any]:
    """The observations of one process for the checks above, since a process takes seconds to start."""
    child = _begun(subject)
    told: dict[str, Any] = child.result(timeout_s=250)
    return {**told, "ended": child.exit_code()}


def launched(source: str) -> dict[str, Any]:
    """Forks after selection, and then describes the rank."""
    broken = ""
    read: set[str] = set()
    with _variables_noted(read):
        try:
            _select_and_fork(source)
        except Exception as error:  # noqa: BLE001 - the other check goes on
            broken = str(error) if isinstance(error, BrokenPromiseError) else describe(error, whole=True)
        ends = [] if broken else ends_in_any_state(source)  # before the device is used in this process
        with tempfile.TemporaryFile() as written, _on_standard_output(written.fileno()):
            before = _process()
            first = _first_use(load(source).accelerator)
            first += [
                f"the first use of the device changes {what} from {value!r:.60} to {now!r:.60}"
                for (what, value), now in zip(before.items(), _process().values(), strict=True)
                if value != now
            ]
            written.seek(0)
            said = written.read().decode(errors="replace")
        if said:
            first.append(f"the first use of the device writes to standard output: {said!r:.80}")
        record = record_of(load(source).accelerator)
        if record is not None:  # whose package may have been imported, and have read variables, before
            record.probe()
            record.device_count()
    first += _not_exported(load(source).accelerator, read)
    return {
        "ends": ends,
        "fork": broken,
        "first": first,
        "host": _children_on_the_host(load(source).accelerator) if hasattr(os, "fork") else [],
        "rank": _describe_rank(source),
        "exits_with": _EXIT_CODE,
    }


@contextmanager
def _on_standard_output(descriptor: int) -> Iterator[None]:
    """A block in which a file takes what is written to standard output, by Python or by a library."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def _process() -> dict[str, object]:
    """What belongs to the program, and not to a device that it uses."""
    readings: dict[str, Callable[[], object]] = {
        "the working directory": os.getcwd,
        "the default dtype": torch.get_default_dtype,
        "the default device": torch.get_default_device,
        "the number of the host's threads": torch.get_num_threads,
        "the precision of float32 products": torch.get_float32_matmul_precision,
        "whether gradients are recorded": torch.is_grad_enabled,
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled,
        "the processors of the process": lambda: sorted(os.sched_getaffinity(0)),
        "sys.excepthook": lambda: sys.excepthook,
        "sys.stdout": lambda: sys.stdout,
        "the recursion limit": sys.getrecursionlimit,
        "the handlers of logging": lambda: list(logging.getLogger().handlers),
        "the locale": lambda: locale.setlocale(locale.LC_ALL),
    }
    found: dict[str, object] = {}
    for what, read in readings.items():
        with suppress(AttributeError):  # not each system has processors to choose
            found[what] = read()
    return found


def _first_use(accelerator: Accelerator) -> list[str]:
    """What is wrong after the device was used for the first time in this process."""
    broken: list[str] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    torch.manual_seed(3)
    names = device_names(accelerator)
    drawn = [torch.rand(65, device=name).cpu() for name in names]
    torch.manual_seed(3)
    for name, numbers in zip(names, drawn, strict=True):
        if not torch.equal(torch.rand(65, device=name).cpu(), numbers):
            broken.append(
                f"torch.manual_seed() before the first use of {name}, through manual_seed_all(), is lost"
            )
    side = accelerator.Stream()
    with accelerator.stream(side):
        default = accelerator.default_stream()
    if default != accelerator.default_stream() or default != accelerator.current_stream():
        broken.append("default_stream(), first called within stream(s), is another stream than afterwards")
    for name in names:
        broken += _inference_first(name)
    tiny = torch.tensor([1e-40])
    if float(tiny.mul(1.0)) == 0 or float(torch.tensor([1e-310], dtype=torch.float64) * 1) == 0:
        broken.append("after tensors were made on the device, the host takes its small numbers for zero")
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        broken.append("after tensors were made on the device, SIGINT raises no KeyboardInterrupt")
    except KeyboardInterrupt:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    if seen != [signal.SIGTERM]:
        broken.append(
            "after tensors were made on the device, a handler of SIGTERM that was set before is not called"
        )
    broken += _child_that_ends()
    broken += _child_that_computes(names[0])
    return broken


def _child_that_computes(name: str) -> list[str]:
    """A child that is forked after the device was used computes right, raises or crashes."""
    if not hasattr(os, "fork"):
        return []

    def compute() -> int:
        return int(float(torch.full((4,), 1.5, device=name).mul(2).sum()) != 12)

    with suppress(ChildProcessError):
        if in_fork(compute, _FORKED_S) == 1:
            return [
                f"a sum on {name} is wrong, and raises nothing, in a child that was forked after "
                f"{name} was used"
            ]
    return []


_FORKED_S = 20


def _child_that_ends() -> list[str]:
    if not hasattr(os, "fork"):
        return []
    after = "after tensors were made on the device,"
    try:
        code = in_fork(lambda: 3, _FORKED_S)
    except ChildProcessError:
        return [f"{after} the exit code of a child is lost"]
    if code is None:
        return [f"{after} a forked child that only ends has not ended within {_FORKED_S} s"]
    return [] if code == 3 else [f"{after} a child that ends with 3 ends with {code}"]


def _children_on_the_host(accelerator: Accelerator) -> list[str]:
    """What is wrong in forked children that use the host only, as torch's own workers do.

    torch asks the device's module whether it is in a child that cannot use the device, _is_in_bad_fork(), and
    calls its manual_seed_all() otherwise (torch.utils.rename_privateuse1_backend).
    """
    torch.manual_seed(11)
    wanted = torch.rand(5).tolist()
    names = device_names(accelerator)
    for name in names:
        torch.ones(3, device=name).add_(1)
    accelerator.synchronize()
    states = accelerator.get_rng_state_all()

    def seeded() -> bool:
        torch.manual_seed(11)
        return torch.rand(5).tolist() == wanted

    def seeded_anew() -> bool:
        return torch.seed() == torch.initial_seed()

    def kept() -> bool:
        torch.manual_seed(11)
        with torch.random.fork_rng(devices=[], device_type=accelerator.device_type):
            torch.rand(9)
        return torch.rand(5).tolist() == wanted

    def saved() -> bool:
        file = io.BytesIO()
        torch.save({"a": torch.arange(5.0)}, file)
        file.seek(0)
        return bool(torch.load(file)["a"].tolist() == [0, 1, 2, 3, 4])

    def loaded() -> bool:
        numbers = torch.utils.data.TensorDataset(torch.arange(6))
        batches = torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True)
        return sorted(int(x) for (batch,) in batches for x in batch) == list(range(6))

    def computed() -> bool:
        with torch.no_grad():
            layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))
            return bool(layer(torch.ones(2, 3)).isfinite().all())

    steps: dict[str, Callable[[], bool]] = {
        "torch.manual_seed(), which calls manual_seed_all() of the device's module,": seeded,
        "torch.seed(), which calls manual_seed_all() of the device's module,": seeded_anew,
        "torch.random.fork_rng(devices=[])": kept,
        "torch.save and torch.load": saved, "a DataLoader": loaded, "a layer of the host": computed,
    }  # fmt: skip
    broken: list[str] = []
    with tempfile.TemporaryFile() as written:

        def run() -> int:
            for what, step in steps.items():
                try:
                    said = "" if step() else f"{what} gives something else"
                except Exception as error:  # noqa: BLE001 - told to the process that forked
                    method = raised_by(error, accelerator)
                    raises = f"{method and f'{method}() raises '}{describe(error, whole=True)}"
                    said = f"{what} raises {raises}"
                os.write(written.fileno(), f"{said}\n".encode() if said else b"")
            return 0

        code = in_fork(run, _FORKED_S)
        written.seek(0)
        broken += written.read().decode(errors="replace").splitlines()
    if code is None:
        broken.append(f"it does not end within {_FORKED_S} s")
    elif code:
        broken.append(f"it {how_it_ended(code)}")
    where = f"in a child that was forked after {' and '.join(names)} were used, and uses the host,"
    told = [f"{where} {what}" for what in broken]
    bad_fork = getattr(accelerator.torch_module, "_is_in_bad_fork", None)
    if bad_fork is not None and bad_fork() is not False:
        told.append(f"_is_in_bad_fork() of torch's module is {bad_fork()!r} in a process that was not forked")
    for index, (before, now) in enumerate(zip(states, accelerator.get_rng_state_all(), strict=True)):
        if not torch.equal(before, now) and not is_host(accelerator):
            told.append(f"manual_seed_all() in a forked child changes the state of device {index} here")
    return told


def _inference_first(name: str) -> list[str]:
    """Layers that are first called in inference_mode() train afterwards."""
    functional = torch.nn.functional
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "layer_norm": lambda x: functional.layer_norm(x, (8,)),
        "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: functional.group_norm(x, 2), "gelu": functional.gelu,
        "rms_norm": lambda x: functional.rms_norm(x, (8,)), "dropout": functional.dropout,
        "cross_entropy": lambda x: functional.cross_entropy(x, x.detach().argmax(-1)),
        "softmax": lambda x: x.softmax(-1), "a product": lambda x: x @ x.t(), "a division": lambda x: x / 3,
        "conv1d": lambda x: functional.conv1d(x[None], torch.ones(2, 4, 3, device=x.device)),
    }  # fmt: skip
    broken = []
    for what, layer in layers.items():
        given = torch.linspace(-1, 1, 32).reshape(4, 8).to(name)
        try:
            with torch.inference_mode():
                layer(given.clone())
        except Exception:  # noqa: BLE001 - other checks are about operators, and dtypes
            continue
        x = given.clone().requires_grad_()
        try:
            layer(x).sum().backward()
        except RuntimeError as error:
            broken.append(
                f"{what} on {name}, first called in inference_mode(), does not train: {describe(error)}"
            )
    return broken


@contextmanager
def _variables_noted(read: set[str]) -> Iterator[None]:
    """A block that notes variables of the environment, each with the file that reads it."""
    kind = type(os.environ)
    theirs = kind.__getitem__

    def noted(self: Any, key: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and Path(frame.f_code.co_filename).name in (
            "os.py",
            "<frozen os>",
            "_collections_abc.py",
            "<frozen _collections_abc>",
        ):
            frame = frame.f_back
        read.add(f"{key}\0{frame.f_globals.get('__name__', '')}")
        return theirs(self, key)

    with mock.patch.object(kind, "__getitem__", noted):
        yield


def _not_exported(accelerator: Accelerator, read: set[str]) -> list[str]:
    """Variables that a vendor's own package for acclimate reads, and that ranks on other hosts do not get."""
    record = record_of(accelerator)
    if record is None or record in BUILTIN:
        return []
    package = record.target.partition(":")[0].partition(".")[0]
    limits = (*accelerator.visible_devices_envs(), *record.visible_devices_fallbacks)
    known = (*_EXPORTED_UNASKED, *accelerator.exported_variable_prefixes)
    readers = (key.partition("\0") for key in read)
    names = sorted(name for name, _, module in readers if module.partition(".")[0] == package)
    return [
        f"{name}, which {package} reads, is not exported: exported_variable_prefixes is "
        f"{accelerator.exported_variable_prefixes}"
        for name in dict.fromkeys(names)
        if name not in limits and name not in _OF_ONE_HOST and not name.startswith(known)
    ]


_EXPORTED_UNASKED = ("DS_", "ACCLIMATE_ACCELERATOR", "XDG_", "PYTHON", "LOCAL_", "RANK", "WORLD_", "TORCH",
                     "OMP_", "LD_", "CXX", "CC", "CUDA_HOME")  # fmt: skip
"""How variables begin that the launcher sets or exports for every accelerator, or that describe a host."""


def _select_and_fork(source: str) -> None:
    """Selects an accelerator, counts its devices, forks, and computes in the forked process."""
    accelerator = load(source).accelerator
    told = (accelerator.is_available(), accelerator.device_count(), accelerator.device_type)
    with tempfile.TemporaryFile() as written:
        code = in_fork(lambda: _compute(source, accelerator, told, written.fileno()), _FORK_TIMEOUT_S)
        written.seek(0)
        said = written.read().decode(errors="replace")
    if code is None:
        raise BrokenPromiseError(
            f"a process that was forked after selection did not finish within {_FORK_TIMEOUT_S} s"
        )
    require(
        code == 0,
        f"a process that was forked after selection {how_it_ended(code)}: {said or 'it wrote nothing'}",
    )


def _compute(source: str, inherited: Accelerator, told: tuple[Any, ...], writing: int) -> int:
    """Computes in the forked process; writes what is wrong, and returns an exit code."""
    code, said = 0, ""
    accelerator = inherited
    try:
        for accelerator in (inherited, load(source).accelerator):
            now = (accelerator.is_available(), accelerator.device_count(), accelerator.device_type)
            if now != told:
                code, said = 1, f"is_available(), device_count() and device_type are {now}, before {told}"
            ones = torch.ones(64, 64, device=accelerator.current_device_name())
            accelerator.synchronize()
            total = float((ones @ ones).sum())
            if total != 64.0**3:
                code, said = 1, f"the sum of a product is {total}"
    except Exception as error:  # noqa: BLE001 - told to the process that forked
        method = raised_by(error, accelerator)
        code, said = 1, f"{method and f'{method}() raises '}{describe(error, whole=True)}"
    os.write(writing, said.encode())
    return code
