"""Models that hold other models, such as an encoder of images beside a text, are split in all parts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from architectures import randomise
from splitting import own_parameters

from acclimate.errors import PlanError
from acclimate.llm.split import Plan, apply_plan, make_plan
from acclimate.llm.split.collectives import ThreadRanks, on_threads

TEXT = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
BERT = {**TEXT, "is_decoder": True, "add_cross_attention": True}
TOKENS = torch.arange(14).view(2, 7) * 11 % 90 + 3


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_model(config: Any, kind: Any) -> Any:
    torch.manual_seed(0)
    return randomise(kind._from_config(config, dtype=torch.float32).eval())


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **SIGHT},
        image_token_id=159,
    )
    return random_model(config, transformers.LlavaForConditionalGeneration)


def bert_with_bert() -> Any:
    encoder = transformers.BertConfig(**TEXT)
    decoder = transformers.BertConfig(**BERT)
    config = transformers.EncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    return random_model(config, transformers.EncoderDecoderModel)


def xlm() -> Any:
    config = transformers.XLMConfig(
        vocab_size=160, emb_dim=64, n_layers=2, n_heads=4, causal=True, n_langs=1, max_position_embeddings=64
    )
    return random_model(config, transformers.XLMWithLMHeadModel)


def worst(model: Any, plan: Plan, call: Callable[[Any], Any]) -> tuple[float, float]:
    """Returns the largest difference of a logit on any rank, and the largest share of the parameters."""
    with torch.no_grad():
        expected = call(model).logits

    def work(ranks: ThreadRanks) -> tuple[float, float]:
        part = apply_plan(copy.deepcopy(model), plan, ranks)
        with torch.no_grad():
            error = float((call(part).logits - expected).abs().max())
        return error, own_parameters(part) / own_parameters(model)

    errors, shares = zip(*on_threads(plan.size, work), strict=True)
    return max(errors), max(shares)


def with_image(model: Any) -> Any:
    pictures = torch.full((2, 4), 159)
    return model(input_ids=torch.cat([pictures, TOKENS], 1), pixel_values=numbers(2, 3, 16, 16))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_encoder_of_images_is_split_beside_the_text(size: int) -> None:
    model = llava()
    plan = make_plan(model, size)
    layer = "model.vision_tower.encoder.layers.1"
    assert plan.splits[f"{layer}.mlp.fc1.weight"].kind == "columns"
    assert plan.splits[f"{layer}.self_attn.out_proj.weight"].kind == "rows"
    error, share = worst(model, plan, with_image)
    assert error < 1e-4
    assert share <= 0.60


@pytest.mark.slow
def test_a_decoder_whose_own_table_is_the_heads_is_split() -> None:
    model = bert_with_bert()
    error, share = worst(model, make_plan(model, 2), lambda m: m(input_ids=TOKENS, decoder_input_ids=TOKENS))
    assert error < 1e-4
    assert share <= 0.60


def test_a_model_that_always_fills_a_cache_is_split() -> None:
    """Its layers are run again with the cache as it was before them."""
    model = xlm()
    error, share = worst(model, make_plan(model, 2), lambda m: m(input_ids=TOKENS))
    assert error < 1e-4
    assert share <= 0.60


def test_a_linear_module_that_gets_too_few_columns_is_named() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(10, 8))
    with pytest.raises(PlanError, match="2 takes 10 columns, but was called with 12"):
        make_plan(model, 2)


class Pictures(nn.Module):
    """Mostly a convolution, which is not split, and a matrix that only its own code knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.convolution = nn.Conv1d(8, 8, 31, padding=15)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.convolution(self.table(input_ids).mT).mT
        return x + self.down(torch.relu(self.up(x)))


def test_a_refusal_says_why_and_its_mapping_is_taken() -> None:
    with pytest.raises(PlanError, match=r"convolution \(convolutions are not split\)") as refused:
        make_plan(Pictures(), 2)
    mapping = re.search(r"the mapping (\{.*\})", str(refused.value))
    assert mapping is not None
    plan = make_plan(Pictures(), 2, json.loads(mapping[1]))
    assert plan.splits["up.weight"].kind == "columns"


def trocr() -> Any:
    config = transformers.TrOCRConfig(
        vocab_size=160, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
        cross_attention_hidden_size=24, max_position_embeddings=64,
    )  # fmt: skip
    return random_model(config, transformers.TrOCRForCausalLM)


@pytest.mark.slow
def test_cross_attention_that_text_alone_does_not_reach_is_split() -> None:
    model = trocr()
    plan = make_plan(model, 2)
    assert plan.splits["model.decoder.layers.1.encoder_attn.k_proj.weight"].kind == "columns"
    states = numbers(2, 5, 24)
    error, share = worst(model, plan, lambda m: m(input_ids=TOKENS, encoder_hidden_states=states))
    assert error < 1e-4
    assert share <= 0.60
    error, _ = worst(model, plan, lambda m: m(input_ids=TOKENS))
    assert error < 1e-4


class Captions(nn.Module):
    """Takes an image where it is given one; its text model alone says which its head is."""

    def __init__(self) -> None:
        super().__init__()
        self.sight = random_model(transformers.CLIPVisionConfig(**SIGHT), transformers.CLIPVisionModel)
        text = transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)
        self.text = random_model(text, transformers.LlamaForCausalLM)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Any:
        embedded = self.text.model.embed_tokens(input_ids)
        if pixel_values is not None:
            embedded = embedded + self.sight(pixel_values).pooler_output[:, None]
        return self.text(inputs_embeds=embedded)

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.text.model.embed_tokens
        return found

    def get_output_embeddings(self) -> None:
        return None


def test_an_encoder_that_no_known_input_reaches_is_planned_by_itself() -> None:
    model = Captions()
    plan = make_plan(model, 2)
    assert plan.splits["sight.encoder.layers.0.mlp.fc1.weight"].kind == "columns"
    assert plan.splits["text.lm_head.weight"].kind == "vocabulary"
    picture = numbers(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(TOKENS, picture).logits

    def work(ranks: ThreadRanks) -> float:
        part = apply_plan(copy.deepcopy(model), plan, ranks)
        with torch.no_grad():
            return float((part(TOKENS, picture).logits - expected).abs().max())

    assert max(on_threads(2, work)) < 1e-4


def test_the_users_mapping_counts_in_a_model_that_is_planned_by_itself() -> None:
    plan = make_plan(Captions(), 2, {"sight.encoder.layers.0.mlp.*": "replicated"}, verify=False)
    assert plan.splits["sight.encoder.layers.0.mlp.fc1.weight"].kind == "replicated"
    assert plan.splits["sight.encoder.layers.1.mlp.fc1.weight"].kind == "columns"
