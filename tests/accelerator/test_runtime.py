"""Profiler marks, lazy calls, compilers and launching work alike on every accelerator."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import profile

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.backends.generic import GenericAccelerator
from acclimate.errors import UnknownCompileBackendError


def names_seen(profiler: profile) -> list[str]:
    return [event.name for event in profiler.events()]


def test_a_range_is_seen_by_the_profiler_with_what_ran_in_it(acc: Accelerator) -> None:
    with profile() as profiler:
        acc.range_push("outer", domain="library", category="kind")
        acc.range_push("inner")
        torch.zeros(8).sum()
        acc.range_pop()
        acc.range_pop(domain="library")
        torch.ones(8)
    events = {event.name: event for event in profiler.events()}
    outer, inner = events["outer"].time_range, events["inner"].time_range
    total, ones = events["aten::sum"].time_range, events["aten::ones"].time_range
    assert outer.start <= inner.start <= total.start
    assert total.end <= inner.end <= outer.end <= ones.start


def test_closing_a_range_that_was_not_opened_does_nothing(acc: Accelerator) -> None:
    acc.range_pop()
    acc.range_pop("library")


def test_a_range_is_closed_by_the_thread_that_opened_it(acc: Accelerator) -> None:
    with profile() as profiler:
        acc.range_push("mine")
        thread = threading.Thread(target=acc.range_pop)
        thread.start()
        thread.join()
        torch.ones(8)
        acc.range_pop()
    events = {event.name: event.time_range for event in profiler.events()}
    assert events["mine"].end >= events["aten::ones"].end


def test_cudas_names_for_ranges_work(acc: Accelerator) -> None:
    @acc.nvtx.range("decorated")
    def work() -> torch.Tensor:
        return torch.zeros(1)

    with profile() as profiler:
        acc.nvtx.range_push("pushed")
        acc.nvtx.range_pop()
        with acc.nvtx.range("block"), acc.nvtx.range("step {} of {all}", 1, all=2):
            work()
        with pytest.raises(KeyError), acc.nvtx.range("broken"):
            raise KeyError
    assert {"pushed", "block", "decorated", "broken", "step 1 of 2"} <= set(names_seen(profiler))


def test_a_late_call_is_made_once_the_device_is_there(acc: Accelerator) -> None:
    calls = []
    acc.lazy_call(lambda: calls.append(1))
    assert calls == [1]


def test_a_late_call_goes_through_the_vendors_queue(whole: Accelerator) -> None:
    whole.torch_module.log.clear()
    whole.lazy_call(lambda: "called")
    assert whole.torch_module.log == [("lazy_call", "called")]


def test_the_communication_backend_is_one_string(acc: Accelerator) -> None:
    assert type(acc.communication_backend_name()) is str
    assert acc.communication_backend_name() == acc.communication_backend


def test_a_device_without_a_communication_backend_goes_through_the_host(indexed: Accelerator) -> None:
    assert indexed.communication_backend_name() == "staged"


def test_a_communication_backend_registered_for_the_device_is_used(
    indexed: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setitem(known, indexed.device_type, "theirs")
    assert indexed.communication_backend_name() == "theirs"


def test_triton_is_not_promised_where_nothing_is_known_of_it(acc: Accelerator) -> None:
    assert acc.is_triton_supported() is False
    assert acc.prefer_triton_grouped_mm() is False


def usual_compile_backend(acc: Accelerator) -> str:
    """Inductor has no code generator for a device written in Python."""
    return "eager" if isinstance(acc, GenericAccelerator) else "inductor"


def test_the_compile_backend_is_inductor_where_it_generates_code(acc: Accelerator) -> None:
    assert acc.get_compile_backend() == usual_compile_backend(acc)


def test_a_compile_backend_set_is_kept_by_that_accelerator_alone(acc: Accelerator) -> None:
    mine = CPUAccelerator()
    mine.set_compile_backend("eager")
    assert mine.get_compile_backend() == "eager"
    assert CPUAccelerator().get_compile_backend() == "inductor"
    assert acc.get_compile_backend() == usual_compile_backend(acc)


@pytest.mark.parametrize("name", ["aot_eager", "eager", "inductor"])
def test_torch_compile_takes_the_compile_backend(cpu: CPUAccelerator, name: str) -> None:
    mine = CPUAccelerator()
    mine.set_compile_backend(name)
    compiled = torch.compile(lambda x: x + 1, backend=mine.get_compile_backend())
    if name != "inductor":  # which would start a compiler
        assert compiled(torch.zeros(1)).item() == 1


def test_a_compile_backend_that_torch_does_not_know_is_refused(acc: Accelerator) -> None:
    with pytest.raises(UnknownCompileBackendError, match=r'"inductr" is not supported by .*inductor'):
        acc.set_compile_backend("inductr")
    assert acc.get_compile_backend() == usual_compile_backend(acc)


def test_exported_variables_are_a_list_of_ones_own(acc: Accelerator) -> None:
    before = acc.export_envs()
    assert type(before) is list
    assert all(type(prefix) is str for prefix in before)
    acc.export_envs().append("X_")
    assert acc.export_envs() == before


def test_visible_devices_have_no_variable_where_torch_has_none(acc: Accelerator) -> None:
    environment = {"PATH": "/bin"}
    acc.set_visible_devices_envs(environment, [0, 1])
    assert environment == {"PATH": "/bin"}
    assert acc.visible_devices_envs() == []


@pytest.mark.parametrize("devices", [[0, 2], ["0", "2"], range(0, 4, 2)])
def test_visible_devices_are_set_in_the_environment_given(devices: list[int | str]) -> None:
    class Limited(CPUAccelerator):
        visible_devices_variable = "THEIR_VISIBLE_DEVICES"

    environment = {"THEIR_VISIBLE_DEVICES": "7"}
    Limited().set_visible_devices_envs(environment, devices)
    assert environment == {"THEIR_VISIBLE_DEVICES": "0,2"}
    assert Limited().visible_devices_envs() == ["THEIR_VISIBLE_DEVICES"]


class VendorsCompiler(CPUAccelerator):
    """A backend that names its compile backend, as an extension does."""

    compile_backend = "aot_eager"


def test_a_backend_declares_its_compile_backend_under_a_public_name() -> None:
    acc = VendorsCompiler()
    assert acc.get_compile_backend() == "aot_eager"
    acc.set_compile_backend("eager")
    assert (acc.get_compile_backend(), VendorsCompiler().get_compile_backend()) == ("eager", "aot_eager")
