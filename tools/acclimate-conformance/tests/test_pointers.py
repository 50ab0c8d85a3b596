"""A failed check says what is wrong and names the method that the vendor has to change."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acclimate.accelerator import Accelerator, DeviceLike, MixedPrecision
from acclimate.backends.cpu import CPUAccelerator
from acclimate_conformance.checks import ambient, claims
from acclimate_conformance.checks.assertions import BrokenPromiseError, all_told, require_close
from acclimate_conformance.checks.calls import Calls, where_to_mend
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import _comparable
from acclimate_conformance.checks.memory import capacity as memory_capacity
from acclimate_conformance.checks.runtime.types import misfit
from acclimate_conformance.checks.target import Subject
from acclimate_conformance.result import About, Report, Result
from acclimate_conformance.runner.catalog import checks
from acclimate_conformance.runner.causes import ranked
from acclimate_conformance.runner.examine import examine


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """Checks collect garbage; the objects of the other tests here need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


CATALOG = {check.id: check for check in checks()}


class OwnBackend(CPUAccelerator):
    communication_backend = "gloo"


class OwnBuilders(CPUAccelerator):
    op_builders = CPUAccelerator.op_builders


class OwnFigures(CPUAccelerator):
    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        return super().mem_get_info(device)


class ClaimsFloat8(CPUAccelerator):
    def supported_dtypes(self) -> list[torch.dtype]:
        return [*super().supported_dtypes(), torch.float8_e4m3fn]


def failed_changes(accelerator: Accelerator, name: str, reason: str = "") -> list[str]:
    weights = where_to_mend(accelerator, CATALOG[name], Calls(), reason, ())
    return sorted(weights, key=lambda change: -weights[change])


@pytest.mark.parametrize("topic", ["collectives", "reductions", "barrier", "tensors_of_any_shape"])
def test_a_fault_of_a_collective_is_in_the_backend_that_the_class_names(topic: str) -> None:
    changes = failed_changes(OwnBackend(), f"communication/{topic}")
    assert changes[0].startswith(f"communication_backend: implemented by {__name__}:OwnBackend")
    assert 'it names the backend "gloo" of torch.distributed' in changes[0]
    assert not [change for change in changes if change.startswith("communication_backend_name")]


@pytest.mark.parametrize(
    ("name", "reason", "of"),
    [
        ("random/draws_keep_their_range", "multinomial draws a place twice", "operators"),
        ("dtypes/gradients_flow", "the gradient of where is wrong on cpu", "operators"),
        ("random/generators_are_used", "torch.rand with a generator changes the default one", "operators"),
        ("dtypes/gradient_scaling", "a step with infinite gradients is not skipped", "operators"),
        ("runtime/tensors_are_saved", "a tensor on cpu after torch.load is elsewhere", "tensors"),
        ("dtypes/copies_of_every_kind", "copy_() of a row gives others", "tensors"),
    ],
)
def test_what_names_no_method_is_a_fault_of_the_devices_operators_or_tensors(
    name: str, reason: str, of: str
) -> None:
    assert failed_changes(OwnFigures(), name, reason)[0] == f"{of} on cpu: {reason}"


def test_a_fault_of_an_op_is_in_the_builders_that_the_class_names() -> None:
    changes = failed_changes(OwnBuilders(), "ops/optimizer_ops_compute")
    assert changes[0].startswith(f"op_builders: implemented by {__name__}:OwnBuilders")


def test_the_method_that_the_class_overrides_is_named_though_the_check_calls_another() -> None:
    @check("available_memory", promise="It asks for what is available.", once=True)
    def asks(accelerator: Accelerator) -> None:
        accelerator.available_memory()
        raise BrokenPromiseError("it is wrong")

    result = examine(asks, Subject(OwnFigures(), "cpu"))
    assert result.changes[0].startswith(f"mem_get_info: implemented by {__name__}:OwnFigures")


def test_a_dtype_that_is_claimed_and_missing_is_said_to_be_a_false_claim() -> None:
    @check("amp", promise="It adds in every dtype.", once=True)
    def adds(accelerator: Accelerator) -> None:
        for dtype in accelerator.supported_dtypes():
            torch.ones(2, dtype=dtype).add(1)

    result = examine(adds, Subject(ClaimsFloat8(), "cpu"))
    assert result.reason.startswith("supported_dtypes() lists float8_e4m3fn, but the device does not compute")
    assert result.changes[0].startswith(f"supported_dtypes: implemented by {__name__}:ClaimsFloat8")


def test_an_error_that_has_nothing_to_do_with_a_dtype_is_no_false_claim() -> None:
    @check("amp", promise="It raises.", once=True)
    def raises(accelerator: Accelerator) -> None:
        raise ValueError("no luck")

    assert examine(raises, Subject(ClaimsFloat8(), "cpu")).reason == "ValueError: no luck"


def test_an_error_that_is_no_exception_fails_its_check_and_ctrl_c_ends_the_run() -> None:
    """torch.distributed.checkpoint raises such an error, and pytest-xdist would end with it."""
    from torch.distributed.checkpoint import CheckpointException

    raised: list[BaseException] = [CheckpointException("it failed", {}), KeyboardInterrupt()]

    @check("amp", promise="It raises.", once=True)
    def raises(accelerator: Accelerator) -> None:
        raise raised.pop(0)

    result = examine(raises, Subject(CPUAccelerator(), "cpu"))
    assert result.outcome == "failed"
    assert result.reason.startswith("CheckpointException: ")
    with pytest.raises(KeyboardInterrupt):
        examine(raises, Subject(CPUAccelerator(), "cpu"))


class Block(AbstractContextManager[None]):
    """A block that is equal to others of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block)

    __hash__ = None  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        pass


def test_blocks_are_compared_by_the_device_that_they_make_current() -> None:
    accelerator = CPUAccelerator()
    kept, plain = (_comparable(accelerator, block) for block in (Block(), nullcontext()))
    assert kept == plain == accelerator.current_device()
    stream = accelerator.current_stream()
    assert _comparable(accelerator, stream) is stream


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (("A",), tuple[str, ...], True),
        ("A", tuple[str, ...], False),
        (["A"], tuple[str, ...], False),
        (("A", 1), tuple[str, ...], False),
        ((1, 2), tuple[int, int], True),
        ((1, 2, 3), tuple[int, int], False),
        (True, int, False),
        (None, str | None, True),
        (b"A", str | None, False),
        ({"A": 1}, dict[str, str], False),
        ({"A": 1}, dict[str, Any], True),
        (ValueError, type[RuntimeError], False),
        (torch.OutOfMemoryError, type[RuntimeError], True),
    ],
)
def test_a_value_is_of_the_stated_type_or_not(value: object, kind: Any, fits: bool) -> None:
    assert (misfit(value, kind, "it") == "") is fits


def test_the_free_memory_of_the_host_is_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate.host import topology
    from acclimate_conformance.checks.memory import hard_cases

    asked: list[int] = []
    monkeypatch.setattr(topology, "available_memory", lambda: asked.append(1) or 2**20)
    # As on a device that shares the memory.
    monkeypatch.setattr(hard_cases, "is_host", lambda accelerator: False)
    result = examine(CATALOG["memory/figures_beyond_32_bits"], Subject(CPUAccelerator(), "cpu"))
    assert asked
    assert result.outcome == "not offered"
    assert result.reason == "there is too little memory for an allocation of 2 GiB"


class OthersFreeMemory(CPUAccelerator):
    """Other programs free more, each time that one asks, than a check allocates."""

    _asked = 0

    def available_memory(self, device_index: DeviceLike = None) -> int:
        self._asked += 1
        return (2 << 30) + self._asked * (300 << 20) - self.memory_allocated()


def test_memory_that_other_programs_free_meanwhile_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_capacity, "_FIGURES_LAG_S", 0.0)
    memory_capacity.capacity.function(Subject(OthersFreeMemory(), "cpu"))


class FreePagesInLists(CPUAccelerator):
    """The kernel has free pages in the processors' lists, which it does not count as available."""

    def __init__(self) -> None:
        super().__init__()
        self._before = self.memory_allocated()

    def available_memory(self, device_index: DeviceLike = None) -> int:
        allocated = self.memory_allocated() - self._before
        return (4 << 30) - max(0, allocated - (600 << 20))


@pytest.mark.slow
def test_free_memory_in_the_lists_of_processors_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_capacity, "_FIGURES_LAG_S", 0.0)
    memory_capacity.capacity.function(Subject(FreePagesInLists(), "cpu"))


def test_available_memory_that_stays_the_same_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_capacity, "_FIGURES_LAG_S", 0.0)
    monkeypatch.setattr(memory_capacity, "_CHANCES", 1)  # each collects this process's garbage twice
    accelerator = CPUAccelerator()
    monkeypatch.setattr(accelerator, "available_memory", lambda: 1 << 30)
    with pytest.raises(BrokenPromiseError, match="falls by 0"):
        memory_capacity.capacity.function(Subject(accelerator, "cpu"))


# -- in a class that defines all methods itself, so that none stands out --------------------------------


def _planted(name: str, fault: Callable[..., Any]) -> Accelerator:
    """An accelerator with a fault in one of the methods, all of which its class defines."""
    own: dict[str, Any] = {}
    for kind in reversed(CPUAccelerator.__mro__[:-1]):
        own |= {key: value for key, value in vars(kind).items() if not key.startswith("__")}

    @functools.wraps(own[name])
    def faulty(self: Any, *given: Any, **named: Any) -> Any:
        return fault(own[name], self, *given, **named)

    accelerator: Accelerator = type("Vendor", (CPUAccelerator,), {**own, name: faulty})()
    return accelerator


def _peak_is_now(before: Callable[..., Any], self: Any, *given: Any) -> dict[str, Any]:
    figures = before(self, *given)
    return {**figures, "reserved_bytes.all.peak": figures["reserved_bytes.all.current"]}


@contextmanager
def _leaves_gradients_off(before: Callable[..., Any], self: Any, *given: Any) -> Iterator[None]:
    with before(self, *given):
        yield
    torch.set_grad_enabled(False)


FAULTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "manual_seed": (lambda before, self, seed: before(self, seed % 2**32), ("random/seeds_of_every_size",)),
    "set_rng_state": (lambda before, self, *given: None, ("random/state_saved_and_restored",)),
    "available_memory": (lambda before, self, *given: 2**30, ("memory/capacity",)),
    "stream": (
        lambda before, self, given: before(self, given or self.default_stream()),
        ("streams/current_stream",),
    ),
    "range_pop": (
        lambda before, self, *given: (before(self, *given), before(self, *given)),
        ("runtime/profiler_marks",),
    ),
    "toolkit_version": (lambda before, self: "unknown", ("ops/toolkit",)),
    "get_device_name": (lambda before, self, *given: " ", ("devices/properties",)),
    "lazy_call": (
        lambda before, self, call: (before(self, call), before(self, call)), ("runtime/lazy_calls",),
    ),
    "is_out_of_memory": (lambda before, self, error: True, ("memory/out_of_memory",)),
    "memory_stats": (_peak_is_now, ("memory/peak", "memory/peak_is_the_highest")),
    "mem_get_info": (
        lambda before, self, *given: (before(self, *given)[0] * 7 // 10, before(self, *given)[1]),
        ("memory/capacity_of_a_host",),
    ),
    "capture_to_graph": (_leaves_gradients_off, ("graphs/replay_trains",)),
}  # fmt: skip


SLOW = (
    "available_memory", "capture_to_graph", "is_out_of_memory", "lazy_call", "mem_get_info", "memory_stats",
    "range_pop",
)  # fmt: skip
"""Their checks take seconds of processor time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAULTS]
)
def test_the_method_at_fault_is_named_among_many_of_the_same_class(name: str) -> None:
    fault, names = FAULTS[name]
    subject = Subject(_planted(name, fault), "cpu")
    category = names[0].partition("/")[0]
    others = [check for check in CATALOG.values() if check.category == category and not check.once]
    results = ranked([examine(check, subject) for check in [*others[:4], *map(CATALOG.get, names)] if check])
    result = results[-1]
    assert result.outcome == "failed"
    assert result.changes[0].startswith(f"{name}: implemented by"), result.reason


def test_an_events_fault_is_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    event = CPUAccelerator().Event
    before = event.elapsed_time
    monkeypatch.setattr(event, "elapsed_time", lambda self, other: 2 * before(self, other))
    (result,) = ranked([examine(CATALOG["streams/events_measure_time"], Subject(CPUAccelerator(), "cpu"))])
    assert result.outcome == "failed"
    assert result.changes[0].startswith("Event.elapsed_time: implemented by")


@pytest.mark.parametrize(
    ("check", "reason", "culprit"),
    [
        (
            "streams/host_waits", "after Stream.synchronize() an earlier copy to the host is not complete",
            "Stream.synchronize: implemented by",
        ),
        (
            "graphs/empty_graph_refused",
            "replay_graph() after Graph.reset() is accepted; it must raise RuntimeError",
            "Graph.reset: of the objects that create_graph() makes",
        ),
        (
            "random/generators",
            "Generator.clone_state() of default_generator() of cpu draws other numbers",
            "Generator.clone_state: of the generators",
        ),
        (
            "random/every_kind_of_draw_repeats",
            "the operator rand changes the state of the host's generator",
            "operators on cpu: rand",
        ),
    ],
)  # fmt: skip
def test_what_is_outside_of_the_interface_is_at_fault_if_a_text_names_it(
    check: str, reason: str, culprit: str
) -> None:
    assert failed_changes(OwnFigures(), check, reason)[0].startswith(culprit)


def test_a_wrong_count_of_the_record_is_the_records() -> None:
    reason = "the device_count() of its record is 8, and device_count() 2"
    changes = failed_changes(OwnFigures(), "devices/counts", reason)
    assert changes[0] == f"Backend.device_count: in the record whose target is {__name__}:OwnFigures"


def test_a_wrong_product_is_a_fault_of_the_devices_operators() -> None:
    @check("supported_dtypes", promise="It multiplies.", once=True)
    def multiplies(accelerator: Accelerator) -> None:
        require_close(torch.zeros(4), torch.ones(4), torch.float16, "a matrix product")

    result = examine(multiplies, Subject(CPUAccelerator(), "cpu"))
    assert result.changes[0] == "operators on cpu: a matrix product in float16"


def test_failures_with_one_cause_are_listed_together() -> None:
    def failed(name: str, cause: str, change: str) -> Result:
        return Result(f"memory/{name}", "memory", "It works.", "failed", "seen", (), 0.1, cause=cause,
                      changes=(change,), weights=(1.0,))  # fmt: skip

    error = "TypeError: this device has no int{} kernels"
    results = [
        failed("a", error.format(64), "memory_allocated: here"),
        failed("b", error.format(32), "empty_cache: here"),
        failed("c", "", "total_memory: here"), failed("d", "", "total_memory: here"),
        failed("e", "RuntimeError: once", "mem_get_info: here"),
    ]  # fmt: skip
    about = About("foo", "foo:Foo", (), "", "", "", "")
    report = Report(about, ranked(results), 1.0)
    causes = [(cause, [result.name for result in group]) for cause, group in report.causes]
    assert causes == [
        (error.format(64), ["a", "b"]), ("total_memory: here", ["c", "d"]), ("mem_get_info: here", ["e"]),
    ]  # fmt: skip


def test_failures_of_operators_are_listed_by_the_operator_at_fault_and_no_others() -> None:
    def failed(name: str, change: str) -> Result:
        return Result(f"dtypes/{name}", "dtypes", "It works.", "failed", "seen", (), 0.1,
                      changes=(f"operators on foo: {change}",), weights=(4.0,))  # fmt: skip

    told = [
        failed("a", "sigmoid, in a gate is 3"), failed("b", "sigmoid, in a loss of 7 is 4"),
        failed("c", "mul, in a product is 3"), failed("d", "the sum of 7 numbers is off"),
        failed("e", "the sum of 9 numbers is off"), failed("f", "a gradient"),
    ]  # fmt: skip
    about = About("foo", "foo:Foo", (), "", "", "", "")
    groups = [[result.name for result in group] for _, group in Report(about, ranked(told), 1.0).causes]
    assert groups == [["a", "b"], ["d", "e"], ["c"], ["f"]]


def test_a_method_that_one_check_proves_to_be_at_fault_explains_failures_of_checks_that_use_it() -> None:
    def failed(name: str, **changes: float) -> Result:
        return Result(f"memory/{name}", "memory", "It works.", "failed", "seen", (), 0.1,
                      changes=tuple(changes), weights=tuple(changes.values()))  # fmt: skip

    results = ranked(
        [
            failed("names_it", empty_cache=3.6, max_memory_allocated=0.2),
            failed("uses_it", max_memory_allocated=1.6, empty_cache=0.0),
            failed("has_another", total_memory=3.0, empty_cache=0.0),
        ]
    )
    assert [result.changes[0] for result in results] == ["empty_cache", "empty_cache", "total_memory"]


def test_what_happened_before_is_less_likely_at_fault_than_the_draw_that_was_made() -> None:
    reason = (
        "after the draw dropout() of 64 on cpu the host's generator has changed; before it: set_rng_state() "
        "of 3 torch.float32, which is refused"
    )
    (result,) = ranked([_failed("walks_over_random_numbers", reason)])
    assert result.changes[0] == "operators on cpu: dropout"


def test_a_method_of_a_generator_that_one_check_proves_explains_a_walk_that_called_it_before() -> None:
    named = "Generator.clone_state() of default_generator() changes the state of the generator of cpu"
    walked = (
        "after the draw normal_() of 64 on cpu with a generator get_rng_state(0) differs from what it was; "
        "before it: Generator.clone_state() of default_generator(0)"
    )
    results = ranked([_failed("generators", named), _failed("walks_over_random_numbers", walked)])
    assert {result.changes[0].partition(":")[0] for result in results} == {"Generator.clone_state"}


@pytest.mark.parametrize(
    "reason",
    [
        "seed_all() returned 7, initial_seed() is 8",
        "initial_seed() is 8, not 7, after seed_all()",
    ],
)
def test_a_call_that_changes_something_is_at_fault_before_the_one_that_tells_it(reason: str) -> None:
    results = ranked([_failed("fresh_seeds", reason), _failed("fresh_seeds", reason)])
    assert [result.changes[0].partition(":")[0] for result in results] == ["seed_all", "seed_all"]


def _failed(name: str, reason: str) -> Result:
    weights = where_to_mend(OwnFigures(), CATALOG[f"random/{name}"], Calls(), reason, ())
    return Result(f"random/{name}", "random", "It works.", "failed", reason, (), 0.1,
                  changes=tuple(weights), weights=tuple(weights.values()))  # fmt: skip


def test_a_wrong_compiled_function_is_a_fault_of_the_backend_that_compiles() -> None:
    reason = 'a checkpoint with dropout in a function compiled with "inductor" draws other numbers'
    first = failed_changes(OwnFigures(), "runtime/checkpoints_draw_again", reason)[0]
    assert first.startswith("compile_backend: ")
    assert 'it names the backend "inductor" of torch.compile' in first


def test_what_an_observation_begins_with_is_at_fault_before_a_call_that_it_names() -> None:
    reason = "OutOfMemoryError: torch.eye on cpu is accepted; OutOfMemoryError: memory_allocated() is lower"
    changes = failed_changes(OwnFigures(), "memory/a_full_device_says_so", reason)
    assert changes[0].startswith("OutOfMemoryError: ")


def test_one_method_that_explains_several_failures_is_named_by_each() -> None:
    def failed(name: str, **changes: float) -> Result:
        return Result(f"memory/{name}", "memory", "It works.", "failed", "seen", (), 0.1,
                      changes=tuple(changes), weights=tuple(changes.values()))  # fmt: skip

    results = ranked(
        [
            failed("a", max_memory_reserved=1.2, reset_peak_memory_stats=0.9),
            failed("b", max_memory_allocated=1.2, reset_peak_memory_stats=1.0),
            failed("c", memory_stats=1.2, reset_peak_memory_stats=0.9),
        ]
    )
    assert {result.changes[0] for result in results} == {"reset_peak_memory_stats"}


def test_a_second_cause_that_more_failures_name_is_the_first_unless_that_is_proven() -> None:
    told = [
        {"memory_stats": 2.0, "reset_peak_memory_stats": 0.2},
        {"reset_peak_memory_stats": 2.0, "max_memory_reserved": 0.2},
        {"reset_peak_memory_stats": 2.0, "memory_reserved": 0.2},
        {"empty_cache": 3.0, "reset_peak_memory_stats": 0.2},
    ]
    results = ranked(
        [
            Result(f"memory/{number}", "memory", "It works.", "failed", "seen", (), 0.1,
                   changes=tuple(changes), weights=tuple(changes.values()))
            for number, changes in enumerate(told)
        ]
    )  # fmt: skip
    firsts = [result.changes[0] for result in results]
    assert firsts == [*["reset_peak_memory_stats"] * 3, "empty_cache"]


@pytest.mark.parametrize("other", ["reset_peak_memory_stats", "max_memory_allocated"])
def test_a_default_is_at_fault_unless_another_failure_names_what_it_calls(other: str) -> None:
    default = (
        "reset_max_memory_cached: acclimate's default, which calls reset_peak_memory_stats; fix that, or"
    )
    walked = {default: 2.0, "reset_peak_memory_stats: here": 0.4}
    results = [
        Result(f"memory/{name}", "memory", "It works.", "failed", "seen", (), 0.1,
               changes=tuple(changes), weights=tuple(changes.values()))
        for name, changes in (("walked", walked), ("named", {f"{other}: here": 2.0}))
    ]  # fmt: skip
    first = ranked(results)[0].changes[0].partition(":")[0]
    is_named = other == "reset_peak_memory_stats"
    assert first == ("reset_peak_memory_stats" if is_named else "reset_max_memory_cached")


class _Twice(SimpleNamespace):
    """An accelerator of two devices whose current_stream() tells the stream of the current one."""

    device_type = "two"

    def current_device(self) -> int:
        return int(self.here)

    def set_device(self, index: int) -> None:
        self.here = index

    def device_count(self) -> int:
        return 2

    def current_stream(self, index: int) -> str:
        return f"stream of {self.here if self.is_wrong else index}"


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_stream_that_changes_back_with_the_device_is_told_wrongly(is_wrong: bool) -> None:
    accelerator: Any = _Twice(here=0, is_wrong=is_wrong)
    before: dict[str, object] = {
        "the current device": 0, "the current stream of device 0": "stream of 0",
    }  # fmt: skip
    accelerator.set_device(1)
    after = {
        "the current device": 1,
        "the current stream of device 0": accelerator.current_stream(0) if is_wrong else "another",
    }
    told = ambient.follows(accelerator, before, after)
    assert told.startswith("current_stream(0) is stream of 0 while device 0") is is_wrong
    assert accelerator.current_device() == 1


def test_a_name_of_the_interface_in_a_reason_is_at_fault_even_if_it_is_not_called() -> None:
    @check("FloatTensor", "IntTensor", promise="They differ.", once=True)
    def differ(accelerator: Accelerator) -> None:
        raise BrokenPromiseError("a tensor of int64 is an instance of IntTensor: True")

    assert examine(differ, Subject(CPUAccelerator(), "cpu")).changes[0].startswith("IntTensor: ")


def test_a_function_of_torch_with_the_name_of_a_method_is_not_that_method() -> None:
    @check("manual_seed", "manual_seed_all", promise="A seed is kept.", once=True)
    def keeps(accelerator: Accelerator) -> None:
        raise BrokenPromiseError("torch.manual_seed(), which calls manual_seed_all(), is lost")

    assert examine(keeps, Subject(CPUAccelerator(), "cpu")).changes[0].startswith("manual_seed_all: ")


def test_a_property_of_the_vendors_own_is_at_fault_before_the_devices_operators() -> None:
    class OwnAmp(CPUAccelerator):
        @property
        def amp(self) -> MixedPrecision:
            return MixedPrecision(self.device_type)

    @check("amp", promise="It scales.", of="operators", once=True)
    def scales(accelerator: Accelerator) -> None:
        raise BrokenPromiseError("a scale of 8 is 16")

    own, default = (examine(scales, Subject(kind(), "cpu")).changes[0] for kind in (OwnAmp, CPUAccelerator))
    assert own.startswith("amp: implemented by")
    assert default == "operators on cpu: a scale of 8 is 16"


def test_a_block_tells_all_broken_promises_and_the_error_that_ends_it() -> None:
    def seen(*broken: str, error: Exception | None = None) -> None:
        with all_told(most=2) as noted:
            for text in broken:
                noted(text == "right", text)
            if error is not None:
                raise error

    with pytest.raises(BrokenPromiseError, match=r"^one; two; and 1 others$"):
        seen("one", "right", "two", "three")
    with pytest.raises(BrokenPromiseError, match=r"^one; ValueError: the end$"):
        seen("one", error=ValueError("the end"))
    with pytest.raises(ValueError, match="alone"):
        seen(error=ValueError("alone"))


class NoLongs(CPUAccelerator):
    """It does not add uint16, and does not say that it has."""


def test_a_dtype_that_is_neither_claimed_nor_there_is_not_offered() -> None:
    @check("amp", promise="It adds.", once=True)
    def adds(accelerator: Accelerator) -> None:
        raise TypeError("this device has no Long")

    @check("amp", promise="It adds.", once=True)
    def other(accelerator: Accelerator) -> None:
        raise TypeError("this device has no uint16")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_SCALAR_TYPES", {torch.uint16: "UInt16", torch.int64: "Long"})
        absent = examine(other, Subject(NoLongs(), "cpu"))
        there = examine(adds, Subject(NoLongs(), "cpu"))
    assert absent.outcome == "not offered"
    assert absent.reason.startswith("the device has no uint16: ")
    assert there.outcome == "failed"
