"""Code written with streams and events runs on every accelerator; on the host they keep their contract."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from acclimate.accelerator import Accelerator, DeviceLike, HostEvent, HostStream
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import UnsupportedError
from fresh_process import FreshProcesses


@pytest.fixture(autouse=True)
def _default_stream_again(acc: Accelerator) -> Iterator[None]:
    yield
    acc.set_stream(acc.default_stream())


def test_a_stream_made_is_an_object_of_its_class(acc: Accelerator) -> None:
    assert isinstance(acc.Stream, type)
    assert isinstance(acc.Stream(), acc.Stream)
    assert isinstance(acc.current_stream(), acc.Stream)
    assert isinstance(acc.default_stream(0), acc.Stream)


def test_an_event_made_is_an_object_of_its_class(acc: Accelerator) -> None:
    assert isinstance(acc.Event, type)
    assert isinstance(acc.Event(enable_timing=True), acc.Event)


def test_the_default_stream_is_current_at_first(acc: Accelerator) -> None:
    assert acc.current_stream() == acc.default_stream()


def test_work_on_a_stream_is_done(acc: Accelerator) -> None:
    stream = acc.Stream()
    with acc.stream(stream):
        total = torch.ones(4, device=acc.device_name()).sum()
    acc.current_stream().wait_stream(stream)
    assert total.item() == 4


def test_a_stream_that_is_none_changes_nothing(acc: Accelerator) -> None:
    before = acc.current_stream()
    with acc.stream(None):
        assert acc.current_stream() == before
    acc.set_stream(None)
    assert acc.current_stream() == before


def test_an_event_orders_two_streams(acc: Accelerator) -> None:
    event = acc.Event()
    event.record(acc.current_stream())
    acc.Stream().wait_event(event)
    assert acc.current_stream().query() in (True, False)


def test_a_module_without_set_stream_says_what_to_use(
    bare: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = torch.Stream(device="bare")
    with monkeypatch.context() as context:
        context.delattr(torch.accelerator, "set_stream")
        with pytest.raises(UnsupportedError, match=r"with accelerator\.stream"):
            bare.set_stream(stream)


def test_each_stream_is_another_one_and_current_in_its_block(acc: Accelerator) -> None:
    streams = [acc.Stream() for _ in range(2)]
    assert len({stream.stream_id for stream in (*streams, acc.default_stream())}) == 3
    for stream in streams:
        with acc.stream(stream):
            assert acc.current_stream() == stream != acc.default_stream()


def test_events_order_streams_and_measure_a_finite_time(acc: Accelerator) -> None:
    one, other = acc.Stream(), acc.Stream()
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record(one)
    end.record(one)
    other.wait_event(end)
    end.synchronize()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < math.inf


def test_a_module_with_streams_of_its_own_is_asked(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(torch.Stream):
        pass

    entered = []
    monkeypatch.setattr(whole.torch_module, "Stream", Stream, raising=False)
    monkeypatch.setattr(whole.torch_module, "stream", lambda s: entered.append(s) or s, raising=False)
    monkeypatch.setattr(whole.torch_module, "default_stream", lambda index: f"default {index}", raising=False)
    assert whole.Stream is Stream
    stream = whole.Stream()
    with whole.stream(stream):
        pass
    assert entered == [stream]
    assert whole.default_stream(1) == "default 1"


# -- on the host -------------------------------------------------------------------------------------


def test_within_a_stream_it_is_current(cpu: CPUAccelerator) -> None:
    outer, inner = cpu.Stream(), cpu.Stream()
    with cpu.stream(outer):
        assert cpu.current_stream() is outer
        with inner:
            assert cpu.current_stream() is inner
            with outer:
                assert cpu.current_stream() is outer
            assert cpu.current_stream() is inner
        assert cpu.current_stream() is outer
    assert cpu.current_stream() is cpu.default_stream()


def test_entering_a_stream_gives_it(cpu: CPUAccelerator) -> None:
    stream = cpu.Stream()
    with cpu.stream(stream) as entered:
        assert entered is stream


def test_an_error_within_a_stream_leaves_it(cpu: CPUAccelerator) -> None:
    with pytest.raises(KeyError), cpu.stream(cpu.Stream()):
        raise KeyError
    assert cpu.current_stream() is cpu.default_stream()


def test_a_stream_set_stays_current(cpu: CPUAccelerator) -> None:
    stream = cpu.Stream()
    cpu.set_stream(stream)
    assert cpu.current_stream() is stream
    with cpu.stream(cpu.Stream()):
        pass
    assert cpu.current_stream() is stream


def test_each_thread_has_its_own_current_stream(cpu: CPUAccelerator) -> None:
    seen = []
    with cpu.stream(cpu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(cpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [cpu.default_stream()]


def test_two_threads_in_one_stream_each_come_out_where_they_were(cpu: CPUAccelerator) -> None:
    shared, theirs = cpu.Stream(), cpu.Stream()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with theirs, shared:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert inside.wait(60)
    try:
        assert cpu.current_stream() is cpu.default_stream()
    finally:
        leave.set()
        thread.join()


def test_streams_differ_and_keep_what_they_were_made_with(cpu: CPUAccelerator) -> None:
    first, second = cpu.Stream(priority=-1), cpu.Stream(device=1)
    assert first != second
    assert first.stream_id != second.stream_id
    assert first.priority == -1
    assert first.device == second.device == torch.device("cpu")


def test_a_stream_has_done_its_work(cpu: CPUAccelerator) -> None:
    stream = cpu.Stream()
    stream.synchronize()
    stream.wait_stream(cpu.default_stream())
    event = stream.record_event()
    stream.wait_event(event)
    event.wait(stream)
    event.synchronize()
    assert stream.query() is event.query() is True


def test_elapsed_time_is_at_least_what_was_slept(cpu: CPUAccelerator) -> None:
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    start.record()
    before = time.perf_counter()
    time.sleep(0.02)
    slept_ms = (time.perf_counter() - before) * 1000
    end.record()
    elapsed = start.elapsed_time(end)
    assert type(elapsed) is float
    assert 20 <= slept_ms <= elapsed < 10_000


def test_events_recorded_by_a_stream_measure_time(cpu: CPUAccelerator) -> None:
    stream = cpu.Stream()
    start, end = stream.record_event(), stream.record_event()
    assert 0 <= start.elapsed_time(end) < 10_000
    assert end.elapsed_time(start) <= 0


def test_an_event_recorded_again_counts_from_then(cpu: CPUAccelerator) -> None:
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    before = time.perf_counter()
    start.record()
    end.record()
    since_then_ms = (time.perf_counter() - before) * 1000  # long, where the machine is busy
    assert start.elapsed_time(end) <= since_then_ms


@pytest.mark.parametrize("timed", [(True, False), (False, True), (False, False)])
def test_an_event_made_without_timing_has_no_elapsed_time(
    cpu: CPUAccelerator, timed: tuple[bool, bool]
) -> None:
    start, end = (cpu.Event(enable_timing=flag) for flag in timed)
    start.record()
    end.record()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(end)


@pytest.mark.parametrize("recorded", [0, 1])
def test_an_event_not_recorded_has_no_elapsed_time(cpu: CPUAccelerator, recorded: int) -> None:
    events = [cpu.Event(enable_timing=True) for _ in range(2)]
    events[recorded].record()
    with pytest.raises(RuntimeError, match="recorded before"):
        events[0].elapsed_time(events[1])


def test_host_events_take_what_cudas_take() -> None:
    theirs = dict(inspect.signature(torch.cuda.Event.__new__).parameters)
    del theirs["cls"]
    ours = inspect.signature(HostEvent).parameters
    assert {name: parameter.default for name, parameter in theirs.items()} == {
        name: parameter.default for name, parameter in ours.items()
    }
    assert list(theirs) == list(ours)


@pytest.mark.parametrize(("ours", "theirs"), [(HostStream, torch.Stream), (HostEvent, torch.Event)])
def test_host_streams_and_events_do_what_torchs_do(ours: type, theirs: type) -> None:
    theirs_alone = {"event_id", "device_index", "device_type", "native_handle", "is_capturing"}
    between_processes = {"ipc_handle", "from_ipc_handle"}
    wanted = {name for name in dir(theirs) if not name.startswith("_")} - theirs_alone - between_processes
    has = set(dir(ours())) | {"device"}
    assert wanted <= has, wanted - has


# -- devices with one queue --------------------------------------------------------------------------


class OneQueue(CPUAccelerator):
    """A device that works on its own and has no streams; waiting for it is counted."""

    supports_streams = False
    waits = 0

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: DeviceLike = None) -> None:
        self.waits += 1


def test_streams_of_a_device_without_them_do_nothing_and_wait_for_the_device() -> None:
    acc = OneQueue()
    default = acc.current_stream()
    stream = acc.Stream()
    stream.wait_stream(default)
    with acc.stream(stream):
        assert acc.current_stream() is stream
        assert isinstance(acc.current_stream(), acc.Stream)
    assert acc.current_stream() is default is acc.default_stream()
    assert acc.waits == 0
    stream.synchronize()
    assert acc.waits == 1


def test_events_of_a_device_without_streams_measure_its_work_and_not_the_queueing() -> None:
    acc = OneQueue()
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record()
    end.record()
    assert acc.waits == 2
    assert start.elapsed_time(end) > 0


def test_streams_of_two_kinds_of_devices_are_current_each_on_its_own(cpu: CPUAccelerator) -> None:
    acc = OneQueue()
    with cpu.stream(cpu.Stream()) as host, acc.stream(acc.Stream()) as stream:
        assert (cpu.current_stream(), acc.current_stream()) == (host, stream)


def test_a_device_whose_guard_makes_no_streams_gets_stand_ins(fresh: FreshProcesses) -> None:
    told = fresh.check(
        """
import torch
import python_device
python_device.register("bare")
class Stream:
    # As c10's DeviceGuardImplInterface::getNewStream for a device that leaves it out, such as torchvulkan's.
    def __new__(cls, *args, **kwargs):
        raise NotImplementedError("Backend doesn't support create a new Stream.")
torch.Stream = Stream
from acclimate import get_accelerator
acc = get_accelerator()
side = acc.Stream()
side.wait_stream(acc.current_stream())
with acc.stream(side):
    inside = acc.current_stream() is side
acc.current_stream().wait_stream(side)
start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
start.record(); end.record(); end.synchronize()
tell(name=acc.name, inside=inside, device=str(side.device), time=start.elapsed_time(end) > 0)
""",
        path=[Path(__file__).parent],
    ).told
    assert told == {"name": "bare", "inside": True, "device": "bare", "time": True}
