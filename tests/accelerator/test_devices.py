"""Devices are named, chosen and waited for alike on every accelerator."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from acclimate.accelerator import Accelerator, DeviceProperties
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import AcclimateError, InvalidDeviceError

TRUTHS = (
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "is_available",
    "is_initialized",
)


@pytest.mark.parametrize("name", TRUTHS)
def test_what_is_true_or_not_is_a_bool(acc: Accelerator, name: str) -> None:
    assert type(getattr(acc, name)()) is bool


def test_an_accelerator_in_use_is_available(acc: Accelerator) -> None:
    assert acc.is_available()


def test_indices_and_counts_are_ints(acc: Accelerator) -> None:
    assert type(acc.current_device()) is int
    assert type(acc.device_count()) is int
    assert acc.device_count() >= 1


def test_the_current_device_is_one_of_those_counted(acc: Accelerator) -> None:
    assert acc.current_device() in range(acc.device_count())


def test_torch_takes_every_device_name(acc: Accelerator) -> None:
    names = [acc.device_name(), acc.current_device_name()]
    names += [acc.device_name(index) for index in range(acc.device_count())]
    assert {torch.device(name).type for name in names} == {acc.device_type}


def test_a_tensor_can_be_made_on_the_current_device(acc: Accelerator) -> None:
    tensor = torch.zeros(2, device=acc.current_device_name())
    assert tensor.device.type == acc.device_type
    assert tensor.sum().item() == 0


def test_a_device_is_a_context_manager(acc: Accelerator) -> None:
    before = acc.current_device()
    for index in [None, 0, acc.device_name(0), torch.device(acc.device_name())]:
        with acc.device(index):
            pass
        assert acc.current_device() == before


def test_within_device_that_device_is_current(whole: Accelerator) -> None:
    with whole.device(1):
        assert whole.current_device() == 1
        assert whole.current_device_name() == "whole:1"
        with whole.device("whole:0"):
            assert whole.current_device() == 0
        assert whole.current_device() == 1
    assert whole.current_device() == 0


def test_an_error_within_device_leaves_the_device_as_it_was(whole: Accelerator) -> None:
    with pytest.raises(KeyError), whole.device(1):
        raise KeyError
    assert whole.current_device() == 0


def test_set_device_lasts(whole: Accelerator) -> None:
    whole.set_device("whole:1")
    try:
        assert whole.current_device() == 1
    finally:
        whole.set_device(0)
    assert whole.current_device() == 0


def test_a_name_without_index_means_the_current_device(whole: Accelerator) -> None:
    with whole.device(1):
        assert whole.get_device_name("whole") == "Whole 1"


def test_set_device_to_the_current_one_changes_nothing(acc: Accelerator) -> None:
    before = acc.current_device()
    acc.set_device(before)
    assert acc.current_device() == before


TAKES_A_DEVICE = (
    "device",
    "set_device",
    "synchronize",
    "get_device_properties",
    "get_device_name",
    "get_device_capability",
    "default_generator",
    "get_rng_state",
    "current_stream",
    "default_stream",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "memory_cached",
    "memory_stats",
    "memory_summary",
    "mem_get_info",
    "total_memory",
    "available_memory",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)


@pytest.mark.parametrize("name", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", ["meta", "no such type", "meta:0"])
def test_a_device_of_another_kind_is_refused_by_name(acc: Accelerator, name: str, device: str) -> None:
    with pytest.raises(InvalidDeviceError, match=device):
        getattr(acc, name)(device)


@pytest.mark.parametrize("name", TAKES_A_DEVICE)
@pytest.mark.parametrize("beyond", [-1, 0])
def test_an_index_beyond_the_last_device_is_refused(indexed: Accelerator, name: str, beyond: int) -> None:
    index = beyond if beyond < 0 else indexed.device_count()
    with pytest.raises(InvalidDeviceError, match=f"no device {index};"):
        getattr(indexed, name)(index)


def test_a_refused_device_is_a_runtime_error_as_in_torch(acc: Accelerator) -> None:
    with pytest.raises(RuntimeError) as caught:
        acc.set_device("meta")
    assert isinstance(caught.value, AcclimateError)
    assert acc.device_name(0) in str(caught.value), "the message does not say how devices are named"


def test_synchronize_waits_on_the_device_asked_for(whole: Accelerator) -> None:
    whole.torch_module.log.clear()
    whole.synchronize(1)
    whole.synchronize()
    assert whole.torch_module.log == [("synchronize", 1), ("synchronize", 0)]


def test_synchronize_can_always_be_called_on_the_host(cpu: CPUAccelerator) -> None:
    cpu.synchronize()
    cpu.synchronize(cpu.current_device())


def test_init_reaches_the_device(whole: Accelerator) -> None:
    whole.torch_module.log.clear()
    whole.init()
    assert whole.torch_module.log == [("init", 0)]
    assert whole.is_initialized() is False


def test_init_can_always_be_called(acc: Accelerator) -> None:
    acc.init()


def test_a_device_that_says_nothing_of_its_context_counts_as_initialized(bare: Accelerator) -> None:
    assert bare.is_initialized() is True


def test_properties_have_the_fields_of_cuda(acc: Accelerator) -> None:
    properties = acc.get_device_properties()
    assert type(properties.name) is str
    assert properties.name
    for field in ("total_memory", "multi_processor_count", "major", "minor"):
        assert type(getattr(properties, field)) is int, field


def test_properties_that_lack_a_field_are_completed(whole: Accelerator) -> None:
    assert whole.get_device_properties(1) == DeviceProperties(
        name="Whole 1", total_memory=1 << 30, multi_processor_count=1, major=0, minor=0
    )


@pytest.mark.parametrize("kind", [dict, tuple])
def test_a_capability_is_two_ints_whatever_the_module_says(
    whole: Accelerator, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"dtypes": [1]} if kind is dict else (7, 5)
    monkeypatch.setattr(whole.torch_module, "get_device_capability", lambda index=None: said, raising=False)
    assert whole.get_device_capability() == ((0, 0) if kind is dict else (7, 5))


def test_a_device_without_capability_reaches_none(acc: Accelerator) -> None:
    capability = acc.get_device_capability()
    assert capability == (0, 0)
    assert not capability >= (8, 0)


def test_the_vendors_name_is_a_str(acc: Accelerator) -> None:
    assert type(acc.get_device_name()) is str
    assert acc.get_device_name(0) == acc.get_device_properties(0).name


def test_an_accelerator_shows_its_name(acc: Accelerator) -> None:
    assert repr(acc) == f"<{type(acc).__name__} {acc.name}>"


def test_a_device_type_that_torch_has_no_module_for_has_an_empty_one() -> None:
    class Unheard(CPUAccelerator):
        device_type = "unheard_of"

    assert not [name for name in vars(Unheard().torch_module) if not name.startswith("__")]


def test_properties_take_the_vendors_name_where_torchs_module_tells_only_that() -> None:
    module = types.ModuleType("torch.named")
    module.device_count = lambda: 1
    module.get_device_name = lambda index: "Vendor's best"

    class Named(Accelerator):
        device_type, communication_backend, visible_devices_variable = "named", "gloo", None
        torch_module = module

    assert Named().get_device_properties(0).name == Named().get_device_name(0) == "Vendor's best"


def test_an_index_that_is_not_there_is_refused_with_those_that_are(whole: Accelerator) -> None:
    with pytest.raises(InvalidDeviceError, match="has no device 2; devices that exist here: 0 to 1"):
        whole.memory_allocated(2)
