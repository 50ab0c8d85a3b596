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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import save_chat_model
from warm_processes import WarmProcesses

from served_model import told_address

pytest.importorskip("transformers.cli.serving.model_manager", reason="this transformers has no such server")

from acclimate.cli import main
from acclimate.llm import load_model
from acclimate.llm.decode import loop
from acclimate.llm.decode.batching import Batcher

QUESTIONS = ("The capital of France", "Of Italy?", "A few more words", "and emoji")


# Imported by the tests alone, since each process of a run collects this file, and one runs them.
NEEDED = ("openai", "fastapi", "uvicorn")
pytestmark = [
    pytest.mark.usefixtures("warm_model_starts"),
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="the extra `serve` is not installed"),
]
MAIN = "import sys; from acclimate.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
OPTIONS = ("--port", "0", "--dtype", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers have no end."""
    return save_chat_model(tmp_path_factory.mktemp("model") / "tiny-chat", end=1000, context=1_000_000)


@pytest.fixture(scope="module")
def address(folder: Path, warm: WarmProcesses) -> Iterator[str]:
    with told_address(warm.start(str(folder), *OPTIONS, code=MAIN)) as found:
        yield found


def client(address: str) -> Any:
    import openai

    return openai.OpenAI(base_url=address, api_key="none", timeout=600, max_retries=0)


def ask(address: str, question: str, tokens: int = 24) -> str:
    made = client(address).chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0
    )
    text: str = made.choices[0].message.content
    return text


def test_openais_client_gets_models_chats_completions_and_streams(address: str, folder: Path) -> None:
    from acclimate.llm.serving import server_tokenizer

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
    from openai import BadRequestError

    asked = client(address)
    with pytest.raises(BadRequestError, match="pinned to 'tiny-chat'; requested 'other'"):
        asked.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(BadRequestError, match="the request lacks 'role'"):
        asked.chat.completions.create(model="tiny-chat", messages=[{"content": "Hello"}])
    for path, body, message in (
        ("chat/completions", b"{bad", "JSON decode error"),
        ("chat/completions", b"[1]", "body: Input should be a valid dictionary"),
        ("embeddings", b"{}", "Not Found"),
    ):
        request = urllib.request.Request(
            f"{address}/{path}", body, {"Content-Type": "application/json"}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=600)
        assert message in json.loads(raised.value.read())["error"]["message"]


def test_transformers_chat_talks_with_the_server(
    address: str, warm: WarmProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = warm.run(
        *("chat", "tiny-chat", address, "max_new_tokens=6", "do_sample=False"),
        code="from transformers.cli.transformers import main; main()",
        input=b"The capital of France\nn\n!exit\n",
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-chat was already loaded" in done.stdout
    assert "6 tokens in" in done.stdout


@pytest.mark.slow
def test_a_server_over_two_ranks_answers_as_one_process_does(address: str, folder: Path) -> None:
    alone = [ask(address, question) for question in QUESTIONS[:2]]
    command = [sys.executable, "-m", "acclimate", "serve", str(folder), *OPTIONS, "--num_accelerators", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process, told_address(process) as shared:
        assert [ask(shared, question) for question in QUESTIONS[:2]] == alone
        stream = client(shared).chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=900000, stream=True
        )
        next(iter(stream))
        stream.close()  # all ranks stop, or the next request would wait
        assert ask(shared, QUESTIONS[0]) == alone[0]


def test_requests_take_native_steps_together_and_read_only_what_is_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate.llm.serving import build_app, requests_at_once, server_tokenizer

    loaded = load_model(folder, dtype="float32")
    tokenizer = server_tokenizer(loaded, None, trust_remote_code=False)
    app = build_app(loaded.module, tokenizer, "tiny-chat", None, requests_at_once(loaded.module))
    batch: list[int] = []
    known: list[int] = []
    run, sample = Batcher._run, loop.lean_sample

    def counted(batcher: Batcher, slots: Any) -> None:
        batch.append(len(slots))
        run(batcher, slots)

    def watched(*args: Any, **inputs: Any) -> Any:
        known.append(inputs["past_key_values"].get_seq_length())
        made = sample(*args, **inputs)
        assert made is not None
        return made

    monkeypatch.setattr(Batcher, "_run", counted)
    monkeypatch.setattr(loop, "lean_sample", watched)
    messages = [{"role": "user", "content": "The capital of France and a few more words to merge. " * 2}]
    body = {"messages": messages, "max_tokens": 400, "temperature": 0, "stop": ["never written"]}

    async def four() -> None:
        await asyncio.gather(*(_send(app, body) for _ in range(4)))

    asyncio.run(four())
    assert max(batch) > 1
    assert known == [0] * 4
    asyncio.run(_send(app, {**body, "messages": [*messages, {"role": "assistant", "content": "Words"}]}))
    assert known[-1] >= 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_has_gone_stops_computing(
    stream: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate.llm.serving import build_app, requests_at_once, server_tokenizer

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


async def _send(app: Any, body: dict[str, Any]) -> None:
    """Sends a request, and waits for the answer."""
    await _leave_when(app, body, lambda: False)


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
    await asyncio.wait_for(app(scope, receive, send), 600)


def test_a_used_port_is_an_error_of_one_line(
    address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = address.rpartition(":")[2].partition("/")[0]
    assert main(["serve", str(folder), "--port", port]) == 2
    assert f"127.0.0.1 port {port} cannot be listened on" in capsys.readouterr().err


def test_ctrl_c_that_an_import_swallows_ends_the_command(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallow(name: str) -> Any:
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a weak reference's callback
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("acclimate.llm.commands.serve.import_module", swallow)
    port = address.rpartition(":")[2].partition("/")[0]  # a used one: else the server would run
    assert main(["serve", str(folder), "--port", port]) == 130


def test_ctrl_c_cuts_answers_without_a_traceback(folder: Path, warm: WarmProcesses) -> None:
    process = warm.start(str(folder), *OPTIONS, code=MAIN)
    told = b""
    while b" at http" not in told:
        told = process.stderr.readline()
    address = told.decode().partition(" at ")[2].partition(";")[0]
    stream = client(address).chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=900000, stream=True
    )
    next(iter(stream))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in stderr, stderr
