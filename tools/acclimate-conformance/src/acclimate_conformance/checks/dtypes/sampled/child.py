"""The child processes that make these observations: torch's own tests change torch when they are imported."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    device_names,
    is_host,
    require,
)
from acclimate_conformance.checks.children import Child
from acclimate_conformance.checks.dtypes.sampled import (
    kernels,
    models,
    numbers,
    options,
    pairs,
    refusals,
    repeated,
    rows,
    settings,
    sizes,
    topics,
)
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings
from acclimate_conformance.checks.target import Subject, load

Topic = Callable[[Accelerator, Findings], None]
TOPICS: dict[Topic, str] = {
    topics.operators_as_on_the_host: "Operators give the host's numbers, shapes and dtypes on the inputs of "
    "torch's own tests, and share memory with the same inputs.",
    topics.operators_in_every_dtype: "They do so in every supported dtype, with integers, truth values and "
    "complex numbers, also in place and into tensors given as out.",
    topics.operators_on_any_layout: "They do so on tensors that are transposed, have gaps or channels last, "
    "repeat one row, or begin anywhere in their memory.",
    topics.operators_on_special_numbers: "They do so if the first input has NaN, infinity and zeros of both "
    "signs.",
    topics.operators_in_place_and_into_others: "They do so in place and into tensors given as out.",
    topics.operators_on_other_operands: "They do so on tensors without elements, on operands of two dtypes, "
    "beside numbers, and into an input that is also given as out.",
    topics.gradients_as_on_the_host: "First and second gradients of operators are the host's on the inputs "
    "of torch's own tests, in any layout.",
    topics.gradients_in_hard_cases: "Gradients are the host's also for complex numbers, for zeros and equal "
    "numbers, without elements, and the second time through a graph.",
    topics.lists_of_tensors_as_on_the_host: "Operators on lists of tensors, with which optimizers compute, "
    "give the host's numbers.",
    kernels.kernels_as_on_the_host: "Each operator that torch's functions and gradients call gives the "
    "host's numbers by itself: into tensors given as out, in place, with many elements, in other layouts.",
    models.modules_as_on_the_host: "Each module of torch.nn gives the host's results, gradients and "
    "statistics, in training and evaluation.",
    models.optimizers_as_on_the_host: "Each optimizer of torch.optim, with each option, also foreach and "
    "fused, changes parameters as on the host.",
    models.gradients_are_clipped: "clip_grad_norm_ and clip_grad_value_ clip gradients as on the host.",
    numbers.every_small_number: "Operators of one number are right for every number of 8 and 16 bits, and "
    "for many others.",
    numbers.pairs_of_numbers: "Operators of two numbers are right for numbers of any size, with any option.",
    numbers.every_conversion: "Conversions between all dtypes, also float8, round to the nearest number, and "
    "halves to even.",
    numbers.results_are_rounded: "Results of 16 bits are rounded to the nearest number, from sums of higher "
    "precision.",
    sizes.operators_of_any_length: "Operators treat each element of dimensions of 1 to 70,001 elements, "
    "and so do their gradients.",
    repeated.operators_beyond_the_grid: "Operators that take each row, column or channel by itself treat all "
    "of 65,537 and more.",
    sizes.attention_with_every_option: "Attention is right with any mask, scale, number of heads and length.",
    settings.operators_in_any_setting: "They do so in another thread, in inference_mode, while another "
    "device is current, with another default dtype, and with deterministic algorithms.",
    pairs.operators_in_two_settings: "They do so in two settings at a time, of streams, threads, devices, "
    "errors, modes, layouts and dtypes, and in graphs that are replayed on other numbers.",
    settings.operators_after_other_calls: "They and their gradients do so after calls of other shapes, "
    "layouts, dtypes and options, and with other numbers in the same memory.",
    settings.operators_within_autocast: "Within amp.autocast they give the host's numbers within 16 bits, in "
    "the dtype that is asked for, and from other dtypes, in place and into others what they give elsewhere.",
    rows.operators_on_rows_that_differ: "They do so on batches of which one row has equal numbers, zeros, "
    "NaN or a mask that hides all, and refuse a batch if one matrix has no result.",
    rows.derivatives_forwards: "Derivatives forwards are the host's, and so are gradients that are added to "
    "others which lie in another order in memory.",
    options.every_option_of_an_operator: "Each option of an operator has torch's effect: each truth value, "
    "word, number, dtype and tensor that may be left out.",
    refusals.wrong_arguments_are_refused: "Operators refuse shapes, dtypes and devices that do not fit, "
    "places beyond the end, and writes to elements that share memory.",
}
"""In the order in which the process makes them, each with the promise that it checks.

The last may leave a device unusable: some note a place beyond the end as a fault of the program.
"""
_WAITING_S = 0.5


def require_sampled(subject: Subject, topic: str) -> str | None:
    """Fails the check if an observation differs from the host's; returns a note of what is lacking."""
    if is_host(subject.accelerator):
        raise NotOfferedError("its operators are the host's, with which those of devices are compared")
    told = _observers(subject).ask(topic)
    if told["absent"]:
        raise NotOfferedError(told["absent"])
    require(not told["broken"], "; ".join(told["broken"]))
    note: str = told["note"]
    return note or None


class _Observers:
    """Processes that observe one topic at a time each; another one after a crash.

    A process computes on one core, so there are two where there are cores, and they go ahead of the checks.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._told: dict[str, Future[dict[str, Any]]] = {}
        self._asked: SimpleQueue[tuple[str, Future[dict[str, Any]]]] = SimpleQueue()
        self._running: dict[int, tuple[Child, TextIO]] = {}
        for number in range(min(_PROCESSES, _cores())):
            # Not of a pool, for whose threads Python waits when it ends.
            threading.Thread(target=self._serve, args=(number,), daemon=True).start()
        atexit.register(self._stop)

    def begin(self, topics: Sequence[str]) -> None:
        """Observes topics in their order, for checks that ask later."""
        for topic in topics:
            if topic not in self._told:
                self._told[topic] = self._submitted(topic)

    def ask(self, topic: str) -> dict[str, Any]:
        """What a process saw of a topic.

        Raises:
            BrokenPromiseError: the process crashed.
        """
        ahead = self._told.pop(topic, None)
        if ahead is None:
            return self._submitted(topic).result()
        try:
            return ahead.result()
        except BrokenPromiseError:  # a device may take one process only
            return self._submitted(topic).result()

    def _submitted(self, topic: str) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        self._asked.put((topic, future))
        return future

    def _serve(self, number: int) -> None:
        while True:
            topic, future = self._asked.get()
            try:
                future.set_result(self._observe(number, topic))
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)

    def _observe(self, number: int, topic: str) -> dict[str, Any]:
        if number not in self._running or self._running[number][0].ended():
            self._running[number] = self._started()
        child, lines = self._running[number]
        lines.write(f"{topic}\n")
        lines.flush()
        answer = lines.readline()
        if not answer:
            child.result()
            raise BrokenPromiseError(f"a child process ended before it had observed {topic}")
        told: dict[str, Any] = json.loads(answer)
        if not told["usable"]:
            child.stop()
        return told

    def _started(self) -> tuple[Child, TextIO]:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            address = str(Path(folder) / "door")
            door.bind(address)
            door.listen()
            door.settimeout(_WAITING_S)
            child = Child(f"{__name__}:observe", self._source, {"address": address})
            while True:
                try:
                    connection, _ = door.accept()
                    break
                except TimeoutError:
                    if child.ended():
                        child.result()  # raises, as it has not answered
        connection.settimeout(None)
        return child, connection.makefile("rw", encoding="utf-8")

    def _stop(self) -> None:
        for child, _ in self._running.values():
            child.stop()


_PROCESSES = 2


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _observers(subject: Subject) -> _Observers:
    return _Observers(subject.source)


def begin(subject: Subject, names: Sequence[str]) -> None:
    """Begins what the checks of these names ask for, while others run.

    Args:
        subject: the accelerator.
        names: of checks, in their order; others than those of this module's topics are left out.
    """
    topics = {topic.__name__ for topic in TOPICS}
    asked = [name for name in names if name in topics]
    if asked and not is_host(subject.accelerator):
        _observers(subject).begin(asked)


def observe(source: str, address: str) -> None:
    """The program of the process: it ends when the other end of the connection is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        accelerator = load(source).accelerator
        if len(device_names(accelerator)) > 1:
            accelerator.set_device(len(device_names(accelerator)) - 1)
        torch.set_num_threads(1)
        by_name = {topic.__name__: topic for topic in TOPICS}
        with connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                lines.write(json.dumps(_observed(accelerator, by_name[line.strip()])) + "\n")
                lines.flush()


def _observed(accelerator: Accelerator, topic: Topic) -> dict[str, Any]:
    absent = ""
    found = Findings(accelerator)
    try:
        importlib.import_module("torch.testing._internal.common_methods_invocations")
    except Exception as error:  # noqa: BLE001 - they ask torch's modules for devices for what a vendor's lacks
        absent = f"torch's own tests cannot be imported: {describe(error)}"
    else:
        topic(accelerator, found)
        if not found.compared and not found.broken:
            absent = f"nothing could be compared: {found.note() or 'the device has no dtype of 16 bits'}"
    return {"absent": absent, "broken": found.broken, "note": found.note(), "usable": found.usable}
