"""The peak of acclimate.backends.process_memory, in tests that need little memory."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

from acclimate.backends import process_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's own peak alone."""
    monkeypatch.setattr(process_memory, "_sampled", process_memory._Sampled())
    monkeypatch.setattr(process_memory, "_kernel_peak_is_reset", True)


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the kernel says that this process occupies now."""

    def occupies(size: int) -> None:
        monkeypatch.setattr(process_memory._statm, "resident_bytes", lambda: size)

    return occupies


@pytest.mark.parametrize("behind", [0, 1, 64 * MIB])
def test_the_peak_is_never_below_what_is_occupied_now(
    resident: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    # The kernel updates its mark only now and then, so it can lag behind the present size.
    resident(512 * MIB)
    monkeypatch.setattr(process_memory, "_kernel_peak", lambda: 512 * MIB - behind)
    assert process_memory.peak_resident_bytes() == 512 * MIB


def test_the_kernels_mark_is_the_peak_where_it_is_higher(
    resident: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident(512 * MIB)
    monkeypatch.setattr(process_memory, "_kernel_peak", lambda: 700 * MIB)
    assert process_memory.peak_resident_bytes() == 700 * MIB


def test_the_largest_size_seen_is_the_peak_where_the_kernel_keeps_none(
    resident: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "_kernel_peak", lambda: None)
    for size in (300, 900, 400):
        resident(size * MIB)
        process_memory.resident_bytes()
    assert process_memory.peak_resident_bytes() == 900 * MIB


def test_a_reset_that_is_refused_starts_the_peak_at_what_is_occupied_then(
    resident: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident(900 * MIB)
    process_memory.resident_bytes()
    opens = builtins.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == "/proc/self/clear_refs":
            raise PermissionError(13, "Permission denied")
        return opens(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refused)
    resident(200 * MIB)
    process_memory.reset_peak()
    resident(100 * MIB)
    assert process_memory.peak_resident_bytes() == 200 * MIB
