"""``torch.sim``, and torch's other state of a device."""

from __future__ import annotations

import io

import pytest
import torch

sim = torch.get_device_module("sim")


def test_all_generators_are_saved_and_restored() -> None:
    states = sim.get_rng_state_all()
    assert len(states) == sim.device_count()
    drawn = [torch.rand(2, device=f"sim:{index}") for index in range(sim.device_count())]
    sim.set_rng_state_all(states)
    for index, numbers in enumerate(drawn):
        assert torch.rand(2, device=f"sim:{index}").equal(numbers)


def test_seed_all_takes_another_number_each_time_for_all_devices() -> None:
    seeds = set()
    for _ in range(2):
        sim.seed_all()
        of_each = {sim.default_generator(index).initial_seed() for index in range(sim.device_count())}
        assert len(of_each) == 1
        seeds |= of_each
    assert len(seeds) == 2
    assert sim.seed() == sim.initial_seed()
    sim.manual_seed_all(0)


def test_an_offset_is_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(RuntimeError, match=r"does not support set_offset.*Use set_state"):
        sim.set_offset(1)
    with pytest.raises(RuntimeError, match=r"does not support get_offset.*Use get_state"):
        sim.get_offset()


def test_init_may_be_called_any_time() -> None:
    sim.init()
    assert sim.is_initialized()
    assert sim.get_device_name("sim:1") == sim.get_device_properties(1).name


def test_flags_of_a_tensor_are_saved_with_it() -> None:
    value, flags = torch.zeros(2, device="sim"), {"packed": True, "padded": False}
    assert torch._utils.get_tensor_metadata(value) == {}
    torch._utils.set_tensor_metadata(value, flags)
    assert torch._utils.get_tensor_metadata(value) == flags
    buffer = io.BytesIO()
    torch.save({"value": value, "conjugate": torch.zeros(2, dtype=torch.cfloat, device="sim").conj()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert torch._utils.get_tensor_metadata(loaded["value"]) == flags
    assert loaded["conjugate"].is_conj()
    buffer.seek(0)
    assert torch._utils.get_tensor_metadata(torch.load(buffer, map_location="cpu")["value"]) == {}


def test_autocast_to_float32_is_refused_with_a_message() -> None:
    with (
        pytest.warns(
            UserWarning, match=r"sim Autocast only supports dtypes of torch.float16, torch.bfloat16"
        ),
        torch.autocast("sim", dtype=torch.float32),
    ):
        assert not torch.is_autocast_enabled("sim")


@pytest.mark.parametrize(
    "name",
    [
        *("current_stream", "synchronize", "mem_get_info", "memory_stats"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    ],
)
def test_a_device_may_be_given_by_keyword_as_to_torchs_modules_for_cuda_and_xpu(name: str) -> None:
    function = getattr(sim, name)
    told = function()
    assert type(function(device="sim:0")) is type(function(device=0)) is type(function(0)) is type(told)
