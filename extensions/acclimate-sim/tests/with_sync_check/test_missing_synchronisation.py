"""Programs with and without the fault, in the process that sync=check watches."""

from __future__ import annotations

import pytest
import torch

from acclimate import get_accelerator

acc = get_accelerator()
missing = pytest.raises(RuntimeError, match="Missing synchronisation")


def ones() -> torch.Tensor:
    return torch.ones(4, device="sim")


def test_a_stream_that_reads_without_waiting_is_caught_and_named() -> None:
    x = ones()
    message = r"aten::mul.* on stream \d+ of sim:0 reads memory that .* on the default stream of sim:0 wrote"
    with acc.stream(acc.Stream()), pytest.raises(RuntimeError, match=message):
        x * 2


def test_a_stream_that_waits_reads() -> None:
    x, stream = ones(), acc.Stream()
    stream.wait_stream(acc.current_stream())
    with acc.stream(stream):
        y = x * 2
    acc.current_stream().wait_stream(stream)
    assert (y + 1).sum().item() == 12


def test_using_a_result_before_its_stream_is_waited_for_is_caught() -> None:
    x, stream = ones(), acc.Stream()
    stream.wait_stream(acc.current_stream())
    with acc.stream(stream):
        y = x * 2
    with missing:
        y + 1


def test_overwriting_what_another_stream_reads_is_caught() -> None:
    x, stream = ones(), acc.Stream()
    stream.wait_stream(acc.current_stream())
    with acc.stream(stream):
        x * 2
    with missing:
        x.add_(1)


def test_an_event_orders_and_one_recorded_too_early_does_not() -> None:
    stream, early = acc.Stream(), acc.Event()
    early.record()
    x, late = ones(), acc.Event()
    late.record()
    stream.wait_event(early)
    with acc.stream(stream), missing:
        x * 2
    stream.wait_event(late)
    with acc.stream(stream):
        x * 2


def test_an_event_orders_through_a_third_stream() -> None:
    x, second, third = ones(), acc.Stream(), acc.Stream()
    second.wait_stream(acc.current_stream())
    third.wait_event(second.record_event())
    with acc.stream(third):
        x * 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda: acc.synchronize(),
        lambda: acc.current_stream().synchronize(),
        lambda: torch.zeros(1, device="sim").item(),
        lambda: torch.zeros(1, device="sim").cpu(),
    ],
    ids=["device", "stream", "item", "copy"],
)
def test_the_host_orders_by_waiting(wait: object) -> None:
    x = ones()
    wait()  # type: ignore[operator]
    with acc.stream(acc.Stream()):
        x * 2


def test_two_streams_may_read_and_may_write_different_halves() -> None:
    x, first, second = ones(), acc.Stream(), acc.Stream()
    acc.synchronize()
    with acc.stream(first):
        x * 2
    with acc.stream(second):
        x * 3
    acc.synchronize()
    with acc.stream(first):
        x[:2].add_(1)
    with acc.stream(second):
        x[2:].add_(1)


def test_making_a_view_is_no_use() -> None:
    x = torch.ones(4, 2, device="sim")
    with acc.stream(acc.Stream()):
        torch.view_as_complex(x)
        x.t()[1:]


def test_copies_between_devices_order_both() -> None:
    x = ones()
    y = x.to("sim:1")
    x.add_(1)
    assert (y + 1).sum().item() == 8


def test_training_with_backward_is_clean() -> None:
    layer = torch.nn.Linear(4, 4).to("sim")
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2, 4, device="sim")).sum().backward()
        optimizer.step()


def test_backward_runs_on_the_streams_of_forward() -> None:
    layer, stream = torch.nn.Linear(4, 4).to("sim"), acc.Stream()
    stream.wait_stream(acc.current_stream())
    with acc.stream(stream):
        loss = layer(torch.ones(2, 4, device="sim")).sum()
    acc.current_stream().wait_stream(stream)
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.sum().item() == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_non_blocking_copy_holds_poison_until_synchronised(dtype: torch.dtype) -> None:
    x = torch.arange(4, device="sim").to(dtype)
    pinned = torch.empty(4, dtype=dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert not any(map(float.__eq__, pinned.double().tolist(), [0.0, 1.0, 2.0, 3.0]))
    acc.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]


def test_an_event_after_the_copy_delivers_it() -> None:
    flags = torch.tensor([True, False], device="sim")
    pinned = torch.empty(2, dtype=torch.bool, pin_memory=True)
    pinned.copy_(flags, non_blocking=True)
    assert pinned.tolist() == [False, True]
    event = acc.Event()
    event.record()
    event.synchronize()
    assert pinned.tolist() == [True, False]


def test_a_blocking_copy_and_one_to_pageable_memory_are_delivered_at_once() -> None:
    x = torch.arange(4.0, device="sim")
    assert x.cpu().tolist() == [0, 1, 2, 3]
    assert torch.empty(4).copy_(x, non_blocking=True).tolist() == [0, 1, 2, 3]


def test_the_device_reads_what_it_copied_out_in_order() -> None:
    x = torch.arange(4.0, device="sim")
    pinned = torch.empty(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.to("sim", non_blocking=True).tolist() == [0, 1, 2, 3]


def test_freeing_pinned_memory_with_a_copy_under_way_is_harmless() -> None:
    pinned = torch.empty(4, pin_memory=True)
    pinned.copy_(ones(), non_blocking=True)
    del pinned
    acc.synchronize()
