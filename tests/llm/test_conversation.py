"""A conversation reads each token once, and answers like transformers without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_models import save_chat_model
from tiny_models import save_tiny_model

import acclimate
from acclimate.errors import GenerationOptionError, PromptError
from acclimate.llm import LoadedModel, load_model
from acclimate.llm.conversation import Conversation
from acclimate.llm.decode import loop
from acclimate.llm.text_options import TextOptions
from quick_parameters import quick

GREEDY = TextOptions(max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def expected(plain: Any, tokens: list[int], new: int = 8) -> list[int]:
    ids = torch.tensor([tokens])
    made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    found: list[int] = made[0, len(tokens) :].tolist()
    return found


def test_each_turn_reads_only_new_tokens_and_answers_as_if_it_read_all(
    loaded: LoadedModel, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    native = loop.lean_sample

    def watched(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        made = native(model, input_ids, *args, **kwargs)
        prompts.append((input_ids[0].tolist(), made is not None))
        return made

    monkeypatch.setattr("acclimate.llm.decode.loop.lean_sample", watched)
    talk = Conversation(loaded, GREEDY, system="Be brief.")
    known = 0
    for message in ("The capital of France", "And of Italy?", "Say it again."):
        made = talk.answer(message)
        prompt, was_fast = prompts[-1]
        assert was_fast
        assert list(made.tokens) == expected(plain, prompt)
        # Up to three tokens of an incomplete character at its end are not part of an answer.
        assert known - 3 <= made.cached_tokens <= known
        # All but the last token, whose successor nobody has asked for.
        known = made.prompt_tokens + made.generated_tokens - 1
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]


def test_a_template_that_rewrites_earlier_messages_is_read_from_the_first_difference(
    loaded: LoadedModel, plain: Any
) -> None:
    # Only the last message is shown whole, as templates do with what a model has thought.
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + (m['content'] if loop.last else m['content'][:3]) "
        "+ eos_token }}{% endfor %}assistant: "
    )
    talk = Conversation(loaded, GREEDY, template=template)
    talk.answer("The capital of France")
    made = talk.answer("And of Italy?")
    tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.folder)
    text = tokenizer.apply_chat_template(talk.messages[:-1], chat_template=template, tokenize=False)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert 0 < made.cached_tokens < made.prompt_tokens - 8
    assert list(made.tokens) == expected(plain, tokens)


def test_a_stopped_answer_stays_in_the_conversation_and_its_tokens_are_not_read_again(
    loaded: LoadedModel,
) -> None:
    talk = Conversation(loaded, GREEDY)
    asked: list[int] = []
    made = talk.answer("The capital", is_stopped=lambda: asked.append(0) or len(asked) == 3)  # type: ignore[func-returns-value]
    assert (made.finish_reason, made.generated_tokens) == ("interrupted", 3)
    assert talk.messages[-1] == {"role": "assistant", "content": made.text}
    assert talk.answer("Again").cached_tokens >= made.prompt_tokens


def test_reset_forgets_all_but_the_instructions(loaded: LoadedModel) -> None:
    talk = Conversation(loaded, GREEDY, system="Be brief.")
    first = talk.answer("The capital")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    again = talk.answer("The capital")
    assert (again.tokens, again.cached_tokens) == (first.tokens, 0)


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(
    tmp_path: Path,
) -> None:
    talk = Conversation(load_model(save_chat_model(tmp_path, context=64), dtype="float32"), GREEDY)
    talk.answer("One")
    before = list(talk.messages)
    with pytest.raises(PromptError, match="context is 64"):
        talk.answer("word " * 60)
    assert talk.messages == before
    assert talk.answer("a").cached_tokens > 0


def test_a_model_without_a_template_says_so_and_what_to_do(tiny_folder: Path) -> None:
    with pytest.raises(PromptError, match=r"has no chat template.*without --chat.*--chat_template"):
        Conversation(load_model(tiny_folder), GREEDY)
    with pytest.raises(PromptError, match="has no chat template"):
        acclimate.generate("Hello", model=tiny_folder, chat=True)


def test_a_template_that_refuses_instructions_is_named_with_its_reason(loaded: LoadedModel) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}x"
    with pytest.raises(PromptError, match="refuses this conversation: No system role"):
        Conversation(loaded, GREEDY, system="Be brief.", template=template)


def test_a_template_cannot_reach_out_of_its_sandbox(loaded: LoadedModel) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(PromptError, match="unsafe"):
        Conversation(loaded, GREEDY, template=template)


def test_generate_puts_the_prompt_into_the_template(folder: Path, loaded: LoadedModel, plain: Any) -> None:
    made = acclimate.generate("Hello", model=loaded, chat=True, system="Be brief.", max_new_tokens=8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(made.tokens) == expected(plain, prompt)
    assert made.prompt_tokens == len(prompt)


def test_a_stop_text_ends_the_text_before_it(loaded: LoadedModel) -> None:
    whole = acclimate.generate("The capital of France", model=loaded, max_new_tokens=20)
    stop = whole.text[6:9]
    pieces: list[str] = []
    made = acclimate.generate(
        "The capital of France", model=loaded, max_new_tokens=20, stop=[stop], on_text=pieces.append
    )
    assert made.finish_reason == "stop"
    assert made.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
    assert made.generated_tokens < whole.generated_tokens


def test_top_k_top_p_and_min_p_limit_what_is_sampled(loaded: LoadedModel) -> None:
    best = acclimate.generate("The capital", model=loaded, max_new_tokens=12).tokens
    for limit in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        drawn = acclimate.generate(
            "The capital", model=loaded, max_new_tokens=12, temperature=5.0, seed=1, **limit
        )
        assert drawn.tokens == best
    free = acclimate.generate("The capital", model=loaded, max_new_tokens=12, temperature=5.0, seed=1)
    assert free.tokens != best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5, "temperature": 1.0}, "top_p must be from 0 to 1"),
        ({"min_p": float("nan"), "temperature": 1.0}, "min_p must be from 0 to 1"),
        ({"top_k": 5, "temperature": 0.0}, "has no effect at temperature 0"),
        ({"stop": [""]}, "stop text must not be empty"),
        ({"system": "Be brief."}, "system needs chat"),
    ],
)
def test_options_without_a_meaning_are_refused(
    options: dict[str, Any], message: str, loaded: LoadedModel
) -> None:
    with pytest.raises(GenerationOptionError, match=message):
        acclimate.generate("Hello", model=loaded, **options)


@pytest.mark.parametrize("kind", quick(("llama", "gemma3", "gpt2"), "gemma3"))
def test_a_cache_of_the_caller_is_continued_by_the_fast_loop_with_transformers_tokens(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(kind, tmp_path)
    fast = acclimate.init_inference(str(folder), dtype="float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for model in (fast, plain):
        cache, ids = transformers.DynamicCache(), torch.tensor([[0, 20, 30, 40]])
        for _ in range(2):
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=5,
                do_sample=False,
                eos_token_id=None,
            )
            ids = torch.cat((ids, torch.tensor([[50, 60]])), 1)
        found.append((ids.tolist(), cache.get_seq_length(), cache.layers[1].values))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], atol=1e-4, rtol=1e-4)


def test_no_token_of_an_answer_that_can_be_stopped_waits_for_a_look_at_the_model(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(loop._Watch, "check", looks.append)
    talk = Conversation(loaded, TextOptions(max_new_tokens=8, stop=("never written",)))
    assert talk.answer("The capital", is_stopped=lambda: False).generated_tokens > 1
    assert not looks
