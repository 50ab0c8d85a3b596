"""Every backend calls only what its device's module really has, with the arguments that it takes.

The modules stand in: they have the names recorded in ``surfaces`` and refuse every other argument. All of the
interface is called on them, the defaults as well as what a backend overrides.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_surface import RECORDED, Calls, Surface, stand_in_for_torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.backends import BUILTIN, Backend, probes
from acclimate.backends.generic import GenericAccelerator
from acclimate.backends.npu import NPUAccelerator

OLDEST, NEWEST = "2.10.0", "2.15.0"
WITHOUT_RECORD = "mtia"
"""A device that torch has a module for, and no record names."""

INDISPENSABLE = {
    "Stream": "as the other three, it has to be of one kind with them",
    "Event": "",
    "stream": "",
    "current_stream": "",
    "default_generators": "nothing else shows a device's generators",
    "graph": "captures into a graph of its own kind",
    "mstx": "every release of torch_npu for torch 2.10 and later has it",
}
"""What a module cannot lack while it has all the rest, and why."""

NOT_WALKED = {
    "build_extension": "imports setuptools; about no device",
    "set_compile_backend": "imports torch.compile; about no device",
    "supports_collectives": "said to the conformance checks alone",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend on one recorded module."""

    backend: type[Accelerator]
    surface: Surface
    torch_version: str

    def __str__(self) -> str:
        return f"{self.backend.__name__}-{self.surface}-torch-{self.torch_version}"


def cases() -> Iterator[Case]:
    backends = {type(record.load()) for record in BUILTIN if not record.is_fallback}
    for backend in sorted(backends, key=lambda backend: backend.__name__):
        for surface in of_device(backend().device_type):
            versions = [surface.version] if surface.package == "torch" else [OLDEST, NEWEST]
            yield from (Case(backend, surface, version) for version in versions)
    for surface in of_device(WITHOUT_RECORD):
        yield Case(GenericAccelerator, surface, surface.version)


PACKAGES = {
    "npu": ["torch_npu"],
    "mlu": ["torch_mlu"],
    "sdaa": ["torch_sdaa"],
    "hpu": ["habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpu"],
}
"""The modules that a probe imports."""


def of_device(device_type: str) -> list[Surface]:
    return [surface for surface in RECORDED if surface.device_type == device_type]


PROBED = [record for record in BUILTIN if record.name not in ("cpu", "cuda")]
"""Records whose probe asks a vendor's package or torch; cuda's also asks how torch was built."""

VENDOR_MODULES = {
    **{record.probe: PACKAGES.get(record.name, []) for record in PROBED},
    probes.xpu_external: ["intel_extension_for_deepspeed"],
    probes.xpu_ipex: ["intel_extension_for_pytorch"],
}

CASES = tuple(cases())
CASE = next(case for case in CASES if case.backend is NPUAccelerator)
"""One that has everything, in which mistakes are planted."""


# -- the walk ----------------------------------------------------------------------------------------


def use_streams(acc: Accelerator) -> None:
    stream, event = acc.Stream(), acc.Event(enable_timing=True)
    last = acc.device_count() - 1
    other = acc.current_stream()
    acc.current_stream(last)
    acc.default_stream()
    acc.default_stream(last).synchronize()
    with acc.stream(stream):
        event.record()
    event.record(stream)
    event.wait()
    event.wait(other)
    stream.wait_event(event)
    stream.wait_stream(other)
    stream.record_event()
    stream.record_event(event)
    stream.query()
    stream.synchronize()
    event.query()
    event.synchronize()
    assert isinstance(event.elapsed_time(acc.Event(enable_timing=True)), float)
    acc.set_stream(stream)
    acc.set_stream(None)
    assert isinstance(other, acc.Stream)


def use_graphs(acc: Accelerator) -> None:
    graph = acc.create_graph()
    with acc.capture_to_graph(graph):
        pass
    with acc.capture_to_graph(acc.create_graph(), stream=acc.Stream()):
        pass
    acc.replay_graph(graph)
    graph.reset()
    assert acc.is_current_stream_capturing() is False


def use_random_numbers(acc: Accelerator) -> None:
    state, last = acc.get_rng_state(), acc.device_count() - 1
    assert state.dtype == torch.uint8
    acc.set_rng_state(state)
    acc.set_rng_state(acc.get_rng_state(last), last)
    acc.set_rng_state_all(acc.get_rng_state_all())
    acc.manual_seed(3)
    acc.manual_seed_all(3)
    assert isinstance(acc.seed(), int)
    assert isinstance(acc.seed_all(), int)
    assert isinstance(acc.initial_seed(), int)
    assert isinstance(acc.default_generator(last), torch.Generator)
    assert len(acc.default_generators) == acc.device_count()
    acc.random()


def use_memory(acc: Accelerator) -> None:
    last = acc.device_count() - 1
    for figure in (
        acc.memory_allocated,
        acc.max_memory_allocated,
        acc.memory_reserved,
        acc.max_memory_reserved,
        acc.memory_cached,
        acc.max_memory_cached,
        acc.total_memory,
        acc.available_memory,
    ):
        assert min(figure(), figure(last)) > 0, f"{figure.__name__} tells nothing"
    assert acc.memory_stats()["allocated_bytes.all.current"] > 0
    acc.memory_stats(last)
    assert isinstance(acc.memory_summary(), str)
    assert isinstance(acc.memory_summary(0, abbreviated=True), str)
    assert acc.mem_get_info(last) == acc.mem_get_info()
    for reset in (
        acc.reset_max_memory_allocated,
        acc.reset_max_memory_cached,
        acc.reset_peak_memory_stats,
        acc.reset_accumulated_memory_stats,
    ):
        reset()
        reset(last)
    acc.empty_cache()
    acc.ipc_collect()
    assert acc.is_out_of_memory(acc.OutOfMemoryError())


def use_devices(acc: Accelerator) -> None:
    last = acc.device_count() - 1
    assert last >= 0
    assert acc.is_available()
    assert isinstance(acc.current_device(), int)
    assert acc.current_device_name().startswith(acc.device_type)
    acc.device_name(last)
    acc.set_device(last)
    with acc.device(last), acc.device(None), acc.device(f"{acc.device_type}:{last}"):
        acc.synchronize()
    acc.synchronize(last)
    acc.init()
    assert acc.is_initialized()
    for device in (None, last, acc.device_name(last)):
        properties = acc.get_device_properties(device)
        assert isinstance(properties.multi_processor_count, int)
        assert acc.get_device_name(device) == "a device"
        assert isinstance(acc.get_device_capability(device), tuple)
    assert [acc.is_synchronized_device(), acc.use_host_timers()] == [False, False]
    acc.resolves_data_dependency()
    acc.handles_memory_backpressure()


def use_data_types(acc: Accelerator) -> None:
    assert torch.float32 in acc.supported_dtypes()
    acc.is_bf16_supported(including_emulation=True)
    for name in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"):
        assert getattr(acc, f"{name}Tensor") is not None
    acc.amp.autocast  # noqa: B018


def use_host_memory(acc: Accelerator) -> None:
    tensor = torch.ones(2)
    acc.pin_memory(tensor)
    acc.pin_empty(2, dtype=torch.float32)
    acc.pin_empty_like(tensor)
    acc.unpin_memory(tensor)
    assert not acc.is_pinned(tensor)
    assert not acc.on_accelerator(tensor)
    acc.register_host_memory(tensor.data_ptr(), 8)
    acc.unregister_host_memory(tensor.data_ptr())
    acc.pin_memory_alignment()


def use_the_rest(acc: Accelerator) -> None:
    acc.range_push("a name")
    acc.range_pop()
    domain = "ours" if acc.supports_nvtx_domain else None
    acc.range_push("a name", domain=domain, category="steps")
    acc.range_pop(domain=domain)
    with acc.nvtx.range("a name"):
        pass
    called: list[bool] = []
    acc.lazy_call(lambda: called.append(True))
    assert called
    assert acc.name
    assert acc.communication_backend_name()
    acc.get_compile_backend()
    acc.is_triton_supported()
    acc.prefer_triton_grouped_mm()
    acc.set_visible_devices_envs({}, [0])
    acc.visible_devices_envs()
    acc.export_envs()
    acc.op_compile_flags()
    acc.op_include_paths()
    acc.op_link_flags()
    acc.get_op_builder("CPUAdamBuilder")
    acc.create_op_builder("CPUAdamBuilder")
    acc.op_builder_dir()
    acc.op_compiler()
    acc.toolkit_version()


USES: tuple[Callable[[Accelerator], None], ...] = (
    use_devices,
    use_random_numbers,
    use_streams,
    use_memory,
    use_data_types,
    use_graphs,
    use_host_memory,
    use_the_rest,
)


def walk(case: Case, patch: pytest.MonkeyPatch) -> list[str]:
    """Calls all of the interface; tells what failed, and every call that the surface does not allow."""
    calls, found = Calls(), []
    with patch.context() as patched:
        stand_in_for_torch(case.surface, case.torch_version, patched, calls)
        # Real tensors are on the host, where torch pins nothing without an accelerator.
        patched.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        for use in USES:
            try:
                use(case.backend())
            except Exception as error:
                found.append(f"{use.__name__}: {type(error).__name__}: {error}")
    return [*calls, *found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backend_calls_only_what_its_device_module_has(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert walk(case, monkeypatch) == []


@pytest.mark.parametrize("record", PROBED, ids=lambda record: f"{record.name}-{record.rank}")
def test_a_probe_asks_only_what_the_device_module_has(
    record: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for surface in of_device(record.torch_type):
        version = surface.version if surface.package == "torch" else NEWEST
        stand_in = stand_in_for_torch(surface, version, monkeypatch)
        monkeypatch.setitem(sys.modules, "torch", stand_in)
        for name in VENDOR_MODULES[record.probe]:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a stand-in")
            module._C = types.SimpleNamespace(_has_xpu=lambda: True)  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
        assert record.probe() is None, surface


def test_every_backend_is_held_to_a_recorded_module() -> None:
    named = {case.backend().name for case in CASES if case.backend is not GenericAccelerator}
    assert named == {record.name for record in BUILTIN if not record.is_fallback}


def test_the_whole_interface_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()

    class Watched(NPUAccelerator):
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    assert walk(dataclasses.replace(CASE, backend=Watched), monkeypatch) == []
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert public - used == set(NOT_WALKED)


# -- the walk itself: what it has to find --------------------------------------------------------------


class WrongName(NPUAccelerator):
    def empty_cache(self) -> None:
        self.torch_module.drop_cache()


class WrongNameCaught(NPUAccelerator):
    """Whoever asks whether a name is there may: the default does."""

    def empty_cache(self) -> None:
        if hasattr(self.torch_module, "drop_cache"):
            self.torch_module.drop_cache()


class TooManyArguments(NPUAccelerator):
    def empty_cache(self) -> None:
        self.torch_module.empty_cache(0)


class WrongKeyword(NPUAccelerator):
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.torch_module.mstx.range_push(msg, category=category)


class WrongCallCaught(NPUAccelerator):
    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        try:
            return bool(self.torch_module.is_bf16_supported(emulated=True))
        except TypeError:
            return False


class WrongMethodOfAClass(NPUAccelerator):
    def create_graph(self) -> Any:
        graph = self.torch_module.NPUGraph()
        graph.capture_begin(stream=None)
        return graph


class WrongModule(NPUAccelerator):
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.torch_module.nvtx.range_push(msg)


class WrongTypeReturned(NPUAccelerator):
    def current_stream(self, device_index: DeviceLike = None) -> Any:
        return None


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        (WrongName, "has no attribute 'drop_cache'"),
        (TooManyArguments, "torch.npu.empty_cache() was called with (0)"),
        (WrongKeyword, "mstx.range_push(message, stream=None, domain='default') was called with ('a name', "),
        (WrongCallCaught, "is_bf16_supported(including_emulation=False) was called with (emulated=True)"),
        (WrongMethodOfAClass, "NPUGraph.capture_begin(pool=None, capture_error_mode='global') was called"),
        (WrongModule, "has no attribute 'nvtx'"),
        (WrongTypeReturned, "use_streams"),
    ],
)
def test_a_planted_mistake_is_found(
    backend: type[Accelerator], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = walk(dataclasses.replace(CASE, backend=backend), monkeypatch)
    assert any(found in line for line in told), told


def test_asking_whether_a_name_is_there_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    assert walk(dataclasses.replace(CASE, backend=WrongNameCaught), monkeypatch) == []


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_defaults_cover_whatever_else_a_module_lacks(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for lacking in sorted(CASE.surface.names.keys() - INDISPENSABLE.keys())[::step]:
        names = {name: data for name, data in CASE.surface.names.items() if name != lacking}
        poorer = dataclasses.replace(CASE.surface, names=names)
        assert walk(dataclasses.replace(CASE, surface=poorer), monkeypatch) == [], f"without {lacking}"
