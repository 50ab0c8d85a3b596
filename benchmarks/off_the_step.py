"""Ways to generate that have no native step, beside plain transformers: tokens per second, in turns.

    python benchmarks/off_the_step.py                     # all ways, on models with random weights
    python benchmarks/off_the_step.py beams experts --turns 5

Each way runs on two copies of a model, transformers' and that of `init_inference`. A turn takes the time of
the tokens after the fourth. The ratio is the median of the turns' ratios. Exits with 1 if one is below 0.9.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    Qwen3MoeConfig,
)

import acclimate

LEAST_RATIO = 0.9
DENSE = LlamaConfig(
    vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=8,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=16000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
EXPERTS = Qwen3MoeConfig(
    vocab_size=2000, hidden_size=512, moe_intermediate_size=256, intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=64, num_experts_per_tok=8,
)  # fmt: skip
IMAGES = LlavaConfig(
    vision_config=CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=56,
        patch_size=14, projection_dim=64,
    ),
    text_config=DENSE, image_token_index=1, image_seq_length=16, vision_feature_layer=-1,
)  # fmt: skip
IDS = torch.arange(5, 21)[None]


def model_of(config: Any) -> Any:
    """A model with random weights in bfloat16."""
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if config is IMAGES else AutoModelForCausalLM
    return kind.from_config(config).to(torch.bfloat16).eval()


def hooked(model: Any) -> dict[str, Any]:
    """A hook that looks at the output of a module, as a probe does."""
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: None)
    return {}


def with_image(model: Any) -> dict[str, Any]:
    """A prompt with one image of 16 patches."""
    ids = torch.cat((IDS[:, :4], torch.full((1, 16), 1), IDS[:, 4:]), 1)
    torch.manual_seed(0)
    return {"inputs": ids, "pixel_values": torch.randn(1, 3, 56, 56, dtype=torch.bfloat16)}


def always(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: options


WAYS: dict[str, tuple[Any, Callable[[Any], dict[str, Any]]]] = {
    "beams": (DENSE, always(num_beams=2)),
    "assistant": (DENSE, lambda model: {"assistant_model": model_of(SMALL)}),
    "prompt_lookup": (DENSE, always(prompt_lookup_num_tokens=3)),
    "hook": (DENSE, hooked),
    "guidance": (DENSE, always(guidance_scale=1.5)),
    "scores": (DENSE, always(return_dict_in_generate=True, output_scores=True)),
    "experts": (EXPERTS, always()),
    "image": (IMAGES, with_image),
    "16_sequences": (DENSE, always(inputs=IDS.repeat(16, 1))),
    "17_sequences": (DENSE, always(inputs=IDS.repeat(17, 1))),
    "prompt_in_chunks": (DENSE, always(inputs=torch.arange(5, 261)[None], prefill_chunk_size=64)),
}


def run_of(model: Any, options: dict[str, Any]) -> Callable[[int], float]:
    """Returns what generates some tokens and returns the seconds that it took."""
    ids = options.pop("inputs", IDS)

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options},
        )
        return time.perf_counter() - start

    return seconds


def main() -> int:
    """Compares the ways; returns 1 if one is slower than plain transformers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; default: all")
    parser.add_argument("--tokens", type=int, default=20, help="timed tokens in each turn")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    unknown = [way for way in args.ways if way not in WAYS]
    if unknown:
        parser.error(f"there is no way {', '.join(unknown)}; there are {', '.join(WAYS)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bfloat16, tokens/s")
    print(f"{'way':18} {'transformers':>12} {'acclimate':>10} {'ratio':>6}")
    slower = False
    for way in args.ways or WAYS:
        config, options_for = WAYS[way]
        model = model_of(config)
        ours = acclimate.init_inference(copy.deepcopy(model))
        runs = [run_of(candidate, options_for(candidate)) for candidate in (model, ours)]
        for run in runs:
            run(4)
        turns = [
            [args.tokens / max(run(4 + args.tokens) - run(4), 1e-9) for run in runs]
            for _ in range(args.turns)
        ]
        theirs, own = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median(own / theirs for theirs, own in turns)
        slower |= ratio < LEAST_RATIO
        print(f"{way:18} {theirs:12.1f} {own:10.1f} {ratio:6.2f}", flush=True)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
