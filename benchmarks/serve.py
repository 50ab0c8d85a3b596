"""`acclimate serve` beside `transformers serve`: one client, and several at once.

    python benchmarks/serve.py MODEL [--clients 4] [--new-tokens 128] [--dtype bfloat16]

MODEL is a folder with a chat template. Both servers run at the same time and are asked in turns. A figure is
the median of the turns. Each client has a question of its own, and each answer is compared with the one that
the same server gave to that client alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

WORDS = ("The capital of France", "Of Italy and Spain?", "Some more words", "Numbers and so on")
TRANSFORMERS = "from transformers.cli.transformers import main; main()"


class Server:
    """A server and its questions.

    Args:
        address: its address, with ``/v1``.
        model: the name that requests give.
        new_tokens: the length of each answer.
    """

    def __init__(self, address: str, model: str, new_tokens: int) -> None:
        self._address, self._model, self._new_tokens = address, model, new_tokens

    def ask(self, client: int) -> tuple[str, int, float]:
        """Returns the answer to a client, its number of tokens and its seconds."""
        question = f"{client} {WORDS[client % len(WORDS)]}"
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._new_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self._address}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as response:
            made = json.loads(response.read())
        took = time.perf_counter() - start
        return made["choices"][0]["message"]["content"], made["usage"]["completion_tokens"], took

    def ask_at_once(self, clients: int) -> tuple[list[str], float]:
        """Returns all answers, and the tokens of all in a second."""
        found: dict[int, tuple[str, int, float]] = {}

        def run(client: int) -> None:
            found[client] = self.ask(client)

        threads = [threading.Thread(target=run, args=(client,)) for client in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
        return [found[client][0] for client in range(clients)], sum(
            answer[1] for answer in found.values()
        ) / took


@contextlib.contextmanager
def running(command: Sequence[str], address: str) -> Iterator[None]:
    """Runs a server until the end of the ``with`` block, which begins when it answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"a server ended with {process.returncode}: {' '.join(command)}")
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/models", timeout=60).read()
                    break
                time.sleep(0.5)
            yield
        finally:
            process.terminate()


def free_port() -> int:
    """Returns a port that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--without-peer", action="store_true")
    args = parser.parse_args()
    folder = str(args.model.resolve())
    own = [sys.executable, "-m", "acclimate", "serve", folder, "--dtype", args.dtype]
    peer = [sys.executable, "-c", TRANSFORMERS, "serve", folder, "--dtype", args.dtype]
    commands = {"acclimate": own} if args.without_peer else {"acclimate": own, "transformers": peer}
    names = {"acclimate": args.model.resolve().name, "transformers": folder}
    with contextlib.ExitStack() as until_the_end:
        servers = {}
        for name, command in commands.items():
            port = free_port()
            address = f"http://127.0.0.1:{port}/v1"
            until_the_end.enter_context(running([*command, "--port", str(port)], address))
            servers[name] = Server(address, names[name], args.new_tokens)
        alone = {name: [server.ask(n)[0] for n in range(args.clients)] for name, server in servers.items()}
        one: dict[str, list[float]] = {name: [] for name in servers}
        several: dict[str, list[float]] = {name: [] for name in servers}
        same = dict.fromkeys(servers, True)
        for _ in range(args.rounds):
            for name, server in servers.items():
                _, tokens, took = server.ask(0)
                one[name].append(tokens / took)
                answers, speed = server.ask_at_once(args.clients)
                several[name].append(speed)
                same[name] = same[name] and answers == alone[name]
    for name in servers:
        first, all_of_them = statistics.median(one[name]), statistics.median(several[name])
        print(
            f"{name}: one client {first:.1f} tokens/s; {args.clients} at once {all_of_them:.1f} in sum, "
            f"{all_of_them / args.clients:.1f} each, {all_of_them / first:.2f} times one; the answers are "
            f"{'those' if same[name] else 'NOT those'} given alone"
        )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
