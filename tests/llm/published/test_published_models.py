"""Models that are quantised in their files run from the numbers that the files hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from published_files import (
    AWQ_4,
    FILES,
    FP8_BLOCK,
    GPTQ_4,
    INT_4,
    awq,
    compressed,
    float8,
    gptq,
    packed,
    save_published,
)

import acclimate
from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.llm import load_model
from acclimate.llm.loading.packed_modules import PackedLinear
from quick_parameters import few_of, quick

IDS = torch.tensor([[0, 5, 9, 17, 40, 3]])
each_file = pytest.mark.parametrize("kind", few_of(FILES, 3))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits.float()
    return found


def linear_modules(model: Any) -> dict[str, Any]:
    return {
        name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in name
    }


@each_file
def test_a_published_weight_keeps_its_exact_values_in_its_own_bits(kind: str, tmp_path: Path) -> None:
    quantise, settings, formats = FILES[kind]
    expected = linear_modules(save_published(tmp_path, quantise, settings))
    model = acclimate.init_inference(tmp_path)
    found = linear_modules(model)
    assert set(model.packing.packed) == formats
    assert found.keys() == expected.keys()
    for name, module in found.items():
        assert isinstance(module, PackedLinear), name
        assert torch.equal(module.packed.dequantize(), expected[name].weight), name


@pytest.mark.parametrize(
    "kind", quick(("gptq", "gptq, asymmetric", "awq", "packed", "int8 of rows"), "gptq, asymmetric")
)
def test_a_published_model_writes_the_tokens_of_its_values_in_float32(kind: str, tmp_path: Path) -> None:
    quantise, settings, _ = FILES[kind]
    expected = save_published(tmp_path, quantise, settings)
    model = load_model(tmp_path).module
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), expected.generate(IDS, **options))


@each_file
def test_in_a_dtype_that_was_asked_for_the_values_are_unpacked(kind: str, tmp_path: Path) -> None:
    quantise, settings, _ = FILES[kind]
    expected = save_published(tmp_path, quantise, settings)
    model = acclimate.init_inference(tmp_path, dtype="float32")
    assert not model.packing.packed
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(
        model.model.layers[1].mlp.down_proj.weight, expected.model.layers[1].mlp.down_proj.weight
    )
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["block", "row", "matrix"])
def test_fp8_weights_are_multiplied_by_their_scales(shape: str, tmp_path: Path) -> None:
    settings = FP8_BLOCK if shape == "block" else {"quant_method": "fp8", "activation_scheme": "static"}
    quantise = float8(shape, name="weight_scale_inv" if shape == "block" else "weight_scale")
    expected = linear_modules(save_published(tmp_path, quantise, settings, hidden=160))
    model = acclimate.init_inference(tmp_path, dtype="float32")
    for name, module in linear_modules(model).items():
        assert torch.equal(module.weight, expected[name].weight), name


def test_groups_in_no_order_are_rounded_to_the_nearest_format_and_the_error_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = save_published(tmp_path, gptq(order="shuffled"), GPTQ_4 | {"desc_act": True})
    with caplog.at_level(logging.WARNING, "acclimate.llm"):
        model = acclimate.init_inference(tmp_path)
    assert set(model.packing.packed) == {"uint8"}
    said = [record.message for record in caplog.records if "relative error" in record.message]
    assert len(said) == 1
    assert "14 weights in GPTQ of 4 bits; they are rounded to uint8" in said[0]
    own = linear_modules(expected)
    errors = [
        float((module.packed.dequantize() - exact).norm() / exact.norm())
        for name, module in linear_modules(model).items()
        for exact in [own[name].weight.detach()]
    ]
    assert 0 < max(errors) < 0.01
    assert f"{max(errors):.1e}" in said[0]


def test_unpacked_weights_are_said_in_one_line_with_their_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_published(tmp_path, awq(), AWQ_4, hidden=256)
    with caplog.at_level(logging.WARNING, "acclimate.llm"):
        acclimate.init_inference(tmp_path, dtype="bfloat16")
    values = 2 * (256 * 256 * 2 + 128 * 256 * 2 + 3 * 512 * 256)
    said = [record.message for record in caplog.records if "unpacked" in record.message]
    assert len(said) == 1
    assert f"14 weights in AWQ of 4 bits unpacked, which takes {values * 2 / 1e6:,.0f} MB in place" in said[0]
    assert f"{values / 2 / 1e6:,.0f} MB of memory" in said[0]


def damaged(name: str, change: Any) -> Any:
    """Changes one tensor of the file; ``None`` removes it."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        full = f"model.layers.1.mlp.up_proj.{name}"
        made = change(tensors[full])
        del tensors[full]
        if made is not None:
            tensors[full] = made.contiguous()

    return damage


@pytest.mark.parametrize(
    ("quantise", "settings", "name", "change", "message"),
    few_of(
        [
            (gptq(), GPTQ_4, "scales", lambda t: None, r"lacks the tensor .*up_proj\.scales"),
            (gptq(), GPTQ_4, "qzeros", lambda t: None, r"lacks the tensor .*up_proj\.qzeros"),
            (gptq(), GPTQ_4, "qweight", lambda t: None, "up_proj"),
            (
                gptq(),
                GPTQ_4,
                "scales",
                lambda t: t[:-1],
                r"up_proj\.scales is of shape \[3, 256\].*\[4, 256\]",
            ),
            (gptq(), GPTQ_4, "qweight", lambda t: t.half(), r"up_proj\.qweight has the dtype torch.float16"),
            (gptq(), GPTQ_4, "qweight", lambda t: t.flatten(), "not a matrix"),
            (gptq(), GPTQ_4, "scales", lambda t: t * torch.inf, r"up_proj.*infinite or NaN"),
            (gptq(order="plain"), GPTQ_4, "g_idx", lambda t: t + 1, r"g_idx gives a column the group 1 or 4"),
            (gptq(order="plain"), GPTQ_4, "g_idx", lambda t: t - 1, r"g_idx gives a column the group -1"),
            (awq(), AWQ_4, "qzeros", lambda t: t[:, 1:], r"up_proj\.qzeros is of shape"),
            (packed(), compressed(INT_4, "pack-quantized"), "weight_scale", lambda t: t[1:], "weight_scale"),
            (packed(), compressed(INT_4, "pack-quantized"), "weight_shape", lambda t: t * 2, "weight_packed"),
            (packed(), compressed(INT_4, "pack-quantized"), "weight_shape", lambda t: None, "weight_shape"),
            (float8("block"), FP8_BLOCK, "weight_scale_inv", lambda t: t[1:], "each 128 x 128"),
            (float8("block"), FP8_BLOCK, "weight_scale_inv", lambda t: None, "weight_scale_inv"),
        ],
        3,
    ),
)
def test_a_damaged_published_weight_is_an_error_that_names_the_tensor(
    quantise: Any, settings: Any, name: str, change: Any, message: str, tmp_path: Path
) -> None:
    save_published(tmp_path, quantise, settings, damage=damaged(name, change))
    with pytest.raises(CorruptModelError, match=message):
        acclimate.init_inference(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    few_of(
        [
            ({"quant_method": "bitsandbytes"}, "bitsandbytes.*gptq, awq"),
            ({"bits": 4}, "None.*gptq, awq"),
            (GPTQ_4 | {"bits": 3}, "bits .* is 3"),
            (GPTQ_4 | {"checkpoint_format": "marlin"}, "marlin"),
            (GPTQ_4 | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic.*down"),
            (AWQ_4 | {"version": "gemv"}, "gemv"),
            (compressed(INT_4, "marlin-24"), "marlin-24"),
            (
                compressed(INT_4, "pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
                "sparse-24-bitmask",
            ),
        ],
        3,
    ),
)
def test_settings_that_cannot_be_read_are_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_published(tmp_path, gptq(), settings)
    with pytest.raises(UnsupportedModelError, match=message):
        acclimate.init_inference(tmp_path)


@pytest.mark.parametrize("bits", ["4", None, True])
def test_settings_of_the_wrong_type_are_an_error(bits: Any, tmp_path: Path) -> None:
    save_published(tmp_path, gptq(), GPTQ_4 | {"bits": bits})
    with pytest.raises(CorruptModelError, match=r"bits .* must be a whole number"):
        acclimate.init_inference(tmp_path)
