"""`--launcher ssh`: an agent on each of two hosts with a real sshd."""

from __future__ import annotations

import signal
import time

import pytest
from engine_jobs import (
    ROOT,
    SLEEP,
    WITH_SOCKETS,
    WITH_TORCH,
    Jobs,
    check_all_reduce,
    check_failing_rank,
    check_interrupt,
    check_killed_launcher,
    check_lost_host,
    check_much_output,
    check_reader_that_exits,
    eventually,
    leftovers,
    read_lines,
)
from hosts import NETWORK

SSH = ("--launcher", "ssh")


@pytest.mark.parametrize(
    "code", [WITH_SOCKETS, pytest.param(WITH_TORCH, marks=pytest.mark.slow)], ids=["sockets", "torch"]
)
def test_ranks_on_two_hosts_reduce_together(jobs: Jobs, code: str) -> None:
    check_all_reduce(jobs, *SSH, code=code)


@pytest.mark.slow
def test_ssh_is_what_auto_takes_where_it_is_installed(jobs: Jobs) -> None:
    code = "import os; print(os.environ['SSH_CONNECTION'].split()[2], os.environ['NODE_RANK'])"
    ended = jobs.run(code, "--num_accelerators", "1")
    lines = {f"[rank {rank}] {host.address} {rank}" for rank, host in enumerate(jobs.hosts.hosts)}
    assert (ended.returncode, set(ended.stdout.splitlines()), ended.stderr) == (0, lines, "")


@pytest.fixture
def vms(jobs: Jobs) -> Jobs:
    """Jobs on hosts that both call themselves vm, a name with Debian's loopback address."""
    with (jobs.hosts.folder / "hosts").open("a") as file:
        file.write("127.0.1.1 vm\n")
    for host in jobs.hosts.hosts:
        assert host.run(["hostname", "vm"]).returncode == 0
    return jobs


@pytest.mark.slow
def test_plain_gloo_connects_hosts_whose_own_name_is_a_loopback_address(vms: Jobs) -> None:
    ended = vms.run(f"{WITH_TORCH}\nprint('total', total)", *SSH, "--num_accelerators", "1")
    lines = [f"[rank {rank}] total 3.0" for rank in (0, 1)]
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, lines), ended.stderr


@pytest.mark.slow
def test_the_users_interface_for_gloo_is_kept(vms: Jobs) -> None:
    code = "import os; print(os.getenv('GLOO_SOCKET_IFNAME'))"
    ours = vms.run(code, *SSH, "--num_accelerators", "1")
    users = vms.run(code, *SSH, "--num_accelerators", "1", "--env", "GLOO_SOCKET_IFNAME=mine")
    alone = vms.run(code, *SSH, hosts=["alpha"])
    said = [[line.split()[-1] for line in ended.stdout.splitlines()] for ended in (ours, users, alone)]
    assert said == [["net0", "net0"], ["mine", "mine"], ["None", "None"]], ours.stderr


@pytest.mark.slow
def test_a_report_names_hosts_as_the_hostfile_does(vms: Jobs) -> None:
    code = "import os, sys; sys.exit(7 if os.environ['RANK'] == '3' else 0)"
    ended = vms.run(code, *SSH)
    assert ended.returncode == 7
    assert "rank 3 (host beta, pid " in ended.stderr


def test_a_failing_rank_ends_the_other_hosts_ranks_with_its_exit_code(jobs: Jobs) -> None:
    check_failing_rank(jobs, *SSH)


@pytest.mark.slow
def test_the_rank_that_failed_first_is_blamed_while_its_neighbours_still_end(jobs: Jobs) -> None:
    """Ranks elsewhere fail for want of it, before its own host has ended the others and tells the outcome."""
    code = """
import os, pathlib, signal, sys, time
rank, gone = os.environ["RANK"], pathlib.Path("gone")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == "3":
    gone.touch()
    sys.exit(7)
while rank == "2" or not gone.exists():
    time.sleep(0.01)
time.sleep(1)
sys.exit(9)
"""
    ended = jobs.run(code, *SSH, "--grace", "3")
    assert ended.returncode == 7, ended.stderr
    assert "acclimate run: rank 3 (host beta, pid " in ended.stderr


def test_an_interrupt_reaches_the_ranks_of_all_hosts(jobs: Jobs) -> None:
    check_interrupt(jobs, *SSH)


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(jobs: Jobs) -> None:
    check_killed_launcher(jobs, *SSH)


def test_a_host_that_goes_away_ends_the_job_and_is_named(jobs: Jobs) -> None:
    check_lost_host(jobs, *SSH)


@pytest.mark.slow
def test_a_host_whose_cable_is_cut_ends_the_job_and_is_named(jobs: Jobs) -> None:
    with jobs.start(SLEEP, *SSH) as job:
        read_lines(job, 4)
        jobs.hosts.cut_the_cable("beta")
        _, stderr = job.communicate(timeout=240)
    assert job.returncode == 1
    assert 'host "beta" was lost: Timeout, server beta not responding.' in stderr
    alpha, beta = jobs.hosts.hosts
    assert eventually(lambda: not alpha.processes()), leftovers([alpha])
    # Beta cannot be told, and finds out by itself.
    assert eventually(lambda: not beta.processes(), within_s=90), leftovers([beta])


@pytest.mark.slow
def test_an_interrupted_job_names_a_host_whose_cable_is_cut(jobs: Jobs) -> None:
    with jobs.start(SLEEP, "--grace", "0.3", *SSH) as job:
        read_lines(job, 4)
        jobs.hosts.cut_the_cable("beta")
        job.send_signal(signal.SIGINT)
        _, stderr = job.communicate(timeout=240)
    assert job.returncode == 130
    assert stderr.endswith(
        'SIGINT was forwarded, but "beta" did not report how its ranks ended, so they may still run.\n'
    )


# -- before any rank starts --------------------------------------------------------------------------


def test_unreachable_hosts_are_all_named_with_sshs_own_words_before_any_rank_starts(jobs: Jobs) -> None:
    ended = jobs.run("open('started', 'w')", *SSH, hosts=["alpha", "gamma", f"{NETWORK}77"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "acclimate run: error: no rank was started:\n" in ended.stderr
    assert 'host "gamma" cannot be reached: ssh: Could not resolve hostname gamma' in ended.stderr
    assert not (jobs.folder / "started").exists()
    assert eventually(lambda: not leftovers(jobs.hosts.hosts))


@pytest.mark.slow
def test_a_host_that_never_answers_is_named_within_ten_seconds(jobs: Jobs) -> None:
    address = jobs.hosts.swallow_packets()
    began = time.monotonic()
    ended = jobs.run(SLEEP, *SSH, hosts=["alpha", address])
    took_s = time.monotonic() - began
    assert f'host "{address}" cannot be reached: ssh: connect to host {address} port 22: ' in ended.stderr
    assert (ended.returncode, ended.stdout) == (2, "")
    assert took_s < 10 + 10  # the machine may be busy


@pytest.mark.slow
def test_a_key_that_the_host_does_not_take_is_said_in_sshs_words(jobs: Jobs) -> None:
    (jobs.hosts.folder / "user_key.pub").write_text("")
    ended = jobs.run(SLEEP, *SSH)
    assert ended.returncode == 2
    assert 'host "alpha" cannot be reached: ' in ended.stderr
    assert "Permission denied (publickey" in ended.stderr


def test_a_host_without_acclimate_is_told_from_one_that_cannot_be_reached(jobs: Jobs) -> None:
    jobs.hosts.hosts[1].run(["mount", "-t", "tmpfs", "none", str(ROOT / "src" / "acclimate")], check=True)
    ended = jobs.run(SLEEP, *SSH)
    assert ended.returncode == 2
    assert 'host "beta" cannot run an agent: exit code 1: ' in ended.stderr
    assert "No module named" in ended.stderr


def test_a_working_directory_that_a_host_lacks_is_named(jobs: Jobs) -> None:
    jobs.hosts.hosts[1].run(["mount", "-t", "tmpfs", "none", str(jobs.folder.parent)], check=True)
    ended = jobs.run(SLEEP, *SSH)
    assert ended.returncode == 2
    assert f'host "beta": The working directory {jobs.folder} cannot be used there' in ended.stderr


# -- what reaches the ranks, and what comes back -----------------------------------------------------


def test_only_listed_variables_are_carried_and_none_shows_in_a_list_of_processes(jobs: Jobs) -> None:
    jobs.environment |= {
        "OMP_SCHEDULE": "static",
        "HF_TOKEN": "s3",
        "TORCH_TOKEN": "s3",
        "OTHER": "1",
    }
    code = """
import os, time
names = ("OMP_SCHEDULE", "HF_TOKEN", "TORCH_TOKEN", "OTHER", "WANDB_KEY", "EMPTY")
print("has", *(f"{name}={os.environ[name]}" for name in names if name in os.environ), flush=True)
time.sleep(600)
"""
    secret = '--env=WANDB_KEY=it\'s $HOME & "more"'
    with jobs.start(code, *SSH, "--env", "OTHER", secret, "--env=EMPTY=", hosts=["alpha"]) as job:
        shown = read_lines(job, 2)
        listed = [*jobs.hosts.hosts[0].processes().values()]
        on_head = [*jobs.hosts.head.processes().values()]
        job.terminate()
        job.communicate(timeout=240)
    expected = 'has OMP_SCHEDULE=static OTHER=1 WANDB_KEY=it\'s $HOME & "more" EMPTY='
    assert shown == {f"[rank {rank}] {expected}" for rank in range(2)}
    assert listed
    assert not [line for line in listed if "more" in line]
    # Where the user typed it, it can be seen: that is one process, and not ssh's.
    assert [line for line in on_head if "more" in line and "acclimate run" not in line] == []


def test_both_streams_and_a_log_for_each_rank_come_through(jobs: Jobs) -> None:
    code = r"""
import os, sys
rank = os.environ["RANK"]
print("out", rank)
sys.stderr.write("err " + rank + "\n")
sys.stdout.buffer.write(b"\xff\x1e not text, no newline " + rank.encode())
"""
    logs = jobs.folder / "logs"
    ended = jobs.run(code, *SSH, "--log_dir", str(logs))
    assert ended.returncode == 0
    out = {f"[rank {rank}] out {rank}" for rank in range(4)}
    odd = {f"[rank {rank}] \udcff\x1e not text, no newline {rank}" for rank in range(4)}
    assert set(ended.stdout.split("\n")) - {""} == out | odd
    assert set(ended.stderr.splitlines()) == {f"[rank {rank}] err {rank}" for rank in range(4)}
    assert sorted(path.name for path in logs.iterdir()) == [f"rank_{rank}.log" for rank in range(4)]


@pytest.mark.slow
def test_much_output_comes_through_in_whole_lines(jobs: Jobs) -> None:
    check_much_output(jobs, *SSH)


@pytest.mark.slow
def test_the_job_ends_when_nobody_reads_its_output_any_more(jobs: Jobs) -> None:
    check_reader_that_exits(jobs, *SSH)


@pytest.mark.slow
def test_hosts_may_have_ports_of_their_own_and_ipv6_addresses(jobs: Jobs) -> None:
    beta = jobs.hosts.hosts[1]
    for machine, address in ((jobs.hosts.head, "fd00:77::1"), (beta, "fd00:77::3")):
        device = "bridge" if machine is jobs.hosts.head else "net0"
        machine.run(["ip", "address", "add", f"{address}/64", "dev", device, "nodad"], check=True)
    hostfile = jobs.folder / "other-hosts"
    hostfile.write_text("alpha:2222 slots=1\n[fd00:77::3]:2222 slots=1\n")
    code = "import os, socket; print(socket.gethostname(), *os.environ['SSH_CONNECTION'].split()[2:])"
    ended = jobs.run(code, *SSH, "--hostfile", str(hostfile))
    assert ended.returncode == 0, ended.stderr
    alpha = jobs.hosts.hosts[0].address
    assert set(ended.stdout.splitlines()) == {f"[rank 0] alpha {alpha} 2222", "[rank 1] beta fd00:77::3 2222"}


@pytest.mark.slow
def test_launcher_args_and_a_port_for_all_reach_ssh(jobs: Jobs) -> None:
    code = "import os; print(os.environ['SSH_CONNECTION'].split()[3])"
    ended = jobs.run(
        code, *SSH, "--ssh_port", "2222", "--launcher_args=-v -oLogLevel=DEBUG1", hosts=["alpha"]
    )
    assert ended.returncode == 0
    assert set(ended.stdout.splitlines()) == {"[rank 0] 2222", "[rank 1] 2222"}


@pytest.mark.slow
def test_the_masters_address_and_port_can_be_chosen(jobs: Jobs) -> None:
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    ended = jobs.run(code, *SSH, "--master_addr", "alpha.example", "--master_port", "4711")
    assert set(ended.stdout.splitlines()) == {f"[rank {rank}] alpha.example 4711" for rank in range(4)}


@pytest.mark.slow
def test_slots_left_out_are_not_used(jobs: Jobs) -> None:
    code = (
        "import os, socket; print(socket.gethostname(), os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'])"
    )
    ended = jobs.run(code, *SSH, "--exclude", "alpha:0")
    expected = {"[rank 0] alpha 0 3", "[rank 1] beta 0 3", "[rank 2] beta 1 3"}
    assert set(ended.stdout.splitlines()) == expected


@pytest.mark.slow
def test_a_plan_longer_than_a_pipe_arrives(jobs: Jobs) -> None:
    jobs.environment |= {"FIRST": "1" * 100_000, "SECOND": "2" * 100_000}
    code = "import os; print(len(os.environ['FIRST']) + len(os.environ['SECOND']))"
    ended = jobs.run(code, *SSH, "--env", "FIRST", "--env", "SECOND")
    expected = {f"[rank {rank}] 200000" for rank in range(4)}
    assert set(ended.stdout.splitlines()) == expected, ended.stderr
