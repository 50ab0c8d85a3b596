from __future__ import annotations

from sim_process import TESTS, run_python


def test_collectives_ddp_fsdp_dtensor_and_sync_batch_norm_give_the_right_numbers_on_two_processes() -> None:
    result = run_python(str(TESTS / "two_ranks.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("passed") == 2
