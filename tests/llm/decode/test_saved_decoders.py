"""A description that an earlier start proved: used for the same model and weights, and for no other."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import make_model, write_gguf

import acclimate
from acclimate.llm.decode import proof, saved
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.proof import describe
from acclimate.llm.decode.saved import decoder_key

pytestmark = pytest.mark.usefixtures("own_descriptions")
PROMPT = torch.arange(3, 12)[None]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were proved."""
    made: list[Any] = []
    original = proof.prove

    def watched(model: Any, *args: Any) -> None:
        made.append(model)
        original(model, *args)

    monkeypatch.setattr(proof, "prove", watched)
    return made


def _text(model: Any) -> list[int]:
    tokens: list[int] = model.generate(PROMPT, do_sample=False, max_new_tokens=12)[0].tolist()
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param({"dtype": dtype}, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
        {"quantize": "int8"},
    ],
)
def test_the_second_start_does_not_prove_again_and_writes_the_same_text(
    tiny_folder: Path, proofs: list[Any], options: dict[str, str]
) -> None:
    first = acclimate.init_inference(tiny_folder, **options)
    text = _text(first)
    second = acclimate.init_inference(tiny_folder, **options)
    assert _text(second) == text
    assert proofs == [first]


@pytest.mark.slow
def test_a_second_start_keeps_the_limit_of_a_description(tmp_path: Path, proofs: list[Any]) -> None:
    path = write_gguf("phi3", make_model("phi3"), tmp_path / "model.gguf")
    texts, limits = [], []
    for _ in range(2):
        model = acclimate.init_inference(path)
        texts.append(_text(model))
        lean = lean_decoder(model)
        assert lean is not None
        limits.append(lean.decoder.limit)
    assert len(proofs) == 1
    assert texts[0] == texts[1]
    assert limits[0] == limits[1]
    assert [type(limit) for limit in limits] == [int, int]


def test_a_model_with_other_code_or_constants_is_proved(tiny_folder: Path, proofs: list[Any]) -> None:
    def start() -> Any:
        return acclimate.init_inference(tiny_folder, dtype="float32")

    keys = {decoder_key(start())}
    changed = start()
    changed.model.layers[1].register_buffer("scale", torch.tensor(2.0))
    keys.add(decoder_key(changed))
    changed.model.layers[1].scale.fill_(3.0)
    keys.add(decoder_key(changed))
    changed = start()
    changed.config.rms_norm_eps *= 2
    keys.add(decoder_key(changed))
    changed = start()
    changed.model.layers[0].mlp.act_fn = torch.nn.GELU()
    keys.add(decoder_key(changed))
    assert None not in keys
    assert len(keys) == 5
    _text(start())
    _text(changed)
    assert len(proofs) == 2


SCALE = 1.0


class Scaled(torch.nn.Module):
    """An MLP of the user's, which reads a number of its file."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * SCALE


def _scaled_by(model: Any, value: float) -> None:
    global SCALE
    SCALE = value
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)


def _active(model: Any, function: Any) -> None:
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = function


def _attention_scaled_by(model: Any, value: Any) -> None:
    model.model.layers[0].self_attn.scaling = value


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "a_number_of_numpy": (_attention_scaled_by, np.float32(0.3), np.float32(3.0)),
    "a_function_of_torch": (_active, torch.relu, torch.nn.functional.gelu),
    "a_number_of_a_file": (_scaled_by, 1.0, 2.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_start_with_another_value_does_not_use_what_the_first_one_saved(
    name: str, tiny_folder: Path
) -> None:
    change, *values = PAIRS[name]
    texts = []
    try:
        for value in values:
            model = acclimate.init_inference(tiny_folder, dtype="float32")
            change(model, value)
            texts.append(_text(model))
            own = model.generate(PROMPT, do_sample=False, max_new_tokens=12, return_dict_in_generate=True)
            assert texts[-1] == own.sequences[0].tolist()
    finally:
        _scaled_by(model, 1.0)
    assert texts[0] != texts[1]


def test_other_weights_use_the_saved_description_and_write_their_own_text(
    tiny_folder: Path, proofs: list[Any]
) -> None:
    first = acclimate.init_inference(tiny_folder, dtype="float32")
    before = _text(first)
    other = acclimate.init_inference(tiny_folder, dtype="float32")
    expected = acclimate.init_inference(tiny_folder, dtype="float32")
    for model in (other, expected):
        for parameter in model.parameters():
            parameter.data.copy_(parameter.roll(1, 0))
    expected.model.layers[0].register_forward_hook(lambda *_: None)  # takes transformers' own step
    assert _text(other) == _text(expected) != before
    assert proofs == [first]


def test_a_change_of_a_file_of_steps_packed_modules_or_kernels_has_a_key_of_its_own(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    for number, folder in enumerate(saved._CODE):
        copies.append(tmp_path / str(number))
        shutil.copytree(folder, copies[-1], ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(saved, "_CODE", tuple(copies))
    model = acclimate.init_inference(tiny_folder, dtype="float32")
    keys = [decoder_key(model)]
    # The last of each kind in each folder: a key for every file takes 3 s.
    kinds = {(path.parent, path.suffix): path for copy in copies for path in sorted(copy.rglob("*.*"))}
    files = list(kinds.values())
    for path in files:
        path.write_text(path.read_text() + "\n")
        keys.append(decoder_key(model))
    assert {path.relative_to(tmp_path).parts[0] for path in files} == set("0123")
    assert "csrc" in {path.parent.name for path in files}
    assert None not in keys
    assert len(set(keys)) == len(files) + 1


def test_a_model_with_hooks_or_from_no_file_is_never_saved(tiny_folder: Path, private_cache: Path) -> None:
    hooked = acclimate.init_inference(tiny_folder, dtype="float32")
    hooked.model.layers[0].mlp.register_forward_hook(lambda module, args, result: None)
    assert decoder_key(hooked) is None
    patched = acclimate.init_inference(tiny_folder, dtype="float32")
    layer = patched.model.layers[0]
    layer.mlp.forward = layer.mlp.forward
    assert decoder_key(patched) is None
    assert decoder_key(torch.nn.Linear(2, 2)) is None
    _text(hooked)
    assert not (private_cache / "decoders").exists()


def test_a_damaged_description_is_proved_again_and_replaced(
    tiny_folder: Path, private_cache: Path, proofs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = acclimate.init_inference(tiny_folder, dtype="float32")
    assert describe(model) is not None
    (file,) = (private_cache / "decoders").glob("*/decoder.json")
    whole = file.read_bytes()
    choice = random.Random(0)
    damaged = bytearray(whole)
    damaged[choice.randrange(40, len(whole) - 40)] ^= 1 << choice.randrange(8)
    # Others are tried in the test of all texts of the cache.
    file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert describe(model) is not None
    assert len(proofs) == 2
    assert "derived and verified again" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.slow
def test_a_description_of_other_modules_is_not_used(
    tiny_folder: Path, private_cache: Path, proofs: list[Any]
) -> None:
    from acclimate.llm.decode.saved import _DECODERS

    model = acclimate.init_inference(tiny_folder, dtype="float32")
    describe(model)
    key = decoder_key(model)
    assert key is not None
    text = _DECODERS.load(key, str)
    assert text is not None
    for other in (
        text.replace("mlp.up_proj", "mlp.left_proj"),
        text.replace('"class": ["Norm"', '"class": ["Nothing"'),
        "{}",
        "[1]",
        "null",
        '"text"',
    ):
        _DECODERS.save(key, other)
        count = len(proofs)
        assert describe(model) is not None
        assert len(proofs) == count + 1


def test_a_cache_that_others_can_change_is_not_used(
    tiny_folder: Path, private_cache: Path, proofs: list[Any]
) -> None:
    model = acclimate.init_inference(tiny_folder, dtype="float32")
    describe(model)
    (folder,) = (entry for entry in (private_cache / "decoders").iterdir() if entry.is_dir())
    folder.chmod(0o777)
    assert describe(model) is not None
    assert len(proofs) == 2
