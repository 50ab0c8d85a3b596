"""Reading and writing a file past the page cache: acclimate beside fio and DeepSpeed's aio, in one run.

Each round starts every program anew and measures it once, one after the other in changing order, so that a
disk whose speed drifts, and memory of which some is slower for the device (on virtual machines by half),
treat all alike; the ratio is that of the medians over the rounds.

    python benchmarks/aio.py --folder DIR --deepspeed-python PYTHON

fio comes from the system (``apt install fio``); DeepSpeed runs in a Python of its own and needs libaio's
headers. A peer that is not there is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

MIB = 1 << 20
FIO_ENGINES = {"io_uring": "io_uring", "aio": "libaio"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", nargs="+", default=["io_uring", "aio", "threads"])
    parser.add_argument("--deepspeed-python", help="a Python in which DeepSpeed is installed")
    parser.add_argument("--serve", choices=["acclimate", "deepspeed"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)

    path = options.folder / f"acclimate-aio-{os.getpid()}.bin"
    try:
        print_table(options, measure(options, find_programs(options), path))
    finally:
        path.unlink(missing_ok=True)
    return 0


# -- the programs: each measures itself, so that starting it does not count -----------------------


class Server:
    """A process that keeps one handle of one library and times its transfers."""

    def __init__(self, python: str, library: str, options: argparse.Namespace, engine: str = "") -> None:
        command = [python, __file__, "--serve", library, "--size-mib", str(options.size_mib)]
        command += ["--block-kib", str(options.block_kib), "--depth", str(options.depth)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        if engine:
            environment["ACCLIMATE_AIO"] = engine
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, work: str, path: Path) -> float:
        """Bytes per second."""
        assert self._process.stdin
        print(json.dumps([work, str(path)]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate("")

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("ANSWER "):  # DeepSpeed prints too
                return json.loads(line[7:])
        raise RuntimeError("The measuring process ended; its message is above.")


class Fio:
    """One fio job per transfer."""

    def __init__(self, options: argparse.Namespace, engine: str) -> None:
        self._arguments = [
            "fio",
            "--name=aio",
            f"--size={options.size_mib}M",
            f"--bs={options.block_kib}k",
            f"--iodepth={options.depth}",
            f"--ioengine={FIO_ENGINES[engine]}",
            "--direct=1",
            "--thread",
            "--output-format=json",
        ]

    def run(self, work: str, path: Path) -> float:
        """Bytes per second."""
        kind = "read" if work == "read" else "write"
        command = [*self._arguments, f"--filename={path}", f"--rw={kind}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])

    def close(self) -> None:
        pass


def serve(options: argparse.Namespace) -> int:
    import torch

    if options.serve == "deepspeed":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        make = AsyncIOBuilder().load().aio_handle
    else:
        from acclimate.ops import AsyncIOHandle

        make = AsyncIOHandle
    # DeepSpeed overlaps completions with submissions only when told to.
    handle = make(options.block_kib * 1024, options.depth, False, True, 1)
    count = options.size_mib * MIB
    example = torch.empty(0, dtype=torch.uint8)
    buffer = handle.new_cpu_locked_tensor(count, example)
    buffer.copy_(torch.arange(count // 8, dtype=torch.int64).view(torch.uint8))
    plain = torch.empty(count, dtype=torch.uint8).fill_(1)
    print("ANSWER 0", flush=True)
    for line in sys.stdin:
        work, path = json.loads(line)
        tensor = plain if work.endswith("plain") else buffer
        start = time.perf_counter()
        transfer = handle.sync_pread if work.startswith("read") else handle.sync_pwrite
        if transfer(tensor, path) != 1:
            raise RuntimeError(f"{options.serve} did not {work}")
        print("ANSWER", count / (time.perf_counter() - start), flush=True)
    return 0


# -- measuring ------------------------------------------------------------------------------------

WORKS = {
    "write": "write over a file",
    "write-new": "write a new file",
    "read": "read",
    "read-plain": "read, ordinary tensor",
}


def find_programs(options: argparse.Namespace) -> dict[str, Callable[[], Server | Fio]]:
    programs: dict[str, Callable[[], Server | Fio]] = {
        f"acclimate {engine}": partial(Server, sys.executable, "acclimate", options, engine)
        for engine in options.engines
    }
    if shutil.which("fio"):
        programs |= {
            f"fio {FIO_ENGINES[engine]}": partial(Fio, options, engine)
            for engine in options.engines
            if engine in FIO_ENGINES
        }
    else:
        print("fio is not installed: its column is left out.")
    if options.deepspeed_python:
        programs["DeepSpeed aio"] = partial(Server, options.deepspeed_python, "deepspeed", options)
    else:
        print("--deepspeed-python is not given: DeepSpeed's column is left out.")
    return programs


def measure(
    options: argparse.Namespace, programs: dict[str, Callable[[], Server | Fio]], path: Path
) -> dict[str, Any]:
    """Speeds by work and program, one per round."""
    speeds: dict[str, dict[str, list[float]]] = {work: {name: [] for name in programs} for work in WORKS}
    names = list(programs)
    for turn in range(options.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            program = programs[name]()
            program.run("write", path)  # makes the file, and warms up
            for work in WORKS:
                if work == "read-plain" and name.startswith("fio"):
                    continue
                if work == "write-new":
                    path.unlink(missing_ok=True)
                speeds[work][name].append(program.run(work, path))
            program.close()
    return speeds


def print_table(options: argparse.Namespace, speeds: dict[str, Any]) -> None:
    print(
        f"\n{options.size_mib} MiB, O_DIRECT, block {options.block_kib} KiB, depth {options.depth}, "
        f"median of {options.rounds} rounds, Linux {platform.release()}, {os.cpu_count()} cores\n"
    )
    print("| work | engine | acclimate MB/s | fio MB/s | to fio | DeepSpeed MB/s | to DeepSpeed |")
    print("|---|---|---|---|---|---|---|")
    for work, by_name in speeds.items():
        for engine in options.engines:
            ours = by_name[f"acclimate {engine}"]
            peers = [by_name.get(f"fio {FIO_ENGINES.get(engine, 'none')}"), by_name.get("DeepSpeed aio")]
            cells = [WORKS[work], engine, f"{statistics.median(ours) / 1e6:.0f}"]
            for peer in peers:
                if not peer:
                    cells += ["-", "-"]
                    continue
                ratio = statistics.median(ours) / statistics.median(peer)
                cells += [f"{statistics.median(peer) / 1e6:.0f}", f"{ratio:.2f}"]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
