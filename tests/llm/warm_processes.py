"""Starts processes that have torch, transformers and acclimate imported already, in 50 ms instead of 4 s.

One server imports them. Each process is a fork of it with a command line, environment and standard streams of
its own, to be signalled, limited and waited for like any other. Run as a script, this file is that server.
"""

from __future__ import annotations

import array
import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WarmProcess:
    """A running process: the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, stdout: Any, stderr: Any) -> None:
        self._connection = connection
        self.pid = self._number()
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                self.kill()
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = self._number()
        return self.returncode

    def _number(self) -> int:
        """The server's next answer."""
        digits = b""
        while not digits.endswith(b"\n"):
            piece = self._connection.recv(1)
            if not piece:
                raise RuntimeError("the server of warm processes has ended")
            digits += piece
        return int(digits)

    def communicate(self, timeout: float = 600) -> tuple[bytes, bytes]:
        contents: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        def read(name: str, pipe: Any) -> None:
            with pipe:
                contents[name] = pipe.read()

        pipes = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            threading.Thread(target=read, args=(name, pipe))
            for name, pipe in pipes.items()
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return contents["stdout"], contents["stderr"]


class WarmProcesses:
    """The server, and the processes it is asked for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = str(Path(self._folder.name) / "server")
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def start(
        self,
        *arguments: str,
        code: str | None = None,
        input: bytes = b"",
        stdout: int | None = None,
        env: Mapping[str, str] | None = None,
        cpu_seconds: int = 0,
        memory_bytes: int = 0,
    ) -> WarmProcess:
        """Starts ``acclimate generate`` with these arguments, or ``code`` with them as ``sys.argv[1:]``."""
        request = {
            "code": code,
            "arguments": arguments,
            "environment": dict(os.environ if env is None else env),
            "folder": os.getcwd(),
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        readable, writable = [], []
        for _ in range(2):
            ends = os.pipe()
            readable.append(os.fdopen(ends[0], "rb", buffering=0))
            writable.append(ends[1])
        with tempfile.TemporaryFile() as given:
            given.write(input)
            given.seek(0)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._address)
            descriptors = [given.fileno(), writable[0] if stdout is None else stdout, writable[1]]
            content = json.dumps(request).encode()
            socket.send_fds(connection, [len(content).to_bytes(8, "little")], descriptors)
            connection.sendall(content)
        for descriptor in writable:
            os.close(descriptor)
        return WarmProcess(connection, *readable)

    def run(self, *arguments: str, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a process to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, out.decode(), err.decode())

    def close(self) -> None:
        self._server.communicate(timeout=30)
        self._folder.cleanup()


def _serve(address: str) -> None:
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama  # noqa: F401 - for the processes

    import acclimate.llm.commands.generate
    import acclimate.llm.generation
    import acclimate.llm.gguf.tokenizer
    import acclimate.llm.gguf.weights  # noqa: F401

    torch.set_num_threads(1)  # a fork has one thread only
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while listener in select.select([listener, sys.stdin], [], [])[0]:  # until the tests close stdin
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(connection)
            os._exit(0)
        connection.close()


def _attend(connection: socket.socket) -> None:
    """Starts the process that a connection asks for, and tells its number and how it ended."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    wanted, content = int.from_bytes(size, "little"), b""
    while len(content) < wanted:
        content += connection.recv(wanted - len(content))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(content), array.array("i", descriptors))
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: dict[str, Any], descriptors: array.array[int]) -> None:
    """Becomes the process; does not return."""
    import torch

    # torch makes a forked child a new pool at its first use. The first two threads must not do that at once.
    torch.set_num_threads(1)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number in (1, 2):  # the streams' own buffers may hold what the server wrote
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        setattr(sys, ("", "stdout", "stderr")[number], stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the server may have asked for it, and its environment is another one
    os.chdir(request["folder"])
    _limit(request)
    sys.argv = ["acclimate", *request["arguments"]]
    code = 1
    try:
        if request["code"] is not None:
            exec(compile(request["code"], "<process>", "exec"), {"__name__": "__main__"})
            code = 0
        else:
            from acclimate.cli import main

            code = main(["generate", *request["arguments"]])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _limit(request: dict[str, Any]) -> None:
    import resource

    if request["cpu_seconds"]:
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"],) * 2)
    if request["memory_bytes"]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + request["memory_bytes"],) * 2)


if __name__ == "__main__":
    _serve(sys.argv[1])
