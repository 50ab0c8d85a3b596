"""``init_inference``: ranks that share a model give the whole model's results, or all raise one error."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import byte_level_tokenizer, config, write_tiny_gguf

import acclimate
from acclimate.errors import AcclimateError, InvalidRankError
from acclimate.llm import GenerationInterrupted, generate, load_split_model
from acclimate.llm.decode import loop
from acclimate.llm.kernels.builder import CPUInferenceBuilder
from quick_parameters import quick
from rank_processes import RankProcesses

PROMPT = [[0, 5, 9, 17]]
KINDS = ("llama", "gemma3", "gpt2", "mixtral", "deepseek_v3")


def build_config(kind: str) -> Any:
    common: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": None,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(**common, num_local_experts=4)
    if kind == "deepseek_v3":  # routers have a buffer that is stored with the weights
        latent = {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        }
        experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        moe = {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
        return transformers.DeepseekV3Config(
            **{**common, "num_key_value_heads": 4}, **latent, **experts, **moe
        )
    made = config(kind, 320)
    made.eos_token_id = None
    return made


def save_random_model(kind: str, folder: Path, shard_size: str = "40KB") -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(build_config(kind))
    for tensor in (*model.parameters(), *model.state_dict().values()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor.data, std=0.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in transformers' own layout, of several files each. Not to be changed: copy them first."""
    parent = tmp_path_factory.mktemp("models")
    return {kind: save_random_model(kind, parent / kind) for kind in KINDS}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "model"))


# -- what the ranks run ------------------------------------------------------------------------------

_kept: dict[str, Any] = {}
_models: dict[str, Any] = {}
"""Loaded by this rank, by folder; what is in a folder stays as it is."""
Damage = Callable[[Path], None]


def generate_tokens(model: Any, **options: Any) -> list[int]:
    tokens: list[int] = model.generate(
        torch.tensor(PROMPT), max_new_tokens=8, **{"do_sample": False, **options}
    )[0].tolist()
    return tokens


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def load(rank: int, folder: str, **options: Any) -> dict[str, Any]:
    model = acclimate.init_inference(folder, **{"dtype": "float32", **options})
    if not options:
        _models[folder] = model
    return {
        "tokens": generate_tokens(model),
        "own": sum(parameter.numel() for parameter in model.parameters()),
        "whole": model.whole.parameters,
        "is its own module": model.module is model,
    }


def hold(rank: int, folder: str) -> None:
    """Takes a model for the next function; this rank may have loaded it for another test."""
    if folder not in _models:
        _models[folder] = acclimate.init_inference(folder, dtype="float32")
    _kept["model"] = _models[folder]


def dtypes(rank: int, folder: str, dtype: str) -> set[str]:
    model = acclimate.init_inference(folder, dtype=dtype)
    return {str(parameter.dtype) for parameter in model.parameters()}


def load_without_planning(rank: int, folder: str, **options: Any) -> list[int]:
    def make_plan(*args: Any, **more: Any) -> None:
        raise RuntimeError("planned anew")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("acclimate.llm.split.planning.make_plan.make_plan", make_plan)
        return generate_tokens(acclimate.init_inference(folder, dtype="float32", **options))


def both_steps(rank: int, folder: str) -> tuple[str, list[int], list[int]]:
    """What computes a token, and the tokens of our loop and of transformers'."""
    model = acclimate.init_inference(folder, dtype="float32")
    kind, own = loop.step_kind(model), generate_tokens(model)
    original = loop.lean_sample
    loop.lean_sample = lambda *_, **__: None  # type: ignore[assignment]
    try:
        return kind, own, generate_tokens(model)
    finally:
        loop.lean_sample = original


def load_packed(rank: int, path: str, **options: Any) -> tuple[list[float], dict[str, int], list[str]]:
    """Returns some logits, how many weights of each format this rank has, and its weights without one."""
    model = acclimate.init_inference(path, **options)
    with torch.no_grad():
        result = model(torch.tensor(PROMPT)).logits[0, -1, :20].float().tolist()
    return result, dict(model.packing.packed), sorted(model.packing.dense)


def load_from(rank: int, folders: list[str]) -> None:
    acclimate.init_inference(folders[rank], dtype="float32")


def sample(rank: int) -> list[int]:
    torch.manual_seed(rank)
    return generate_tokens(_kept["model"], do_sample=True, temperature=2.0)


def generate_from_own_prompt(rank: int) -> None:
    _kept["model"].generate(torch.tensor([[rank, 1]]), max_new_tokens=1)


def split_loaded(rank: int, folder: str) -> tuple[bool, list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    split = acclimate.init_inference(model)
    return split is model, generate_tokens(split)


def save(rank: int, folder: str, most_bytes: int | None = None, **options: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes is not None and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        _kept["model"].save_pretrained(folder, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def peak_while_loading(rank: int, folder: str) -> tuple[int, int, int, int]:
    """The most memory that loading took, what it read, this rank's shard and the largest tensor, in bytes."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    load(rank, folder)  # imports, and memory that the allocator keeps
    _models.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, unread = status("VmRSS"), read_bytes()
    model = acclimate.init_inference(folder, dtype="float32")
    sizes = {name: split.shape for name, split in model.tp_plan_applied.splits.items()}
    largest = max(torch.Size(shape).numel() for shape in sizes.values()) * 4
    shard = sum(parameter.numel() * 4 for parameter in model.parameters())
    return status("VmHWM") - before, read_bytes() - unread, shard, largest


def generate_until_one_rank_is_interrupted(rank: int) -> int:
    """Returns how many tokens this rank had when it stopped."""
    loaded = load_split_model(str(_kept["folder"]), dtype="float32")
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        generate("The capital", model=loaded, max_new_tokens=40, on_text=interrupt)
    except GenerationInterrupted as interruption:
        return interruption.partial.generated_tokens
    return -1


def keep(rank: int, folder: str) -> None:
    _kept["folder"] = folder


def load_while_a_file_changes(rank: int, folder: str, change: Damage) -> None:
    from acclimate.llm.files import slices

    load_slice, loaded = slices.Slice.load, [0]

    def change_and_load(tensor: Any, *arguments: Any) -> None:
        loaded[0] += 1
        if loaded[0] == 4 and rank == 1:
            change(Path(folder))
        load_slice(tensor, *arguments)

    slices.Slice.load = change_and_load  # type: ignore[method-assign]
    try:
        load(rank, folder)
    finally:
        slices.Slice.load = load_slice  # type: ignore[method-assign]


def whole_tokens(folder: Path) -> list[int]:
    return generate_tokens(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


# -- promises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick(KINDS, "llama"))
def test_two_ranks_hold_their_slices_and_generate_what_the_whole_model_does(
    kind: str, two: RankProcesses, folders: dict[str, Path]
) -> None:
    tokens = whole_tokens(folders[kind])
    for found in two.values(load, str(folders[kind])):
        assert found["tokens"] == tokens
        assert found["own"] < 0.75 * found["whole"]
        assert found["is its own module"]


@pytest.mark.slow
def test_three_ranks_generate_what_the_whole_model_does(folders: dict[str, Path], tmp_path: Path) -> None:
    environment = {
        "ACCLIMATE_ACCELERATOR": "cpu",
        "ACCLIMATE_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with RankProcesses(3, backend="gloo", environment=environment, models=True) as three:
        for found in three.values(load, str(folders["llama"])):
            assert found["tokens"] == whole_tokens(folders["llama"])


@pytest.mark.slow
def test_the_second_start_with_a_model_uses_the_first_ones_plan(two: RankProcesses, folder: Path) -> None:
    first = two.values(load, str(folder))
    moved = folder.rename(folder.with_name("elsewhere"))
    assert two.values(load_without_planning, str(moved)) == [answer["tokens"] for answer in first]
    for told in two.run(load_without_planning, str(moved), verify=True):
        assert "planned anew" in told.error


@pytest.mark.parametrize("kind", quick(("gemma3", "llama"), "llama"))
def test_ranks_take_the_lean_step_together(kind: str, two: RankProcesses, folders: dict[str, Path]) -> None:
    for step, own, expected in two.values(both_steps, str(folders[kind])):
        assert step == ("native" if CPUInferenceBuilder().is_compatible() else "plain")
        assert own == expected


def test_ranks_sample_the_same_tokens(two: RankProcesses, folders: dict[str, Path]) -> None:
    two.values(hold, str(folders["llama"]))
    first, second = two.values(sample)
    assert first == second


def test_ranks_with_different_prompts_all_say_so(two: RankProcesses, folders: dict[str, Path]) -> None:
    two.values(hold, str(folders["llama"]))
    for told in two.run(generate_from_own_prompt):
        assert "rank 1 generates from another prompt than rank 0" in told.error


def test_a_loaded_model_is_split_where_it_is(two: RankProcesses, folders: dict[str, Path]) -> None:
    for same, tokens in two.values(split_loaded, str(folders["llama"])):
        assert same
        assert tokens == whole_tokens(folders["llama"])


def test_mixed_dtypes_become_the_one_asked_for(two: RankProcesses, folder: Path) -> None:
    for index, path in enumerate(sorted(folder.glob("*.safetensors"))):
        tensors = load_file(path)
        kinds = (torch.float16, torch.float32, torch.bfloat16)
        save_file({name: tensor.to(kinds[index % 3]) for name, tensor in tensors.items()}, path)
    assert two.values(dtypes, str(folder), "bfloat16") == [{"torch.bfloat16"}] * 2


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_shard_and_the_largest_tensor(
    two: RankProcesses, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    large = config("llama", 4096)
    large.hidden_size, large.intermediate_size, large.num_hidden_layers = 1024, 4096, 3
    large.head_dim = 256
    transformers.AutoModelForCausalLM.from_config(large).save_pretrained(tmp_path)
    stored = (tmp_path / "model.safetensors").stat().st_size
    for peak, read, shard, largest in two.values(peak_while_loading, str(tmp_path)):
        assert shard > 100e6
        assert read < 0.8 * stored  # whole rows are read where they are short
        assert peak <= 1.25 * (shard + largest), (peak, shard, largest)


# -- damage ------------------------------------------------------------------------------------------

NAME = "model.layers.1.self_attn.o_proj.weight"


def file_of(folder: Path, name: str = NAME) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][name])


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        path = file_of(folder)
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NAME]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["v_head.weight"] = torch.ones(2)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME][:16].clone()


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME][3, 1] = float("nan")


def truncate(folder: Path) -> None:
    path = file_of(folder)
    os.truncate(path, path.stat().st_size - 4)


def misplace(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    other = next(name for name in set(index["weight_map"].values()) if name != index["weight_map"][NAME])
    index["weight_map"][NAME] = other
    path.write_text(json.dumps(index))


def drop_from_index(folder: Path) -> None:
    changed(remove)(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][NAME]
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (changed(remove), f"lacks the tensor {NAME}"),
        (drop_from_index, f"lacks weights its config asks for: {NAME}"),
        (changed(add), "leaves out: v_head.weight"),
        (changed(reshape), f"another shape than its config asks for: {NAME} is [16, 32], not [32, 32]"),
        (changed(spoil), f"the tensor {NAME}"),
        (truncate, "is cut off: it ends at byte"),
        (misplace, f"lacks the tensor {NAME}"),
    ],
    ids=["missing", "missing from the index", "extra", "misshapen", "not a number", "truncated", "misplaced"],
)
def test_all_ranks_name_the_damaged_tensor(
    damage: Damage, words: str, two: RankProcesses, folder: Path
) -> None:
    damage(folder)
    for told in two.run(load, str(folder)):
        assert told.error.startswith("CorruptModelError")
        assert words in told.error


def empty(folder: Path) -> None:
    os.truncate(file_of(folder), 100)


def overwrite(folder: Path) -> None:
    path = file_of(folder)
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def disappear(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("change", [empty, overwrite, pytest.param(disappear, marks=pytest.mark.slow)])
def test_all_ranks_name_the_file_that_changes_while_they_read(
    change: Damage, two: RankProcesses, folder: Path
) -> None:
    for told in two.run(load_while_a_file_changes, str(folder), change):
        assert told.error.startswith("CorruptModelError"), told.error
        assert f"{folder}/model-0000" in told.error


@pytest.mark.slow
def test_extra_tensors_can_be_ignored(two: RankProcesses, folder: Path, folders: dict[str, Path]) -> None:
    changed(add)(folder)
    for found in two.values(load, str(folder), ignore_extra=["v_head.*"]):
        assert found["tokens"] == whole_tokens(folders["llama"])


def test_ranks_that_find_other_files_all_say_so(two: RankProcesses, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    changed(add)(other)
    for told in two.run(load_from, [str(folder), str(other)]):
        assert told.error.startswith("CorruptModelError")


def test_an_error_of_one_rank_is_raised_on_all(two: RankProcesses, folder: Path, tmp_path: Path) -> None:
    for told in two.run(load_from, [str(folder), str(tmp_path / "none")]):
        assert told.error.startswith("ModelNotFoundError")


def test_a_rank_that_dies_while_loading_ends_the_others(folders: dict[str, Path], tmp_path: Path) -> None:
    environment = {
        "ACCLIMATE_ACCELERATOR": "cpu",
        "ACCLIMATE_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with RankProcesses(2, backend="gloo", environment=environment, models=True) as ranks:
        ranks.start(load, str(folders["llama"]), ranks=[0])  # waits for rank 1
        ranks.kill(1)
        start = time.monotonic()
        assert ranks.hear(0).error
        assert time.monotonic() - start < 60


def test_all_ranks_stop_at_the_same_token_when_one_is_interrupted(two: RankProcesses, folder: Path) -> None:
    byte_level_tokenizer().save_pretrained(folder)
    two.values(keep, str(folder))
    first, second = two.values(generate_until_one_rank_is_interrupted)
    assert 0 < first == second < 40


# -- saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick(("gemma3", "mixtral"), "gemma3"))
def test_a_split_model_is_saved_as_a_folder_that_transformers_loads(
    kind: str, two: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    two.values(hold, str(folders[kind]))
    two.values(save, str(tmp_path / "saved"))
    assert whole_tokens(tmp_path / "saved") == whole_tokens(folders[kind])
    original, saved = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (folders[kind], tmp_path / "saved")
    )
    assert original.keys() == saved.keys()
    assert all(torch.equal(original[name], saved[name]) for name in original)


def test_saving_beside_a_tokenizer_replaces_the_old_model(
    two: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    save_random_model("gpt2", tmp_path)
    two.values(hold, str(folders["llama"]))
    two.values(save, str(tmp_path))
    assert (tmp_path / "tokenizer.json").exists()
    assert not list(tmp_path.glob("model-*"))
    assert whole_tokens(tmp_path) == whole_tokens(folders["llama"])


def test_a_full_disk_leaves_nothing_and_is_told_to_all_ranks(
    two: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    two.values(hold, str(folders["llama"]))
    for told in two.run(save, str(tmp_path / "saved"), 20_000):
        assert told.error.startswith("SaveError"), told.error
    assert not list(tmp_path.iterdir())


# -- one process -------------------------------------------------------------------------------------


def test_one_process_gets_the_whole_model(folders: dict[str, Path]) -> None:
    model = acclimate.init_inference(folders["llama"], dtype="float32")
    assert generate_tokens(model) == whole_tokens(folders["llama"])
    assert model.module is model
    assert type(model).__name__ == "LlamaForCausalLM"


def test_more_ranks_than_the_job_has_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRankError, match="tp_size is 2, and this job has 1 rank"):
        acclimate.init_inference(folders["llama"], tp_size=2)


def test_a_pickled_checkpoint_is_loaded(folder: Path, folders: dict[str, Path]) -> None:
    tensors = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    model = acclimate.init_inference(folder, dtype="float32")
    assert generate_tokens(model) == whole_tokens(folders["llama"])


def test_tied_weights_that_a_file_has_twice_are_tied(folder: Path, folders: dict[str, Path]) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folders["gemma3"], folder)
    path = file_of(folder, "model.embed_tokens.weight")
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    model = acclimate.init_inference(folder, dtype="float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_split_loader_serves_generate(folder: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    loaded = load_split_model(str(folder), dtype="float32")
    result = generate("The capital", model=loaded, max_new_tokens=3)
    assert (result.generated_tokens, result.ranks, result.parameters) == (3, 1, loaded.parameters)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(AcclimateError, match="not an object of type int"):
        acclimate.init_inference(3)


# -- quantised weights -------------------------------------------------------------------------------


def test_ranks_quantise_their_own_slices_while_loading(two: RankProcesses, folders: dict[str, Path]) -> None:
    (one, packed, _), (other, also, _) = two.values(
        load_packed, str(folders["llama"]), dtype="float32", quantize="int8"
    )
    assert one == other
    assert packed == also == {"int8": 16}
    whole = acclimate.init_inference(folders["llama"], dtype="float32")
    with torch.no_grad():
        expected = whole(torch.tensor(PROMPT)).logits[0, -1, :20]
    assert (torch.tensor(one) - expected).norm() < 0.2 * expected.norm()


def test_a_quantised_key_head_that_each_rank_has_whole_is_used_by_all(
    two: RankProcesses, tmp_path: Path
) -> None:
    one_head = build_config("llama")
    one_head.num_key_value_heads = 1
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(one_head).save_pretrained(tmp_path)
    (one, packed, _), (other, _, _) = two.values(load_packed, str(tmp_path), dtype="float32", quantize="int8")
    assert one == other
    assert packed == {"int8": 16}


def test_ranks_take_rows_and_whole_blocks_of_a_gguf_file_and_unpack_the_rest(
    two: RankProcesses, tmp_path: Path
) -> None:
    path = write_tiny_gguf("llama", tmp_path / "model.gguf")
    (one, packed, dense), (other, _, _) = two.values(load_packed, str(path))
    assert one == other
    assert packed["q8_0"] == 14
    assert dense == [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)]  # 16 columns each
    whole = acclimate.init_inference(path)
    with torch.no_grad():
        expected = whole(torch.tensor(PROMPT)).logits[0, -1, :20].float()
    assert (torch.tensor(one) - expected).norm() < 0.2 * expected.norm()
