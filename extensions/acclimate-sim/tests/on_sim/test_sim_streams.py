from __future__ import annotations

import time

import torch

from acclimate import get_accelerator

acc = get_accelerator()


def test_a_stream_is_current_within_its_block() -> None:
    stream = acc.Stream()
    before = acc.current_stream()
    with acc.stream(stream):
        assert acc.current_stream() == stream
    assert acc.current_stream() == before == acc.default_stream()
    assert acc.current_stream(1).device_index == 1


def test_events_measure_milliseconds() -> None:
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 19 < start.elapsed_time(end) < 10_000
    assert end.query()


def test_the_device_is_not_synchronous_to_its_users() -> None:
    assert not acc.is_synchronized_device()
    acc.synchronize()
    acc.synchronize(1)
    torch.accelerator.synchronize()
