"""What a user can do to a model that ``init_inference`` has split: it works as on a whole one, or is refused.

Almost all tests run on two real processes; a refusal must be an error of all ranks.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from architectures import prompt, tiny_model
from torch import Tensor, nn

import acclimate
from acclimate.errors import PlanError, UnsupportedError, UnsupportedModelError
from acclimate.llm.loading.inference_model import InferenceModel
from pairs import all_pairs
from quick_parameters import quick
from rank_processes import RankProcesses, Told
from shared_kernels import share_kernels

OTHERS = ("gemma3_text", "qwen3_moe", "bloom", "falcon")
NAMES = ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    cache = tmp_path_factory.mktemp("cache")
    share_kernels(cache)
    environment = {"ACCLIMATE_ACCELERATOR": "cpu", "ACCLIMATE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    with RankProcesses(2, backend="gloo", environment=environment, timeout_s=60, models=True) as ranks:
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


def attempt(rank: int, name: str, change: Callable[[Any], Any]) -> None:
    """Makes a change to a split model that it may refuse, or notice when it runs."""
    _, split = pair(name)
    change(split)
    raise AssertionError(f"neither refused nor noticed; it gives {text(split)}")


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
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    del layers[1]
    model.config.num_hidden_layers = 1


def with_hooks(model: Any) -> None:
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers[0].register_forward_hook(lambda _, args, output: output)
    model.get_output_embeddings().register_forward_hook(lambda _, args, output: output * 2)


def wrapped_layer(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers[0] = checkpoint_wrapper(layers[0])


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def one_by_one(model: Any) -> None:
    """The order of the tensors does not count, and tied ones may be missing."""
    model.load_state_dict(dict(reversed(model.state_dict().items())))


def trained_a_step(model: Any) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ranks drop other elements than the whole model
    model.gradient_checkpointing_enable()
    model(**prompt("llama", 2)).logits.log_softmax(-1)[..., 5].mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.5)
    model.eval()


WORKS = [
    one_by_one,
    trained_a_step,
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


def name_of(change: Callable[[Any], Any]) -> str:
    return change.__name__


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *all_pairs(("llama", "gpt2"), WORKS, column_id=name_of),
        *(
            pytest.param(name, change, id=f"{name}-{name_of(change)}", marks=pytest.mark.slow)
            for name in OTHERS
            for change in WORKS
        ),
    ],
)
def test_a_changed_split_model_gives_what_the_changed_whole_one_gives(
    name: str, change: Callable[[Any], Any], two: RankProcesses
) -> None:
    if name == "qwen3_moe" and change in (in_double, moved):
        pytest.skip("transformers' experts do not compute in float64, whole either")
    for found in two.values(compare, name, change):
        assert found["same text"], found
        assert found["error"] < 1e-4


@pytest.mark.parametrize("name", quick(("olmo2", "gpt_oss"), "olmo2"))
def test_a_copy_with_norms_over_all_ranks_uses_its_own_weights(name: str, two: RankProcesses) -> None:
    for found in two.values(compare, name, deep_copied):
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
    for answer in told:
        assert answer.error.startswith(f"{kind.__name__}: "), answer
        assert re.search(message, answer.error), answer


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED, ids=[call[0].__name__ for call in REFUSED])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_that_cannot_work_on_shards_is_refused_by_name(
    name: str, change: Callable[[Any], None], kind: type[Exception], message: str, two: RankProcesses
) -> None:
    assert_refused(two.run(attempt, name, change), kind, message)


def a_split_linear(model: Any) -> tuple[nn.Module, str, nn.Module]:
    """A module of the first layer's MLP or attention, its name in its owner, and the owner."""
    layers = next(inner for inner in model.modules() if isinstance(inner, nn.ModuleList))
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


def with_a_bias(model: Any) -> None:
    """On a module whose results the ranks sum, so that each would add the bias."""
    names = ("o_proj", "attn.c_proj", "attention.dense")
    module = next(inner for name, inner in model.named_modules() if name.endswith(names))
    module.bias = nn.Parameter(torch.ones(model.config.hidden_size))


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
    with_a_bias,
    without_hooks,
]


@pytest.mark.parametrize("change", NOTICED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_a_split_module_is_an_error_of_all_ranks_at_the_next_text(
    name: str, change: Callable[[Any], None], two: RankProcesses
) -> None:
    told = two.run(attempt, name, change)
    assert_refused(told, PlanError, "after the model was split over 2 ranks.*[Cc]hange the whole model first")


# -- generate on ranks that differ -------------------------------------------------------------------


class StopsAfter:
    """A stopping criterion that ends the text after so many of its own calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


class Fails:
    """A streamer, criterion and processor that raises at its third token."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ConnectionResetError("the reader has gone")

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.put(None)
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


class FailsAtTheEnd(Fails):
    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        raise ConnectionResetError("the reader has gone")


class Adds:
    """A logits processor that prefers one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.token] += 1e4
        return scores


class Collects:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def list_of(processor: Any) -> Any:
    from transformers import LogitsProcessorList

    return LogitsProcessorList([processor])


def generated(rank: int, name: str, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The whole model's text and the split one's."""
    whole, split = pair(name)
    torch.manual_seed(7)
    expected = text(whole, **options)
    torch.manual_seed(7 + 5 * rank)  # rank 0's counts
    return expected, text(split, **options)


OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": True, "num_beams": 2, "temperature": 2.0},
    {"prompt_lookup_num_tokens": 2},
    {"use_cache": False},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"cache_implementation": "static", "disable_compile": True},
    {"max_time": 600.0},
]


@pytest.mark.parametrize(("name", "options"), all_pairs(("llama", "gpt2"), OPTIONS))
def test_options_of_generate_give_the_text_of_the_whole_model(
    name: str, options: dict[str, Any], two: RankProcesses
) -> None:
    for expected, found in two.values(generated, name, options):
        assert found == expected


def assisted(rank: int, name: str) -> tuple[list[int], list[int]]:
    whole, split = pair(name)
    return text(whole), text(split, assistant_model=whole)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_assistant_does_not_change_the_text(name: str, two: RankProcesses) -> None:
    for expected, found in two.values(assisted, name):
        assert found == expected


def by_the_clock_of_one_rank(rank: int) -> list[int]:
    """As where one rank's clock runs out first."""
    _, split = pair("llama")
    return text(split, max_new_tokens=40, stopping_criteria=[StopsAfter(5)] if rank == 1 else None)


def by_slow_clocks(rank: int) -> list[int]:
    _, split = pair("llama")
    text(split, max_new_tokens=2)
    return text(split, max_new_tokens=100, max_time=0.02)


def test_a_text_that_one_rank_ends_is_the_same_on_all(two: RankProcesses) -> None:
    first, second = two.values(by_the_clock_of_one_rank)
    assert first == second
    assert len(first) == 9 + 5


def test_a_text_that_ends_by_the_clock_is_the_same_on_all_ranks(two: RankProcesses) -> None:
    first, second = two.values(by_slow_clocks)
    assert first == second
    assert len(first) < 9 + 100


def streamed_on_rank_0(rank: int) -> tuple[list[int], list[int]]:
    _, split = pair("llama")
    streamer = Collects() if rank == 0 else None
    tokens = text(split, streamer=streamer)
    return tokens, streamer.tokens if streamer is not None else [*tokens, -1]


def test_a_streamer_on_rank_0_alone_gets_the_text(two: RankProcesses) -> None:
    (first, streamed), (second, _) = two.values(streamed_on_rank_0)
    assert first == second
    assert streamed == [*first, -1]


def fail_on_one_rank(rank: int, argument: str, kind: type[Any]) -> None:
    _, split = pair("llama")
    mine = kind() if rank == 0 else None
    if mine is not None and argument != "streamer":
        mine = list_of(mine)
    text(split, **{argument: mine})


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("streamer", Fails),
        ("streamer", FailsAtTheEnd),
        ("stopping_criteria", Fails),
        ("logits_processor", Fails),
    ],
)
def test_an_error_in_one_ranks_own_code_is_raised_on_all(
    argument: str, kind: type[Any], two: RankProcesses
) -> None:
    first, second = two.run(fail_on_one_rank, argument, kind)
    assert first.error == "ConnectionResetError: the reader has gone"
    assert second.error == "RankFailedError: rank 0 failed with ConnectionResetError: the reader has gone"
    one, other = two.values(by_the_clock_of_one_rank)  # the ranks still work together
    assert one == other


class Exits(Fails):
    """As the streamer of a server whose task is cancelled: what it raises is no Exception."""

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        self.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value: Any) -> None:
        try:
            super().put(value)
        except ConnectionResetError:
            sys.exit("cancelled")


def exit_on_one_rank(rank: int, argument: str) -> str:
    try:
        fail_on_one_rank(rank, argument, Exits)
    except SystemExit as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("argument", ["streamer", "stopping_criteria"])
def test_one_ranks_own_code_that_exits_ends_the_text_on_all(argument: str, two: RankProcesses) -> None:
    first, second = two.run(exit_on_one_rank, argument)
    assert first.value == "cancelled"
    assert second.error == "RankFailedError: rank 0 failed with SystemExit: cancelled"
    one, other = two.values(by_the_clock_of_one_rank)  # the ranks still work together
    assert one == other


def differ(rank: int, options: list[dict[str, Any]]) -> None:
    text(pair("llama")[1], **options[rank])


def differ_in_settings(rank: int) -> None:
    _, split = pair("llama")
    split.generation_config.repetition_penalty = 1.0 + rank
    text(split)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{}, {"max_new_tokens": 9}], "rank 1 generates with another max_new_tokens than rank 0"),
        ([{"temperature": 2.0}, {}], "rank 1 generates with another temperature than rank 0"),
        (
            [{"attention_mask": torch.ones(1, 9)}, {"attention_mask": torch.zeros(1, 9)}],
            "rank 1 generates with another attention_mask",
        ),
        ([{"logits_processor": list_of(Adds(5))}, {}], "the ranks chose different tokens"),
    ],
    ids=["length", "temperature", "mask", "processor"],
)
def test_ranks_whose_calls_differ_all_say_so(
    options: list[dict[str, Any]], message: str, two: RankProcesses
) -> None:
    for told in two.run(differ, options):
        assert told.error.startswith("InvalidRankError: ")
        assert message in told.error


def test_ranks_whose_settings_differ_all_say_so(two: RankProcesses) -> None:
    for told in two.run(differ_in_settings):
        assert "rank 1 generates with another generation_config of the model than rank 0" in told.error


# -- state dicts -------------------------------------------------------------------------------------


def load_a_whole_state(rank: int, name: str, assign: bool) -> tuple[list[int], list[int]]:
    whole, split = pair(name)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.5)
    split.load_state_dict(whole.state_dict(), assign=assign)
    return text(whole), text(split)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_models_state_is_loaded_in_parts(name: str, assign: bool, two: RankProcesses) -> None:
    for expected, found in two.values(load_a_whole_state, name, assign):
        assert found == expected


def load_the_state_of_rank_0(rank: int) -> None:
    import torch.distributed as dist

    _, split = pair("llama")
    file = io.BytesIO()
    torch.save(split.state_dict(), file)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, file.getvalue())
    split.load_state_dict(torch.load(io.BytesIO(told[0]), weights_only=True))


def test_the_state_of_another_rank_is_refused(two: RankProcesses) -> None:
    for told in two.run(load_the_state_of_rank_0):
        assert told.error.startswith("PlanError: the state dict holds the part of rank 0 of 2")


def load_a_state_that_does_not_fit(rank: int) -> None:
    _, split = pair("llama")
    split.load_state_dict({"lm_head.weight": torch.zeros(200, 64)} if rank == 1 else split.state_dict())


def test_a_state_that_one_rank_cannot_load_is_an_error_of_all(two: RankProcesses) -> None:
    for told in two.run(load_a_state_that_does_not_fit):
        assert "size mismatch for lm_head.weight" in told.error


# -- copies of whole models --------------------------------------------------------------------------


@functools.cache
def on_one_rank() -> tuple[Any, Any]:
    """A model, which tests do not change, and its text."""
    model = acclimate.init_inference(tiny_model("llama"), tp_size=1, dtype="float32")
    return model, text(model)


@pytest.mark.parametrize("restored", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, copy.copy])
def test_a_model_of_one_rank_can_be_pickled_and_copied(restored: Callable[[Any], Any]) -> None:
    model, its_text = on_one_rank()
    made = restored(model)
    assert text(made) == its_text
    assert isinstance(made, type(model).__mro__[2])
    assert isinstance(made, InferenceModel)


def test_a_new_model_of_the_same_class_is_whole(tmp_path: Path) -> None:
    model, its_text = on_one_rank()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert text(again) == its_text
    again.save_pretrained(tmp_path / "again")


# -- errors ------------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    """A model that cannot be traced, with the adapter of which peft would tell."""

    def __init__(self, peft_config: Any = None) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.peft_config = peft_config

    def forward(self, input_ids: Tensor) -> Tensor:
        raise RuntimeError("only with an example")


def split_untraceable(rank: int, peft_config: Any) -> None:
    acclimate.init_inference(Untraceable(peft_config))


def test_an_error_of_tracing_is_raised_on_all_ranks(two: RankProcesses) -> None:
    for told in two.run(split_untraceable, None):
        assert re.match(
            "(Trace|Plan)Error: Untraceable could not be traced: .*only with an example", told.error
        )


def test_a_model_that_cannot_be_split_with_its_adapter_says_which_one(two: RankProcesses) -> None:
    config = {"default": SimpleNamespace(peft_type="LORA", use_dora=True)}
    for told in two.run(split_untraceable, config):
        assert told.error.startswith(
            "PlanError: Untraceable cannot be split over 2 ranks with its adapter default"
        )
        assert "(LORA, DoRA). Merge the adapter into the weights" in told.error


def adapt_before_and_after(rank: int, kind: str) -> tuple[Any, list[int], list[int], str]:
    import peft

    kinds = {
        "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
        "lora": lambda: peft.LoraConfig(
            target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    }
    torch.manual_seed(3)
    whole = peft.get_peft_model(tiny_model("llama"), kinds[kind]())
    expected, refused = text(whole), ""
    try:
        return None, expected, text(acclimate.init_inference(whole, dtype="float32")), refused
    except PlanError as error:
        return None, expected, [], str(error)


@pytest.mark.parametrize("kind", quick(("dora", "lora", "prompt"), "lora", "prompt"))
def test_a_model_with_an_adapter_is_split_right_or_refused_by_name(kind: str, two: RankProcesses) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for _, expected, found, refused in two.values(adapt_before_and_after, kind):
        assert found == expected or "adapter default (LORA, DoRA). Merge" in refused
