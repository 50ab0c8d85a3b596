"""A folder of a LoRA adapter loads over its base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import acclimate
from acclimate.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from acclimate.llm import load_model
from acclimate.llm.decode.loop import step_kind

peft = pytest.importorskip("peft", reason="peft is not installed")

PROMPT = torch.tensor([[0, 20, 30, 40]])


@pytest.fixture
def adapter(tiny_folder: Path, tmp_path: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    folder = tmp_path / "adapter"
    peft.get_peft_model(model, settings).save_pretrained(folder)
    return folder


def expected(tiny_folder: Path, adapter: Path) -> list[list[int]]:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    with torch.no_grad():
        made = peft.PeftModel.from_pretrained(base, adapter).generate(
            input_ids=PROMPT, max_new_tokens=12, do_sample=False
        )
    found: list[list[int]] = made.tolist()
    return found


def test_the_base_is_loaded_and_the_adapter_merged_with_pefts_tokens(
    tiny_folder: Path, adapter: Path
) -> None:
    model = acclimate.init_inference(str(adapter), dtype="float32")
    wanted = expected(tiny_folder, adapter)
    assert model.generate(PROMPT, max_new_tokens=12, do_sample=False).tolist() == wanted
    assert step_kind(model) == "native"
    plain = acclimate.init_inference(str(tiny_folder), dtype="float32")
    assert plain.generate(PROMPT, max_new_tokens=12, do_sample=False).tolist() != wanted


def test_the_commands_load_it_with_the_tokenizer_of_the_base(adapter: Path) -> None:
    made = acclimate.generate("The capital", model=load_model(adapter, quantize="int8"), max_new_tokens=3)
    assert (made.model, made.weights) == ("adapter", "int8")


def test_an_adapter_whose_base_is_missing_or_unnamed_is_refused(adapter: Path) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for base, error in (("/nowhere/base", ModelNotFoundError), (None, CorruptModelError)):
        changed = settings | {"base_model_name_or_path": base}
        (adapter / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(error, match="base"):
            acclimate.init_inference(str(adapter))


def test_an_adapter_without_its_weights_is_refused_with_pefts_reason(adapter: Path) -> None:
    for file in adapter.glob("adapter_model*"):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match="peft cannot merge the adapter"):
        acclimate.init_inference(str(adapter))


def test_a_model_of_init_inference_is_a_base_for_peft(tiny_folder: Path, adapter: Path) -> None:
    model = peft.PeftModel.from_pretrained(
        acclimate.init_inference(str(tiny_folder), dtype="float32"), adapter
    )
    made = model.generate(input_ids=PROMPT, max_new_tokens=12, do_sample=False)
    assert made.tolist() == expected(tiny_folder, adapter)
