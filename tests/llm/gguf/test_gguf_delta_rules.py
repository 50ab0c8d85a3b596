"""Files of Qwen3-Next, Qwen 3.5 and LFM2-MoE give their source's model, and keep their blocks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Change, key, make_model, tensor, without, write_gguf

import acclimate
from acclimate.errors import AcclimateError, CorruptModelError, UnsupportedModelError
from acclimate.llm import load_model
from acclimate.llm.decode.loop import step_kind
from acclimate.llm.files.deferred_tensors import deferred, read
from acclimate.llm.gguf.convert import BLOCKS, converted_gguf
from acclimate.llm.gguf.tensors import read_index, stored_blocks
from quick_parameters import few_of, quick

KIND = gguf.GGMLQuantizationType.Q8_0
ALWAYS: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
IDS = torch.tensor([[7, 70, 31, 100, 9], [15, 3, 200, 41, 8]])
# Heads of a whole block of 32 values each, so that their columns can be put in order without unpacking.
WHOLE_BLOCKS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
WITH_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def packed(*names: str) -> Change:
    """Stores tensors with one of these in their names as blocks; default: those that llama.cpp does."""

    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            is_matrix = values.ndim > 1 and values.shape[-1] % 32 == 0
            is_router = "ffn_gate_inp" in name
            if is_matrix and not is_router and (not names or any(part in name for part in names)):
                tensors[name] = gguf.quantize(values, KIND)

    return pack


@torch.no_grad()
def round_to_blocks(model: Any) -> Any:
    """Gives a model the values that a file of blocks has; a block's values are of one row and 32 columns."""
    for name, parameter in model.named_parameters():
        is_router = name.endswith((".gate.weight", "expert_gate.weight"))
        if parameter.dim() > 1 and parameter.shape[-1] % 32 == 0 and not is_router:
            blocks = gguf.quantize(parameter.numpy(), KIND)
            parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, KIND)))
    return model


@pytest.mark.parametrize(
    ("name", "changes", "unpacked"),
    [
        ("qwen35", WHOLE_BLOCKS, set()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen35", {"linear_key_head_dim": 16, "linear_value_head_dim": 16}, {"out_proj"}),
                (
                    "qwen35-one-value-head-each",
                    {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
                    set(),
                ),
                ("qwen35_moe", WHOLE_BLOCKS | WITH_EXPERTS, set()),
                ("qwen3_next", WHOLE_BLOCKS | WITH_EXPERTS, set()),
                ("lfm2_moe", {"moe_intermediate_size": 32}, set()),
            )
        ),
    ],
    ids=["qwen35", "cut columns", "one value head each", "qwen35_moe", "qwen3_next", "lfm2_moe"],
)
def test_matrices_keep_their_blocks_in_the_native_step(
    name: str, changes: dict[str, Any], unpacked: set[str], tmp_path: Path
) -> None:
    source = round_to_blocks(make_model(name, **changes))
    model = acclimate.init_inference(write_gguf(name, source, tmp_path / "model.gguf", packed()))
    assert step_kind(model) == "native"
    dense = {parameter.rsplit(".", 2)[-2] for parameter in model.packing.dense}
    assert {
        leaf for leaf in dense if leaf in ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")
    } == unpacked
    expected = source.state_dict()
    compared = set()
    for place, module in model.named_modules():
        if getattr(module, "packed", None) is not None and module.packed.format == "q8_0":
            assert torch.equal(module.packed.dequantize(), expected[f"{place}.weight"]), place
            compared.add(id(module.packed))  # a tied head has the embedding's
        for leaf, stack in (getattr(module, "packed_stacks", None) or {}).items():
            assert torch.equal(stack.dequantize(), expected[f"{place}.{leaf}"]), place
            compared.add(id(stack))
    assert len(compared) == dict(model.packing.packed)["q8_0"]
    with torch.no_grad():
        found, wanted = model(IDS).logits.float(), source(IDS).logits
    assert (found - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize("name", quick(("qwen35", "qwen35_moe", "qwen3_next", "lfm2_moe"), "qwen35_moe"))
def test_the_native_step_writes_the_text_of_the_source(name: str, tmp_path: Path) -> None:
    source = make_model(name)
    model = acclimate.init_inference(write_gguf(name, source, tmp_path / "model.gguf"), dtype="float32")
    assert step_kind(model) == "native"
    for ids in (IDS, IDS[1:]):
        options = {"max_new_tokens": 20, **ALWAYS}
        assert torch.equal(model.generate(ids, **options), source.generate(ids, **options))


def test_a_matrix_of_tensors_in_two_types_is_unpacked(tmp_path: Path) -> None:
    source = round_to_blocks(make_model("qwen3_next", **WHOLE_BLOCKS, **WITH_EXPERTS))
    path = write_gguf("qwen3_next", source, tmp_path / "model.gguf", packed("attn_qkv"))
    model = acclimate.init_inference(path)
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in model.packing.dense
    found = model.model.layers[0].linear_attn.in_proj_qkvz.weight
    assert torch.equal(found, source.model.layers[0].linear_attn.in_proj_qkvz.weight.bfloat16())


@torch.no_grad()
def test_a_matrix_of_two_types_runs_in_the_wider_one(tmp_path: Path) -> None:
    source = make_model("qwen3_next", hidden_size=256)
    random = np.random.default_rng(1)
    stored: dict[str, Any] = {}
    for part, rows, name in (("attn_qkv", 2 * 2 * 8 + 6 * 8, "Q5_K"), ("attn_gate", 6 * 8, "Q4_K")):
        kind = gguf.GGMLQuantizationType[name]
        blocks = random.integers(0, 256, (rows, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        blocks[:, :4] = np.full((rows, 2), 0.002, np.float16).view(np.uint8)  # the scales of all scales
        stored[f"blk.0.{part}.weight"] = blocks, kind
    values = {name: gguf.dequantize(*blocks) for name, blocks in stored.items()}

    def load(name: str, tensors: dict[str, Any], **options: Any) -> Any:
        path = write_gguf("qwen3_next", source, tmp_path / name, lambda _, others: others.update(tensors))
        return acclimate.init_inference(path, **options).model.layers[0].linear_attn.in_proj_qkvz

    found = load("blocks.gguf", stored).packed
    assert found.format == "q5_k"
    expected = load("values.gguf", values, dtype="float32").weight
    assert torch.equal(found.dequantize(), expected)


def predict_further(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Adds a block that predicts one more token, as llama.cpp's converter does."""
    prefix = keys.get("general.architecture") or next(key for key in keys if key.endswith("block_count"))
    prefix = prefix.removesuffix(".block_count")
    last = keys[f"{prefix}.block_count"]
    keys[f"{prefix}.block_count"], keys[f"{prefix}.nextn_predict_layers"] = last + 1, 1
    keys[f"{prefix}.attention.recurrent_layers"] = [*keys[f"{prefix}.attention.recurrent_layers"], False]
    for name in [name for name in tensors if name.startswith("blk.0.")]:
        tensors[name.replace("blk.0.", f"blk.{last}.")] = tensors[name]
    tensors[f"blk.{last}.nextn.eh_proj.weight"] = np.ones((32, 64), np.float32)
    for part in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"blk.{last}.nextn.{part}.weight"] = np.ones(32, np.float32)


def join_experts(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    for block in range(2):
        parts = [tensors.pop(f"blk.{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)


def by_interval(keys: dict[str, Any], _tensors: dict[str, Any]) -> None:
    """Says which layers attend as older files do."""
    prefix = next(key for key in keys if key.endswith("block_count")).removesuffix(".block_count")
    del keys[f"{prefix}.attention.recurrent_layers"]
    keys[f"{prefix}.full_attention_interval"] = 2


def as_one_tensor(source: Any) -> Change:
    """Stores the first layer's queries, keys, values and gates as older files of Qwen3-Next do."""

    def join(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors["blk.0.attn_qkv.weight"], tensors["blk.0.attn_gate.weight"]
        tensors["blk.0.ssm_in.weight"] = source.model.layers[0].linear_attn.in_proj_qkvz.weight.numpy()

    return join


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_next", predict_further),
        ("qwen35", predict_further),
        ("qwen35_moe", predict_further),
        ("qwen35_moe", join_experts),
        ("qwen3_next", join_experts),
        ("qwen35_moe", by_interval),
        ("qwen3_next", as_one_tensor),
    ],
)
@torch.no_grad()
def test_other_ways_to_store_a_model_give_the_same_one(name: str, change: Any, tmp_path: Path) -> None:
    source = make_model(name)
    change = change(source) if change is as_one_tensor else change
    loaded = load_model(write_gguf(name, source, tmp_path / "model.gguf", change), dtype="float32")
    torch.testing.assert_close(loaded.module(IDS).logits, source(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "error", "word"),
    few_of(
        [
            *(
                (name, without(f"{prefix}.{missing}"), CorruptModelError, f"lacks the key {prefix}.{missing}")
                for name, prefix in (("qwen3_next", "qwen3next"), ("qwen35", "qwen35"))
                for missing in (
                    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
                    "ssm.inner_size",
                )
            ),
            (
                "qwen35",
                without("qwen35.rope.dimension_sections"),
                CorruptModelError,
                "rope.dimension_sections",
            ),
            (
                "qwen35",
                key("qwen35.rope.dimension_sections", 4),
                CorruptModelError,
                "rope.dimension_sections",
            ),
            (
                "qwen35",
                key("qwen35.rope.dimension_sections", [-1, 2, 3]),
                CorruptModelError,
                "dimension_sections",
            ),
            (
                "qwen35",
                key("qwen35.rope.dimension_sections", [0, 0, 0, 0]),
                UnsupportedModelError,
                "sections",
            ),
            (
                "qwen35",
                key("qwen35.rope.dimension_sections", [1, 1, 1, 9]),
                UnsupportedModelError,
                "sections",
            ),
            ("qwen35", key("qwen35.rope.dimension_sections", [4, 4]), UnsupportedModelError, "sections"),
            ("qwen35", key("qwen35.ssm.group_count", 4), CorruptModelError, "ssm.group_count"),
            ("qwen35", key("qwen35.ssm.inner_size", 47), CorruptModelError, "ssm.inner_size"),
            ("qwen35", key("qwen35.ssm.inner_size", 96), CorruptModelError, "blk.1.ssm_conv1d.weight"),
            ("qwen35", key("qwen35.ssm.state_size", 16), CorruptModelError, "blk.1.ssm_conv1d.weight"),
            ("qwen35", key("qwen35.ssm.group_count", 1 << 31), CorruptModelError, "ssm.group_count"),
            ("qwen35", key("qwen35.attention.recurrent_layers", [True]), CorruptModelError, "2 blocks"),
            (
                "qwen35",
                key("qwen35.attention.recurrent_layers", [True] * 2),
                CorruptModelError,
                "lacks blk.0.",
            ),
            (
                "qwen35",
                key("qwen35.attention.recurrent_layers", "all"),
                CorruptModelError,
                "recurrent_layers",
            ),
            (
                "qwen35",
                key("qwen35.full_attention_interval", 0),
                CorruptModelError,
                "full_attention_interval",
            ),
            ("qwen35", key("qwen35.nextn_predict_layers", 2), CorruptModelError, "nextn_predict_layers is 2"),
            ("qwen35", key("qwen35.nextn_predict_layers", "one"), CorruptModelError, "nextn_predict_layers"),
            ("qwen35", without("blk.1.ssm_alpha.weight"), CorruptModelError, "blk.1.ssm_alpha.weight"),
            ("qwen35", without("blk.1.ssm_a"), CorruptModelError, "blk.1.ssm_a"),
            ("qwen35", tensor("blk.1.ssm_dt.bias", 5), CorruptModelError, "blk.1.ssm_dt.bias"),
            ("qwen35", tensor("blk.1.ssm_out.weight", 48, 32), CorruptModelError, "blk.1.ssm_out.weight"),
            ("qwen35", tensor("blk.1.ssm_a", 6, value=0.5), CorruptModelError, "numbers below 0"),
            ("qwen35", tensor("v.blk.0.attn_q.weight", 8, 8), UnsupportedModelError, "v.blk.0.attn_q.weight"),
            (
                "qwen35",
                tensor("blk.0.attn_sinks.weight", 4),
                UnsupportedModelError,
                "blk.0.attn_sinks.weight",
            ),
            ("qwen35", key("qwen35.attention.scale", 0.5), UnsupportedModelError, "attention.scale"),
            ("qwen35_moe", without("qwen35moe.expert_count"), CorruptModelError, "qwen35moe.expert_count"),
            (
                "qwen35_moe",
                key("qwen35moe.expert_gating_func", 2),
                UnsupportedModelError,
                "expert_gating_func",
            ),
            ("qwen3_next", without("blk.0.attn_gate.weight"), CorruptModelError, "blk.0.attn_gate.weight"),
            (
                "qwen3_next",
                tensor("blk.0.attn_qkv.weight", 128, 32),
                CorruptModelError,
                "blk.0.attn_qkv.weight",
            ),
            ("qwen3_next", tensor("blk.0.ssm_in.weight", 64, 32), CorruptModelError, "blk.0.ssm_in.weight"),
            ("qwen3_next", tensor("blk.0.ssm_ba.weight", 6, 32), CorruptModelError, "blk.0.ssm_ba.weight"),
            (
                "lfm2_moe",
                without("lfm2moe.expert_gating_func"),
                CorruptModelError,
                "lfm2moe.expert_gating_func",
            ),
            ("lfm2_moe", key("lfm2moe.expert_gating_func", 1), UnsupportedModelError, "expert_gating_func"),
            ("lfm2_moe", key("lfm2moe.leading_dense_block_count", 3), CorruptModelError, "blk.3.ffn_up_exps"),
            ("lfm2_moe", key("lfm2moe.leading_dense_block_count", 0), CorruptModelError, "blk.0.ffn_up_exps"),
            ("lfm2_moe", key("lfm2moe.attention.sliding_window", 8), UnsupportedModelError, "sliding_window"),
            (
                "lfm2_moe",
                without("lfm2moe.shortconv.l_cache"),
                CorruptModelError,
                "lfm2moe.shortconv.l_cache",
            ),
            ("lfm2_moe", without("blk.1.exp_probs_b.bias"), CorruptModelError, "blk.1.exp_probs_b.bias"),
            ("lfm2_moe", tensor("blk.1.exp_probs_b.bias", 3), CorruptModelError, "blk.1.exp_probs_b.bias"),
        ],
        3,
    ),
)
def test_what_a_file_lacks_or_contradicts_is_named(
    name: str, change: Change, error: type[AcclimateError], word: str, tmp_path: Path
) -> None:
    path = write_gguf(name, make_model(name), tmp_path / "model.gguf", change)
    with pytest.raises(error) as caught:
        converted_gguf(path, "float32")
    message = str(caught.value)
    assert word in message
    assert path.name in message
    assert "\n" not in message


@torch.no_grad()
def test_the_bias_that_chooses_experts_stays_in_float32(tmp_path: Path) -> None:
    source = make_model("lfm2_moe")
    model = acclimate.init_inference(write_gguf("lfm2_moe", source, tmp_path / "model.gguf"))
    found = model.model.layers[1].feed_forward.expert_bias
    assert torch.equal(found, source.model.layers[1].feed_forward.expert_bias)
    assert found.dtype == torch.float32


def test_an_architecture_that_is_newer_than_the_gguf_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate.llm.gguf import weights

    path = write_gguf("qwen35", make_model("qwen35"), tmp_path / "model.gguf")
    known = {number: name for number, name in weights.MODEL_ARCH_NAMES.items() if name != "qwen35"}
    monkeypatch.setattr(weights, "MODEL_ARCH_NAMES", known)
    with pytest.raises(UnsupportedModelError, match=r"qwen35.*newer than the installed gguf package"):
        converted_gguf(path, "float32")


def test_columns_in_another_order_are_cut_as_the_matrix_is(tmp_path: Path) -> None:
    source = round_to_blocks(make_model("qwen35", **WHOLE_BLOCKS))
    path = write_gguf("qwen35", source, tmp_path / "model.gguf", packed())
    file, tensors = read_index(converted_gguf(path, BLOCKS), path, torch.float32)
    expected = source.model.layers[1].linear_attn.out_proj.weight.detach()
    with contextlib.closing(file):
        whole = deferred(next(found for found in tensors if found.name.endswith("out_proj.weight")))
        for first, last, is_whole in ((0, 192, True), (32, 128, True), (64, 96, True), (16, 80, False)):
            part = whole[:, first:last]
            assert torch.equal(read(part), expected[:, first:last])
            blocks = stored_blocks(part)
            assert (blocks is not None) == is_whole
            if blocks is not None:
                values = gguf.dequantize(blocks.read().numpy().reshape(32, -1), KIND)
                assert torch.equal(torch.from_numpy(values), expected[:, first:last])
