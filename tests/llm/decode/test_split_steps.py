"""Steps of a model that two ranks share: an error of one rank's numbers is raised on both."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

import torch
from architectures import GEMMA4_EXPERTS, tiny_model

from rank_processes import RankProcesses

PROMPT = torch.arange(3, 12)[None]
# The channels of its convolution are in another order than the columns of the projection before it.
DELTA_RULE_BESIDE_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
WAYS = [
    {"do_sample": False}, {"do_sample": True, "top_k": 4}, {"do_sample": False, "num_beams": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2, backend="gloo", models=True) as ranks:
        yield ranks


@functools.cache
def llama() -> Any:
    """The split model of all damages, each of which is undone."""
    import acclimate

    return acclimate.init_inference(tiny_model("llama", tie_word_embeddings=False), tp_size=2)


def errors(rank: int, damage: str) -> tuple[str, list[str], list[int]]:
    """Returns the kind of step, the error of each way to generate, and a text that comes after them."""
    from acclimate.llm.decode.loop import step_kind

    torch.set_num_threads(1)
    model = llama()
    kind = step_kind(model)
    prompt, good = PROMPT.clone(), model.lm_head.weight.detach().clone()
    if damage == "token":
        prompt[0, 4] = 160
    elif damage == "negative":
        prompt[0, -1] = -100
    elif rank == 1:
        model.lm_head.weight.data[5] = float(damage)
        model.lm_head.weight.data[6] = -float(damage)
    found = []
    for options in WAYS:
        try:
            model.generate(prompt, max_new_tokens=3, **options)
            found.append("none")
        except Exception as error:
            found.append(type(error).__name__)
    model.lm_head.weight.data.copy_(good)
    return kind, found, model.generate(PROMPT, max_new_tokens=3, do_sample=False)[0].tolist()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [("token", "IndexError"), ("negative", "IndexError"), ("nan", "LogitsError"), ("inf", "LogitsError")],
)
def test_both_ranks_raise_the_error_and_go_on(two: RankProcesses, damage: str, expected: str) -> None:
    one, other = two.values(errors, damage)
    assert one == other
    kind, found, text = one
    assert kind == "native"
    assert found == [expected] * len(WAYS)
    assert len(text) == PROMPT.shape[1] + 3


def text_of(rank: int, kind: str, **settings: Any) -> tuple[str, list[int], list[int]]:
    """Returns the kind of step, its text, and the text of the whole model."""
    import acclimate
    from acclimate.llm.decode.loop import step_kind

    torch.set_num_threads(1)
    whole = tiny_model(kind, **settings)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = whole.generate(PROMPT, **options)
    model = acclimate.init_inference(whole, tp_size=2)
    return step_kind(model), model.generate(PROMPT, **options)[0].tolist(), expected[0].tolist()


def test_a_forward_that_needs_another_ranks_bias_takes_the_native_step(two: RankProcesses) -> None:
    for kind, ours, whole in two.values(text_of, "gpt2"):
        assert kind == "native"
        assert ours == whole


def test_ranks_that_share_the_channels_of_convolutions_write_the_models_text(
    two: RankProcesses,
) -> None:
    for kind, ours, whole in two.values(text_of, "lfm2"):
        assert kind == "native"
        assert ours == whole


@pytest.mark.parametrize("key_heads", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_normalize_the_heads_that_they_share_by_the_squares_of_all(
    two: RankProcesses, key_heads: int
) -> None:
    # With one key head, both ranks have it, and its squares count once.
    for kind, ours, whole in two.values(functools.partial(text_of, num_key_value_heads=key_heads), "olmo2"):
        assert kind == "native"
        assert ours == whole


def text_without_native_code(rank: int, kind: str) -> tuple[str, list[int], list[int]]:
    """Returns what ``text_of`` does, of a step of torch's operators."""
    from acclimate.llm.decode import proof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "native_decoder", lambda *_: None)
        return text_of(rank, kind)


@pytest.mark.slow
def test_ranks_normalize_the_heads_that_they_share_without_native_code(two: RankProcesses) -> None:
    for kind, ours, whole in two.values(text_without_native_code, "olmo2"):
        assert kind == "plain"
        assert ours == whole


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_ranks_share_the_heads_of_a_delta_rule_and_write_the_models_text(
    two: RankProcesses, name: str
) -> None:
    settings = DELTA_RULE_BESIDE_ATTENTION if name == "qwen3_next" else {}
    for kind, ours, whole in two.values(functools.partial(text_of, **settings), name):
        assert kind == "native"
        assert ours == whole


def texts_past_a_window(rank: int) -> tuple[str, list[int], list[int]]:
    """Returns the kind of step, its text, and the text of the split model's modules."""
    import acclimate
    from acclimate.llm.decode import cache
    from acclimate.llm.decode.loop import step_kind

    torch.set_num_threads(1)
    cache._LEAST_SPARE = 1
    types = ["sliding_attention", "full_attention"]
    whole = tiny_model("gemma2", sliding_window=6, layer_types=types, max_position_embeddings=512)
    model = acclimate.init_inference(whole, tp_size=2, dtype=torch.float32)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}  # four windows
    modules = model.generate(PROMPT, return_dict_in_generate=True, **options).sequences
    return step_kind(model), model.generate(PROMPT, **options)[0].tolist(), modules[0].tolist()


@pytest.mark.slow
def test_ranks_keep_only_the_window_and_write_the_text_of_the_modules(two: RankProcesses) -> None:
    one, other = two.values(texts_past_a_window)
    assert one == other
    kind, ours, modules = one
    assert kind == "native"
    assert ours == modules


def text_with_int8_keys(rank: int, name: str, ranks: int) -> tuple[str, torch.dtype, list[int]]:
    """Returns the kind of step, the dtype of the keys and values that it holds, and its text."""
    import acclimate
    from acclimate.llm.decode.cache import StepCache
    from acclimate.llm.decode.loop import step_kind
    from acclimate.llm.decode.native import NativeStep

    torch.set_num_threads(1)
    whole = tiny_model(name, num_key_value_heads=2, max_position_embeddings=512)
    model = acclimate.init_inference(whole, tp_size=ranks, dtype=torch.float32, kv_cache_dtype="int8")
    held: list[StepCache] = []
    made = NativeStep.__init__

    def noted(self: NativeStep, decoder: Any, cache: StepCache, *others: Any) -> None:
        held.append(cache)
        made(self, decoder, cache, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeStep, "__init__", noted)
        text = model.generate(PROMPT, max_new_tokens=20, do_sample=False, eos_token_id=None)
    return step_kind(model), held[-1].dtype, text[0].tolist()  # the first ones prove the step


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_ranks_with_int8_keys_write_the_text_of_one_process(two: RankProcesses, name: str) -> None:
    expected = text_with_int8_keys(0, name, 1)
    assert expected[:2] == ("native", torch.int8)
    assert two.values(text_with_int8_keys, name, 2) == [expected, expected]


def texts_of_experts(rank: int, name: str, quantize: str | None) -> tuple[str, list[int], list[int]]:
    """Returns the kind of step, its text, and the text of the split model's modules."""
    import acclimate
    from acclimate.llm.decode.loop import step_kind

    torch.set_num_threads(1)
    own = tiny_model(name, **(GEMMA4_EXPERTS if name == "gemma4_text" else {}))
    model = acclimate.init_inference(own, tp_size=2, quantize=quantize, dtype=torch.float32)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    whole = model.generate(PROMPT, return_dict_in_generate=True, **options).sequences
    return step_kind(model), model.generate(PROMPT, **options)[0].tolist(), whole[0].tolist()


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("qwen3_moe", "int8"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("deepseek_v3", None), ("qwen3_moe", None), ("qwen2_moe", None), ("qwen2_moe", "int8"),
                ("olmoe", None), ("olmoe", "int8"),
                ("deepseek_v2", None), ("gemma4_text", None), ("gemma4_text", "int8"),
            )
        ),
    ],
)  # fmt: skip
def test_ranks_share_each_expert_in_the_native_step(
    two: RankProcesses, name: str, quantize: str | None
) -> None:
    one, other = two.values(texts_of_experts, name, quantize)
    assert one == other
    kind, ours, modules = one
    assert kind == "native"
    assert ours == modules


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_ranks_share_quantised_latent_attention_in_the_native_step(two: RankProcesses, quantize: str) -> None:
    one, other = two.values(texts_of_experts, "deepseek_v3", quantize)
    assert one == other
    assert one[0] == "native"  # only after its logits were compared with the modules'
