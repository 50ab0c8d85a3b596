"""`acclimate chat` as a user meets it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_models import TEMPLATE, save_chat_model
from warm_processes import WarmProcesses

from acclimate.cli import main

pytestmark = pytest.mark.usefixtures("warm_model_starts")

MAIN = "import sys; from acclimate.cli import main; sys.exit(main(['chat', *sys.argv[1:]]))"
GREEDY = ("--temperature", "0", "--max-new-tokens", "6", "--dtype", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers have no end."""
    return save_chat_model(tmp_path_factory.mktemp("chat"), end=1000, context=1_000_000)


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    capsys.readouterr()
    code = main(["chat", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_each_line_of_a_pipe_is_answered_and_remembered_until_reset(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "chat.json"
    lines = f"One\n\nTwo\n/save {saved}\n/reset\nOne\n"
    code, out, err = chat(capsys, monkeypatch, lines, str(folder), "--system", "Be brief.", *GREEDY)
    assert code == 0
    first, second = (
        m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "assistant"
    )
    assert out == f"{first}\n{second}\n{first}\n"
    assert first != second
    figures = [line for line in err.splitlines() if "tokens read" in line]
    assert ["known" in line for line in figures] == [False, True, False]


def test_help_lists_the_commands_and_an_unknown_one_is_not_sent_to_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = chat(capsys, monkeypatch, "/help\n/rest\n/exit\nOne\n", str(folder), *GREEDY)
    assert (code, out) == (0, "")
    assert "/reset" in err
    assert "there is no command /rest" in err


def test_a_path_is_a_message_and_quotes_hold_several_lines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "chat.json"
    lines = f'/etc/hosts is what?\n"""one\n two"""\n/save {saved}\n'
    assert chat(capsys, monkeypatch, lines, str(folder), *GREEDY)[0] == 0
    asked = [m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "user"]
    assert asked == ["/etc/hosts is what?", "one\n two"]


def test_a_model_without_a_template_is_refused_and_another_template_can_be_given(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = chat(capsys, monkeypatch, "One\n", "-m", str(tiny_folder), *GREEDY)
    assert (code, out) == (2, "")
    assert "has no chat template" in err
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    given = ("--chat-template", str(template))
    code, out, _ = chat(capsys, monkeypatch, "One\n", "-m", str(tiny_folder), *given, *GREEDY)
    assert code == 0
    assert out


def test_ctrl_c_stops_only_the_answer(warm: WarmProcesses, folder: Path) -> None:
    options = (str(folder), "--max-new-tokens", "900000", "--temperature", "0")
    process = warm.start(*options, code=MAIN, input=b"One\nTwo\n")
    for _ in range(2):
        seen = b""
        while len(seen) < 20:  # an answer is being written
            piece = os.read(process.stdout.fileno(), 1000)
            assert piece, process.communicate()
            seen += piece
        process.send_signal(signal.SIGINT)
        while b"\n" not in seen[-1:]:
            piece = os.read(process.stdout.fileno(), 1)
            assert piece, process.communicate()
            seen += piece
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stderr.decode().count("| stopped]") == 2
    assert b"known" in stderr


@pytest.mark.slow
def test_a_conversation_over_two_ranks_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "One\nTwo\n/reset\nOne\n"
    _, alone, _ = chat(capsys, monkeypatch, lines, str(folder), *GREEDY)
    _, shared, err = chat(capsys, monkeypatch, lines, str(folder), *GREEDY, "--num_accelerators", "2")
    assert shared == alone, err


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_over_two_ranks(folder: Path) -> None:
    arguments = (str(folder), "--temperature", "0", "--max-new-tokens", "900000", "--num_accelerators", "2")
    command = [sys.executable, "-m", "acclimate", "chat", *arguments]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"One\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/exit\n")
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert b"| stopped]" in stderr


def test_on_a_terminal_a_prompt_is_shown_and_ctrl_c_at_it_ends_only_when_repeated(folder: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "acclimate", "chat", str(folder), *GREEDY]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    ) as process:
        os.close(follower)
        seen = ""

        def wait_for(text: str) -> None:
            nonlocal seen
            while text not in seen:
                assert select.select([leader], [], [], 600)[0], seen
                seen += os.read(leader, 1000).decode(errors="replace")
            seen = seen.partition(text)[2]

        wait_for("/help lists the commands.")
        wait_for("> ")
        os.write(leader, b"One\n")
        wait_for("tokens/s")
        wait_for("> ")
        time.sleep(0.5)  # a signal between the prompt and the wait for a key shows with the next key only
        process.send_signal(signal.SIGINT)
        wait_for("Ctrl-C again, Ctrl-D or /exit ends")
        wait_for("> ")
        time.sleep(0.5)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.returncode == 130
        os.close(leader)
