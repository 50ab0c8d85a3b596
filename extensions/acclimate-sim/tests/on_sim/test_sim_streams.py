from __future__ import annotations

import time

import pytest
import torch

from acclimate import get_accelerator
from acclimate.accelerator import Accelerator

acc = get_accelerator()


def test_a_stream_is_current_within_its_block() -> None:
    stream = acc.Stream()
    before = acc.current_stream()
    with acc.stream(stream):
        assert acc.current_stream() == stream
    assert acc.current_stream() == before == acc.default_stream()
    assert acc.current_stream(1).device_index == 1


class WithoutStreamContext(type(acc)):  # type: ignore[misc]
    """The device as if its module had no function ``stream``."""

    torch_module = None


@pytest.mark.parametrize("of", [acc, WithoutStreamContext()], ids=["torch.sim.stream", "torch.Stream"])
def test_a_stream_can_be_entered_again_within_its_block(of: Accelerator) -> None:
    stream = acc.Stream()
    with of.stream(stream):
        with of.stream(stream):
            assert acc.current_stream() == stream
        assert acc.current_stream() == stream
    assert acc.current_stream() == acc.default_stream()


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
