"""A model of ``init_inference`` in transformers' own tools, which expect one of theirs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import transformers

import acclimate


@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_it_works_in_a_pipeline_with_the_text_that_generate_gives(
    quantize: str | None, tiny_folder: Path
) -> None:
    model = acclimate.init_inference(str(tiny_folder), dtype="float32", quantize=quantize)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["The capital of France", "Paris"]
    made = [text[0]["generated_text"] for text in write(prompts, max_new_tokens=6, do_sample=False)]
    ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    own = [model.generate(tokens, max_new_tokens=6, do_sample=False)[0] for tokens in ids]
    assert made == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in own]


def test_a_text_iterator_streamer_gets_the_whole_text_from_another_thread(tiny_folder: Path) -> None:
    model = acclimate.init_inference(str(tiny_folder), dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer("The capital of France", return_tensors="pt").input_ids
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
    options = {"max_new_tokens": 12, "do_sample": False}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs={"streamer": streamer, **options})
    thread.start()
    made = "".join(streamer)
    thread.join()
    assert made == tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])
