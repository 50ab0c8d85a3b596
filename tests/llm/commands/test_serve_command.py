"""`acclimate serve`, asked by clients that others wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import save_chat_model

pytest.importorskip("openai", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("transformers.cli.serving.model_manager", reason="this transformers has no such server")

import openai

from acclimate.cli import main
from acclimate.llm import load_model
from acclimate.llm.serving import build_app, requests_at_once, server_tokenizer

QUESTIONS = ("The capital of France", "Of Italy?", "A few more words", "and emoji")


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """Yields the address of a server."""
    command = [sys.executable, "-m", "acclimate", "serve", str(folder), "--port", "0", "--dtype", "fp32"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError("".join(lines))
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        try:
            yield lines[-1].partition(" at ")[2].partition(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(600) == 130
            drain.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers have no end."""
    return save_chat_model(tmp_path_factory.mktemp("model") / "tiny-chat", end=1000, context=1_000_000)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with server(folder) as found:
        yield found


def client(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="none", timeout=600, max_retries=0)


def ask(address: str, question: str, tokens: int = 24) -> str:
    made = client(address).chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0
    )
    text: str = made.choices[0].message.content
    return text


def test_openais_client_gets_models_chats_completions_and_streams(address: str, folder: Path) -> None:
    asked = client(address)
    assert [model.id for model in asked.models.list()] == ["tiny-chat"]
    assert address.startswith("http://127.0.0.1:")
    messages = [{"role": "user", "content": "Hello"}]
    whole = asked.chat.completions.create(model="tiny-chat", messages=messages, max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    stream = asked.chat.completions.create(
        model="tiny-chat", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole.choices[0].message.content.startswith("".join(pieces).rstrip("\N{REPLACEMENT CHARACTER}"))
    plain = asked.completions.create(model="tiny-chat", prompt="The capital", max_tokens=8, temperature=0)
    model = load_model(folder, dtype="float32")
    tokenizer = server_tokenizer(model, None, trust_remote_code=False)
    ids = tokenizer("The capital", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = model.module.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert plain.choices[0].text == tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True)


def test_requests_at_once_get_the_answers_that_they_get_alone(address: str) -> None:
    alone = [ask(address, question) for question in QUESTIONS]
    assert len(set(alone)) == len(QUESTIONS)
    found: dict[int, str] = {}

    def run(number: int) -> None:
        # Of different lengths, so that some join and leave while others go on.
        found[number] = ask(address, QUESTIONS[number % 4], 24 + 40 * (number % 3))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(12):
        assert found[number].startswith(alone[number % 4].rstrip("\N{REPLACEMENT CHARACTER}"))


def test_what_cannot_be_answered_is_said_in_openais_words(address: str) -> None:
    asked = client(address)
    with pytest.raises(openai.BadRequestError, match="pinned to 'tiny-chat'; requested 'other'"):
        asked.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match="role"):
        asked.chat.completions.create(model="tiny-chat", messages=[{"content": "Hello"}])


def test_transformers_chat_talks_with_the_server(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "chat"]
    done = subprocess.run(
        [*command, "tiny-chat", address, "max_new_tokens=6", "do_sample=False"],
        input="The capital of France\nn\n!exit\n",
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-chat was already loaded" in done.stdout
    assert "6 tokens in" in done.stdout


def test_a_server_over_two_ranks_answers_as_one_process_does(address: str, folder: Path) -> None:
    alone = [ask(address, question) for question in QUESTIONS[:2]]
    with server(folder, "--num_accelerators", "2") as shared:
        assert [ask(shared, question) for question in QUESTIONS[:2]] == alone
        stream = client(shared).chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=900000, stream=True
        )
        next(iter(stream))
        stream.close()  # all ranks stop, or the next request would wait
        assert ask(shared, QUESTIONS[0]) == alone[0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_has_gone_stops_computing(
    stream: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(folder, dtype="float32")
    tokenizer = server_tokenizer(loaded, None, trust_remote_code=False)
    ended = threading.Event()
    began = threading.Event()
    real = type(loaded.module).generate

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(loaded.module, name)

        def generate(self, **arguments: Any) -> Any:
            began.set()
            try:
                return real(loaded.module, **arguments)
            finally:
                ended.set()

    app = build_app(Watched(), tokenizer, "tiny-chat", None, requests_at_once(loaded.module))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 900000, "stream": stream}
    asyncio.run(_leave_when(app, body, began.is_set))
    assert ended.wait(60)


async def _leave_when(app: Any, body: dict[str, Any], began: Callable[[], bool]) -> None:
    """Sends a request, and disconnects once a condition holds."""
    asked = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    sent = [asked]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        while not began():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"",
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 60)


def test_a_used_port_is_an_error_of_one_line(
    address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = address.rpartition(":")[2].partition("/")[0]
    assert main(["serve", str(folder), "--port", port]) == 2
    assert f"127.0.0.1 port {port} cannot be listened on" in capsys.readouterr().err
