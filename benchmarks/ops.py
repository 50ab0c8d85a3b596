"""Optimizer steps on the host: acclimate beside torch's fused ones, DeepSpeed's and the memory itself.

Each round measures every contestant once, one after the other, so that a machine whose speed drifts treats
all alike; the ratio is that of the medians over the rounds. The memory's limit is a native loop that reads
and writes the same bytes in the same mix and does next to nothing else.

    python benchmarks/ops.py --deepspeed-python PYTHON --chart ops.png

DeepSpeed runs in a Python of its own, as its ops need a build of minutes; without it, it is left out.
The chart needs matplotlib.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from peers import DEEPSPEED

LARGE = 32 << 20
SMALL = (1000, 1000)  # tensors, elements of each
Contestants = dict[str, Callable[[], Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", type=int, default=LARGE, help="of the large parameter")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS), help="these works")
    parser.add_argument("--threads", type=int, help="of torch; as many as it takes if not given")
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("ACCLIMATE_PEER_DEEPSPEED"),
        help="a Python in which DeepSpeed is installed; ACCLIMATE_PEER_DEEPSPEED",
    )
    parser.add_argument("--chart", type=Path, help="also draws the ratios as a PNG")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.serve:
        return serve(options.elements)
    peer = DeepSpeed(options) if options.deepspeed_python else None
    limit = MemoryLimit(options.elements)
    rows = []
    for work in options.only:
        contestants = WORKS[work](options.elements)
        if work != "small":
            contestants["memory limit"] = limit.runner(work)
        if peer is not None and peer.can(work):
            contestants["DeepSpeed"] = lambda work=work: peer.measure(work)
        rows.append((work, compare(contestants, options.rounds)))
        print_row(*rows[-1])
        del contestants
    print_machine()
    results.record("ops", [figure_of(*row) for row in rows], {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    if options.chart:
        draw(rows, options.chart)
    return 0


def compare(contestants: Contestants, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contestant in each round; the first two rounds only warm up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for index in range(rounds + 2):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            time.sleep(0.01)  # the last contestant's threads spin for a while before they sleep
            start = time.perf_counter()
            told = contestants[name]()
            elapsed = told if isinstance(told, float) else (time.perf_counter() - start) * 1e3
            if index >= 2:
                times[name].append(elapsed)
    return times


# -- the work ------------------------------------------------------------------------------------


def parameters(sizes: list[int]) -> list[torch.nn.Parameter]:
    result = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for parameter in result:
        parameter.grad = torch.randn(parameter.shape)
    return result


def adam(elements: int) -> Contestants:
    from acclimate.ops import CPUAdam

    settings = {"lr": 1e-4, "weight_decay": 0.01}
    return {
        "acclimate": CPUAdam(parameters([elements]), **settings).step,
        "torch fused": torch.optim.AdamW(parameters([elements]), fused=True, **settings).step,
    }


def offload(elements: int) -> Contestants:
    """A float32 master, a bfloat16 gradient from the accelerator, a bfloat16 parameter to send back."""
    from acclimate.ops import CPUAdam

    settings = {"lr": 1e-4, "weight_decay": 0.01}
    gradient = torch.randn(elements).bfloat16()
    output = torch.empty(elements, dtype=torch.bfloat16)
    ours = CPUAdam(parameters([elements]), **settings)
    master = parameters([elements])
    theirs = torch.optim.AdamW(master, fused=True, **settings)

    def with_casts() -> None:
        with torch.no_grad():
            master[0].grad.copy_(gradient)
            theirs.step()
            output.copy_(master[0])

    return {
        "acclimate": lambda: ours.step(grads=[gradient], outputs=[output]),
        "torch fused": with_casts,
    }


def small(_: int) -> Contestants:
    from acclimate.ops import CPUAdam

    tensors, size = SMALL
    settings = {"lr": 1e-4, "weight_decay": 0.01}
    return {
        "acclimate": CPUAdam(parameters([size] * tensors), **settings).step,
        "torch fused": torch.optim.AdamW(parameters([size] * tensors), fused=True, **settings).step,
    }


def adagrad(elements: int) -> Contestants:
    from acclimate.ops import CPUAdagrad

    return {
        "acclimate": CPUAdagrad(parameters([elements]), lr=1e-4).step,
        "torch fused": torch.optim.Adagrad(parameters([elements]), lr=1e-4, fused=True).step,
    }


def lion(elements: int) -> Contestants:
    from acclimate.ops import CPULion

    return {"acclimate": CPULion(parameters([elements]), lr=1e-4, weight_decay=0.01).step}


WORKS = {"adam": adam, "offload": offload, "small": small, "adagrad": adagrad, "lion": lion}
TITLES = {
    "adam": "Adam step, 32 Mi float32",
    "offload": "offload step: float32 master, bfloat16 in and out",
    "small": "Adam, 1,000 tensors of 1,000 elements",
    "adagrad": "Adagrad step, 32 Mi float32",
    "lion": "Lion step, 32 Mi float32",
}


# -- the memory's limit --------------------------------------------------------------------------

# What is read and written is what an optimizer reads and writes; the arithmetic is one addition. Both with
# and without a look ahead, of which the faster counts.
STREAMS = """
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
template <int changed, bool narrow>
static void stream(float* const* x, const void* in, uint16_t* out, long begin, long end, long ahead) {
  for (long i = begin; i < end; i += 32) {
    __m512 sums[2];
    for (int k = 0; k < 2; ++k) {
      const long at = i + 16 * k;
      __m512 g;
      if (narrow) {
        const __m256i bits = _mm256_loadu_si256((const __m256i*)((const uint16_t*)in + at));
        g = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      } else {
        g = _mm512_loadu_ps((const float*)in + at);
      }
      for (int s = 0; s < changed; ++s) {
        if (ahead) _mm_prefetch((const char*)(x[s] + at) + ahead, _MM_HINT_T0);
        sums[k] = _mm512_add_ps(_mm512_loadu_ps(x[s] + at), g);
        _mm512_storeu_ps(x[s] + at, sums[k]);
      }
    }
    if (narrow) {
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(sums[0]), 16);
      const __m512i high = _mm512_and_si512(_mm512_castps_si512(sums[1]), _mm512_set1_epi32(0xffff0000));
      _mm512_stream_si512((__m512i*)(out + i), _mm512_or_si512(low, high));
    }
  }
  _mm_sfence();
}
extern "C" void run(float* const* x, int changed, const void* in, bool narrow, uint16_t* out, long n,
                    int threads, long ahead) {
  #pragma omp parallel num_threads(threads)
  {
    const long part = n / threads / 32 * 32, begin = omp_get_thread_num() * part;
    if (narrow) stream<3, true>(x, in, out, begin, begin + part, ahead);
    else if (changed == 3) stream<3, false>(x, in, out, begin, begin + part, ahead);
    else stream<2, false>(x, in, out, begin, begin + part, ahead);
  }
}
"""


class MemoryLimit:
    """The same bytes in the same mix of reads and writes, with no work to do on them."""

    def __init__(self, elements: int) -> None:
        from acclimate.host import huge_pages

        self._folder = tempfile.TemporaryDirectory()
        source, library = Path(self._folder.name, "streams.cpp"), Path(self._folder.name, "streams.so")
        source.write_text(STREAMS)
        subprocess.run(
            ["g++", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", source, "-o", library], check=True
        )
        self._run = ctypes.CDLL(str(library)).run
        self._elements = elements
        # Parameters and gradients are the user's memory; what the optimizer makes is on huge pages.
        self._wide, self._narrow = torch.zeros(elements), torch.zeros(elements, dtype=torch.bfloat16)
        states = [torch.empty(elements) for _ in range(2)]
        for state in states:
            huge_pages.request(state)
            state.zero_()
        self._changed = [torch.zeros(elements), *states]
        self._out = torch.zeros(elements, dtype=torch.bfloat16)

    def runner(self, work: str) -> Callable[[], float]:
        narrow = work == "offload"
        changed = 3 if work in ("adam", "offload") else 2
        addresses = (ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in self._changed))
        read = self._narrow if narrow else self._wide

        def once(ahead: int) -> float:
            start = time.perf_counter()
            self._run(addresses, changed, ctypes.c_void_p(read.data_ptr()), ctypes.c_bool(narrow),
                      ctypes.c_void_p(self._out.data_ptr()), ctypes.c_long(self._elements),
                      torch.get_num_threads(), ctypes.c_long(ahead))  # fmt: skip
            return (time.perf_counter() - start) * 1e3

        return lambda: min(once(0), once(256))


# -- DeepSpeed, in a process of its own ----------------------------------------------------------


class DeepSpeed:
    """A process that steps DeepSpeed's optimizers when asked, and says how long each took."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [options.deepspeed_python, __file__, "--serve", "--elements", str(options.elements)]
        command += ["--threads", str(torch.get_num_threads())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def can(self, work: str) -> bool:
        return self._ask("prepare", work) is not None

    def measure(self, work: str) -> float:
        return float(self._ask("step", work))

    def _ask(self, verb: str, work: str) -> Any:
        print(verb, work, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        return None


def serve(elements: int) -> int:
    steps: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        verb, work = line.split()
        answer: Any = None
        if verb == "prepare":
            steps.clear()
            try:
                steps[work] = deepspeed_step(work, elements)
                answer = True
            except (ImportError, RuntimeError) as error:
                print(f"DeepSpeed is left out of {work}: {error}", file=sys.stderr)
        else:
            start = time.perf_counter()
            steps[work]()
            answer = (time.perf_counter() - start) * 1e3
        print("answer", json.dumps(answer), flush=True)
    return 0


def deepspeed_step(work: str, elements: int) -> Callable[[], Any]:
    if work == "adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(parameters([elements]), lr=1e-4).step
    if work == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(parameters([elements]), lr=1e-4, weight_decay=0.01).step
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master = parameters([SMALL[1]] * SMALL[0] if work == "small" else [elements])
    optimizer = DeepSpeedCPUAdam(master, lr=1e-4, weight_decay=0.01)
    if work != "offload":
        return optimizer.step
    gradient = torch.randn(elements).bfloat16()
    output = torch.empty(elements, dtype=torch.bfloat16)

    def with_casts() -> None:
        with torch.no_grad():
            master[0].grad.copy_(gradient)
            optimizer.step()
            output.copy_(master[0])

    return with_casts


# -- what is shown -------------------------------------------------------------------------------


def print_row(work: str, times: dict[str, list[float]]) -> None:
    ours = statistics.median(times["acclimate"])
    print(
        f"\n{TITLES[work]}\n  {'':14} {'median ms':>10} {'best ms':>10} {'theirs / ours':>14} {'of bests':>9}"
    )
    for name, values in times.items():
        median, best = statistics.median(values), min(values)
        print(f"  {name:14} {median:10.2f} {best:10.2f} {median / ours:14.2f} "
              f"{best / min(times['acclimate']):9.2f}")  # fmt: skip


def figure_of(work: str, times: dict[str, list[float]]) -> results.Figure:
    medians = {name: statistics.median(values) for name, values in times.items()}
    peers = {name: medians[name] for name in ("torch fused", "DeepSpeed") if name in medians}
    return results.Figure(TITLES[work], "ms", medians["acclimate"], peers)


def print_machine() -> None:
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads")


def draw(rows: list[tuple[str, dict[str, list[float]]]], path: Path) -> None:
    """Bars of milliseconds, a group for each work, scaled to acclimate's time."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not installed.", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ["memory limit", "acclimate", "torch fused", "DeepSpeed"]
    colours = ["#b0b0b0", "#2a6f97", "#e09f3e", "#9e2a2b"]
    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    width = 0.2
    for index, (name, colour) in enumerate(zip(names, colours, strict=True)):
        heights = [
            statistics.median(times[name]) / statistics.median(times["acclimate"]) if name in times else 0.0
            for _, times in rows
        ]
        places = [row + (index - 1.5) * width for row in range(len(rows))]
        bars = axes.bar(places, heights, width, label=name, color=colour)
        labels = [f"{height:.2f}" if height else "" for height in heights]
        axes.bar_label(bars, labels, fontsize=8)
    axes.set_xticks(
        range(len(rows)), [TITLES[work].replace(", ", ",\n").replace(": ", ":\n") for work, _ in rows]
    )
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("time, in acclimate's (lower is faster)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
