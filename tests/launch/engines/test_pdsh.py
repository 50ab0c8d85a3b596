"""`--launcher pdsh`: an agent on each of two hosts, started by one pdsh."""

from __future__ import annotations

import shutil

import pytest
from engine_jobs import (
    SLEEP,
    WITH_TORCH,
    Jobs,
    check_all_reduce,
    check_failing_rank,
    check_interrupt,
    check_killed_launcher,
    check_lost_host,
    check_much_output,
    check_reader_that_exits,
)

PDSH = ("--launcher", "pdsh")
pytestmark = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")


def test_ranks_on_two_hosts_reduce_together(jobs: Jobs) -> None:
    check_all_reduce(jobs, *PDSH)


@pytest.mark.slow
def test_ranks_on_two_hosts_reduce_together_with_torch(jobs: Jobs) -> None:
    check_all_reduce(jobs, *PDSH, code=WITH_TORCH)


@pytest.mark.slow
def test_a_failing_rank_ends_the_other_hosts_ranks_with_its_exit_code(jobs: Jobs) -> None:
    check_failing_rank(jobs, *PDSH)


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_of_all_hosts(jobs: Jobs) -> None:
    check_interrupt(jobs, *PDSH)


@pytest.mark.slow
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(jobs: Jobs) -> None:
    check_killed_launcher(jobs, *PDSH)


@pytest.mark.slow
def test_much_output_comes_through_in_whole_lines(jobs: Jobs) -> None:
    check_much_output(jobs, *PDSH)


@pytest.mark.slow
def test_the_job_ends_when_nobody_reads_its_output_any_more(jobs: Jobs) -> None:
    check_reader_that_exits(jobs, *PDSH)


@pytest.mark.slow
def test_a_host_that_goes_away_ends_the_job_and_is_named(jobs: Jobs) -> None:
    check_lost_host(jobs, *PDSH)


def test_an_unreachable_host_is_named_with_sshs_own_words_before_any_rank_starts(jobs: Jobs) -> None:
    ended = jobs.run(SLEEP, *PDSH, hosts=["alpha", "gamma"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert 'host "gamma" cannot be reached: ssh: Could not resolve hostname gamma' in ended.stderr


@pytest.mark.slow
def test_values_of_variables_do_not_show_in_a_list_of_processes(jobs: Jobs) -> None:
    # psutil passes over a process that ends while the list is read.
    code = """
import os, psutil
words = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or []]
print(os.environ["WANDB_KEY"], sum("s3cr" + "et" in word for word in words))
"""
    ended = jobs.run(code, *PDSH, "--env=WANDB_KEY=s3cret", hosts=["beta"])
    assert set(ended.stdout.splitlines()) == {"[rank 0] s3cret 0", "[rank 1] s3cret 0"}, ended.stderr


def test_hosts_with_different_ports_are_refused(jobs: Jobs) -> None:
    hostfile = jobs.folder / "other-hosts"
    hostfile.write_text("alpha:2222 slots=1\nbeta slots=1\n")
    ended = jobs.run(SLEEP, *PDSH, "--hostfile", str(hostfile))
    assert ended.returncode == 2
    assert "pdsh takes one ssh port for all hosts." in ended.stderr
