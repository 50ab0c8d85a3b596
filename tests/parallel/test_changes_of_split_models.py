"""What a user can do to a model after ``init_inference`` split it: it works as on the whole one, or is refused.

Each test runs on two real processes; a refusal must be an error of all ranks.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from architectures import prompt, tiny_model
from torch import Tensor, nn

import acclimate
from acclimate.errors import PlanError, UnsupportedError, UnsupportedModelError
from rank_processes import RankProcesses, Told, preload
from shared_kernels import share_kernels

preload("acclimate.parallel.planning.make_plan", "transformers.models.qwen3_moe.modeling_qwen3_moe")

NAMES = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "bloom", "falcon")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    cache = tmp_path_factory.mktemp("cache")
    share_kernels(cache)
    environment = {"ACCLIMATE_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    with RankProcesses(2, backend="gloo", environment=environment, timeout_s=60) as ranks:
        yield ranks


# -- what the ranks run ------------------------------------------------------------------------------

_models: dict[str, tuple[Any, Any]] = {}


def pair(name: str) -> tuple[Any, Any]:
    """The whole model, and a split one of the same weights; both new to the caller."""
    if name not in _models:
        whole = tiny_model(name)
        _models[name] = whole, acclimate.init_inference(copy.deepcopy(whole), dtype="float32", verify=False)
    whole, split = _models[name]
    return copy.deepcopy(whole), copy.deepcopy(split)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(prompt("llama", 2)["input_ids"]).logits
    return found


def text(model: Any, **options: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": 8, **options}
    tokens: list[int] = model.generate(**prompt("llama", 1), **settings)[0].tolist()
    return tokens


def compare(rank: int, name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Makes a change to a whole model and to a split one, and compares what they give."""
    whole, split = pair(name)
    of_whole, of_split = change(whole), change(split)
    whole = whole if of_whole is None else of_whole
    split = split if of_split is None else of_split
    error = float((logits(whole).double() - logits(split).double()).abs().max())
    return {"error": error, "same text": text(whole) == text(split)}


def attempt(rank: int, name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Makes a change to a split model that it may refuse, or notice when it runs."""
    whole, split = pair(name)
    before = text(split)
    change(split)
    text(split)
    raise AssertionError(f"neither refused nor noticed; before: {before}")


# -- changes that work -------------------------------------------------------------------------------


def deep_copied(model: Any) -> Any:
    """A copy that works with its own weights, not with the first model's."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return made


def shallowly_copied(model: Any) -> Any:
    return copy.copy(model)


def in_double(model: Any) -> Any:
    return model.double()


def in_bfloat16_and_back(model: Any) -> Any:
    return model.bfloat16().float()


def moved(model: Any) -> Any:
    return model.to("cpu").to(torch.float64)


def tied_again(model: Any) -> None:
    model.tie_weights()


def trained_and_evaluated(model: Any) -> None:
    model.train()
    model.requires_grad_(False)
    model.requires_grad_(True)
    model.eval()


def with_input_gradients(model: Any) -> None:
    model.enable_input_require_grads()


def with_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def with_other_settings(model: Any) -> None:
    model.config.use_cache = False
    model.config.num_attention_heads = 2
    model.generation_config.repetition_penalty = 1.3


def own_state_loaded(model: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)


def state_saved_and_loaded(model: Any) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))


def state_assigned(model: Any) -> None:
    model.load_state_dict(dict(model.state_dict()), assign=True)


def with_fewer_layers(model: Any) -> None:
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    del layers[1]
    model.config.num_hidden_layers = 1


def with_hooks(model: Any) -> None:
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    layers[0].register_forward_hook(lambda _, args, output: output)
    model.get_output_embeddings().register_forward_hook(lambda _, args, output: output * 2)


def wrapped_layer(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    layers[0] = checkpoint_wrapper(layers[0])


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WORKS = [
    deep_copied,
    shallowly_copied,
    in_double,
    in_bfloat16_and_back,
    moved,
    tied_again,
    trained_and_evaluated,
    with_input_gradients,
    with_eager_attention,
    with_other_settings,
    own_state_loaded,
    state_saved_and_loaded,
    state_assigned,
    with_fewer_layers,
    with_hooks,
    wrapped_layer,
]


@pytest.mark.parametrize("change", WORKS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_split_model_gives_what_the_changed_whole_one_gives(
    name: str, change: Callable[[Any], Any], two: RankProcesses
) -> None:
    for found in two.values(compare, name, change):
        assert found["same text"], found
        assert found["error"] < 1e-4


# -- changes that are refused ------------------------------------------------------------------------


def resized(model: Any) -> None:
    model.resize_token_embeddings(200)


def other_embeddings(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(160, 64))


def other_head(model: Any) -> None:
    model.set_output_embeddings(nn.Linear(64, 160, bias=False))


def initialized_again(model: Any) -> None:
    model.init_weights()


def with_an_adapter(model: Any) -> None:
    model.add_adapter(object())


def with_an_adapter_of_a_folder(model: Any) -> None:
    model.load_adapter("folder")


def pushed(model: Any) -> None:
    model.push_to_hub("name")


def pickled(model: Any) -> None:
    pickle.dumps(model)


def saved_as_an_object(model: Any) -> None:
    torch.save(model, io.BytesIO())


def split_again(model: Any) -> None:
    acclimate.init_inference(model)


def quantised_afterwards(model: Any) -> None:
    acclimate.init_inference(model, quantize="int8")


def wrapped_and_split_again(model: Any) -> None:
    acclimate.init_inference(nn.Sequential(model))


REFUSED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (resized, UnsupportedError, "resize_token_embeddings .* split over 2 ranks. Resize the whole model, and"),
    (other_embeddings, UnsupportedError, "set_input_embeddings .* split over 2 ranks"),
    (other_head, UnsupportedError, "set_output_embeddings .* split over 2 ranks"),
    (initialized_again, UnsupportedError, "init_weights .* split over 2 ranks"),
    (with_an_adapter, UnsupportedError, "add_adapter .* split over 2 ranks"),
    (with_an_adapter_of_a_folder, UnsupportedError, "load_adapter .* split over 2 ranks"),
    (pushed, UnsupportedError, "push_to_hub .* split over 2 ranks"),
    (pickled, UnsupportedError, "cannot be pickled.*save_pretrained"),
    (saved_as_an_object, UnsupportedError, "cannot be pickled.*save_pretrained"),
    (split_again, UnsupportedModelError, "is already split over 2 ranks"),
    (quantised_afterwards, UnsupportedModelError, "is already split over 2 ranks"),
    (wrapped_and_split_again, UnsupportedModelError, "is already split over 2 ranks"),
]


def assert_refused(told: list[Told], kind: type[Exception], message: str) -> None:
    for each in told:
        assert each.error.startswith(f"{kind.__name__}: "), each
        assert re.search(message, each.error), each


@pytest.mark.parametrize(
    ("change", "kind", "message"), REFUSED, ids=[each[0].__name__ for each in REFUSED]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_that_cannot_work_on_shards_is_refused_by_name(
    name: str, change: Callable[[Any], None], kind: type[Exception], message: str, two: RankProcesses
) -> None:
    assert_refused(two.run(attempt, name, change), kind, message)


def a_split_linear(model: Any) -> tuple[nn.Module, str, nn.Module]:
    """A module of the first layer's MLP or attention, its name in its owner, and the owner."""
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    for owner in layers[0].modules():
        for name, module in owner.named_children():
            if type(module).__name__ in ("FewRowLinear", "Linear", "Conv1D", "FalconLinear"):
                return owner, name, module
    raise AssertionError("no linear module")


def with_an_adapter_beside_a_linear_module(model: Any) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Any:
            return self.base_layer(x)

    owner, name, module = a_split_linear(model)
    setattr(owner, name, Adapted(module))


def with_another_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 160, bias=False)


def with_another_head_on_one_rank(model: Any) -> None:
    if model.model_ranks.rank == 1:
        model.lm_head = nn.Linear(64, 160, bias=False)


def parametrized(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(a_split_linear(model)[2], "weight", nn.Identity())


def weight_normalized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(a_split_linear(model)[2])


def pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(a_split_linear(model)[2], "weight", 0.5)


def with_whole_weights(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.zeros(160, 64))


def without_hooks(model: Any) -> None:
    for module in model.modules():
        module._forward_hooks.clear()


NOTICED = [
    with_an_adapter_beside_a_linear_module,
    with_another_head,
    with_another_head_on_one_rank,
    parametrized,
    weight_normalized,
    pruned,
    with_whole_weights,
    without_hooks,
]


@pytest.mark.parametrize("change", NOTICED, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_a_split_module_is_an_error_of_all_ranks_at_the_next_text(
    name: str, change: Callable[[Any], None], two: RankProcesses
) -> None:
    told = two.run(attempt, name, change)
    assert_refused(told, PlanError, "after the model was split over 2 ranks.*[Cc]hange the whole model first")
