"""Decoding on this accelerator's device with acclimate's step and with transformers' own loop, in turns.

    python benchmarks/device_decode.py                          # Qwen3-0.6B's shape in bfloat16
    python benchmarks/device_decode.py --models Llama-8B --quantize int8 --tokens 64

Random weights, made on the device. Tokens per second of all sequences together, from the difference between a
long and a short text, so that reading the prompt does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from decode import transformers_loop
from transformers import AutoConfig, AutoModelForCausalLM

import acclimate
from acclimate import get_accelerator
from acclimate.llm.decode.loop import step_kind

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-1B": (
        "gemma3_text",
        {
            "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        },
    ),
    "Llama-8B": (
        "llama",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8,
        },
    ),
    "OLMoE, 4 layers": (
        "olmoe",
        {
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 4,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        },
    ),
}  # fmt: skip
ROWS = ((1, 32), (8, 32), (1, 4096))
"""Sequences, and tokens of their prompts."""
_SHORT = 4


def build(name: str, device: str) -> Any:
    """A model of a shape, of random weights in bfloat16."""
    kind, settings = SHAPES[name]
    config = AutoConfig.for_model(kind, eos_token_id=None, max_position_embeddings=16384, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


def seconds(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """How long a text takes."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    begin = time.perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    accelerator.synchronize()
    return time.perf_counter() - begin


def rate(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Tokens per second of all sequences."""
    seconds(model, prompt, _SHORT)
    short, long = (min(seconds(model, prompt, n) for _ in range(2)) for n in (_SHORT, _SHORT + tokens))
    return len(prompt) * tokens / (long - short)


def main() -> int:
    """Measures, and prints a line for each model and row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["Qwen3-0.6B"])
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    sys.stdout.write(f"{accelerator.get_device_name()}, torch {torch.__version__}\n")
    for name in args.models:
        model = acclimate.init_inference(build(name, device), quantize=args.quantize)
        for batch, length in ROWS:
            prompt = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
            ours = rate(model, prompt, args.tokens)
            with transformers_loop():
                theirs = rate(model, prompt, args.tokens)
            sys.stdout.write(
                f"{name}, {args.quantize or 'bfloat16'}, {batch} after {length}: "
                f"{step_kind(model)} step {ours:.1f}, transformers' loop {theirs:.1f} tokens/s\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
