"""Random numbers can be repeated, on every accelerator and whatever its module offers."""

from __future__ import annotations

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import InvalidDeviceError, UnsupportedError


def draw(acc: Accelerator) -> list[float]:
    return torch.rand(8, device=acc.device_name()).cpu().tolist()


@pytest.mark.parametrize("seed", ["manual_seed", "manual_seed_all"])
def test_the_same_seed_gives_the_same_numbers(acc: Accelerator, seed: str) -> None:
    getattr(acc, seed)(11)
    first = draw(acc)
    second = draw(acc)
    getattr(acc, seed)(11)
    assert draw(acc) == first
    assert first != second


def test_another_seed_gives_other_numbers(acc: Accelerator) -> None:
    acc.manual_seed(1)
    first = draw(acc)
    acc.manual_seed(2)
    assert draw(acc) != first


@pytest.mark.parametrize("index", [(), (0,), (None,)])
def test_a_state_set_gives_the_numbers_that_followed_it(
    with_generators: Accelerator, index: tuple[int | None, ...]
) -> None:
    acc = with_generators
    state = acc.get_rng_state(*index)
    first = draw(acc)
    acc.set_rng_state(state, *index)
    assert draw(acc) == first


def test_a_state_can_be_set_for_a_device_by_name(with_generators: Accelerator) -> None:
    acc = with_generators
    state = acc.get_rng_state(acc.device_name(0))
    first = draw(acc)
    acc.set_rng_state(state, torch.device(acc.device_name(0)))
    assert draw(acc) == first


def test_a_state_is_bytes_on_the_host(with_generators: Accelerator) -> None:
    state = with_generators.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"


def test_all_states_set_give_the_numbers_that_followed_them(with_generators: Accelerator) -> None:
    acc = with_generators
    states = acc.get_rng_state_all()
    assert type(states) is list
    first = draw(acc)
    acc.set_rng_state_all(states)
    assert draw(acc) == first


def test_each_device_has_a_state_of_its_own(whole: Accelerator) -> None:
    whole.set_rng_state(torch.Generator().manual_seed(5).get_state(), 1)
    before = whole.get_rng_state(0)
    whole.default_generator(1).manual_seed(6)
    assert torch.equal(whole.get_rng_state(0), before)
    assert whole.get_rng_state_all()[1].equal(torch.Generator().manual_seed(6).get_state())


def test_more_states_than_devices_are_refused(whole: Accelerator) -> None:
    with pytest.raises(InvalidDeviceError, match="no device 2"):
        whole.set_rng_state_all([whole.get_rng_state()] * 3)


def test_manual_seed_seeds_the_current_device_alone(whole: Accelerator) -> None:
    whole.manual_seed_all(1)
    with whole.device(1):
        whole.manual_seed(2)
        assert whole.initial_seed() == 2
    assert whole.initial_seed() == 1


def test_without_functions_in_the_module_the_generators_serve(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(whole.torch_module, "manual_seed")
    monkeypatch.delattr(whole.torch_module, "manual_seed_all")
    whole.manual_seed_all(3)
    assert [generator.initial_seed() for generator in whole.default_generators] == [3, 3]
    with whole.device(1):
        whole.manual_seed(4)
    assert [generator.initial_seed() for generator in whole.default_generators] == [3, 4]


@pytest.mark.parametrize("seed", ["manual_seed", "manual_seed_all"])
def test_a_seed_with_a_fraction_loses_it_as_with_cuda(
    seed: str, whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(whole.torch_module, "manual_seed")
    monkeypatch.delattr(whole.torch_module, "manual_seed_all")
    getattr(whole, seed)(5.75)
    assert whole.initial_seed() == 5


def test_seeding_one_of_several_devices_leaves_the_others_where_only_all_can_be_seeded(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(whole.torch_module, "manual_seed")
    whole.manual_seed_all(1)
    with whole.device(1):
        whole.manual_seed(2)
    assert [generator.initial_seed() for generator in whole.default_generators] == [1, 2]


def test_a_device_alone_is_seeded_by_what_seeds_all(bare: Accelerator) -> None:
    bare.manual_seed(9)
    assert torch.default_generator.initial_seed() == 9


def test_a_device_alone_is_seeded_where_its_module_seeds_one_but_not_all(
    bare: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    monkeypatch.delattr(bare.torch_module, "manual_seed_all")
    monkeypatch.setattr(bare.torch_module, "manual_seed", seeded.append, raising=False)
    bare.manual_seed_all(8)
    assert seeded == [8]


def test_each_device_is_given_its_own_generator(whole: Accelerator) -> None:
    assert [whole.default_generator(index) for index in range(2)] == list(
        whole.torch_module.default_generators
    )
    assert whole.default_generator(1) is not torch.default_generator
    with whole.device(1):
        assert whole.default_generator() is whole.torch_module.default_generators[1]


def test_all_states_are_set_each_on_its_device(whole: Accelerator) -> None:
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (21, 22)]
    whole.set_rng_state_all(states)
    assert all(map(torch.equal, whole.get_rng_state_all(), states))


@pytest.mark.parametrize("generator", ["value", "function"])
def test_a_module_with_one_default_generator_serves(
    whole: Accelerator, generator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = torch.Generator()
    monkeypatch.delattr(whole.torch_module, "default_generators")
    shown = mine if generator == "value" else lambda index: mine
    monkeypatch.setattr(whole.torch_module, "default_generator", shown, raising=False)
    assert whole.default_generator(1) is mine


def test_initial_seed_is_the_seed(with_generators: Accelerator) -> None:
    with_generators.manual_seed(1234)
    assert with_generators.initial_seed() == 1234


@pytest.mark.parametrize("name", ["seed", "seed_all"])
def test_seed_seeds_with_a_number_that_differs_and_returns_it(
    with_generators: Accelerator, name: str
) -> None:
    first, second = getattr(with_generators, name)(), getattr(with_generators, name)()
    assert type(first) is int
    assert first != second
    assert with_generators.initial_seed() == second


def test_the_default_generator_is_the_one_operators_draw_from(with_generators: Accelerator) -> None:
    acc = with_generators
    assert isinstance(acc.default_generator(0), torch.Generator)
    acc.default_generator(0).manual_seed(7)
    first = draw(acc)
    acc.default_generator(0).manual_seed(7)
    assert draw(acc) == first


def test_there_is_a_default_generator_per_device(with_generators: Accelerator) -> None:
    generators = with_generators.default_generators
    assert type(generators) is tuple
    assert len(generators) == with_generators.device_count()
    assert all(with_generators.default_generator(i) is generator for i, generator in enumerate(generators))


@pytest.mark.parametrize("name", ["default_generator", "get_rng_state", "initial_seed", "seed"])
def test_what_a_module_does_not_show_is_refused_with_the_way_out(bare: Accelerator, name: str) -> None:
    with pytest.raises(UnsupportedError, match="Draw the numbers on the host"):
        getattr(bare, name)()


def test_random_is_torchs_module(acc: Accelerator) -> None:
    assert acc.random() is torch.random


def test_fork_rng_leaves_the_hosts_state_as_it_was(cpu: CPUAccelerator) -> None:
    before = cpu.get_rng_state()
    with cpu.random().fork_rng(devices=[]):
        draw(cpu)
    assert torch.equal(cpu.get_rng_state(), before)


def test_the_host_has_one_state_whatever_its_devices(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert len(cpu.get_rng_state_all()) == 1
    assert cpu.default_generators == (torch.default_generator,) * 3


def test_seeding_the_host_is_seeding_torch(cpu: CPUAccelerator) -> None:
    cpu.manual_seed(5)
    assert torch.initial_seed() == 5
    assert torch.equal(cpu.get_rng_state(), torch.get_rng_state())
