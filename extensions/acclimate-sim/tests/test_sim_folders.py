"""Runs the tests that need sim, each folder or file in one process of its own."""

from __future__ import annotations

import pytest
from sim_process import run_folder


@pytest.mark.parametrize(
    ("folder", "profile"),
    [
        ("on_sim", ""),
        pytest.param("on_sim", "hpu-like", marks=pytest.mark.slow),
        pytest.param("on_sim", "devices=2,sync=check", marks=pytest.mark.slow),
        pytest.param("with_sync_check", "sync=check", marks=pytest.mark.slow),
        # As Apple's GPUs and some of Intel's are; and Gaudi, which replaces Parameters.
        pytest.param(
            "with_sync_check/test_grad_scaler.py with_limits",
            "no=float64+bfloat16,replace=yes,sync=check",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_folder_passes_on_sim(folder: str, profile: str) -> None:
    run_folder(folder, profile)


@pytest.mark.slow
def test_the_slow_tests_pass_on_sim() -> None:
    run_folder("on_sim", marks="slow")
