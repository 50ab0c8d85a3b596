"""A Python that has torch imported already: it starts a program in 50 ms instead of 2 s.

One server makes the imports. Each program is a fork of it with a command line, environment, folder and
standard streams of its own, and is waited for, signalled and talked to as any process of :mod:`subprocess`.
The Pythons that such a program starts come from the server too. A program has torch when it imports it, and
torch then loads vendors' packages as it does at the end of a real import. What differs from a real start:
no ``sitecustomize`` runs, torch computes in one thread, and the system shows the server's command line.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

STANDARD = sys.stdlib_module_names | {"__main__"}
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_address = ""
"""Where the server listens. Set in the programs, for those that they start."""
_use_one_thread: Callable[[], object] = bool
"""Tells torch, if the server has imported it."""


class WarmPopen(subprocess.Popen):
    """Starts a Python as a fork of the server, and any other program as it is."""

    _connection: socket.socket | None = None

    # subprocess has no public way to change how a process is started and waited for.

    def _execute_child(self, *given: Any) -> None:
        told = _EXECUTE.bind(self, *given).arguments
        arguments = _arguments_of_python(told["args"])
        in_group = told.get("process_group", -1) != -1  # from Python 3.11 on
        if not arguments or told["shell"] or told["preexec_fn"] or told["pass_fds"] or in_group:
            super()._execute_child(*given)
            return
        request = {
            "command": arguments,
            "environment": dict(os.environ if told["env"] is None else told["env"]),
            "folder": str(told["cwd"] or os.getcwd()),
            "new_session": bool(told["start_new_session"]),
        }
        streams = (told["p2cread"], told["c2pwrite"], told["errwrite"])
        own = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_address)
        with tempfile.TemporaryFile(dir=Path(_address).parent) as file:
            file.write(json.dumps(request).encode())
            file.flush()
            # One message, so that the server never waits for the rest of one.
            socket.send_fds(self._connection, [b"r"], [*own, file.fileno()])
        self.pid = self._answer()
        self._child_created = True
        self._close_pipe_fds(
            *(told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        return self._wait_for_answer(self.pid, wait_flags)

    def _internal_poll(self, _deadstate: int | None = None, **options: Any) -> int | None:
        if self._connection is not None:
            options["_waitpid"] = self._wait_for_answer
        return super()._internal_poll(_deadstate, **options)

    def _wait_for_answer(self, pid: int, flags: int) -> tuple[int, int]:
        """As :func:`os.waitpid`, of what the server tells."""
        assert self._connection is not None
        if flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = self._answer()
        self._connection.close()
        return pid, status

    def _answer(self) -> int:
        """The server's next number."""
        assert self._connection is not None
        digits = b""
        while not digits.endswith(b"\n"):
            piece = self._connection.recv(1)
            if not piece:
                raise RuntimeError("the server of warm Pythons has ended")
            digits += piece
        return int(digits)


def _arguments_of_python(command: Any) -> list[str]:
    """What a command line gives to Python, itself or by a script's first line; nothing of other programs."""
    parts = [command] if isinstance(command, (str, os.PathLike)) else list(command)
    program, *rest = map(str, parts)
    if program == sys.executable:
        return rest
    script = Path(program)
    if script.parent == Path(sys.executable).parent and script.is_file():
        with script.open("rb") as file:
            if file.readline().decode(errors="replace").strip() == f"#!{sys.executable}":
                return [program, *rest]
    return []


class WarmServer:
    """The server, and a second one that is a fork of it and imports more once it is asked for a program.

    They may still be at their imports; programs start when these are made.

    Args:
        modules: what both import. An expression after a colon is evaluated in the module, once for all
            programs: what a module computes at its first use and keeps.
        more: what only the second one imports.
    """

    def __init__(self, modules: Sequence[str], more: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address, self.address_of_second = (
            str(Path(self._folder.name) / name) for name in ("server", "second")
        )
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for listener, address in ((first, self.address), (second, self.address_of_second)):
                listener.bind(address)
                listener.listen(64)
            servers = [(first.fileno(), [*modules]), (second.fileno(), [*more])]
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(servers)],
                env={**os.environ, "PYTHONPATH": "", _AUTOLOAD: "0"},
                stdin=subprocess.PIPE,
                pass_fds=[first.fileno(), second.fileno()],
            )

    def close(self) -> None:
        """Ends both."""
        self._process.communicate(timeout=600)
        self._folder.cleanup()


class WarmPython:
    """Programs of a server, once it has made its imports.

    Args:
        address: of the server.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        with self.in_place():
            subprocess.run([sys.executable, "-c", ""], check=True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the Pythons that this process starts come from the server."""
        global _address, _use_one_thread
        before = _address, subprocess.Popen
        _address, subprocess.Popen = self._address, WarmPopen
        try:
            yield
        finally:
            _address, subprocess.Popen = before


def start_real_pythons() -> None:
    """In a program: those that it starts do not come from the server, but within ``in_place``."""
    if subprocess.Popen is WarmPopen:
        subprocess.Popen = subprocess.Popen.__base__


# -- in the server ---------------------------------------------------------------------------------


def serve(servers: Sequence[tuple[int, list[str]]], groups: Sequence[list[str]] = ()) -> None:
    """Starts programs for those who connect to a descriptor, until standard input ends.

    Args:
        servers: the descriptor of this server and of each that is a fork of the one before, and what it
            imports.
        groups: what came with each import of the servers before.
    """
    global _address, _use_one_thread
    (descriptor, modules), *further = servers
    listener = socket.socket(fileno=descriptor)
    groups = [*groups]
    for module in modules:
        before = set(sys.modules)
        name, _, expression = module.partition(":")
        imported = importlib.import_module(name)
        if expression:
            eval(expression, vars(imported).copy())
        groups.append([name for name in sys.modules if name not in before and _package(name) not in STANDARD])
    if further:
        if os.fork() == 0:
            listener.close()
            if sys.stdin not in select.select([further[0][0], sys.stdin], [], [])[0]:
                serve(further, groups)
            return
        os.close(further[0][0])
    if "torch" in sys.modules:
        _use_one_thread = functools.partial(sys.modules["torch"].set_num_threads, 1)
    _use_one_thread()
    _Imported([{name: sys.modules.pop(name) for name in group} for group in groups]).install()
    gc.collect()
    gc.freeze()  # else every program would copy the pages that its garbage collector marks
    _collapse_pages()
    _address = listener.getsockname()
    ended, signalled = os.pipe()
    for end in (ended, signalled):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    asking: list[socket.socket] = []
    """Connections of programs that may be stopped, or killed, before they say what to start."""
    while True:
        ready = select.select([listener, sys.stdin, ended, *asking], [], [])[0]
        if sys.stdin in ready:
            return
        if ended in ready:
            os.read(ended, 4096)
            _tell_the_ended(running)
        if listener in ready:
            asking.append(listener.accept()[0])
        for connection in [connection for connection in asking if connection in ready]:
            asking.remove(connection)
            others = [other.fileno() for other in asking]
            _start(connection, running, [listener.fileno(), ended, signalled, *others])


def _collapse_pages() -> None:
    """Puts the memory of this process into huge pages, as far as Linux has it so (from 6.1 on).

    A fork copies an entry for each page, and gives it back at its end: with 290 MB in small pages that took
    15 ms of processor time, and takes 2 ms in huge ones.
    """
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, number, *name = line.split()
        if rights == "rw-p" and number == "0" and name in ([], ["[heap]"]):
            start, end = (int(digits, 16) for digits in place.split("-"))
            start = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            # One by one, since it stops at the first that it cannot do. Memory that comes later is as before.
            for page in range(start, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                advise(page, _HUGE_PAGE, _MADV_COLLAPSE)


def _tell_the_ended(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid not in running:
            continue  # the second server
        with running.pop(pid) as connection, contextlib.suppress(OSError):  # nobody waits for it
            connection.sendall(f"{status}\n".encode())


def _start(connection: socket.socket, running: dict[int, socket.socket], own: list[int]) -> None:
    """Starts the program that a connection asks for, and tells its number."""
    asked, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    if not asked:
        connection.close()  # who asked has ended
        return
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (*own, connection.fileno(), *(other.fileno() for other in running.values())):
            os.close(descriptor)
        *streams, file = descriptors
        with open(file, "rb") as content:
            content.seek(0)
            request = json.loads(content.read())
        _become(request, array.array("i", streams))
    for descriptor in descriptors:
        os.close(descriptor)
    running[child] = connection
    with contextlib.suppress(OSError):  # who asked has ended
        connection.sendall(f"{child}\n".encode())


# -- in a program ----------------------------------------------------------------------------------


class _Imported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a program what the server has imported when the program imports it.

    Args:
        groups: what came with each of the server's imports, by name.
    """

    def __init__(self, groups: list[dict[str, types.ModuleType]]) -> None:
        self._groups = groups
        self._bringing = False
        self._modules = {name: module for group in groups for name, module in group.items()}

    def install(self) -> None:
        """Asks it first for what is not imported."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        real = self._modules[fullname].__spec__
        assert real is not None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self._real_spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._real_spec
        name = module.__name__
        package = _package(name)
        (group,) = (group for group in self._groups if name in group)
        if package == "torch" and name != "torch":
            self._bring(group)
        else:
            # torch imports all that came with it; any other package itself only, as far as it matters here.
            for other in list(self._modules):
                if other in group if name == "torch" else _package(other) == package:
                    sys.modules.setdefault(other, self._modules.pop(other))
        if name == "torch" and module._is_device_backend_autoload_enabled():
            module._import_device_backends()

    def _bring(self, group: Iterable[str]) -> None:
        """Imports what came with a part of torch, one by one: some wait for the import of one of them."""
        if self._bringing:
            return
        left = [name for name in group if name in self._modules]  # a package before may have come whole
        plain = {name for name in left if self._is_plain(name)}
        for name in left:
            if name not in plain:
                sys.modules.setdefault(name, self._modules[name])
        before = sys.meta_path[:]
        # pytest's finder would read files anew whose names are those of tests.
        others = [one for one in before if not type(one).__module__.startswith("_pytest.")]
        self._bringing, sys.meta_path[:] = True, others
        try:
            for name in (name for name in left if name in plain):
                parent, _, child = name.rpartition(".")
                package = self._modules.get(parent, sys.modules.get(parent))
                known = getattr(package, child, None)
                importlib.import_module(name)
                if known is not None:  # a package may have something else under the name of a module
                    setattr(package, child, known)
        finally:
            kept = [one for one in before if one not in others or one in sys.meta_path]
            self._bringing, sys.meta_path[:] = False, kept

    def _is_plain(self, name: str) -> bool:
        """Whether a module was imported from a file as most are, and under its own name; torch's settings are
        not."""
        module = self._modules[name]
        return (
            type(module) is types.ModuleType and module.__spec__ is not None and module.__spec__.name == name
        )


def _package(module: str) -> str:
    return module.partition(".")[0]


def _become(request: dict[str, Any], streams: array.array[int]) -> None:
    """Becomes the program; does not return."""
    _use_one_thread()  # torch makes a fork a new pool at its first use, for which two threads must not race
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the server may have asked for it, and its environment is another one
    os.chdir(request["folder"])
    subprocess.Popen = WarmPopen
    code = 1
    try:
        _run(request["command"])
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _run(command: list[str]) -> None:
    """Runs what a command line of Python names."""
    if command[0] == "-u":  # what it writes is small, or goes to a descriptor
        command = command[1:]
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [entry for entry in given.split(os.pathsep) if entry]
    importlib.invalidate_caches()
    option, *rest = command
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        _run_as_main(rest[0], "<string>")
    elif option == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        # The server may have imported it, or what imports it.
        warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(option).resolve().parent))
        _run_as_main(Path(option).read_text("utf-8"), option)


def _run_as_main(source: str, file: str) -> None:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if file != "<string>":
        main.__file__ = file
    exec(compile(source, file, "exec"), vars(main))


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _end(code: int) -> None:
    """Ends as an interpreter does, without the half second that taking torch apart would cost."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as Python has it
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    # Under this name it is found once the program has another main module: what looks for the module of each
    # frame, as some of torch does, would else go through all modules each time.
    sys.modules["warm_python"] = sys.modules["__main__"]
    del sys.path[0]
    serve(json.loads(sys.argv[1]))
