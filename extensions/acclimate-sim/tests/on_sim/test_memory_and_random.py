from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from acclimate import get_accelerator

acc = get_accelerator()


def test_allocation_shows_and_is_given_back() -> None:
    acc.empty_cache()
    before = acc.memory_allocated(1)
    a = torch.empty(1 << 20, device="sim:1")
    b = a + 1
    assert acc.memory_allocated(1) - before == 2 * (4 << 20)
    del a, b
    assert acc.memory_allocated(1) == before
    assert acc.max_memory_allocated(1) - before >= 2 * (4 << 20)
    assert acc.memory_reserved(1) > acc.memory_allocated(1)
    assert acc.available_memory(1) == acc.total_memory(1) - acc.memory_reserved(1)
    acc.empty_cache()
    assert acc.memory_reserved(1) == acc.memory_allocated(1)
    acc.reset_peak_memory_stats(1)
    assert acc.max_memory_allocated(1) == before


def test_a_full_device_raises_and_recovers() -> None:
    acc.empty_cache()
    ooms = acc.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(acc.available_memory() + 1, dtype=torch.uint8, device="sim")
    assert acc.memory_stats()["num_ooms"] == ooms + 1
    assert torch.ones(3, device="sim").sum().item() == 3


def test_the_same_seed_gives_the_hosts_numbers_on_every_device() -> None:
    torch.manual_seed(5)
    drawn = [torch.randn(9, device=device).cpu() for device in ("cpu", "sim:0", "sim:1")]
    assert drawn[0].equal(drawn[1])
    assert drawn[0].equal(drawn[2])


def test_devices_draw_from_generators_of_their_own() -> None:
    state = acc.get_rng_state(0)
    torch.rand(4, device="sim:1")
    torch.nn.functional.dropout(torch.ones(4), 0.5)
    assert acc.get_rng_state(0).equal(state)
    first = torch.nn.functional.dropout(torch.ones(99, device="sim:0"), 0.5)
    acc.set_rng_state(state, 0)
    assert torch.nn.functional.dropout(torch.ones(99, device="sim:0"), 0.5).equal(first)


def test_operators_without_a_generator_argument_draw_from_the_devices_too() -> None:
    host, device = torch.get_rng_state(), acc.get_rng_state(0)
    first, _ = torch.native_dropout(torch.ones(99, device="sim:0"), 0.5, True)
    assert torch.get_rng_state().equal(host)
    assert not acc.get_rng_state(0).equal(device)
    acc.set_rng_state(device, 0)
    assert torch.native_dropout(torch.ones(99, device="sim:0"), 0.5, True)[0].equal(first)


def test_a_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(2, device="sim", generator=torch.Generator())
    assert torch.randn(2, device="sim", generator=torch.Generator("sim").manual_seed(1)).device.type == "sim"


def test_fork_rng_restores() -> None:
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        inside = torch.randn(3, device="sim")
    assert torch.randn(3, device="sim").equal(inside)


def test_pinned_memory_is_known_as_such() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), pin_memory=True)
    assert next(iter(loader))[0].is_pinned()


def _product(queue: multiprocessing.SimpleQueue[float]) -> None:
    ones = torch.ones(3, device="sim")
    queue.put((ones @ ones).item())


def test_a_child_forked_after_the_choice_computes() -> None:
    fork = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[float] = fork.SimpleQueue()
    child = fork.Process(target=_product, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == 3


def test_each_thread_has_its_own_current_device() -> None:
    found: dict[int, int] = {}

    def work(index: int) -> None:
        acc.set_device(index)
        for _ in range(100):
            torch.native_dropout(torch.randn(10, device="sim"), 0.5, True)
        found[index] = torch.zeros(1, device="sim").device.index

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1}
    assert acc.current_device() == 0
