"""Reading and writing a file past the page cache: acclimate beside fio and DeepSpeed's aio, in one run.

On a virtual machine some memory is half as fast for the disk as other memory, and a disk gives a burst and
then a rate. So, each pair taking turns who is first, with a pause before every transfer:

- acclimate and fio move the same memory, ``depth`` blocks that both map, to and from the same file. Neither
  syncs it. Of a new file both reserve the whole room first, and for both that time counts, though fio's own
  clock starts later.
- acclimate and DeepSpeed move one tensor of the whole size in one process.

Each round is a new process. A ratio is the median over the rounds of the two speeds' ratio; beside it that of
the best rounds.

    python benchmarks/aio.py --folder DIR --deepspeed-python PYTHON --chart aio.png

fio comes from the system (``apt install fio``); DeepSpeed is in a Python of its own, with a torch that
acclimate runs on too, and needs libaio's headers. A peer that is not there is left out.
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from peers import DEEPSPEED

MIB = 1 << 20
FIO_ENGINES = {"io_uring": "io_uring", "aio": "libaio"}
WORKS = {"write": "write over a file", "write-new": "write a new file", "read": "read"}


@dataclass(frozen=True)
class Speed:
    """Of one transfer."""

    bytes_per_s: float
    processor_s: float
    """Of all threads of the process that made it."""


Rounds = dict[tuple[str, str, str], list[tuple[Speed, Speed]]]
"""acclimate's and the peer's speed of each round, by work, engine and peer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=1024, help="of the file, whole depths of blocks")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pause-s", type=float, default=2.0, help="before each transfer, for the disk")
    parser.add_argument("--engines", nargs="+", default=["io_uring", "aio", "threads"])
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("ACCLIMATE_PEER_DEEPSPEED"),
        help="a Python in which DeepSpeed is installed; ACCLIMATE_PEER_DEEPSPEED",
    )
    parser.add_argument("--chart", type=Path, help="also draws the speeds as a PNG; needs matplotlib")
    parser.add_argument("--serve", type=Path, metavar="MEMORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)

    shared = Path("/dev/shm")  # memory that two programs can map
    with (
        tempfile.TemporaryDirectory(prefix="acclimate-aio-", dir=options.folder) as folder,
        tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as memory,
    ):
        rounds = Measurement(options, Path(folder, "data"), Path(memory, "blocks")).run()
    print_tables(options, rounds)
    results.record("aio", figures_of(options.engines[0], rounds), {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    if options.chart:
        draw(options, rounds)
    return 0


# -- the programs: each measures itself, so that starting it does not count -----------------------


class Server:
    """A process with a handle of each library, which times their transfers."""

    def __init__(self, options: argparse.Namespace, memory: Path) -> None:
        command = [options.deepspeed_python or sys.executable, __file__, "--serve", str(memory)]
        command += ["--size-mib", str(options.size_mib), "--block-kib", str(options.block_kib)]
        command += ["--depth", str(options.depth), "--engines", *options.engines]
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
            "ACCLIMATE_PEER_DEEPSPEED": options.deepspeed_python or "",
        }
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, name: str, work: str, path: Path, shared: bool) -> Speed:
        assert self._process.stdin
        print(json.dumps([name, work, str(path), shared]), file=self._process.stdin, flush=True)
        return Speed(*self._answer())

    def close(self) -> None:
        self._process.communicate("")

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("ANSWER "):  # DeepSpeed prints too
                return json.loads(line[7:])
        raise RuntimeError("The measuring process ended; its message is above.")


def serve(options: argparse.Namespace) -> int:
    """The measuring process: reads what to do from its input, a line for each transfer."""
    import mmap

    import torch

    from acclimate.ops import AsyncIOHandle

    # DeepSpeed overlaps completions with submissions only when told to.
    settings = (options.block_kib * 1024, options.depth, False, True, 1)
    handles: dict[str, Any] = {}
    for engine in options.engines:
        os.environ["ACCLIMATE_AIO"] = engine
        handles[f"acclimate {engine}"] = AsyncIOHandle(*settings)
    allocator = handles[f"acclimate {options.engines[0]}"]
    if options.deepspeed_python:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

        # DeepSpeed copies whatever it has not allocated itself.
        allocator = handles["DeepSpeed"] = AsyncIOBuilder().load().aio_handle(*settings)
    total = options.size_mib * MIB
    whole = allocator.new_cpu_locked_tensor(total, torch.empty(0, dtype=torch.uint8))
    whole.copy_(torch.arange(total // 8, dtype=torch.int64).view(torch.uint8))
    with options.serve.open("r+b") as file:
        blocks = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def transfer(name: str, work: str, path: str, shared: bool) -> None:
        handle = handles[name]
        if shared:
            reserve_room(Path(path), total)
            start = handle.async_pread if work == "read" else handle.async_pwrite
            for offset in range(0, total, len(blocks)):
                start(blocks, path, file_offset=offset)
            handle.wait()
        elif (handle.sync_pread if work == "read" else handle.sync_pwrite)(whole, path) != 1:
            raise RuntimeError(f"{name} did not {work}")

    print("ANSWER 0", flush=True)
    for line in sys.stdin:
        before, start = os.times(), time.perf_counter()
        transfer(*json.loads(line))
        seconds, after = time.perf_counter() - start, os.times()
        processor_s = after.user - before.user + after.system - before.system
        print("ANSWER", json.dumps([total / seconds, processor_s]), flush=True)
    return 0


def reserve_room(path: Path, size: int) -> None:
    """What fio does for a new file before it starts its clock, and acclimate for a new file of one tensor."""
    if not path.exists():
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def run_fio(options: argparse.Namespace, engine: str, work: str, path: Path, memory: Path) -> Speed:
    """One fio job, and the making of its file where there is none."""
    total = options.size_mib * MIB
    start = time.perf_counter()
    reserve_room(path, total)
    reserved_s = time.perf_counter() - start
    kind = "read" if work == "read" else "write"
    command = ["fio", "--name=aio", f"--size={options.size_mib}M", f"--bs={options.block_kib}k"]
    command += [f"--iodepth={options.depth}", f"--ioengine={FIO_ENGINES[engine]}", "--direct=1", "--thread"]
    command += ["--output-format=json", f"--filename={path}", f"--rw={kind}", f"--iomem=mmapshared:{memory}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    processor_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job[kind]["runtime"] / 1e3
    return Speed(total / (total / job[kind]["bw_bytes"] + reserved_s), processor_s)


# -- measuring ------------------------------------------------------------------------------------


class Measurement:
    """All rounds of all pairs."""

    def __init__(self, options: argparse.Namespace, path: Path, memory: Path) -> None:
        self._options, self._path, self._memory = options, path, memory
        self._fio = [engine for engine in options.engines if engine in FIO_ENGINES]
        if not shutil.which("fio"):
            print("fio is not installed: it is left out.")
            self._fio = []
        if not options.deepspeed_python:
            print("--deepspeed-python is not given: DeepSpeed is left out.")
        memory.write_bytes(os.urandom(options.block_kib * 1024) * options.depth)

    def run(self) -> Rounds:
        rounds: Rounds = {}
        for index in range(self._options.rounds):
            server = Server(self._options, self._memory)
            server.run(f"acclimate {self._options.engines[0]}", "write", self._path, True)  # makes the file
            for key, ours, theirs in self._pairs(server):
                programs = [ours, theirs] if index % 2 == 0 else [theirs, ours]
                speeds = {program: self._one(key[0], program) for program in programs}
                rounds.setdefault(key, []).append((speeds[ours], speeds[theirs]))
            server.close()
        return rounds

    def _pairs(
        self, server: Server
    ) -> list[tuple[tuple[str, str, str], Callable[[], Speed], Callable[[], Speed]]]:
        options, path, memory = self._options, self._path, self._memory
        pairs = []

        def served(name: str, work: str, shared: bool) -> Callable[[], Speed]:
            return lambda: server.run(name, work, path, shared)

        def fio(engine: str, work: str) -> Callable[[], Speed]:
            return lambda: run_fio(options, engine, work, path, memory)

        for work in WORKS:
            for engine in self._fio:
                ours = served(f"acclimate {engine}", work, shared=True)
                pairs.append(((work, engine, "fio"), ours, fio(engine, work)))
            for engine in options.engines if options.deepspeed_python else ():
                ours, theirs = (served(n, work, shared=False) for n in (f"acclimate {engine}", "DeepSpeed"))
                pairs.append(((work, engine, "DeepSpeed"), ours, theirs))
        return pairs

    def _one(self, work: str, program: Callable[[], Speed]) -> Speed:
        if work == "write-new":
            self._path.unlink(missing_ok=True)
            os.sync()  # or the file system would free the old file's room during the transfer
        time.sleep(self._options.pause_s)
        return program()


# -- what is shown --------------------------------------------------------------------------------


def print_tables(options: argparse.Namespace, rounds: Rounds) -> None:
    """A table for each peer."""
    print(
        f"\n{options.size_mib} MiB, O_DIRECT, block {options.block_kib} KiB, depth {options.depth}, "
        f"{options.rounds} rounds, Linux {platform.release()}, {os.cpu_count()} cores"
    )
    for peer in ("fio", "DeepSpeed"):
        rows = {key: pairs for key, pairs in rounds.items() if key[2] == peer}
        if not rows:
            continue
        print(f"\n| work | engine | acclimate MB/s | {peer} MB/s | ratio | of bests | processor ms |")
        print("|---|---|---:|---:|---:|---:|---:|")
        for (work, engine, _), pairs in rows.items():
            ours, theirs = ([speed.bytes_per_s / 1e6 for speed in side] for side in zip(*pairs, strict=True))
            cells = [
                WORKS[work],
                engine,
                f"{statistics.median(ours):.0f}",
                f"{statistics.median(theirs):.0f}",
            ]
            ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
            cells += [f"{ratio:.2f}", f"{max(ours) / max(theirs):.2f}"]
            spent = [
                statistics.median(speed.processor_s * 1e3 for speed in side)
                for side in zip(*pairs, strict=True)
            ]
            cells.append(f"{spent[0]:.0f} / {spent[1]:.0f}")
            print("| " + " | ".join(cells) + " |")


def figures_of(engine: str, rounds: Rounds) -> list[results.Figure]:
    """Of one engine; a ratio is that of the pairs, so each peer's speed is ours over it."""
    figures = []
    for work, title in WORKS.items():
        pairs = {peer: rows for (done, used, peer), rows in rounds.items() if (done, used) == (work, engine)}
        if not pairs:
            continue
        ours = statistics.median(own.bytes_per_s for rows in pairs.values() for own, _ in rows) / 1e6
        ratios = {
            peer: statistics.median(own.bytes_per_s / other.bytes_per_s for own, other in rows)
            for peer, rows in pairs.items()
        }
        peers = {peer: ours / ratio for peer, ratio in ratios.items()}
        figures.append(results.Figure(f"{title}, {engine}", "MB/s", ours, peers))
    return figures


def draw(options: argparse.Namespace, rounds: Rounds) -> None:
    """Bars of GB/s, a pair for each work and engine, a panel for each peer."""
    try:
        import matplotlib
    except ImportError:
        print(f"{options.chart} is not drawn: matplotlib is not installed.", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = sorted({peer for _, _, peer in rounds}, reverse=True)
    figure, panels = pyplot.subplots(1, len(peers), figsize=(6.5 * len(peers), 4.5), squeeze=False)
    for axes, peer in zip(panels[0], peers, strict=True):
        rows = {key: pairs for key, pairs in rounds.items() if key[2] == peer}
        for index, (name, colour) in enumerate([("acclimate", "#2a6f97"), (peer, "#e09f3e")]):
            heights = [
                statistics.median(pair[index].bytes_per_s for pair in pairs) / 1e9 for pairs in rows.values()
            ]
            places = [row + (index - 0.5) * 0.38 for row in range(len(rows))]
            axes.bar_label(axes.bar(places, heights, 0.38, label=name, color=colour), fmt="%.2f", fontsize=7)
        axes.set_xticks(
            range(len(rows)), [f"{WORKS[work]}\n{engine}" for work, engine, _ in rows], fontsize=7
        )
        axes.tick_params(axis="x", rotation=30)
        axes.set_ylabel("GB/s (higher is faster)")
        axes.set_title(f"{options.size_mib} MiB past the page cache, beside {peer}", fontsize=10)
        axes.legend()
    figure.tight_layout()
    figure.savefig(options.chart, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
