"""Memory figures are in bytes, agree with each other, and exist on every accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acclimate.accelerator import Accelerator
from fresh_process import FreshProcesses

SIZES = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "total_memory",
    "available_memory",
)
RESETS = (
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_an_int_of_bytes(acc: Accelerator, name: str) -> None:
    figure = getattr(acc, name)
    for index in [(), (None,), (0,), (acc.device_name(0),)]:
        assert type(figure(*index)) is int
        assert figure(*index) >= 0


@pytest.mark.parametrize("pool", ["allocated", "reserved"])
def test_a_peak_is_not_below_what_is_there(acc: Accelerator, pool: str) -> None:
    now = getattr(acc, f"memory_{pool}")()
    assert getattr(acc, f"max_memory_{pool}")() >= now


def test_free_and_total_are_two_ints(acc: Accelerator) -> None:
    free, total = acc.mem_get_info()
    assert type(free) is type(total) is int
    assert 0 <= free <= total


def test_total_memory_is_that_of_mem_get_info(acc: Accelerator) -> None:
    assert acc.total_memory() == acc.mem_get_info()[1] == acc.get_device_properties().total_memory


@pytest.mark.parametrize("name", RESETS)
def test_peaks_can_always_be_reset(acc: Accelerator, name: str) -> None:
    getattr(acc, name)()
    getattr(acc, name)(0)
    now = acc.memory_allocated()
    assert acc.max_memory_allocated() >= now


def test_memory_can_always_be_given_back(acc: Accelerator) -> None:
    acc.empty_cache()
    acc.ipc_collect()


def test_statistics_are_a_dictionary_of_torchs_names(acc: Accelerator) -> None:
    statistics = acc.memory_stats()
    assert type(statistics) is dict
    assert all(name.count(".") == 2 and type(size) is int for name, size in statistics.items())


def test_a_summary_names_the_device_and_its_figures(acc: Accelerator) -> None:
    summary = acc.memory_summary(0, abbreviated=True)
    assert acc.device_name(0) in summary
    assert f"{acc.total_memory(0) / 2**20:,.1f} MiB" in summary


def test_a_full_device_raises_torchs_error(acc: Accelerator) -> None:
    assert acc.OutOfMemoryError is torch.OutOfMemoryError
    assert issubclass(acc.OutOfMemoryError, RuntimeError)


# -- what a vendor's module says, and where it is silent ----------------------------------------------


def test_the_vendors_figures_are_passed_on(whole: Accelerator) -> None:
    assert [whole.memory_allocated(index) for index in (0, 1)] == [1000, 2000]


def test_a_figure_follows_the_current_device(whole: Accelerator) -> None:
    with whole.device(1):
        assert whole.memory_allocated() == whole.memory_allocated("whole") == 2000


def test_a_figure_that_the_module_lacks_comes_from_its_statistics(whole: Accelerator) -> None:
    assert whole.max_memory_allocated(1) == 4000
    assert whole.memory_reserved(1) == whole.memory_cached(1) == 6000
    assert whole.max_memory_reserved(1) == whole.max_memory_cached(1) == 8000


def test_without_mem_get_info_what_the_allocator_holds_is_not_free(whole: Accelerator) -> None:
    assert whole.mem_get_info(1) == ((1 << 30) - 6000, 1 << 30)
    assert whole.available_memory(1) == (1 << 30) - 6000


def test_free_memory_is_what_the_device_says(whole: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole.torch_module, "mem_get_info", lambda index: (index + 5, 77), raising=False)
    assert whole.mem_get_info(1) == (6, 77)
    assert whole.available_memory("whole:1") == 6


def test_the_vendors_summary_is_passed_on(whole: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        whole.torch_module, "memory_summary", lambda index, short: f"{index} {short}", raising=False
    )
    assert whole.memory_summary(1, True) == "1 True"


def test_resets_reach_the_device_asked_for(whole: Accelerator) -> None:
    whole.torch_module.log.clear()
    whole.reset_peak_memory_stats(1)
    whole.reset_max_memory_allocated("whole:1")
    whole.reset_max_memory_cached()
    whole.empty_cache()
    assert whole.torch_module.log == [
        ("reset_peak_memory_stats", 1),
        ("reset_peak_memory_stats", 1),
        ("reset_peak_memory_stats", 0),
        ("empty_cache", 0),
    ]


def test_a_device_without_statistics_has_none(bare: Accelerator) -> None:
    # Its allocator is none that torch.accelerator can ask, so those functions fail on an assertion.
    with pytest.raises(RuntimeError):
        torch.accelerator.memory_allocated()
    assert bare.memory_stats() == {}
    assert bare.memory_allocated() == bare.max_memory_reserved() == bare.total_memory() == 0
    assert bare.mem_get_info() == (0, 0)


def test_an_allocator_without_get_memory_info_leaves_the_rest_of_the_interface_usable(
    fresh: FreshProcesses,
) -> None:
    told = fresh.check(
        """
import json, torch
import python_device
python_device.register("bare")
def unimplemented(*args):
    # What torch says for an allocator that leaves the optional function out.
    raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")
statistics = lambda *args: {"allocated_bytes.all.current": 5}
torch.accelerator.memory_stats = torch.accelerator.memory.memory_stats = statistics
torch.accelerator.get_memory_info = unimplemented
from acclimate import get_accelerator
from acclimate.info import collect
acc = get_accelerator()
tell(
    name=acc.get_device_name(), free=acc.available_memory(), total=acc.total_memory(),
    properties=acc.get_device_properties().name, error=collect().error,
)
""",
        path=[Path(__file__).parent],
    ).told
    assert told == {"name": "bare:0", "free": 0, "total": 0, "properties": "bare:0", "error": None}
