"""Models of images and text that get only text: a capture leaves their configurations as they were."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

import acclimate
from acclimate.llm.decode.capture import capture
from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.loop import step_kind
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
TEXT: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32,
}  # fmt: skip
ROTARY = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
SPECIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mllama": (
        {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default"}},
        {"num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 32,
         "intermediate_layers_indices": [0], "num_channels": 3},
    ),
    "qwen2_vl": (ROTARY, {}), "qwen2_5_vl": (ROTARY, {}), "qwen3_vl": (ROTARY, {}), "glm4v": (ROTARY, {}),
}  # fmt: skip
FEW = ["gemma3"]
MANY = [
    "qwen2_vl", "mllama", "llava", "paligemma", "llava_next", "llava_onevision", "vipllava", "video_llava",
    "qwen2_5_vl", "qwen3_vl", "glm4v", "idefics3", "smolvlm", "internvl", "aya_vision", "cohere2_vision",
    "deepseek_vl", "fuyu", "lighton_ocr", "git", "mistral3",
]  # fmt: skip
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def tiny_model(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    default = kind()
    text, vision = SPECIAL.get(name, ({}, {}))
    parts: dict[str, Any] = {token: 150 for token in TOKENS if hasattr(default, token)}
    for part, values in (("text_config", {**TEXT, **text}), ("vision_config", {**VISION, **vision})):
        config = getattr(default, part, None)
        if isinstance(config, PreTrainedConfig):
            known = config.to_dict()
            fitting = {key: value for key, value in values.items() if key in known}
            parts[part] = {"model_type": config.model_type, **fitting}
    if "text_config" not in parts:
        parts |= TEXT
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(kind(**parts)).eval()
    model.generation_config.eos_token_id = None
    return model


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """Returns the attributes of every configuration in a model, private ones too."""
    found: dict[str, dict[str, Any]] = {}

    def see(place: str, config: Any) -> None:
        own = vars(config)
        found[place] = {
            name: id(value) if isinstance(value, PreTrainedConfig) else copy.deepcopy(value)
            for name, value in own.items()
        }
        for name, value in own.items():
            if isinstance(value, PreTrainedConfig):
                see(f"{place}/{name}", value)

    for name, module in model.named_modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            see(name, module.config)
    return found


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)])
def test_text_is_the_same_and_configurations_stay_as_they_were(name: str) -> None:
    model = tiny_model(name)
    vision = getattr(model.config, "vision_config", None)
    if vision is not None:
        vision._attn_implementation = "eager"  # another one than the text's
    expected = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    before = configurations(model)
    made = acclimate.init_inference(model)
    kind = step_kind(made)
    assert kind in ("native", "plain", "transformers")
    for _ in range(2):
        assert torch.equal(made.generate(PROMPT, max_new_tokens=5, do_sample=False), expected)
    assert configurations(made) == before
    if name in ("llava", "mistral3"):
        assert kind == "native"


@pytest.mark.parametrize("name", quick(("gemma3", "qwen2_vl", "llava"), "llava"))
def test_text_without_images_takes_the_native_step(name: str, taken: list[bool]) -> None:
    model = tiny_model(name)
    batch, mask = PROMPT.repeat(2, 1), torch.ones((2, 9), dtype=torch.long)
    mask[1, :4] = 0
    given = {"input_ids": batch, "attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    expected = model.generate(**given)
    made = acclimate.init_inference(model)
    assert torch.equal(made.generate(**given), expected)
    assert taken == [True]


def test_a_capture_that_fails_leaves_the_model_as_it_was() -> None:
    class Stubborn(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if type(args[0]) is not torch.Tensor:
                raise RuntimeError("this module refuses fake tensors")
            return args[0]

    model = tiny_model("llava")
    expected = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    model.model.language_model.norm = torch.nn.Sequential(model.model.language_model.norm, Stubborn())
    before = configurations(model)
    made = acclimate.init_inference(model)
    with pytest.raises(NotRepresentedError, match="this module refuses"):
        capture(made, {}, 2)
    assert configurations(made) == before
    assert step_kind(made) == "transformers"
    assert torch.equal(made.generate(PROMPT, max_new_tokens=5, do_sample=False), expected)


def test_calls_of_other_threads_compute_as_ever_while_a_program_is_captured() -> None:
    model = tiny_model("llava")
    with torch.no_grad():
        expected = model(input_ids=PROMPT, use_cache=False).logits
    others: list[bool] = []
    ended = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not ended.is_set():
                others.append(torch.equal(model(input_ids=PROMPT, use_cache=False).logits, expected))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        capture(model, {}, 2)
    finally:
        ended.set()
        thread.join()
    assert others
    assert all(others)
