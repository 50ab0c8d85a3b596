"""Odd input for the launcher, each piece made from a seed: the same seed always gives the same input.

``python tests/launch/fuzz_launcher.py [COUNT]`` tries so many of each kind, and says which failed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import FrameType

from callers import Port

from acclimate.command_line import CommandParser
from acclimate.errors import AcclimateError
from acclimate.launch.command import plan_job
from acclimate.launch.options import add_arguments, read_options
from acclimate.launch.plan.devices import find_accelerator
from acclimate.launch.plan.hostfile import HostPlan, choose_slots, read_hostfile
from acclimate.launch.plan.job import JobPlan, plan_ranks
from acclimate.launch.remote.coordinator import Coordinator, Peer
from acclimate.launch.remote.protocol import FROM_LAUNCHER, MessageDemux
from acclimate.launch.wire import LineBuffer, decode

LIMIT_S = 20
"""An input that takes longer is a hang; all should take milliseconds."""
LIMIT_BYTES = 500 << 20
"""How far the memory of all inputs together may grow; eight times as much cannot be had at all."""
NUMBERS = (0, 1, -1, 2, 255, 256, 65_535, 65_536, 2**31, 2**63, 10**20, 10**400, 0.5, 1e300)
TEXTS = (
    "",
    "x",
    "\0",
    "é",
    "\ud800",
    "\x1b[31m",
    "a" * 5000,
    "..",
    "/",
    "-",
    "@",
    ":",
    "%",
    "$(id)",
    "{}",
    "٣",
)
VALUES = (*NUMBERS, *TEXTS, None, True, [], {}, [[]], {"a": 1}, [None], float("inf"), float("nan"))
MESSAGES = (
    {"call": {"name": "0", "nonce": "n"}},
    {"hello": "0" * 64},
    {"here": True},
    {"ready": {"address": "10.0.0.1", "port": 4000}},
    {"refused": "no such folder"},
    {"failed": {"code": 1, "reason": None, "failed": {
        "rank": 0, "host": "a", "pid": 3, "code": -9, "last_lines": ["x"], "cause": None}}},
    {"outcome": {"code": 0, "failed": None, "reason": None}},
)  # fmt: skip
FROM_A_LAUNCHER = (
    {"answer": {"nonce": "n", "proof": "p"}},
    {"assignment": {"node_rank": 0, "mark": "m", "job": json.loads(json.dumps(asdict(
        JobPlan((HostPlan("a", (0, 1)),), ("true",), {"A": "1"}, "/", "cpu"))))}},
    {"start": {"master_addr": "10.0.0.1", "master_port": 4000}},
    {"signal": 2},
    {"stop": "because"},
    {"alive": True},
    {"pause": True},
)  # fmt: skip
WHOLE_LINES = (
    b"[" * 4000,
    b"[" * 200_000,
    b'{"a":' * 800,
    b"9" * 4000,
    b"x" * 2_000_000,
    b"\xff" * 100,
    b"",
    b"null",
    b'"\\ud800"',
)
LINES = (
    "worker-1 slots=2",
    "worker-2:2222 slots=2",
    "[fe80::1]:22 slots=2",
    "[fe80::1%eth0] slots=1",
    "# comment",
    "a slots=1  # half",
    "",
)
FILTERS = ("worker-1:0,1@worker-2", "worker-1", "[fe80::1]:0", "a:0@a:1")
COMMANDS = (
    ["--num_accelerators", "2", "x.py"],
    ["--bind_cores_to_rank", "--bind_core_list", "0-1", "x.py", "--its", "argument"],
    ["--hostfile", "HOSTFILE", "--include", "worker-1:0,1@worker-2", "x.py"],
    ["--hostfile", "HOSTFILE", "--exclude", "worker-1:0", "--num_nodes", "1", "x.py"],
    ["--num_nodes", "2", "--node_rank", "0", "--master_addr", "10.0.0.1", "--master_port", "29500", "x.py"],
    ["--env", "A=1", "--env=PATH", "--log_dir", "logs", "--grace", "2.5", "x.py"],
    ["--launcher", "ssh", "--launcher_args=-v -o x=y", "--ssh_port", "22", "x.py"],
    ["--max_restarts", "1", "--min_nodes", "1", "--max_nodes", "2", "--master_addr", "a", "x.py"],
    ["--module", "json.tool"],
    ["--no_python", "true"],
    ["--show_binding", "--use_hyperthreads"],
)


# -- making them -------------------------------------------------------------------------------------


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few changes anywhere."""
    text = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            text[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del text[at : at + rng.randrange(1, 20)]
        elif kind == 2:
            text[at:at] = rng.choice([b"\n", b"\0", b"[" * 5000, b'{"a":' * 2000, b"9" * 5000, b"\xff", b'"'])
        elif kind == 3:
            text[at:at] = text[: rng.randrange(200)]
        elif kind == 4:
            del text[at:]
        else:
            text[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(50)))
    return bytes(text)


def damage_json(rng: random.Random, value: object) -> object:
    """Some values replaced, keys taken away and added."""
    if rng.random() < 0.15:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        kept = {key: damage_json(rng, item) for key, item in value.items() if rng.random() > 0.05}
        return {**kept, rng.choice(("code", "more")): rng.choice(VALUES)} if rng.random() < 0.1 else kept
    if isinstance(value, list):
        return [damage_json(rng, item) for item in value]
    return value


def one_wrong(rng: random.Random, value: object) -> object:
    """The same with one value in it replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: one_wrong(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], one_wrong(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def introduction(rng: random.Random) -> bytes:
    """What an agent says first, with one thing wrong: a call, and a proof."""
    call = {"call": {"name": rng.choice("01"), "nonce": rng.choice(TEXTS)}}
    hello = {"hello": rng.choice((*TEXTS, "0" * 64))}
    lines = [json.dumps(message).encode() + b"\n" for message in (call, hello)]
    if rng.random() < 0.5:
        lines[rng.randrange(2)] = rng.choice(WHOLE_LINES) + b"\n"
    return b"".join(lines)


def some_lines(rng: random.Random, messages: tuple[dict[str, object], ...]) -> bytes:
    """Messages of all degrees of damage."""
    if rng.random() < 0.3:  # nothing wrong but one value
        return json.dumps(one_wrong(rng, rng.choice(messages))).encode() + b"\n"
    if rng.random() < 0.15:
        return rng.choice(WHOLE_LINES) + b"\n"
    lines = []
    for _ in range(rng.randrange(1, 6)):
        message: object = rng.choice(messages)
        if rng.random() < 0.6:
            message = damage_json(rng, message)
        lines.append(json.dumps(message).encode() + b"\n")
    data = b"".join(lines)
    return damage_bytes(rng, data) if rng.random() < 0.5 else data


def in_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """As a network may deliver it."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# -- trying them -------------------------------------------------------------------------------------


def try_port(seed: int) -> None:
    """Strangers and agents of a job of two ranks say odd things; other agents get through and are heard."""
    rng = random.Random(f"port {seed}")
    job = JobPlan((HostPlan("a", (0, 1)),), ("true",), {}, "/", "cpu")
    peers = {"0": Peer("a"), "1": Peer("a")}
    coordinator = Coordinator(job, list(peers.values()))
    port = Port(lambda name, message: coordinator.handle(peers[name], message))
    try:
        for _ in range(rng.randrange(1, 4)):
            stranger = port.connect()
            said = introduction(rng) if rng.random() < 0.5 else some_lines(rng, MESSAGES)
            for piece in in_pieces(rng, said):
                port.say(stranger, piece)
        agent = port.agent("0")
        for piece in in_pieces(rng, some_lines(rng, MESSAGES[2:])):
            port.say(agent, piece)
        other = port.agent("1")
        port.say(other, b'{"refused": "because"}\n')
        if not port.until(lambda: ("1", {"refused": "because"}) in port.heard, 10):
            raise AssertionError("the other agent was not heard")
        with suppress(AcclimateError):
            coordinator._conclude()
    finally:
        port.close()
        coordinator.loop.close()


def try_messages(seed: int) -> None:
    """A launcher that says odd things to an agent, and an agent that does so over ssh."""
    rng = random.Random(f"messages {seed}")
    lines = LineBuffer(1 << 20)
    with suppress(AcclimateError):
        for piece in in_pieces(rng, some_lines(rng, FROM_A_LAUNCHER)):
            for line in lines.feed(piece):
                decode(line, FROM_LAUNCHER)
    demux, mark = MessageDemux(b"\x1emark"), b"\x1emark"
    parts = [some_lines(rng, MESSAGES).replace(b"{", mark + b"{", 1) for _ in range(3)]
    with suppress(AcclimateError):
        for piece in in_pieces(rng, b"output\n".join(parts)):
            demux.feed(piece)
    demux.end()


def try_hostfile(seed: int) -> None:
    """A hostfile gives hosts, or an error of ours."""
    rng = random.Random(f"hostfile {seed}")
    lines = [rng.choice(LINES) for _ in range(rng.randrange(1, 6))]
    odd = (*TEXTS, "9" * 5000)
    if rng.random() < 0.6:  # a line with one thing wrong at most
        parts = ["b", "", str(rng.choice(NUMBERS)), ""]
        if rng.random() < 0.5:
            parts[rng.randrange(4)] = rng.choice(odd)
        lines = [f"{parts[0]}{parts[1]} slots={parts[2]}{parts[3]}"]
    data = "\n".join(lines).encode(errors="surrogatepass")
    if rng.random() < 0.3:
        data = damage_bytes(rng, data)
    path = Path("hostfile")
    path.write_bytes(data)
    text = rng.choice((*FILTERS, *TEXTS, f"b:{rng.choice(NUMBERS)}", f"b:{'9' * 5000}"))
    with suppress(AcclimateError):
        hosts = read_hostfile(path)
        if any(not host.name.isprintable() or set(host.name) & set(" $/\\^@") for host in hosts):
            raise AssertionError(f"no program can be given these names: {hosts}")
        choose_slots(hosts, num_accelerators=rng.choice((None, 1, 10**9)))
    with suppress(AcclimateError):
        choose_slots(read_hostfile(path), **{rng.choice(("include", "exclude")): text})


def try_command_line(seed: int) -> None:
    """A command line gives the plans of ranks, or an error of ours."""
    rng = random.Random(f"command line {seed}")
    words = list(rng.choice(COMMANDS))
    if rng.random() < 0.3:
        words = [*rng.choice(COMMANDS)[:-1], *words]
    if rng.random() < 0.5:  # one option with an odd value, in what is right otherwise
        parser = CommandParser()
        add_arguments(parser)
        taking = [action for action in parser._actions if action.option_strings and action.nargs is None]
        words.insert(0, f"{rng.choice(taking).option_strings[-1]}={rng.choice((*VALUES, '9' * 5000))}")
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(words))
        kind = rng.randrange(4)
        if kind == 0:
            words[at] = str(rng.choice(VALUES))
        elif kind == 1:
            del words[at]
            words = words or ["x.py"]
        elif kind == 2:
            words.insert(at, rng.choice((*TEXTS, "--", "x" * 1_000_000, "--grace=1e400", "--no_such")))
        else:
            words[at] = damage_bytes(rng, words[at].encode(errors="surrogatepass")).decode(errors="replace")
    Path("HOSTFILE").write_text("\n".join(LINES))
    Path("x.py").write_text("")
    parser = CommandParser()
    add_arguments(parser)
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()), suppress(AcclimateError, SystemExit):
        options = read_options(parser.parse_args(words), os.environ)
        job = plan_job(options, find_accelerator(), os.environ)
        for node_rank in range(min(len(job.hosts), 3)):
            plan_ranks(
                JobPlan(**{**vars(job), "master_addr": job.master_addr or "a", "master_port": 1}),
                node_rank,
                os.environ,
            )


KINDS: dict[str, Callable[[int], None]] = {
    "control port": try_port,
    "messages": try_messages,
    "hostfile": try_hostfile,
    "command line": try_command_line,
}


def _overdue(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def fuzz(kind: str, count: int) -> list[str]:
    """Tries the first so many seeds of a kind in an empty folder; returns what failed."""
    failures, began, memory = [], Path.cwd(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGALRM, _overdue)
    space, most = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 8 * LIMIT_BYTES, most))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for seed in range(count):
                signal.alarm(LIMIT_S)
                try:
                    KINDS[kind](seed)
                except Exception:
                    failures.append(f"{kind}, seed {seed}:\n{traceback.format_exc()}")
                finally:
                    signal.alarm(0)
        finally:
            os.chdir(began)
            signal.signal(signal.SIGALRM, handler)
            resource.setrlimit(resource.RLIMIT_AS, (space, most))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    if grown > LIMIT_BYTES:
        failures.append(f"{kind}: the memory grew by {grown} bytes")
    return failures


def main() -> int:
    """Tries as many of each kind as the first argument says."""
    count, failed = int(sys.argv[1]) if len(sys.argv) > 1 else 250, 0
    for kind in KINDS:
        began = time.monotonic()
        failures = fuzz(kind, count)
        failed += len(failures)
        sys.stdout.write(
            f"{kind}: {count} inputs, {len(failures)} failed, {time.monotonic() - began:.0f} s\n"
        )
        sys.stdout.write("\n".join(failures))
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    sys.stdout.write(f"largest resident set: {largest} MiB\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
