"""Texts of several threads that take their steps together are those that each gets alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import save_tiny_model

import acclimate
from acclimate.errors import LogitsError
from acclimate.llm.decode import batching, cache, native
from acclimate.llm.decode.batching import Batcher, batched_with_others
from acclimate.llm.decode.loop import lean_decoder
from quick_parameters import quick

PROMPTS = [[0, 20, 30, 40], [0, 50], [0, *range(60, 75)], [0, 90, 91], [0, 33, 44, 55, 66], [0, 120]]
LENGTHS = [30, 8, 20, 45, 3, 40]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class Meeting:
    """A streamer that waits at the first new token until all texts have got there."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier, self._calls = barrier, 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self._barrier.wait(600)

    def end(self) -> None: ...


@pytest.mark.parametrize("kind", quick(("llama", "gemma3", "gpt2"), "gemma3"))
def test_texts_that_come_and_go_are_those_of_each_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(kind, tmp_path)
    if kind == "gemma3":  # all texts pass its window
        monkeypatch.setattr(cache, "_LEAST_SPARE", 1)
        config = json.loads((folder / "config.json").read_text())
        windowed = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        (folder / "config.json").write_text(json.dumps(config | windowed))
    model = acclimate.init_inference(str(folder), dtype="float32")
    batch: list[int] = []
    run = Batcher._run

    def counted(self: Batcher, slots: Any) -> None:
        batch.append(len(slots))
        run(self, slots)

    monkeypatch.setattr(batching.Batcher, "_run", counted)

    def generate(number: int, streamer: Any = None) -> list[int]:
        ids = torch.tensor([PROMPTS[number]])
        # Every second text needs all logits.
        penalty = 1.3 if number % 2 else 1.0
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTHS[number],
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=penalty,
            streamer=streamer,
        )
        found: list[int] = made[0].tolist()
        return found

    alone = [generate(number) for number in range(len(PROMPTS))]
    assert not batch
    assert at_once(model, generate, len(PROMPTS)) == alone
    assert sum(batch) == sum(LENGTHS) - len(LENGTHS)
    assert batch[0] == len(PROMPTS)


def at_once(model: Any, generate: Callable[[int, Any], Any], count: int) -> list[Any]:
    """Returns what ``generate(number, streamer)`` returns for each number, in threads whose texts begin to
    take their steps together."""
    barrier = threading.Barrier(count + 1)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        with batched_with_others():
            found[number] = generate(number, Meeting(barrier))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    wait_until(lambda: barrier.n_waiting == count)
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    others = lean.native.batcher
    with others.reading():  # no step begins until all wait for one
        barrier.wait(600)
        wait_until(lambda: all(slot.token is not None for slot in others._slots))
    for thread in threads:
        thread.join()
    return [found[number] for number in range(count)]


class Recorder(transformers.LogitsProcessor):  # type: ignore[misc]
    """Keeps all logits."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores.clone())
        return scores


CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 300},
    "deepseek_v3": {
        "q_lora_rank": 96, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
        "v_head_dim": 48, "num_key_value_heads": 4, "head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def larger_model(kind: str) -> Any:
    """A model in bfloat16 whose sums have many terms, and whose keys are divided into parts."""
    shape = {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    config: Any = {
        "llama": transformers.LlamaConfig,
        "gemma3": transformers.Gemma3TextConfig,
        "mixtral": transformers.MixtralConfig,
        "deepseek_v3": transformers.DeepseekV3Config,
    }[kind](**(shape | CHANGES.get(kind, {})))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantize"),
    [*((kind, None) for kind in ("llama", "gemma3", "mixtral", "deepseek_v3")), ("llama", "int4")],
)
def test_logits_of_texts_together_are_those_of_each_alone_to_the_last_bit(
    kind: str, quantize: str | None
) -> None:
    torch.set_num_threads(2)
    model = acclimate.init_inference(larger_model(kind), quantize=quantize)
    prompts = [torch.randint(2, 320, (1, length)) for length in (5, 301, 40, 290)]

    def logits(number: int, streamer: Any = None) -> torch.Tensor:
        recorder = Recorder()
        model.generate(
            prompts[number],
            attention_mask=torch.ones_like(prompts[number]),
            max_new_tokens=12 + 4 * number,
            do_sample=False,
            eos_token_id=None,
            logits_processor=[recorder],
            streamer=streamer,
        )
        return torch.cat(recorder.logits)

    alone = [logits(number) for number in range(4)]
    together = at_once(model, logits, 4)
    assert [torch.equal(mine, other) for mine, other in zip(alone, together, strict=True)] == [True] * 4


def test_an_error_in_one_text_ends_only_that_text(tiny_folder: Path) -> None:
    model = acclimate.init_inference(str(tiny_folder), dtype="float32")
    ids = torch.tensor([PROMPTS[0]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    alone = model.generate(ids, **options, eos_token_id=None).tolist()
    barrier = threading.Barrier(2)
    found: dict[str, Any] = {}

    class Fails(Meeting):
        def put(self, value: Any) -> None:
            super().put(value)
            if self._calls == 5:
                raise RuntimeError("the client has gone")

    def work(name: str, streamer: Any) -> None:
        try:
            with batched_with_others():
                found[name] = model.generate(ids, **options, eos_token_id=None, streamer=streamer).tolist()
        except RuntimeError as error:
            found[name] = str(error)

    threads = [
        threading.Thread(target=work, args=("good", Meeting(barrier))),
        threading.Thread(target=work, args=("bad", Fails(barrier))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"good": alone, "bad": "the client has gone"}
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    assert not lean.native.batcher._slots


class Forces(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes the token at one place of a text a certain one."""

    def __init__(self, place: int, token: int) -> None:
        self._place, self._token = place, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self._place:
            scores[:, self._token] = 1e9
        return scores


@pytest.mark.parametrize("expected", quick(("LogitsError", "IndexError"), "LogitsError"))
def test_a_step_that_fails_for_one_text_goes_on_for_the_others(expected: str, tmp_path: Path) -> None:
    kind = {"LogitsError": "llama", "IndexError": "gpt2"}[expected]
    model = acclimate.init_inference(str(save_tiny_model(kind, tmp_path)), dtype="float32")
    bad = model.config.vocab_size - 2
    if expected == "LogitsError":  # after a token that only one text gets
        with torch.no_grad():
            model.get_input_embeddings().weight[bad] = torch.inf
        prompts, processors = PROMPTS[:3], [[], [Forces(8, bad)], []]
    else:  # only one text passes the learned positions
        prompts, processors = [[0, 20], [0, *range(20, 75)], [0, 90]], [[], [], []]

    def generate(number: int, streamer: Any = None) -> Any:
        ids = torch.tensor([prompts[number]])
        try:
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
                eos_token_id=None, logits_processor=processors[number], streamer=streamer,
            ).tolist()  # fmt: skip
        except (LogitsError, IndexError) as error:
            return type(error).__name__

    alone = [generate(number) for number in range(3)]
    assert [one if isinstance(one, str) else "a text" for one in alone] == ["a text", expected, "a text"]
    assert at_once(model, generate, 3) == alone


def test_a_long_prompt_is_read_between_the_steps_of_others(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_READ_TOGETHER", 16)
    model = acclimate.init_inference(str(tiny_folder), dtype="bfloat16")
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    if not lean.native.prefills:
        pytest.skip("this processor's prompts are read by torch")
    long = torch.arange(100)[None]  # 7 parts
    events: list[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def put(self, value: Any) -> None:
            events.append(self.name)

        def end(self) -> None: ...

    def write(name: str, ids: torch.Tensor, tokens: int, **options: Any) -> list[int]:
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            eos_token_id=None, streamer=Listener(name), **options,
        )  # fmt: skip
        found: list[int] = made[0].tolist()
        return found

    alone = write("alone", long, 5)
    found: dict[str, list[int]] = {}
    done = threading.Event()

    class IsDone(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), done.is_set())

    def keep_writing() -> None:
        with batched_with_others():
            write("short", torch.tensor([PROMPTS[0]]), 20_000, stopping_criteria=[IsDone()])

    def read_long() -> None:
        with batched_with_others():
            found["long"] = write("long", long, 5)

    others = threading.Thread(target=keep_writing)
    others.start()
    wait_until(lambda: events.count("short") > 5)
    run = native.NativeStep._run

    def run_longer(self: native.NativeStep, tokens: torch.Tensor, *rest: Any) -> None:
        """Takes as long as a part of 512 tokens: the other text has its next token meanwhile."""
        run(self, tokens, *rest)
        if tokens.numel() == 16:
            events.append("part")
            wait_until(lambda: any(slot.token is not None for slot in lean.native.batcher._slots))

    monkeypatch.setattr(native.NativeStep, "_run", run_longer)
    reader = threading.Thread(target=read_long)
    reader.start()
    reader.join()
    done.set()
    others.join()
    between = events[events.index("part") :]
    between = between[: between.index("long")]
    assert between.count("part") == 6
    assert between.count("short") >= 5
    assert found["long"] == alone
