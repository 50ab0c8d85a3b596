"""Models with experts whose weights are trained, as those of users are and random ones are not.

Routers of trained models are sure of some tokens and have near ties for others; biases are small.
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from deep_experts import changes, model_class, tiny_config

import acclimate
from acclimate.llm.decode import proof
from acclimate.llm.decode.loop import lean_decoder, step_kind

LAYERS, STEPS, LENGTH = 6, 150, 96
ROOM = Path(acclimate.__file__).parent / "llm"
OPTIONS = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

pytestmark = pytest.mark.slow


@functools.cache
def sources() -> Tensor:
    """The bytes of this package's sources, as tokens."""
    text = b"".join(path.read_bytes() for path in sorted(ROOM.rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


@functools.cache
def trained(name: str) -> Any:
    """Returns a model that has learnt for some seconds to write Python, in float32."""
    torch.manual_seed(0)
    config = tiny_config(name, **changes(name, LAYERS), vocab_size=256)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, 0)
    model = model_class(name).from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(sources()) - LENGTH, (8,))
        tokens = torch.stack([sources()[start : start + LENGTH] for start in starts])
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5
    return model.eval()


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["lfm2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "olmoe"])
def test_the_step_of_a_trained_model_is_proved_with_any_tokens(name: str, bits: str | None) -> None:
    options = {} if bits is None else {"quantize": bits}
    model = acclimate.init_inference(copy.deepcopy(trained(name)).bfloat16(), **options)
    lean = lean_decoder(model)
    assert lean is not None
    for draw in range(20):
        proof.prove(model, lean, proof.example_tokens(model, draw))


@pytest.mark.parametrize("name", ["lfm2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "olmoe"])
@pytest.mark.parametrize("length", [1, 40, 65])
def test_a_trained_model_writes_the_text_of_transformers(name: str, length: int) -> None:
    model = acclimate.init_inference(copy.deepcopy(trained(name)))
    assert step_kind(model) == "native"
    prompt = sources()[None, 3000 : 3000 + length]
    mask = torch.ones_like(prompt)
    texts = [one.generate(prompt, attention_mask=mask, **OPTIONS) for one in (trained(name), model)]
    assert torch.equal(*texts)
