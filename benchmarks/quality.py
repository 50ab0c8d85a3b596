"""What 8 or 4 bits cost in quality: perplexity over real text, and greedy text beside transformers'.

    python benchmarks/quality.py [MODEL] [--bytes 20000] [--json FILE]

The text is English prose that comes with Python and its packages: their licences. Each way of running the
model is compared with transformers' own in bfloat16. A native step reads its own keys and values, so those in
8 bits are compared with others over the logits of steps. Returns 1 where a limit of the quality is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from acclimate.llm.loading.loaded_model import load_tokenizer
from acclimate.llm.loading.locate import find_model
from acclimate.llm.quiet import quiet_transformers

KEYS = "int8 keys and values"
LIMITS = {"bfloat16": 0.005, "int8": 0.01, "int4": 0.05, KEYS: 0.005}
"""By how much a perplexity may exceed transformers'; the blocks of a GGUF file are as bfloat16."""
FLOOR = "transformers, eager"
"""Its other attention sums in another order: no way that sums differently has more texts in common."""
WINDOW = 512
STEPS = 2048
PROMPTS = (
    "The capital of France is",
    "The most beautiful thing about mathematics is",
    "Once upon a time, in a village by the sea,",
    "To bake bread at home, you first need",
    "The history of the bicycle begins",
    "In physics, energy is",
    "My favourite season is autumn because",
    "A good night's sleep is important since",
    "The first computers were",
    "Dear Sir or Madam, I am writing to",
)


def prose(size: int) -> str:
    """So many bytes of English prose from files that come with Python and its packages."""
    texts = "".join(file.read_text(encoding="utf-8", errors="replace") for file in _prose_files())
    if len(texts) < size:
        raise SystemExit(f"only {len(texts):,} characters of prose were found on this machine")
    return texts[:size]


def _prose_files() -> Iterator[Path]:
    yield from Path(sysconfig.get_path("stdlib")).glob("LICENSE*")
    for folder in site.getsitepackages():
        yield from sorted(Path(folder).glob("numpy*.dist-info/**/LICENSE*"))[:1]
    for name in ("torch", "transformers", "rich"):
        for path in sorted(importlib.metadata.files(name) or [], key=str):
            if path.name.upper().startswith(("LICENSE", "NOTICE")) and "dist-info" in str(path):
                yield Path(str(path.locate()))


@torch.inference_mode()
def perplexity(model: Any, tokens: list[int], start: int | None) -> float:
    """Of windows of 512 tokens, each after the start token."""
    loss, count = 0.0, 0
    for first in range(0, len(tokens) - 1, WINDOW):
        window = tokens[first : first + WINDOW + 1]
        ids = torch.tensor([([start] if start is not None else []) + window])
        logits = model(ids).logits[0].float()
        wanted = ids[0, 1:]
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum"))
        count += len(wanted)
    return math.exp(loss / count)


@torch.inference_mode()
def few_row_perplexity(model: Any, tokens: list[int], rows: int = 8) -> float:
    """The same over 1,024 tokens, a few at a time, so that the few-row kernels compute them."""
    from transformers import DynamicCache

    cache, loss, count = DynamicCache(config=model.config), 0.0, 0
    part = tokens[:1025]
    for first in range(0, len(part) - 1, rows):
        ids = torch.tensor([part[first : first + rows]])
        logits = model(ids, past_key_values=cache, use_cache=True).logits[0].float()
        wanted = torch.tensor(part[first + 1 : first + 1 + rows])
        loss += float(torch.nn.functional.cross_entropy(logits[: len(wanted)], wanted, reduction="sum"))
        count += len(wanted)
    return math.exp(loss / count)


@torch.inference_mode()
def step_perplexity(model: Any, tokens: list[int], start: int | None) -> float:
    """Of windows of 2,048 tokens, each after the start token, which the native step reads one by one."""
    from acclimate.llm.decode.loop import cache_dtype, lean_decoder

    lean = lean_decoder(model)
    if lean is None:
        raise SystemExit("the model has no native step")
    loss, count = 0.0, 0
    for first in range(0, len(tokens) - 1, STEPS):
        window = ([start] if start is not None else []) + tokens[first : first + STEPS + 1]
        ids = torch.tensor(window)
        step = lean.go_on(None, torch.zeros(1, dtype=torch.long), 0, len(ids), dtype=cache_dtype(model))
        for token, wanted in zip(ids[:-1].split(1), ids[1:].split(1), strict=True):
            loss += float(torch.nn.functional.cross_entropy(step(token).float(), wanted))
        count += len(ids) - 1
    return math.exp(loss / count)


@torch.inference_mode()
def texts(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy text of 64 tokens for each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def measure(model: str | None, size: int) -> dict[str, Any]:
    """All figures."""
    from transformers import AutoModelForCausalLM

    folder = find_model(model, lambda: "bfloat16").folder
    tokenizer = load_tokenizer(folder, False)
    tokens = tokenizer.encode(prose(size))
    start = tokens[0] if tokens[:1] == tokenizer.encode("a")[:1] else None
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    source = model if model is not None else None

    def plain(**options: Any) -> Any:
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()

    def ours(**options: Any) -> Callable[[], Any]:
        from acclimate.llm import load_split_model

        return lambda: load_split_model(source, **options).module

    ways: dict[str, Callable[[], Any]] = {
        "transformers": plain,
        FLOOR: lambda: plain(attn_implementation="eager"),
        "bfloat16": ours(dtype="bfloat16"),
        KEYS: ours(dtype="bfloat16", kv_cache_dtype="int8"),
        "as the file has it": ours(),
        "int8": ours(quantize="int8"),
        "int4": ours(quantize="int4"),
    }
    report: dict[str, Any] = {"model": folder.name, "bytes": size, "tokens": len(tokens), "ways": {}}
    reference: list[list[int]] = []
    for name, load in ways.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        loaded = load()
        written = texts(loaded, prompts)
        reference = reference or written
        rest = tokens[1:] if start is not None else tokens
        report["ways"][name] = {
            "perplexity": perplexity(loaded, rest, start),
            "step_perplexity": step_perplexity(loaded, rest, start) if name in ("bfloat16", KEYS) else None,
            "few_row_perplexity": few_row_perplexity(loaded, tokens),
            "same_texts": sum(a == b for a, b in zip(written, reference, strict=True)),
        }
        print(report["ways"][name], file=sys.stderr, flush=True)
        del loaded
        gc.collect()
    return report


def show(report: dict[str, Any]) -> bool:
    """Prints the figures; returns whether all are within their limits."""
    columns = "perplexity", "beside transformers", "few rows", "steps", "same text", "limit"
    table = Table("weights", *columns, box=None)
    base, fine = report["ways"]["transformers"], True
    for name, way in report["ways"].items():
        ratio = way["perplexity"] / base["perplexity"] - 1
        few = way["few_row_perplexity"] / base["few_row_perplexity"] - 1
        most = LIMITS.get(name, LIMITS["bfloat16"])
        good = name == FLOOR or (ratio <= most and few <= most)
        steps = ""
        if way["step_perplexity"] is not None:
            change = way["step_perplexity"] / report["ways"]["bfloat16"]["step_perplexity"] - 1
            steps, good = f"{way['step_perplexity']:.3f} {change:+.2%}", good and change <= most
        if name == "bfloat16":
            good = good and way["same_texts"] >= 0.9 * len(PROMPTS)
        fine = fine and good
        table.add_row(
            name,
            f"{way['perplexity']:.3f}",
            f"{ratio:+.2%}",
            f"{few:+.2%}",
            steps,
            f"{way['same_texts']} of {len(PROMPTS)}",
            f"{most:.1%}" + ("" if good else "  exceeded"),
        )
    console = Console(width=100)
    console.print(f"{report['model']}, {report['tokens']:,} tokens of {report['bytes']:,} bytes of prose")
    console.print(table)
    return fine


def main() -> int:
    """Measures and shows; returns 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Quality of quantised weights beside transformers.")
    parser.add_argument(
        "model", nargs="?", help="a folder, a .gguf file or a hub id; default: the demo model"
    )
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = measure(options.model, options.bytes)
    fine = show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
