"""Linear layers of few rows on the host: acclimate beside torch's own kernels and the memory itself.

Each round measures every contestant once, one after the other, so that a machine whose speed drifts treats
all alike; a time is the least of all rounds. As many copies of a weight are read in turn as exceed the
caches. The limit is a sum over one tensor on huge pages.

    python benchmarks/inference_linear.py
    python benchmarks/inference_linear.py --models gemma-3-270m --rows 1 --threads 1 --processor-time

--processor-time does not count what other programs take of a busy machine; it needs --threads 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from acclimate.host import huge_pages
from acclimate.llm.kernels import PackedWeight

# The shapes [n, k] of a model's largest linear layers.
MODELS = {
    "gemma-3-270m": {"down": (640, 2048), "gate": (2048, 640), "head": (262144, 640)},
    "llama-1b": {"query": (2048, 2048), "gate": (8192, 2048), "down": (2048, 8192)},
    "llama-8b": {"query": (4096, 4096), "gate": (14336, 4096), "down": (4096, 14336)},
}
LEAST_BYTES = 192 << 20  # of the weights that a round reads, which no cache holds
BLOCKS = {"q4_0": (32, 18), "q5_0": (32, 22), "q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
QUANTISED = ("int8", "int4", "int5", *BLOCKS)


@dataclass
class Contestant:
    """A product that reads some bytes."""

    name: str
    run: Callable[[], object]
    read_bytes: int
    best_s: float = math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gemma-3-270m", "llama-1b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, help="of torch; as many as it takes if not given")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.processor_time and torch.get_num_threads() != 1:
        parser.error("--processor-time needs --threads 1")
    clock = time.thread_time if options.processor_time else time.perf_counter
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| model | weight | rows | kernel | GB/s | of the memory's | time of torch's bf16 |")
    print("|---|---|---|---|---|---|---|")
    for model, rows in itertools.product(options.models, options.rows):
        for name, (n, k) in MODELS[model].items():
            memory, *contestants = make_contestants(n, k, rows)
            for _, contestant in itertools.product(range(options.rounds), (memory, *contestants)):
                begin = clock()
                contestant.run()
                contestant.best_s = min(contestant.best_s, clock() - begin)
            limit = memory.read_bytes / memory.best_s
            for contestant in contestants:
                rate = contestant.read_bytes / contestant.best_s
                # Each round of each contestant makes as many products for each byte of a bf16 weight.
                ratio = contestant.best_s / contestants[0].best_s
                print(
                    f"| {model} | {name} [{n}, {k}] | {rows} | {contestant.name} | {rate / 1e9:.1f} | "
                    f"{rate / limit:.2f} | {ratio:.2f} |",
                    flush=True,
                )


def make_contestants(n: int, k: int, rows: int) -> list[Contestant]:
    """The memory first, then torch's product in bf16, then all others."""
    size = torch.empty(LEAST_BYTES // 4)
    huge_pages.request(size)
    size.fill_(1)
    copies = max(1, math.ceil(LEAST_BYTES / (n * k)))  # of weights of at least half a byte a value
    x = torch.randn(rows, k).bfloat16()
    weights = [on_huge_pages(torch.randn(n, k).bfloat16()) for _ in range(copies)]
    found = [
        Contestant("memory", size.sum, LEAST_BYTES),
        over("torch bf16", weights, lambda w: functional.linear(x, w), n * k * 2),
        over_packed("dense bf16", [PackedWeight.dense(w) for w in weights], x),
    ]
    int8 = [on_huge_pages(torch.randint(-127, 127, (n, k), dtype=torch.int8)) for _ in range(copies)]
    scales = torch.ones(n).bfloat16()
    found.append(over("torch int8pack", int8, lambda w: torch._weight_int8pack_mm(x, w, scales), n * k))
    if n % 64 == 0:
        group, codes = 32, torch.randint(0, 15, (n, k), dtype=torch.int32)
        packed = [torch._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(copies)]
        zeros = torch.ones(k // group, n, 2).bfloat16()
        found.append(
            over("torch int4pack", packed,
                 lambda w: torch._weight_int4pack_mm_for_cpu(x, w, group, zeros),
                 n * k // 2 + zeros.numel() * 2)
        )  # fmt: skip
    for scheme in QUANTISED:
        if scheme not in BLOCKS or k % BLOCKS[scheme][0] == 0:
            found.append(over_packed(scheme, random_weights(scheme, n, k, copies), x))
    return found


def on_huge_pages(values: Tensor) -> Tensor:
    result = torch.empty_like(values)
    huge_pages.request(result)
    return result.copy_(values)


def random_weights(scheme: str, n: int, k: int, copies: int) -> list[PackedWeight]:
    if scheme not in BLOCKS:
        first = PackedWeight.quantize(torch.randn(n, k), scheme)
    else:
        values, size = BLOCKS[scheme]
        # Bytes below 64 make no infinite scales.
        blocks = torch.randint(0, 64, (n, k // values * size), dtype=torch.uint8)
        first = PackedWeight.from_gguf(blocks, scheme, (n, k))
    others = (PackedWeight(scheme, on_huge_pages(first.data), (n, k)) for _ in range(copies - 1))
    return [first, *others]


def over_packed(name: str, weights: list[PackedWeight], x: Tensor) -> Contestant:
    def run() -> None:
        for weight in weights:
            weight.linear(x)

    return Contestant(f"acclimate {name}", run, sum(weight.nbytes for weight in weights))


def over(
    name: str, weights: list[Tensor], product: Callable[[Tensor], Tensor], read_bytes: int
) -> Contestant:
    def run() -> None:
        for weight in weights:
            product(weight)

    return Contestant(name, run, read_bytes * len(weights))


if __name__ == "__main__":
    main()
