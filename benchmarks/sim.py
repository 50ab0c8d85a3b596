"""What the emulated accelerator costs: a training step of a 10-million-parameter GPT, beside the host's.

    python benchmarks/sim.py [--rounds N]

Both run in one process, in turn, so that a noisy machine slows both; the ratio of the medians is the figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time

os.environ["ACCLIMATE_ACCELERATOR"] = "sim"

import torch
from torch import nn

from acclimate import get_accelerator

AT_MOST = 1.3
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 4096, 320, 5, 7, 128, 4


class Block(nn.Module):
    """A transformer's layer: attention, then a feed-forward net, each on the normalised stream."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_net = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.net(self.before_net(x))


class GPT(nn.Module):
    """A GPT-2 in miniature, with the embedding as its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return x @ self.tokens.weight.t()


class Training:
    """A model, its optimizer and one batch on a device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = GPT().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(device)

    def step(self) -> float:
        self.optimizer.zero_grad()
        logits = self.model(self.batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a training step on sim against one on the host.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    logging.getLogger("acclimate").setLevel(logging.ERROR)
    get_accelerator()
    trainings = {device: Training(device) for device in ("cpu", "sim")}
    parameters = sum(p.numel() for p in trainings["cpu"].model.parameters())
    losses = {device: [training.step() for _ in range(3)] for device, training in trainings.items()}
    times: dict[str, list[float]] = {"cpu": [], "sim": []}
    for _ in range(rounds):
        for device, training in trainings.items():
            start = time.perf_counter()
            training.step()
            times[device].append((time.perf_counter() - start) * 1e3)
    medians = {device: statistics.median(values) for device, values in times.items()}
    ratio = medians["sim"] / medians["cpu"]
    threads = torch.get_num_threads()
    print(f"{parameters / 1e6:.1f} M parameters, {BATCH} sequences of {LENGTH} tokens, {threads} threads")
    print(f"{'device':<8}{'median, ms':>12}{'best, ms':>12}")
    for device, values in times.items():
        print(f"{device:<8}{medians[device]:>12.1f}{min(values):>12.1f}")
    print(f"sim takes {ratio:.2f} of the host's time; at most {AT_MOST} is wanted")
    print(f"losses of the first steps equal: {losses['cpu'] == losses['sim']}")
    print(json.dumps({"benchmark": "sim", "ratio": ratio, "at_most": AT_MOST, "median_ms": medians}))


if __name__ == "__main__":
    main()
