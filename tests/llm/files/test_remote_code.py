"""Python code that a model brings with it runs only with --trust_remote_code, whatever stdin says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from generate_command import PROMPT, Run, assert_one_line_error

import acclimate
from acclimate.errors import RemoteCodeError

CONFIG = """
from pathlib import Path
from transformers import LlamaConfig
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own-model"
"""
MODEL = """
from pathlib import Path
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
Path({marker!r}).touch()
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
GENERATE = """
from pathlib import Path
Path({marker!r}).touch()
def generate(model, *arguments, **options):
    return model.generate(*arguments, **options)
"""


def change(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "the-code-ran"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where transformers copies code before it imports it; one folder, for it stays imported."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def folder(
    tiny_folder: Path, tmp_path: Path, marker: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A tiny model with code of its own beside it, which nothing names yet."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    for name, code in {
        "configuration_own.py": CONFIG,
        "modeling_own.py": MODEL,
        "tokenization_own.py": TOKENIZER,
        "custom_generate/generate.py": GENERATE,
    }.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(code.format(marker=str(marker)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    return copy


def own_model(folder: Path) -> None:
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    change(folder / "config.json", model_type="own-model", auto_map=names)


def own_tokenizer(folder: Path) -> None:
    names = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=names)


def old_tokenizer(folder: Path) -> None:
    names = ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=names)


def own_kernel(folder: Path) -> None:
    change(folder / "config.json", attn_implementation="someone/attention")


def own_kernel_within(folder: Path) -> None:
    change(folder / "config.json", text_config={"_attn_implementation_internal": "someone/attention"})


def contrastive_search(folder: Path) -> None:
    change(folder / "generation_config.json", penalty_alpha=0.6, top_k=4)


def beam_groups(folder: Path) -> None:
    change(folder / "generation_config.json", num_beam_groups=2, num_beams=4)


def custom_generate(folder: Path) -> None:
    change(folder / "generation_config.json", custom_generate="someone/generate")


@pytest.mark.parametrize(
    ("ask", "file", "field"),
    [
        (own_model, "config.json", "auto_map"),
        (own_tokenizer, "tokenizer_config.json", "auto_map"),
        (old_tokenizer, "tokenizer_config.json", "auto_map"),
        (own_kernel, "config.json", "attn_implementation"),
        (own_kernel_within, "config.json", "_attn_implementation_internal"),
        (contrastive_search, "generation_config.json", "penalty_alpha"),
        (beam_groups, "generation_config.json", "num_beam_groups"),
        (custom_generate, "generation_config.json", "custom_generate"),
    ],
)
def test_code_is_refused_with_the_file_and_the_field_and_stdin_is_not_asked(
    acclimate: Run, folder: Path, marker: Path, ask: Any, file: str, field: str
) -> None:
    ask(folder)
    done = acclimate(PROMPT, "--model", str(folder), input=b"y\n" * 20)
    assert_one_line_error(done, file, field, "--trust_remote_code")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["config.json", "processor_config.json", "preprocessor_config.json"])
def test_code_that_nobody_needs_is_not_run(acclimate: Run, folder: Path, marker: Path, file: str) -> None:
    names = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
        "AutoProcessor": "tokenization_own.OwnTokenizer",
        "AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"],
    }
    change(folder / file, auto_map=names)
    done = acclimate(PROMPT, "--model", str(folder), "--max-new-tokens", "3", input=b"y\n" * 20)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("ask", [own_model, own_tokenizer])
def test_trusted_code_runs(acclimate: Run, folder: Path, marker: Path, ask: Any) -> None:
    shutil.rmtree(folder / "custom_generate")
    ask(folder)
    done = acclimate(PROMPT, "--model", str(folder), "--max-new-tokens", "3", "--trust_remote_code")
    assert done.returncode == 0, done.stderr
    assert marker.exists()


def test_a_program_trusts_with_a_keyword(folder: Path, marker: Path) -> None:
    shutil.rmtree(folder / "custom_generate")
    own_model(folder)
    with pytest.raises(RemoteCodeError, match="auto_map"):
        acclimate.generate(PROMPT, model=folder)
    assert not marker.exists()
    assert acclimate.generate(PROMPT, model=folder, max_new_tokens=2, trust_remote_code=True).tokens
    assert marker.exists()
