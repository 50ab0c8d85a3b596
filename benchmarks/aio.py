"""Reading and writing a file past the page cache: acclimate beside fio and DeepSpeed's aio, in one run.

acclimate and DeepSpeed run in one process and move the same tensor: on virtual machines some memory is half
as fast for the disk as other memory, so that two processes cannot be compared. Each round is a new process,
and fio, which cannot share memory, is a new process each time; the ratio to DeepSpeed is the median of the
rounds' ratios, that to fio the ratio of the medians. The order is drawn anew for each work.

    python benchmarks/aio.py --folder DIR --deepspeed-python PYTHON

fio comes from the system (``apt install fio``); DeepSpeed is in a Python of its own, with a torch that
acclimate runs on too, and needs libaio's headers. A peer that is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
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
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)

    path = options.folder / f"acclimate-aio-{os.getpid()}.bin"
    try:
        print_table(options, measure(options, path))
    finally:
        path.unlink(missing_ok=True)
    return 0


# -- the programs: each measures itself, so that starting it does not count -----------------------


class Server:
    """A process with a handle of each library, which times their transfers of one tensor."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [options.deepspeed_python or sys.executable, __file__, "--serve"]
        command += ["--size-mib", str(options.size_mib), "--block-kib", str(options.block_kib)]
        command += ["--depth", str(options.depth), "--engines", *options.engines]
        if options.deepspeed_python:
            command += ["--deepspeed-python", options.deepspeed_python]
        package = Path(__file__).parents[1] / "src"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(package)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, name: str, work: str, path: Path) -> float:
        """Bytes per second."""
        assert self._process.stdin
        print(json.dumps([name, work, str(path)]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate("")

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("ANSWER "):  # DeepSpeed prints too
                return json.loads(line[7:])
        raise RuntimeError("The measuring process ended; its message is above.")


def run_fio(options: argparse.Namespace, engine: str, work: str, path: Path) -> float:
    """Bytes per second of one fio job."""
    kind = "read" if work == "read" else "write"
    command = ["fio", "--name=aio", f"--size={options.size_mib}M", f"--bs={options.block_kib}k"]
    command += [f"--iodepth={options.depth}", f"--ioengine={engine}", "--direct=1", "--thread"]
    command += ["--output-format=json", f"--filename={path}", f"--rw={kind}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])


def serve(options: argparse.Namespace) -> int:
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
        allocator = handles["DeepSpeed aio"] = AsyncIOBuilder().load().aio_handle(*settings)
    count = options.size_mib * MIB
    buffer = allocator.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8))
    buffer.copy_(torch.arange(count // 8, dtype=torch.int64).view(torch.uint8))
    plain = torch.empty(count, dtype=torch.uint8).fill_(1)
    print("ANSWER 0", flush=True)
    for line in sys.stdin:
        name, work, path = json.loads(line)
        tensor = plain if work.endswith("plain") else buffer
        transfer = handles[name].sync_pread if work.startswith("read") else handles[name].sync_pwrite
        start = time.perf_counter()
        if transfer(tensor, path) != 1:
            raise RuntimeError(f"{name} did not {work}")
        print("ANSWER", count / (time.perf_counter() - start), flush=True)
    return 0


# -- measuring ------------------------------------------------------------------------------------

WORKS = {
    "write": "write over a file",
    "write-new": "write a new file",
    "read": "read",
    "read-plain": "read, ordinary tensor",
}


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Speeds by work and program, one per round."""
    names = [f"acclimate {engine}" for engine in options.engines]
    if options.deepspeed_python:
        names.append("DeepSpeed aio")
    else:
        print("--deepspeed-python is not given: DeepSpeed's column is left out.")
    if shutil.which("fio"):
        names += [f"fio {FIO_ENGINES[engine]}" for engine in options.engines if engine in FIO_ENGINES]
    else:
        print("fio is not installed: its column is left out.")
    speeds: dict[str, dict[str, list[float]]] = {work: {name: [] for name in names} for work in WORKS}
    chance = random.Random(0)
    for _ in range(options.rounds):
        server = Server(options)
        server.run(names[0], "write", path)  # makes the file
        for work, name in [(work, name) for work in WORKS for name in chance.sample(names, len(names))]:
            is_fio = name.startswith("fio")
            if is_fio and work == "read-plain":
                continue
            if work == "write-new":
                path.unlink(missing_ok=True)
            if is_fio:
                speed = run_fio(options, name.removeprefix("fio "), work, path)
            else:
                speed = server.run(name, work, path)
            speeds[work][name].append(speed)
        server.close()
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
                if peer is peers[1]:
                    ratio = statistics.median(own / other for own, other in zip(ours, peer, strict=True))
                cells += [f"{statistics.median(peer) / 1e6:.0f}", f"{ratio:.2f}"]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
