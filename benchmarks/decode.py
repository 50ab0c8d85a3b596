"""Decode with the lean loop, with transformers' own, and the time that reading the weights takes, in one run.

    python benchmarks/decode.py                        # random weights in the shape of gemma-3-270m
    python benchmarks/decode.py --model DIR --threads 2 --batch 8

Both loops run on the same model object, in turns. A time is the median of the tokens after the second; the
limit is the time that the same threads need to read as many bytes. A ratio of one run counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import acclimate
from acclimate.llm.decode import loop


def random_gemma(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0, 0.1)
    return model


class Clock(StoppingCriteria):
    """Notes when each token comes, and ends nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@contextlib.contextmanager
def transformers_loop() -> Iterator[None]:
    """Lets models generate with transformers' own loop in the ``with`` block."""
    original = loop.lean_sample
    loop.lean_sample = lambda *args, **options: None
    try:
        yield
    finally:
        loop.lean_sample = original


def decode(model: Any, prompt: torch.Tensor, tokens: int, *, lean: bool) -> tuple[torch.Tensor, list[float]]:
    """Returns the text, and the milliseconds of each token after the second."""
    clock = Clock()
    with contextlib.nullcontext() if lean else transformers_loop():
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    return text, [1e3 * (later - earlier) for earlier, later in itertools.pairwise(clock.times[2:])]


def read(memory: torch.Tensor) -> float:
    """Returns the milliseconds that reading memory takes."""
    start = time.perf_counter()
    memory.sum()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder; else random weights in the shape of gemma-3-270m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens in each turn")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = acclimate.init_inference(args.model or random_gemma(dtype), dtype=args.dtype)
    start = time.perf_counter()
    lean = loop.lean_decoder(model)
    kind = "none" if lean is None else "plain" if lean.native is None else "native"
    print(f"step: {kind}; described and proved in {time.perf_counter() - start:.2f} s")
    prompt = torch.randint(3, model.get_input_embeddings().weight.shape[0], (args.batch, args.prompt))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = torch.ones(size // 8, dtype=torch.int64)
    ours, theirs, limits = [], [], []
    for turn in range(args.turns):
        limits += [read(memory) for _ in range(3)]
        text, times = decode(model, prompt, args.tokens, lean=True)
        ours += times
        limits += [read(memory) for _ in range(3)]
        other, times = decode(model, prompt, args.tokens, lean=False)
        theirs += times
        same = int((text == other).all(0).long().cumprod(0).sum()) - args.prompt
        print(f"turn {turn + 1}: the first {same} of {args.tokens} new tokens are the same")
    limit, lean_ms, own_ms = (statistics.median(times_ms) for times_ms in (limits, ours, theirs))
    print(f"weights {size / 1e6:.0f} MB, {args.threads} threads, batch {args.batch}, {args.dtype}")
    for name, ms, least in (
        ("reading the weights", limit, min(limits)),
        ("acclimate", lean_ms, min(ours)),
        ("transformers", own_ms, min(theirs)),
    ):
        print(
            f"{name:20} {ms:8.2f} ms a token, least {least:8.2f}; {1e3 * args.batch / ms:7.1f} tok/s; "
            f"{limit / ms:5.2f} of the limit (least: {min(limits) / least:.2f})"
        )


if __name__ == "__main__":
    main()
