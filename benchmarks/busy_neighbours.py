"""Decoding and all_reduce beside busy programs and under quotas of processor time, against peers in turns.

    python benchmarks/busy_neighbours.py                       # all; quotas need root and a cpu controller
    python benchmarks/busy_neighbours.py busy quotas           # some of: busy, quotas, ranks, collectives
    python benchmarks/busy_neighbours.py --llama PYTHON MODEL.gguf

Models have random weights. A figure is the speed beside others divided by the speed alone, each the median of
the turns. Its goal is 0.8 times the share of the processors that is left, and 0.6 times for several ranks:
a processor with n busy programs leaves 1 / (n + 1) of itself. No figure may be below that of one thread.

As root, the measured processes and their busy programs run in a control group with a large weight, so that
other work on the machine takes little of their time. A turn in which other work still took more than a
twentieth of the processors is repeated; if that does not help, the row says so.

With --real-time, for a machine that others keep busy, what is measured has a real-time priority, and programs
of a higher one take the processors in turns of 4 ms, as busy programs would. There are no quotas then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("busy_neighbours_worker.py")
BUSY = "while True: pass"
# Takes a processor at a real-time priority above that of what is measured, and gives it back.
TURNS = """
import os, sys, time
processor, busy_s, idle_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {processor})
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(7))
while True:
    end = time.perf_counter() + busy_s
    while time.perf_counter() < end:
        pass
    time.sleep(idle_s)
"""
SLICE_S = 0.004
BUSY_PROGRAMS = (1, 2, 4)
QUOTAS = (0.5, 1.0, 1.5)
PERIOD_US = 100_000
MOST_DISTURBED = 0.05
MOST_TRIES = 6
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class ControlGroup:
    """A control group with a large weight, for what is measured; without root it is none."""

    def __init__(self, *, wanted: bool) -> None:
        self._is_v2 = (CONTROL_GROUPS / "cgroup.controllers").exists()
        name = f"acclimate-neighbours-{os.getpid()}"
        roots = (
            [CONTROL_GROUPS]
            if self._is_v2
            else [CONTROL_GROUPS / controller for controller in ("cpu", "cpuacct")]
        )
        self._folders = [root / name for root in roots]
        self.exists = False
        if not wanted:
            return
        with contextlib.suppress(OSError):
            for folder in self._folders:
                folder.mkdir()
            weight, largest = ("cpu.weight", 10000) if self._is_v2 else ("cpu.shares", 262144)
            if self._is_v2:
                (self._folders[0] / "cgroup.subtree_control").write_text("+cpu")
                for leaf in ("work", "busy"):  # processes of version 2 are in the leaves
                    (self._folders[0] / leaf).mkdir()
            (self._folders[0] / weight).write_text(str(largest))
            self.exists = True

    def add(self, process: int, *, busy: bool) -> None:
        """Adds a process, as one that is measured or a busy one."""
        if self.exists:
            for folder in self._folders:
                leaf = folder / ("busy" if busy else "work") if self._is_v2 else folder
                (leaf / "cgroup.procs").write_text(str(process))

    def limit(self, processors: float | None) -> None:
        """Sets the quota of the group; ``None``: none."""
        quota = -1 if processors is None else int(processors * PERIOD_US)
        if self._is_v2:
            text = f"{'max' if quota < 0 else quota} {PERIOD_US}"
            (self._folders[0] / "work" / "cpu.max").write_text(text)
        else:
            (self._folders[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folders[0] / "cpu.cfs_quota_us").write_text(str(quota))

    def used_s(self) -> float:
        """The processor time of its processes."""
        if self._is_v2:
            stat = dict(line.split() for line in (self._folders[0] / "cpu.stat").read_text().splitlines())
            return int(stat["usage_usec"]) * 1e-6
        return int((self._folders[1] / "cpuacct.usage").read_text()) * 1e-9

    def remove(self) -> None:
        """Removes the group; its processes have ended."""
        for folder in self._folders:
            for leaf in (folder / "work", folder / "busy", folder):
                with contextlib.suppress(OSError):
                    leaf.rmdir()


class Worker:
    """One or two processes that decode, or sum over ranks, for some seconds when asked."""

    def __init__(
        self, name: str, group: ControlGroup, *arguments: str, ranks: int = 1, python: str = sys.executable
    ) -> None:
        self.name = name
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            process = subprocess.Popen(
                [python, WORKER, *arguments],
                env={**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in variables.items()}},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            group.add(process.pid, busy=False)
            self._processes.append(process)
        for process in self._processes:
            self._answer(process)

    def speed(self, seconds: float) -> float:
        """Calls or tokens per second."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return min(float(self._answer(process)) for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("= "):
                return line[2:]
        raise SystemExit(f"{self.name} ended; run {' '.join(map(str, process.args))} to see why")


@contextlib.contextmanager
def neighbours(group: ControlGroup, programs: int) -> Iterator[None]:
    """So many busy programs, while the block runs, or what takes as much time of each processor in turns."""
    python = [sys.executable, "-S", "-c"]
    if os.sched_getscheduler(0) == os.SCHED_RR:
        processors = sorted(os.sched_getaffinity(0))
        there = [
            programs // len(processors) + (i < programs % len(processors)) for i in range(len(processors))
        ]
        started = [
            subprocess.Popen([*python, TURNS, str(processor), str(count * SLICE_S), str(SLICE_S)])
            for processor, count in zip(processors, there, strict=True)
            if count > 0
        ]
    else:
        started = [subprocess.Popen([*python, BUSY]) for _ in range(programs)]
        for process in started:
            group.add(process.pid, busy=True)
    time.sleep(0.3)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def busy_s() -> float:
    """The time that all processors of the machine have worked."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(worker: Worker, group: ControlGroup, seconds: float) -> tuple[float, float]:
    """A speed, and the share of the processors that other work took meanwhile."""
    best = (0.0, 2.0)
    for _ in range(MOST_TRIES):
        start, all_before, own_before = time.perf_counter(), busy_s(), group.used_s() if group.exists else 0
        speed = worker.speed(seconds)
        took = (time.perf_counter() - start) * len(os.sched_getaffinity(0))
        others = (busy_s() - all_before - (group.used_s() - own_before)) / took if group.exists else 0.0
        if others < best[1]:
            best = speed, others
        if others <= MOST_DISTURBED:
            break
    return best


def left(programs: int) -> float:
    """The share of the processors that so many busy programs leave."""
    processors = len(os.sched_getaffinity(0))
    fewest, more = divmod(programs, processors)
    return ((processors - more) / (fewest + 1) + more / (fewest + 2)) / processors


def compare(
    title: str, workers: Sequence[Worker], group: ControlGroup, factor: float, turns: int, seconds: float,
    conditions: Sequence[tuple[str, int, float | None]],
) -> bool:  # fmt: skip
    """Prints a table; returns whether the first worker reaches all goals, and the second's speed."""
    print(f"\n{title}\n{'':12}" + "".join(f"{worker.name:>22}" for worker in workers) + f"{'goal':>7}")
    alone: dict[str, float] = {}
    reaches = True
    for name, programs, quota in (("alone", 0, None), *conditions):
        found: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
        with neighbours(group, programs):
            if quota is not None:
                group.limit(quota)
            for _ in range(turns):
                for worker in workers:
                    found[worker.name].append(measured(worker, group, seconds))
            if quota is not None:
                group.limit(None)
        speeds = {
            contestant: statistics.median(speed for speed, _ in turn) for contestant, turn in found.items()
        }
        alone = alone or speeds
        processors = len(os.sched_getaffinity(0))
        goal = factor * (left(programs) if quota is None else min(1.0, quota / processors))
        row = [
            f"{speeds[contestant]:.5g} ({speeds[contestant] / alone[contestant]:.2f})"
            for contestant in speeds
        ]
        disturbed = max(others for turn in found.values() for _, others in turn)
        remark = f"  other work took {disturbed:.0%}" if disturbed > MOST_DISTURBED else ""
        print(f"{name:12}" + "".join(f"{cell:>22}" for cell in row) + f"{goal:7.2f}{remark}", flush=True)
        own = workers[0].name
        if name != "alone":
            reaches &= speeds[own] >= goal * alone[own]
            if "one thread" in speeds:
                reaches &= speeds[own] >= 0.95 * speeds["one thread"]
    return reaches


def main() -> int:
    """Compares; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("busy", "quotas", "ranks", "collectives")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument(
        "--real-time", action="store_true", help="on a machine that others keep busy; see above"
    )
    parser.add_argument(
        "--llama", nargs=2, metavar=("PYTHON", "GGUF"), help="a Python with llama_cpp, a model"
    )
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in parts]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(parts)}")
    chosen = args.parts or parts
    if args.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(6))
    group = ControlGroup(wanted=not args.real_time)
    if not group.exists and not args.real_time:
        print("not root: no quotas, and other work on this machine disturbs the figures", file=sys.stderr)
    rest = (args.turns, args.seconds)
    titles = {
        "ranks": "tokens/s, 2 ranks of one thread",
        "collectives": "all_reduce of 4,096 floats, calls/s",
    }
    busy = [(f"{programs} busy", programs, None) for programs in BUSY_PROGRAMS]
    reaches = True
    workers: list[Worker] = []
    try:
        if "busy" in chosen or "quotas" in chosen:
            workers = [Worker(name, group, name) for name in ("acclimate", "one thread", "transformers")]
            if args.llama:
                workers.append(Worker("llama.cpp", group, "llama.cpp", args.llama[1], python=args.llama[0]))
            if "busy" in chosen:
                reaches &= compare("tokens/s", workers, group, 0.8, *rest, busy)
            if "quotas" in chosen and group.exists:
                limits = [(f"quota {quota}", 0, quota) for quota in QUOTAS]
                reaches &= compare("tokens/s", workers, group, 0.8, *rest, limits)
        for part, names in (("ranks", ("ranks",)), ("collectives", ("shm", "gloo"))):
            if part in chosen:
                for worker in workers:
                    worker.end()
                workers = [Worker(name, group, name, ranks=2) for name in names]
                reaches &= compare(titles[part], workers, group, 0.6, *rest, busy[:1])
    finally:
        for worker in workers:
            worker.end()
        group.remove()
    return int(not reaches)


if __name__ == "__main__":
    sys.exit(main())
