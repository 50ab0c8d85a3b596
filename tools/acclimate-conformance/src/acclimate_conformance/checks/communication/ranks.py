"""Processes that communicate with the accelerator's backend, and report what they saw by topic."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch import distributed

from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    is_host,
    require,
)
from acclimate_conformance.checks.children import Child
from acclimate_conformance.checks.claims import lacking
from acclimate_conformance.checks.communication.observer import Observer
from acclimate_conformance.checks.communication.time_limit import LOOK_S, WAITED, limited
from acclimate_conformance.checks.communication.topics import TOPICS
from acclimate_conformance.checks.target import Subject, load

_TIMEOUT_S = 240
_TOPIC_LIMIT_S = 60
_FIRST_LIMIT_S = 60  # the first collective sets up what connects the ranks
_Told = dict[str, dict[str, list[str]]]
_NOTHING: dict[str, list[str]] = {"broken": [], "lacking": []}
_ENDED = "it ended at"
_LEAVING_S = 5.0  # for a rank that has failed: the others may not leave the group with it


def require_topic(subject: Subject, topic: str) -> str | None:
    """Fails the check if a process saw a fault in a topic; returns a note of what the backend lacks."""
    if not distributed.is_available():
        raise NotOfferedError("this torch is built without torch.distributed")
    told = _outcome(subject)
    if isinstance(told, Exception):
        raise told
    broken, lacking = told[topic]["broken"], told[topic]["lacking"]
    if broken and told[topic]["cause"]:
        raise BrokenPromiseError("; ".join(broken[:3]), cause=told[topic]["cause"][0])
    require(not broken, "; ".join(broken[:3]))
    return f"its backend lacks {', '.join(lacking)}" if lacking else None


@functools.lru_cache(maxsize=1)
def _outcome(subject: Subject) -> _Told | BrokenPromiseError | NotOfferedError:
    """The observations of the processes, or the error with which each topic ends."""
    devices = len(device_names(subject.accelerator))
    try:
        return _on_ranks(subject, 3)
    except BrokenPromiseError as broken:
        if devices > 2 or is_host(subject.accelerator):
            return broken
        why = str(broken)
    # Many backends refuse two ranks on one device; a single rank at least shows that the backend works.
    try:
        told = _on_ranks(subject, devices)
    except BrokenPromiseError as broken:
        return broken
    if devices > 1:
        return told
    # A library for collectives tells the reason last, after where in its sources it was found.
    reason = str(why).strip().splitlines()[-1]
    return NotOfferedError(f"there is one device here, which two ranks cannot share: {reason}")


def _on_ranks(subject: Subject, count: int) -> _Told:
    """Runs :func:`rank` in ``count`` processes, and joins what they report."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for number in range(count):
            told = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count}
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment.update({name: str(value) for name, value in told.items()})
            arguments = {"number": number, "count": count, "folder": folder}
            ranks.append(Child(f"{__name__}:rank", subject.source, arguments, environment))
        results: list[_Told] = []
        all_done = threading.Event()
        watcher = threading.Thread(target=_tell_of_crashes, args=(ranks, Path(folder), all_done), daemon=True)
        watcher.start()
        try:
            for number, process in enumerate(ranks):
                results.append(_result(process, Path(folder), number))
        finally:
            all_done.set()
            watcher.join()
            for process in ranks:
                process.stop()
    return _joined(results)


def _tell_of_crashes(ranks: Sequence[Child], folder: Path, all_done: threading.Event) -> None:
    """Leaves a file for each rank that crashed, so that the others do not wait long."""
    while not all_done.wait(LOOK_S):
        for number, process in enumerate(ranks):
            if process.ended() and not process.ended_well():
                _mark(folder, number).touch()


def _result(process: Child, folder: Path, number: int) -> _Told:
    """The report of one rank, even if it ended before its last topic."""
    try:
        told: _Told = process.result(_TIMEOUT_S)
    except BrokenPromiseError:
        saved = _saved(folder, number)
        if not saved.exists():
            raise
        told = json.loads(saved.read_text(encoding="utf-8"))
    return told


def _joined(results: list[_Told]) -> _Told:
    """The joint report of the ranks on each topic; a topic that one rank did not reach is broken."""
    joined: _Told = {}
    before = _first_end(results)
    for topic in (function.__name__ for function in TOPICS):
        broken = [
            f"rank {number}: {text}"
            for number, result in enumerate(results)
            for text in result.get(topic, _NOTHING)["broken"]
        ]
        ended = not all(topic in result for result in results) or any(_ENDED in text for text in broken)
        if not broken and ended:
            broken = [f"the ranks did not reach it: {before}"]
        joined[topic] = {
            "broken": broken,
            "lacking": results[0].get(topic, _NOTHING)["lacking"],
            "cause": [f"a rank ended, and left the others alone: {before}"] if ended else [],
        }
    return joined


def _first_end(results: list[_Told]) -> str:
    """Which rank ended early, and where: one that did not just wait for another, if there is one."""
    ends = [
        f"rank {number}: {text}"
        for topic in (function.__name__ for function in TOPICS)
        for number, result in enumerate(results)
        for text in result.get(topic, _NOTHING)["broken"]
        if _ENDED in text
    ]
    return next((text for text in ends if WAITED not in text), next(iter(ends), "a rank crashed"))


def _line_of(error: BaseException) -> str:
    """The innermost line of a topic that an error came from."""
    here = Path(__file__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.line for f in frames if Path(f.filename).parent == here.parent and f.filename != str(here)]
    return (lines[-1] if lines else None) or "another file"


def _mark(folder: Path, number: int) -> Path:
    return folder / f"rank {number} has ended"


def _saved(folder: Path, number: int) -> Path:
    return folder / f"rank {number}.json"


def rank(source: str, number: int, count: int, folder: str) -> _Told:
    """The program of one of the processes."""
    accelerator = load(source).accelerator
    accelerator.set_device(number % len(device_names(accelerator)))
    distributed.init_process_group(
        accelerator.communication_backend_name(),
        init_method=f"file://{Path(folder) / 'store'}",
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=_TIMEOUT_S - 20),
    )
    told: _Told = {}
    offered: dict[str, str] = {}
    leaving_s: float = _TOPIC_LIMIT_S

    def ended() -> str:
        return next(
            (f"rank {k}" for k in range(count) if k != number and _mark(Path(folder), k).exists()), ""
        )

    try:
        for topic in TOPICS:
            name = topic.__name__
            here = Observer(accelerator, number, count, Path(folder), offered)

            def give_up(why: str, name: str = name, here: Observer = here) -> None:
                _mark(Path(folder), number).touch()
                here.broken.append(f"{_ENDED} {name}: it {why}")
                sys.stderr.write(f"rank {number}: {here.broken[-1]}\n")
                if told:  # else the ranks may not fit on the devices that are here
                    told[name] = {"broken": here.broken, "lacking": here.lacking}
                    _saved(Path(folder), number).write_text(json.dumps(told), encoding="utf-8")

            limit_s = _TOPIC_LIMIT_S if told else _FIRST_LIMIT_S
            with limited(limit_s, topic.__code__.co_filename, give_up, ended):
                try:
                    topic(here)
                except Exception as error:
                    absent = lacking(accelerator, error)
                    if absent:  # for the other ranks too
                        dtype = absent.removeprefix("the device has no ").partition(":")[0]
                        here.lacking.append(f"{dtype} (which the device has not either)")
                        told[name] = {"broken": here.broken, "lacking": here.lacking}
                        continue
                    give_up(f"raised {describe(error, whole=True)}, in {_line_of(error)}")
                    leaving_s = _LEAVING_S
                    raise
            told[name] = {"broken": here.broken, "lacking": here.lacking}
            if here.last_act is not None:  # the last topic is about a rank that ends
                _saved(Path(folder), number).write_text(json.dumps(told), encoding="utf-8")
                here.last_act()
                os._exit(0)
        _saved(Path(folder), number).write_text(json.dumps(told), encoding="utf-8")
    finally:
        # A model of DDP that is collected later would hold the last reference to the group, whose end
        # then waits, with the GIL, for a thread that waits for the GIL.
        gc.collect()
        with limited(leaving_s, __file__, lambda why: None):
            distributed.destroy_process_group()
    return told
