"""Small tensors share memory on huge pages; large ones have their own."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from acclimate.host.huge_pages import SharedPages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of_memory(address: int) -> set[str]:
    """What Linux notes about the mapping of an address; ``hg``: huge pages are requested."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping has the address {address:x}")


def test_small_tensors_keep_their_values_and_lie_on_cache_lines_of_the_same_memory() -> None:
    pages = SharedPages()
    given = [torch.randn(3, 7), torch.arange(65, dtype=torch.uint8), torch.randn(5).bfloat16()]
    moved = [pages.move(tensor) for tensor in given]
    for before, after in zip(given, moved, strict=True):
        assert torch.equal(before, after)
        assert after.dtype == before.dtype
        assert after.is_contiguous()
        assert after.data_ptr() % 64 == 0
        assert after.data_ptr() != before.data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1


@pytest.mark.skipif(not THP.exists(), reason="this system has no huge pages")
def test_small_tensors_are_where_huge_pages_are_requested() -> None:
    moved = SharedPages().move(torch.ones(1000))
    assert "hg" in flags_of_memory(moved.data_ptr())
    assert moved.data_ptr() % (2 << 20) == 0


def test_a_large_tensor_an_empty_one_and_one_of_a_device_stay_where_they_are() -> None:
    pages = SharedPages()
    for tensor in (torch.empty(4 << 20, dtype=torch.uint8), torch.empty(0), torch.empty(8, device="meta")):
        assert pages.move(tensor) is tensor


def test_more_tensors_than_one_piece_of_memory_holds_keep_their_values() -> None:
    pages = SharedPages()
    moved = [pages.move(torch.full((3 << 20,), value, dtype=torch.uint8)) for value in range(12)]
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(moved))
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 3


def test_a_copy_of_a_moved_tensor_has_memory_of_its_own() -> None:
    moved = SharedPages().move(torch.ones(4))
    other = copy.deepcopy(moved)
    other.zero_()
    assert torch.equal(moved, torch.ones(4))
