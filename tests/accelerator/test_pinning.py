"""Pinned memory is host memory: locked where a device can, ordinary where it cannot."""

from __future__ import annotations

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import InvalidDeviceError


def test_a_pinned_tensor_holds_the_data_on_the_host(acc: Accelerator) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    pinned = acc.pin_memory(tensor)
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned, tensor)


def test_whether_a_tensor_is_pinned_is_a_bool(acc: Accelerator) -> None:
    assert acc.is_pinned(torch.zeros(2)) is False
    assert type(acc.is_pinned(acc.pin_memory(torch.zeros(2)))) is bool


@pytest.mark.parametrize("align_bytes", [0, 1, 4096])
def test_the_alignment_of_older_releases_of_deepspeed_is_taken_in_both_forms(
    acc: Accelerator, align_bytes: int
) -> None:
    tensor = torch.arange(1000)
    assert torch.equal(acc.pin_memory(tensor, align_bytes), tensor)
    assert torch.equal(acc.pin_memory(tensor, align_bytes=align_bytes), tensor)


@pytest.mark.parametrize(("match_shape", "shape"), [(True, (2, 3)), (False, (6,))])
def test_a_template_is_not_copied(acc: Accelerator, match_shape: bool, shape: tuple[int, ...]) -> None:
    template = torch.zeros(2, 3, dtype=torch.int16)
    fresh = acc.pin_memory(template, make_copy=False, match_shape=match_shape)
    assert (fresh.shape, fresh.dtype) == (shape, torch.int16)
    assert fresh.data_ptr() != template.data_ptr()


@pytest.mark.parametrize(
    ("size", "shape"),
    [((2, 3), (2, 3)), (([2, 3],), (2, 3)), ((torch.Size([4]),), (4,)), ((0,), (0,)), ((), ()), (((),), ())],
)
def test_pin_empty_takes_sizes_in_either_form(
    acc: Accelerator, size: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    tensor = acc.pin_empty(*size, dtype=torch.float16)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, torch.float16, "cpu")


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_pin_empty_like_has_the_shape_and_a_dtype(acc: Accelerator, dtype: torch.dtype | None) -> None:
    tensor = acc.pin_empty_like(torch.zeros(3, 2), dtype=dtype)
    assert (tensor.shape, tensor.dtype) == ((3, 2), dtype or torch.float32)


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "no such type"])
def test_memory_elsewhere_than_on_the_host_cannot_be_pinned(
    acc: Accelerator, device: str | torch.device
) -> None:
    with pytest.raises(InvalidDeviceError, match='must be "cpu"'):
        acc.pin_empty(2, dtype=torch.float32, device=device)
    with pytest.raises(InvalidDeviceError, match='must be "cpu"'):
        acc.pin_empty_like(torch.zeros(2), device=device)


def test_nothing_is_locked_for_the_host(cpu: Accelerator) -> None:
    tensor = torch.zeros(2)
    assert cpu.pin_memory(tensor) is tensor
    assert not cpu.is_pinned(cpu.pin_empty(2, dtype=torch.float32))


def test_a_device_that_cannot_pin_gets_ordinary_memory(bare: Accelerator) -> None:
    with pytest.raises(NotImplementedError):
        torch.zeros(2).pin_memory()
    tensor = torch.zeros(2)
    assert bare.pin_memory(tensor) is tensor
    assert not bare.is_pinned(bare.pin_empty(2, dtype=torch.float32))


def test_memory_is_pinned_on_the_host_whatever_the_default_device_is(acc: Accelerator) -> None:
    given = torch.ones(3)
    with torch.device(acc.current_device_name()):
        assert acc.pin_memory(given).device.type == "cpu"
        assert acc.pin_empty(3, dtype=torch.float32).device.type == "cpu"


def test_foreign_memory_is_only_locked_where_a_device_can(acc: Accelerator) -> None:
    tensor = torch.zeros(1024)
    assert acc.register_host_memory(tensor.data_ptr(), tensor.nbytes) is False
    acc.unregister_host_memory(tensor.data_ptr())
    assert acc.pin_memory_alignment() == 1


def test_a_tensor_can_be_unpinned_and_used_on(acc: Accelerator) -> None:
    pinned = acc.pin_memory(torch.ones(2))
    acc.unpin_memory(pinned)
    assert pinned.sum().item() == 2


def test_on_accelerator_tells_where_a_tensor_is(acc: Accelerator) -> None:
    assert acc.on_accelerator(torch.zeros(1, device=acc.device_name())) is True
    assert acc.on_accelerator(torch.zeros(1, device="meta")) is False


def test_a_tensor_of_the_host_is_on_no_other_accelerator(indexed: Accelerator) -> None:
    assert indexed.on_accelerator(torch.zeros(1)) is False
