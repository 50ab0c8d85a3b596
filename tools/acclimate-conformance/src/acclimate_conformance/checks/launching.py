"""Checks of what the launcher relies on: visible devices, launched ranks, a fork after selection."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.host.process_status import how_it_ended
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    exactly,
    is_host,
    require,
)
from acclimate_conformance.checks.calls import raised_by
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.children import Child
from acclimate_conformance.checks.target import Subject, load

_FORK_TIMEOUT_S = 120


@check(
    "set_visible_devices_envs", "visible_devices_envs", "visible_devices_variable", "device_count",
    promise="A process that is limited to some devices sees that many, from index 0 on, and computes "
    "on them.",
    timeout_s=320, once=True,
)  # fmt: skip
def visible_devices(subject: Subject) -> str | None:
    accelerator = subject.accelerator
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
    _require_seen(subject, environment, variables, 1)
    if last == 0:
        return "with only one device here, a limit cannot be observed"
    accelerator.set_visible_devices_envs(environment, [last, 0])
    _require_seen(subject, environment, variables, 2)
    return None


_ASCENDING = ("ASCEND_RT_VISIBLE_DEVICES",)
"""Variables of drivers that take devices in ascending order only."""


def _require_seen(
    subject: Subject, environment: dict[str, str], variables: Sequence[str], wanted: int
) -> None:
    """Fails the check unless a child with this environment counts and uses so many devices."""
    limit = " ".join(f"{variable}={environment.get(variable)}" for variable in variables)
    try:
        seen = Child(f"{__name__}:count_devices", subject.source, environment=environment).result()
    except BrokenPromiseError as broken:
        raise BrokenPromiseError(f"with {limit}, which leaves {wanted}, {broken}") from None
    require(seen == wanted, f"with {limit} the device_count() of a child is {seen}, not {wanted}")


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
    "process ends with exit code 0.",
    timeout_s=320, once=True,
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
        ended == 0, f"a process that used {told['used']}, and returns from its program, {how_it_ended(ended)}"
    )


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
    ones = torch.ones(4, device=accelerator.current_device_name())
    stream, event = accelerator.Stream(), accelerator.Event()
    accelerator.synchronize()
    with accelerator.stream(stream):
        ones.mul_(2)
        event.record()
    event.synchronize()
    accelerator.synchronize()
    _KEPT.extend((ones, stream, event))
    with suppress(Exception):  # other checks are about graphs
        graph = accelerator.create_graph()
        _KEPT.append(graph)
        with accelerator.capture_to_graph(graph):
            ones.mul_(2)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        return "a stream, an event and a graph"
    return "a stream and an event"


_KEPT: list[Any] = []
"""What a process holds until it ends."""


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


@lru_cache(maxsize=1)
def _launched(subject: Subject) -> dict[str, Any]:
    """The observations of one process for both checks above, since a process takes seconds to start."""
    environment = {**os.environ, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    child = Child(f"{__name__}:launched", subject.source, environment=environment)
    told: dict[str, Any] = child.result(timeout_s=250)
    return {**told, "ended": child.exit_code()}


def launched(source: str) -> dict[str, Any]:
    """Forks after selection, and then describes the rank."""
    broken = ""
    try:
        _select_and_fork(source)
    except Exception as error:  # noqa: BLE001 - the other check goes on
        broken = str(error) if isinstance(error, BrokenPromiseError) else describe(error, whole=True)
    return {"fork": broken, "rank": _describe_rank(source)}


def _select_and_fork(source: str) -> None:
    """Selects an accelerator, counts its devices, forks, and computes in the forked process."""
    accelerator = load(source).accelerator
    told = (accelerator.is_available(), accelerator.device_count(), accelerator.device_type)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _compute_and_leave(source, accelerator, told, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        raise BrokenPromiseError(
            f"a process that was forked after selection did not finish within {_FORK_TIMEOUT_S} s"
        )
    require(
        code == 0,
        f"a process that was forked after selection {how_it_ended(code)}: {said or 'it wrote nothing'}",
    )


def _compute_and_leave(source: str, inherited: Accelerator, told: tuple[Any, ...], writing: int) -> None:
    """The forked process; does not return."""
    signal.alarm(_FORK_TIMEOUT_S)
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
    os._exit(code)
