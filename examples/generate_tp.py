"""Text from a language model that is split over ranks.

acclimate run --bind_cores_to_rank examples/generate_tp.py --model DIR

The same file runs in one process. No line names hardware, and only printing depends on the rank.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoTokenizer

import acclimate


def main() -> None:
    """Prints a prompt and its continuation."""
    parser = argparse.ArgumentParser(description="Generates text with a model that is split over ranks.")
    parser.add_argument("--model", required=True, help="a folder, a .gguf file or a hub id")
    parser.add_argument("--prompt", default="The most beautiful thing about mathematics is")
    parser.add_argument("--max_new_tokens", type=int, default=40)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    model = acclimate.init_inference(options.model, dtype=options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
    if model.model_ranks.is_first:
        sys.stdout.write(tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n")


if __name__ == "__main__":
    main()
