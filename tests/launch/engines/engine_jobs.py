"""Jobs on the hosts of tests, as a user starts them: ``acclimate run`` on the machine named head."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hosts import Hosts, Machine

from fresh_process import plain_environment

ROOT = Path(__file__).parents[3]
ENGINES_FOLDER = ROOT / ".engines"
"""Where `make` puts the MPIs, each in a folder of its own as their programs have the same names."""
ACCLIMATE = [sys.executable, "-m", "acclimate", "run"]

WITH_TORCH = """
import torch, torch.distributed as distributed
torch.set_num_threads(1)
distributed.init_process_group("gloo")
tensor = torch.tensor([2.0 ** distributed.get_rank()])
distributed.all_reduce(tensor)
total = tensor.item()
distributed.destroy_process_group()
"""
WITH_SOCKETS = """
import os, socket, time
rank, meeting_place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(("", meeting_place[1])) as server:
        others = [server.accept()[0].makefile("rw") for _ in range(1, int(os.environ["WORLD_SIZE"]))]
    total = 1.0 + sum(float(other.readline()) for other in others)
    for other in others: print(total, file=other, flush=True)
else:
    for _ in range(600):
        try: first = socket.create_connection(meeting_place).makefile("rw")
        except ConnectionRefusedError: time.sleep(0.1)  # it does not listen yet
        else: break
    print(2.0**rank, file=first, flush=True)
    total = float(first.readline())
"""
"""The same as above, in a hundredth of the processor time."""
RESULT = """
import os, socket
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "OMP_NUM_THREADS")]
print("result", socket.gethostname(), *place, cores, total)
"""
"""Each rank's result is the sum over all of 2 to the power of the rank."""


class Jobs:
    """Starts jobs on the hosts.

    Args:
        hosts: with their names in the hostfile, two slots each.
        folder: for the user's working directory and programs.
        path: folders to put in front of ``PATH``.
        environment: of the launcher, besides.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self.folder = hosts, folder / "user" / "work"
        self.folder.mkdir(parents=True)
        ssh = folder / "bin" / "ssh"  # as if the user's own configuration had these hosts' keys
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {hosts.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        folders = [ssh.parent, *path, Path(sys.executable).parent, *os.environ["PATH"].split(os.pathsep)]
        self.environment = {
            **plain_environment(),
            "PATH": os.pathsep.join(map(str, folders)),
            **(environment or {}),
        }

    def hostfile(self, *names: str) -> Path:
        """Of these hosts, or of all."""
        path = self.folder / "hostfile"
        path.write_text(
            "".join(f"{name} slots=2\n" for name in names or [host.name for host in self.hosts.hosts])
        )
        return path

    def script(self, code: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(code)
        return path

    def start(self, code: str, *options: str, hosts: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Starts a job of this code on two slots of each host."""
        command = [*ACCLIMATE, "--hostfile", str(self.hostfile(*hosts)), *options, str(self.script(code))]
        return self.hosts.head.popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            directory=self.folder,
            env=self.environment,
        )

    def run(
        self, code: str, *options: str, hosts: Sequence[str] = (), timeout_s: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Runs such a job to its end."""
        with self.start(code, *options, hosts=hosts) as job:
            try:
                stdout, stderr = job.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                job.kill()
                raise
        return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


SLEEP = """
import os, time
print("up", os.environ["RANK"], flush=True)
time.sleep(600)
"""


def read_lines(job: subprocess.Popen[str], count: int) -> set[str]:
    """The next lines that a job writes."""
    assert job.stdout is not None
    return {job.stdout.readline().rstrip("\n") for _ in range(count)}


def eventually(holds: Callable[[], bool], within_s: float = 120.0) -> bool:
    """Whether something comes true."""
    give_up = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def leftovers(machines: Sequence[Machine]) -> dict[str, dict[int, str]]:
    """What still runs on the hosts."""
    return {machine.name: found for machine in machines if (found := machine.processes())}


UP = {f"[rank {rank}] up {rank}" for rank in range(4)}


# -- promises that every engine keeps ----------------------------------------------------------------


def check_all_reduce(jobs: Jobs, *options: str, code: str = WITH_SOCKETS) -> None:
    """Two hosts, two ranks each, every rank on cores of its own: all get the sum over all four."""
    cores = sorted(os.sched_getaffinity(0))
    ended = jobs.run(code + RESULT, "--bind_cores_to_rank", *options)
    assert ended.returncode == 0, ended.stderr
    half = len(cores) // 2
    if half * 2 != len(cores) or not half:
        pytest.skip(f"two ranks cannot share {len(cores)} cores evenly here")
    results = {}
    for line in ended.stdout.splitlines():
        tag, _, result = line.partition("] result ")
        results[tag.removeprefix("[")] = result.split()
    places = {tag: (host, rank, local) for tag, (host, rank, local, *_) in results.items()}
    assert places == {
        f"rank {rank}": (("alpha", "beta")[rank // 2], str(rank), str(rank % 2)) for rank in range(4)
    }
    assert {total for *_, total in results.values()} == {"15.0"}
    bound = {tag: set(allowed.split(",")) for tag, (*_, allowed, _) in results.items()}
    for first, second in (("rank 0", "rank 1"), ("rank 2", "rank 3")):
        assert not bound[first] & bound[second]
        assert bound[first] | bound[second] <= set(map(str, cores))
    assert eventually(lambda: not leftovers(jobs.hosts.hosts)), leftovers(jobs.hosts.hosts)


def check_failing_rank(jobs: Jobs, *options: str) -> None:
    """The exit code is the rank's, and the last lines say which one it was; the others have ended."""
    code = """
import os, sys, time
if os.environ["RANK"] == "3":
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""
    ended = jobs.run(code, *options)
    assert ended.returncode == 7, ended.stderr
    assert "acclimate run: the last line of rank 3:\n    about to fail\n" in ended.stderr
    assert re.search(r"acclimate run: rank 3 \(host beta, pid \d+\) ended with exit code 7\.$", ended.stderr)
    assert eventually(lambda: not leftovers(jobs.hosts.hosts)), leftovers(jobs.hosts.hosts)


def check_interrupt(jobs: Jobs, *options: str) -> None:
    """Ranks on all hosts get the launcher's SIGINT itself, and time to end."""
    code = """
import os, signal, sys, time
def end(number, frame):
    print("got", number, os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, end)
print("up", os.environ["RANK"], flush=True)
time.sleep(600)
"""
    with jobs.start(code, *options) as job:
        assert read_lines(job, 4) == UP
        job.send_signal(signal.SIGINT)
        stdout, stderr = job.communicate(timeout=240)
    assert set(stdout.splitlines()) == {f"[rank {rank}] got 2 {rank}" for rank in range(4)}, stderr
    assert eventually(lambda: not leftovers(jobs.hosts.hosts)), leftovers(jobs.hosts.hosts)


def check_killed_launcher(jobs: Jobs, *options: str) -> None:
    """No process is left on any host, the launcher's own included, when it is killed."""
    with jobs.start(SLEEP, *options) as job:
        assert read_lines(job, 4) == UP
        job.kill()
    everything = [jobs.hosts.head, *jobs.hosts.hosts]
    assert eventually(lambda: not leftovers(everything)), leftovers(everything)


def check_lost_host(jobs: Jobs, *options: str) -> None:
    """A host that is switched off ends the job on the other one, and is named."""
    alpha, beta = jobs.hosts.hosts
    with jobs.start(SLEEP, *options) as job:
        assert read_lines(job, 4) == UP
        beta.pull_the_plug()
        _, stderr = job.communicate(timeout=240)
    assert job.returncode == 1, stderr
    assert 'acclimate run: host "beta" was lost: ' in stderr
    assert eventually(lambda: not leftovers([alpha])), leftovers([alpha])


def check_much_output(jobs: Jobs, *options: str) -> None:
    """Nothing is lost, and no line has another rank's in it, where all ranks print at once."""
    code = """
import os, sys
for number in range(5000):
    print(os.environ["RANK"], number, "x" * 200)
    print(os.environ["RANK"], number, "y" * 20, file=sys.stderr)
"""
    ended = jobs.run(code, *options)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for text, filling in ((ended.stdout, "x" * 200), (ended.stderr, "y" * 20)):
        numbers = range(5000)
        wanted = {f"[rank {rank}] {rank} {number} {filling}" for rank in range(4) for number in numbers}
        lines = [line for line in text.splitlines() if "[rank " in line]  # Open MPI adds warnings
        assert (len(lines), set(lines) - wanted) == (len(wanted), set())
    assert eventually(lambda: not leftovers(jobs.hosts.hosts)), leftovers(jobs.hosts.hosts)


def check_reader_that_exits(jobs: Jobs, *options: str) -> None:
    """The job ends when nobody reads its output any more, and says so."""
    code = "import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.01)"
    with jobs.start(code, *options) as job:
        read_lines(job, 4)
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        assert job.wait(240) == 128 + signal.SIGPIPE
        stderr = job.stderr.read()
    reason = "acclimate run: the reader of standard output has exited, so the ranks were ended."
    assert re.findall("acclimate run: .*", stderr) == [reason], stderr
    assert eventually(lambda: not leftovers(jobs.hosts.hosts)), leftovers(jobs.hosts.hosts)
