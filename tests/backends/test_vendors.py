"""What a vendor's backend does differently from torch's conventions, on a module with its recorded names."""

from __future__ import annotations

import platform
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_surface import GIBIBYTE, RECORDED, Torch, stand_in_for_torch

from acclimate.accelerator import Accelerator, DeviceProperties, RecordedGraph
from acclimate.backends import BUILTIN

NEWEST = "2.15.0"
MARKED = {"npu": "mstx", "mlu": "cnpx"}

Arrange = Callable[..., tuple[Accelerator, Torch]]


@pytest.fixture
def arrange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrange]:
    """An accelerator by name, on the newest recorded module of its device, and the torch that it sees."""

    def on(name: str, version: str | None = None) -> tuple[Accelerator, Torch]:
        accelerator = next(record for record in BUILTIN if record.name == name).load()
        found = [recorded for recorded in RECORDED if recorded.device_type == accelerator.device_type]
        surface = found[-1] if version is None else next(known for known in found if known.version == version)
        torch_version = surface.version if surface.package == "torch" else NEWEST
        return accelerator, stand_in_for_torch(surface, torch_version, monkeypatch)

    return on


def answer(monkeypatch: pytest.MonkeyPatch, module: Any, **answers: Any) -> None:
    for name, value in answers.items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, value=value, **kwargs: value)


# -- graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("npu", "NPUGraph"),
        ("mlu", "MLUGraph"),
        ("hpu", "HPUGraph"),
        ("xpu", "XPUGraph"),
        ("cuda", "CUDAGraph"),
    ],
)
def test_a_graph_is_the_vendors_own(name: str, graph: str, arrange: Arrange) -> None:
    acc, _ = arrange(name)
    assert type(acc.create_graph()).__name__ == graph


def test_a_vendor_without_graphs_gets_recorded_ones(arrange: Arrange) -> None:
    acc, stand_in = arrange("sdaa")
    del stand_in.accelerator.Graph
    assert isinstance(acc.create_graph(), RecordedGraph)


def test_a_graph_is_captured_by_the_vendors_context_on_the_stream_and_pool_given(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("npu")
    seen: list[tuple[Any, ...]] = []

    def captured(graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[str]:
        seen.append((graph, pool, stream))
        return nullcontext("what the vendor's context gives")

    monkeypatch.setattr(stand_in.npu, "graph", captured)
    graph, stream = acc.create_graph(), acc.Stream()
    with acc.capture_to_graph(graph, pool=(0, 1), stream=stream) as given, acc.capture_to_graph(graph):
        assert given == "what the vendor's context gives"
    assert seen == [(graph, (0, 1), stream), (graph, None, None)]


@pytest.mark.parametrize("fails_to", ["begin", "end"])
@pytest.mark.parametrize("name", ["cuda", "xpu", "npu", "mlu"])
def test_the_current_stream_is_as_before_if_a_capture_fails(
    name: str, fails_to: str, arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange(name)
    current = [acc.Stream()]

    class Selected:
        """Does what torch.cuda.stream does."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = current[-1]
            current.append(self.stream)

        def __exit__(self, *error: object) -> None:
            current.append(self.before)

    class Capture:
        """Does what torch.cuda.graph does if the driver refuses: its stream stays current."""

        def __init__(self, graph: Any, stream: Any = None) -> None:
            self.stream = acc.Stream()

        def __enter__(self) -> None:
            module.stream(self.stream).__enter__()
            if fails_to == "begin":
                raise RuntimeError("the capture did not begin")

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("the capture did not end")

    module = getattr(stand_in, name)
    monkeypatch.setattr(module, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(module, "stream", Selected)
    monkeypatch.setattr(module, "graph", Capture)
    before = acc.current_stream()
    with (
        pytest.raises(RuntimeError, match=f"the capture did not {fails_to}"),
        acc.capture_to_graph(acc.create_graph()),
    ):
        assert acc.current_stream() is not before
    assert acc.current_stream() is before


def test_generators_of_cuda_draw_again_after_a_capture_that_the_driver_could_not_end(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("cuda")
    captures: list[str] = []

    class Capture:
        """Does what torch.cuda.graph does: only an end that succeeds ends the generators' capture."""

        def __init__(self, graph: Any, stream: Any = None) -> None:
            pass

        def __enter__(self) -> None:
            captures[:] = ["of the generators"]

        def __exit__(self, kind: object, *error: object) -> None:
            if kind is not None:
                raise RuntimeError("the capture did not end")
            captures.clear()

    monkeypatch.setattr(stand_in.cuda, "graph", Capture)
    with pytest.raises(RuntimeError, match="did not end"), acc.capture_to_graph(acc.create_graph()):
        raise ValueError("what a capture cannot hold")
    assert captures == []


def test_gaudi_ignores_the_pool_that_its_graphs_do_not_have(arrange: Arrange) -> None:
    acc, _ = arrange("hpu")
    with acc.capture_to_graph(acc.create_graph(), pool=(0, 1)):
        pass


# -- devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field"),
    [("npu", "vector_core_num"), ("xpu", "gpu_subslice_count"), ("sdaa", "multi_processor_count")],
)
def test_a_vendors_own_count_of_processors_is_read(
    name: str, field: str, arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange(name)
    properties = types.SimpleNamespace(name="a device", total_memory=7, **{field: 48})
    answer(monkeypatch, getattr(stand_in, name), get_device_properties=properties)
    assert acc.get_device_properties() == DeviceProperties("a device", 7, multi_processor_count=48)


def test_gaudis_properties_are_a_text_and_still_make_properties(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("hpu")
    answer(monkeypatch, stand_in.hpu, get_device_properties="(sramBaseAddress=1, dramSize=96)")
    found = acc.get_device_properties()
    assert (found.name, found.total_memory) == ("a device", acc.total_memory())


# -- marks for profilers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "module"), MARKED.items())
def test_marks_go_to_the_vendors_profiler(
    name: str, module: str, arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange(name)
    marks = getattr(getattr(stand_in, name), module)
    seen: list[str] = []
    monkeypatch.setattr(marks, "range_push", lambda msg, **kwargs: seen.append(msg))
    monkeypatch.setattr(marks, "range_pop", lambda *args: seen.append("end"))
    with acc.nvtx.range("forward"):
        pass
    assert seen == ["forward", "end"]


def test_ascend_keeps_ranges_of_different_domains_apart(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("npu")
    domains: list[str] = []
    monkeypatch.setattr(stand_in.npu.mstx, "range_push", lambda msg, domain: domains.append(domain))
    monkeypatch.setattr(stand_in.npu.mstx, "range_pop", domains.append)
    acc.range_push("forward", domain="ours")
    acc.range_pop("ours")
    acc.range_push("forward")
    acc.range_pop()
    assert domains == ["ours", "ours", "default", "default"]


# -- Ascend ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [".", "aarch64-linux"])
def test_cann_tells_its_version(
    folder: str, arrange: Arrange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / folder / "ascend_toolkit_install.info"
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("package_name=Ascend-cann-toolkit\ncompatible_version=[V100R001C15]\nversion=8.2.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert arrange("npu")[0].toolkit_version() == "8.2.RC1"


def test_without_cann_there_is_no_version(
    arrange: Arrange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, _ = arrange("npu")
    (tmp_path / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\n")
    for home in (None, "", str(tmp_path / "absent"), str(tmp_path)):
        monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
        if home is not None:
            monkeypatch.setenv("ASCEND_HOME_PATH", home)
        assert acc.toolkit_version() is None


def test_ascend_is_given_its_devices_in_the_only_order_that_it_takes(arrange: Arrange) -> None:
    environment: dict[str, str] = {}
    arrange("npu")[0].set_visible_devices_envs(environment, ["10", 2, 1])
    assert environment == {"ASCEND_RT_VISIBLE_DEVICES": "1,2,10"}


# -- Intel GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", [True, False])
def test_an_intel_gpu_says_which_types_it_computes_in(
    offered: bool, arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("xpu", NEWEST)
    properties = stand_in.xpu.get_device_properties(0)
    for name in ("has_fp16", "has_fp64"):
        setattr(properties, name, offered)
    answer(monkeypatch, stand_in.xpu, get_device_properties=properties)
    monkeypatch.setattr(
        stand_in.xpu, "is_bf16_supported", lambda including_emulation=True: including_emulation or offered
    )
    expected = [torch.float32, torch.bfloat16, torch.float16, torch.float64] if offered else [torch.float32]
    assert acc.supported_dtypes() == expected
    assert acc.is_bf16_supported() is offered
    assert acc.is_bf16_supported(including_emulation=True)


@pytest.mark.parametrize(("xccl", "name"), [(True, "xccl"), (False, "ccl")])
def test_intel_gpus_communicate_through_torch_where_it_can(
    xccl: bool, name: str, arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: xccl)
    assert arrange("xpu")[0].communication_backend_name() == name


# -- Apple GPUs --------------------------------------------------------------------------------------


def test_memory_of_an_apple_gpu_is_what_metal_tells(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("mps", "2.13.0")
    answer(
        monkeypatch,
        stand_in.mps,
        current_allocated_memory=3 * GIBIBYTE,
        driver_allocated_memory=5 * GIBIBYTE,
        recommended_max_memory=12 * GIBIBYTE,
    )
    assert (acc.memory_allocated(), acc.memory_reserved()) == (3 * GIBIBYTE, 5 * GIBIBYTE)
    assert acc.mem_get_info() == (7 * GIBIBYTE, 12 * GIBIBYTE)
    assert (acc.total_memory(), acc.available_memory()) == (12 * GIBIBYTE, 7 * GIBIBYTE)


def test_memory_is_not_pinned_for_an_apple_gpu_whose_pinned_tensors_are_no_hosts(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("mps", "2.13.0")
    asked = []

    def empty(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return torch.zeros(*size)

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError('Attempted to set the storage of a tensor on device "cpu"')

    monkeypatch.setattr(stand_in, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    tensor = torch.ones(3)
    assert acc.pin_memory(tensor) is tensor
    assert acc.pin_empty(2, 3, dtype=torch.float32).shape == (2, 3)
    assert not any(asked)


def test_the_peak_of_an_apple_gpu_is_the_most_seen_until_it_is_reset(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("mps", "2.13.0")
    for size in (100, 700, 300):
        answer(monkeypatch, stand_in.mps, current_allocated_memory=size, driver_allocated_memory=2 * size)
        assert acc.memory_allocated() == size
    assert (acc.max_memory_allocated(), acc.max_memory_reserved()) == (700, 1400)
    acc.reset_peak_memory_stats()
    assert (acc.max_memory_allocated(), acc.max_memory_reserved()) == (300, 600)


def test_figures_that_torch_keeps_for_apple_gpus_are_preferred(
    arrange: Arrange, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, stand_in = arrange("mps", NEWEST)
    kept = {"allocated_bytes.all.current": 11, "allocated_bytes.all.peak": 22}
    answer(monkeypatch, stand_in.accelerator, memory_stats=kept, max_memory_allocated=22)
    assert acc.memory_stats() == kept
    assert acc.max_memory_allocated() == 22


def test_an_apple_gpu_is_described_by_metal(arrange: Arrange, monkeypatch: pytest.MonkeyPatch) -> None:
    acc, stand_in = arrange("mps")
    answer(monkeypatch, stand_in.backends.mps, get_name="Apple M4", get_core_count=10)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    assert acc.get_device_name() == "Apple M4"
    assert acc.get_device_properties().multi_processor_count == 10
    assert acc.toolkit_version() == "26.1"


@pytest.mark.parametrize("version", ["2.10.0", NEWEST])
def test_a_stream_of_an_apple_gpu_is_waited_for_by_an_event(version: str, arrange: Arrange) -> None:
    acc, _ = arrange("mps", version)
    stream = acc.Stream()
    seen: list[str] = []

    class Event:
        def query(self) -> bool:
            seen.append("query")
            return False

        def synchronize(self) -> None:
            seen.append("synchronize")

    stream.record_event = Event
    assert stream.query() is False
    stream.synchronize()
    assert seen == ["query", "synchronize"]
    assert isinstance(acc.current_stream(), acc.Stream)


# -- Gaudi -------------------------------------------------------------------------------------------


def test_gaudis_statistics_have_torchs_names_too(arrange: Arrange, monkeypatch: pytest.MonkeyPatch) -> None:
    acc, stand_in = arrange("hpu")
    answer(monkeypatch, stand_in.hpu, memory_stats={"InUse": 1, "MaxInUse": 2, "Limit": 3, "NumAllocs": 4})
    assert acc.memory_stats() == {
        "InUse": 1,
        "MaxInUse": 2,
        "Limit": 3,
        "NumAllocs": 4,
        "allocated_bytes.all.current": 1,
        "allocated_bytes.all.peak": 2,
        "reserved_bytes.all.current": 3,
        "reserved_bytes.all.peak": 3,
    }


def test_gaudi_has_one_generator_and_one_name_for_all_devices_of_a_process(arrange: Arrange) -> None:
    acc, _ = arrange("hpu")
    acc.manual_seed_all(3)
    (state,) = acc.get_rng_state_all()
    first = torch.rand(2, generator=acc.default_generator(1))
    acc.set_rng_state_all([state])
    assert torch.equal(torch.rand(2, generator=acc.default_generator(0)), first)
    acc.set_rng_state(state, 1)
    assert torch.equal(acc.get_rng_state(0), state)
    assert [acc.device_name(), acc.device_name(1), acc.current_device_name()] == ["hpu", "hpu", "hpu"]


def test_gaudi_compiles_with_its_own_backend(arrange: Arrange) -> None:
    assert arrange("hpu")[0].get_compile_backend() == "hpu_backend"
