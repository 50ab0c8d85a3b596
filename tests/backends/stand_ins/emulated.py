"""Implements the names that most vendors' modules share, on the emulated device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import jiterator

from acclimate.accelerator.recorded_graph import RecordedCapture, RecordedGraph, is_recording
from acclimate_sim import torch_module as sim

_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}
_thread = threading.local()


@dataclass(frozen=True)
class Properties:
    """What torch.cuda, torch_npu and torch_mlu tell of a device."""

    name: str
    total_memory: int
    multi_processor_count: int = 108
    major: int = 8
    minor: int = 0


def device_functions(device_type: str) -> dict[str, Any]:
    """By name; each takes its arguments in the order that vendors have in common."""
    return {
        **asked_by_torch(device_type),
        **_devices(device_type),
        **_streams(device_type),
        **_memory(device_type),
        **_random(device_type),
        **_tensor_types(device_type),
    }


def graphs(graph_class: str) -> dict[str, Any]:
    """The graph class of a vendor under its name, and ``graph``: operators are recorded, and replayed."""
    return {
        graph_class: type(graph_class, (_Graph,), {}),
        "graph": _capture,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": is_recording,
    }


def ranges() -> dict[str, Callable[..., Any]]:
    """Profiler ranges in the manner of NVTX: push gives the depth from 0, pop the depth that was left."""
    return {
        "range_push": _push,
        "range_pop": _pop,
        "range_start": lambda message, *_, **__: len(message),
        "range_end": lambda *_, **__: None,
        "mark": lambda *_, **__: None,
    }


# -- devices ------------------------------------------------------------------------------------------


def index_of(device: Any) -> int:
    """What every function takes as a device: an index, a name, a ``torch.device``, or ``None``."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return sim.current_device() if index is None else index


def _devices(device_type: str) -> dict[str, Any]:
    def properties(device: Any = None) -> Properties:
        return Properties(_device_name(device), sim.mem_get_info(index_of(device))[1])

    def _device_name(device: Any = None) -> str:
        index_of(device)
        return f"a stand-in for {device_type}"

    class device_of(sim.device):  # noqa: N801 - torch's name for it
        def __init__(self, obj: torch.Tensor) -> None:
            super().__init__(obj.device if obj.device.type == device_type else None)

    return {
        "can_device_access_peer": lambda device, peer: True,
        "current_device": sim.current_device,
        "device": sim.device,
        "device_count": sim.device_count,
        "device_of": device_of,
        "get_amp_supported_dtype": sim.get_amp_supported_dtype,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "get_device_name": _device_name,
        "get_device_properties": properties,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: torch.bfloat16 in sim.get_amp_supported_dtype(),
        "is_initialized": lambda: True,
        "set_device": sim.set_device,
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
    }


def asked_by_torch(device_type: str) -> dict[str, Any]:
    """What torch itself asks of a device's module, so that the vendor's must have it, recorded or not."""
    from_outside = torch._C._get_privateuse1_backend_name() == device_type
    return {
        # torch.amp.autocast refuses a device from outside without the one, and fake tensors call the other.
        **(
            {"get_amp_supported_dtype": sim.get_amp_supported_dtype, "is_initialized": lambda: True}
            if from_outside
            else {}
        ),
        # torch's own tests make operators with it, which the checks of conformance do not call.
        **({"jiterator": jiterator} if device_type == "cuda" else {}),
        # Of torch.mps too it is asked, which does not have it.
        **({} if device_type == "mps" else {"_initialized": True}),
        "_is_in_bad_fork": lambda: False,
        "_lazy_call": lambda callback, **_: callback(),
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: _exchange(device),
        "_maybe_exchange_device": lambda device: _exchange(device),
    }


def _exchange(device: int) -> int:
    before = sim.current_device()
    if device >= 0:
        sim.set_device(device)
    return before


# -- streams ------------------------------------------------------------------------------------------


def _streams(device_type: str) -> dict[str, Any]:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
            if "stream_id" in identity:  # an existing one
                return super().__new__(cls, **identity)
            return super().__new__(cls, device=torch.device(device_type, index_of(device)), priority=priority)

        # As in the vendors' modules: torch's own takes events of torch's class only, not of a subclass.
        def record_event(self, event: torch.Event | None = None) -> torch.Event:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_event(self, event: torch.Event) -> None:
            event.wait(self)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, *unused: bool, **also_unused: bool) -> Event:
            made = super().__new__(cls, torch.device(device_type), enable_timing=enable_timing)
            # torch compares the times of events of its own class only, not of a subclass.
            made._time = torch.Event(torch.device(device_type), enable_timing=enable_timing)
            return made

        def record(self, stream: torch.Stream | None = None) -> None:
            super().record(stream)
            self._time.record(stream)

        def elapsed_time(self, end_event: Event) -> float:
            return self._time.elapsed_time(end_event._time)

    # Streams are of the class that the module shows: its constructor checks what it is given.
    def shown() -> type[torch.Stream]:
        module = getattr(torch, device_type)
        return module.Stream if "Stream" in vars(module) else torch.Stream

    def existing(stream_id: int, index: int) -> torch.Stream:
        known = torch.accelerator.current_stream(index)
        return shown()(stream_id=stream_id, device_index=index, device_type=known.device_type)

    def current_stream(device: Any = None) -> torch.Stream:
        index = index_of(device)
        return existing(torch.accelerator.current_stream(index).stream_id, index)

    def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    return {
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: existing(0, index_of(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
    }


# -- memory -------------------------------------------------------------------------------------------


def _memory(device_type: str) -> dict[str, Any]:
    def on_index(function: Callable[[int], Any]) -> Callable[..., Any]:
        return lambda device=None: function(index_of(device))

    of = torch.accelerator
    # Now, as later torch.accelerator may have no statistics of the device.
    allocated, statistics = of.memory_allocated, of.memory_stats

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        return f"a stand-in for {device_type}: {allocated(index_of(device))} bytes allocated"

    return {
        "OutOfMemoryError": torch.OutOfMemoryError,
        "empty_cache": of.empty_cache,
        "ipc_collect": lambda: None,
        "max_memory_allocated": on_index(of.max_memory_allocated),
        "max_memory_cached": on_index(of.max_memory_reserved),
        "max_memory_reserved": on_index(of.max_memory_reserved),
        "mem_get_info": on_index(of.get_memory_info),
        "memory_allocated": on_index(allocated),
        "memory_cached": on_index(of.memory_reserved),
        "memory_reserved": on_index(of.memory_reserved),
        # As torch's caching allocators tell it if blocks of any size are split.
        "memory_stats": lambda device=None: {**statistics(index_of(device)), "max_split_size": -1},
        "memory_summary": summary,
        "reset_accumulated_memory_stats": on_index(of.reset_accumulated_memory_stats),
        "reset_max_memory_allocated": on_index(of.reset_peak_memory_stats),
        "reset_max_memory_cached": on_index(of.reset_peak_memory_stats),
        "reset_peak_memory_stats": on_index(of.reset_peak_memory_stats),
    }


# -- random numbers -----------------------------------------------------------------------------------


def _random(device_type: str) -> dict[str, Any]:
    def every() -> tuple[torch.Generator, ...]:
        return tuple(sim.default_generator(index) for index in range(sim.device_count()))

    def seed_all() -> None:
        seed = sim.default_generator().seed()
        sim.manual_seed_all(seed)

    def set_all(new_states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(every(), new_states, strict=True):
            generator.set_state(state)

    return {
        "default_generators": every(),
        "get_rng_state": lambda device=device_type: sim.default_generator(device).get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in every()],
        "initial_seed": sim.initial_seed,
        "manual_seed": lambda seed: sim.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: sim.manual_seed_all(int(seed)),
        "seed": lambda: sim.default_generator().seed(),
        "seed_all": seed_all,
        "set_rng_state": lambda state, device=device_type: sim.default_generator(device).set_state(state),
        "set_rng_state_all": set_all,
    }


# -- tensor types -------------------------------------------------------------------------------------


class _TensorType(type):
    """A class whose instances are the tensors of one dtype on the device."""

    dtype: torch.dtype
    device_type: str

    def __instancecheck__(cls, instance: object) -> bool:
        tensor = isinstance(instance, torch.Tensor)
        return tensor and instance.dtype == cls.dtype and instance.device.type == cls.device_type

    def __call__(cls, *data: Any) -> torch.Tensor:
        if all(isinstance(size, int) for size in data):
            return torch.empty(data or (0,), dtype=cls.dtype, device=cls.device_type)
        if isinstance(data[0], torch.Size):
            return torch.empty(data[0], dtype=cls.dtype, device=cls.device_type)
        return torch.tensor(data[0], dtype=cls.dtype, device=cls.device_type)


def _tensor_types(device_type: str) -> dict[str, Any]:
    return {
        name: _TensorType(name, (), {"dtype": dtype, "device_type": device_type})
        for name, dtype in _TENSOR_TYPES.items()
    }


# -- graphs and ranges --------------------------------------------------------------------------------


class _Graph(RecordedGraph):
    """A graph with the methods that vendors' classes have in common."""

    def __init__(self, *unused: Any) -> None:
        super().__init__()

    def capture_begin(self, *unused: Any) -> None:
        self._capture = RecordedCapture(self)
        self._capture.__enter__()

    def capture_end(self) -> None:
        self._capture.__exit__(None, None, None)

    def replay(self, *unused: Any) -> None:
        super().replay()

    def pool(self) -> tuple[int, int]:
        return 0, 1


class _capture:  # noqa: N801 - torch's name for it is "graph"
    """The context manager ``graph``; where the capture fails, that is what is told."""

    def __init__(self, graph: _Graph, *unused: Any, **also_unused: Any) -> None:
        self._capture = RecordedCapture(graph)

    def __enter__(self) -> None:
        self._capture.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._capture.__exit__(*error)


def _push(message: str, *_: Any, **__: Any) -> int:
    open_ranges = _thread.__dict__.setdefault("ranges", [])
    open_ranges.append(message)
    return len(open_ranges) - 1


def _pop(*_: Any, **__: Any) -> int:
    open_ranges = _thread.__dict__.setdefault("ranges", [])
    if open_ranges:
        open_ranges.pop()
    return len(open_ranges)
