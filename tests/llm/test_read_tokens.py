"""A text reads only what is new after the beginning of an earlier one, and is the same text."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import transformers

import acclimate
from acclimate.llm import read_tokens
from acclimate.llm.decode.batching import batched_with_others
from acclimate.llm.read_tokens import RemembersTexts


class ClientGoneError(Exception):
    pass


class LeavesAfter:
    """A streamer whose client goes away."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def put(self, value: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise ClientGoneError

    def end(self) -> None: ...


def made_model(**changes: Any) -> Any:
    shape = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape | changes))


@pytest.fixture(scope="module")
def model() -> Any:
    return acclimate.init_inference(made_model(), dtype="float32")


class Watched:
    """A model that notes how many tokens of each prompt are known."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.known: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> Any:
        cache = arguments.get("past_key_values")
        self.known.append(0 if cache is None else cache.get_seq_length())
        return self._model.generate(**arguments)


def ask(model: Any, prompt: list[int], new: int = 8, **more: Any) -> list[int]:
    """Returns a text with its prompt."""
    settings = copy.deepcopy(model.generation_config)
    settings.update(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, **more
    )
    found: list[int] = made[0].tolist()
    return found


def prompt(seed: int, length: int = 50) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_next_turn_reads_only_new_tokens_and_gives_the_same_text(model: Any) -> None:
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)
    text = prompt(1)
    for turn in range(3):
        made = ask(remembers, text)
        assert made == ask(model, text)
        text = made + prompt(10 + turn, 5)
    # All but the last token of a text has been read.
    assert watched.known == [0, 57, 70]


def test_a_shared_beginning_is_read_once_and_conversations_do_not_displace_each_other(model: Any) -> None:
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)
    system = prompt(1, 60)
    first, second = system + prompt(2, 20), system + prompt(3, 20)
    texts = [ask(remembers, first), ask(remembers, second)]
    assert texts == [ask(model, first), ask(model, second)]
    for text in texts:
        ask(remembers, [*text, 7])
    assert watched.known == [0, 60, 87, 87]


def test_texts_at_once_continue_the_same_beginning(model: Any) -> None:
    remembers = RemembersTexts(model, ClientGoneError)
    text = ask(remembers, prompt(1))
    asked = [text + prompt(seed, 6) for seed in range(8)]
    found: dict[int, list[int]] = {}

    def run(number: int) -> None:
        with batched_with_others():
            found[number] = ask(remembers, asked[number], 10 + 5 * (number % 3))
            # Its end is right too, though it was computed with others'.
            found[number] = ask(remembers, [*found[number], 9], 6)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(asked):
        assert found[number] == ask(model, [*ask(model, text, 10 + 5 * (number % 3)), 9], 6)


def test_after_a_client_has_gone_its_prompt_is_known_and_the_next_text_is_right(model: Any) -> None:
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)
    with pytest.raises(ClientGoneError):
        ask(remembers, prompt(1), streamer=LeavesAfter(5))
    longer = prompt(1) + prompt(2, 5)
    assert ask(remembers, longer) == ask(model, longer)
    with pytest.raises(ClientGoneError):
        ask(remembers, prompt(3), streamer=LeavesAfter(0))  # before anything is read
    assert ask(remembers, prompt(3)) == ask(model, prompt(3))
    assert watched.known == [0, 50, 0, 0]


def test_an_error_in_a_text_leaves_nothing_of_it(model: Any) -> None:
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)

    class Fails(LeavesAfter):
        def put(self, value: Any) -> None:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        ask(remembers, prompt(1), streamer=Fails(0))
    assert ask(remembers, prompt(1)) == ask(model, prompt(1))
    assert watched.known == [0, 0]


@pytest.mark.parametrize("limit", ["texts", "bytes"])
def test_what_was_used_longest_ago_is_forgotten_first(
    limit: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token's keys and values take 2 layers * 2 heads * 8 values * 4 bytes twice: 256 bytes.
    monkeypatch.setattr(read_tokens, f"_MOST_{limit.upper()}", 2 if limit == "texts" else 57 * 256 * 2 + 100)
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)
    for seed in (1, 2, 1, 3, 1, 2):
        assert ask(remembers, prompt(seed)) == ask(model, prompt(seed))
    assert watched.known == [0, 0, 49, 0, 49, 0]


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"use_cache": False}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2}],
)
def test_texts_of_which_nothing_can_be_kept_are_generated_as_before(
    settings: dict[str, Any], model: Any
) -> None:
    watched = Watched(model)
    remembers = RemembersTexts(watched, ClientGoneError)
    ids = torch.tensor([prompt(1)])
    options = copy.deepcopy(model.generation_config)
    options.update(max_new_tokens=4, do_sample="num_return_sequences" in settings, pad_token_id=0, **settings)
    for _ in range(2):
        torch.manual_seed(0)
        made = remembers.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=options
        )
        torch.manual_seed(0)
        assert torch.equal(
            made,
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=options),
        )
    assert watched.known == [0, 0]


def test_a_model_that_keeps_more_than_keys_and_values_reads_each_prompt() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    watched = Watched(acclimate.init_inference(transformers.MambaForCausalLM(config), dtype="float32"))
    remembers = RemembersTexts(watched, ClientGoneError)
    assert ask(remembers, prompt(1), 4) == ask(remembers, prompt(1), 4)
    assert watched.known == [0, 0]
