"""Chooses the hosts and slots of a job: the hostfile, filters and limits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from acclimate.errors import HostfileError, LaunchOptionError, MissingFileError, excerpt

MAX_RANKS_PER_HOST = 4096
"""A larger number is a typing error, and would fill the memory before the system refuses it."""
_MAX_RANKS = 1 << 20
_MAX_BYTES = 16 << 20
"""More than the size of a hostfile with a million hosts."""
_LARGEST_PORT = 65535
_NAME = re.compile(r"[\w.][\w.-]{0,1023}")
"""The resolver's limit; each message about a host contains its name."""
_EXAMPLE = "a line reads: host slots=N, host:port slots=N or [IPv6 address]:port slots=N"


class _Named:
    name: str
    """The host's name for ssh; an IPv6 address has no brackets."""

    @property
    def label(self) -> str:
        """Returns the name as in a hostfile or filter: an IPv6 address in brackets."""
        return f"[{self.name}]" if ":" in self.name else self.name


@dataclass(frozen=True)
class Host(_Named):
    """One line of a hostfile."""

    name: str
    slots: int
    """The number of ranks that it can hold."""
    port: int | None = None
    """Its ssh port, if the hostfile gives one."""

    def __str__(self) -> str:
        """Returns the hostfile's line for this host."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.label}{port} slots={self.slots}"


@dataclass(frozen=True)
class HostPlan(_Named):
    """One host's part of a job."""

    name: str
    slots: tuple[int, ...]
    """The indices of its slots, ascending, which are those of the accelerator's devices."""
    port: int | None = None
    is_listed: bool = True
    """Whether the user or an allocation gave the name."""


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Returns the hosts of a hostfile, in its order.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        HostfileError: a line cannot be understood, a host comes twice, or there is none.
    """
    shown = excerpt(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise HostfileError(f"{shown} is larger than {_MAX_BYTES >> 20} MiB, so it is not a hostfile.")
        text = content.decode("utf-8-sig")  # editors on Windows put a mark before the first line
    except UnicodeDecodeError as error:
        raise HostfileError(f"{shown} is not text ({error.reason} at byte {error.start}).") from error
    except HostfileError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise MissingFileError(
            f"The hostfile {shown} cannot be read: {why}. Give the path of a text file in which {_EXAMPLE}."
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Returns the hosts in a hostfile's text; errors call it ``source``.

    Raises:
        HostfileError: a line cannot be understood, a host comes twice, or there is none.
    """
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as error:
            raise HostfileError(f"{source}:{number}: {error}") from None
        first = lines.setdefault(host.name.lower(), number)
        if first != number:
            raise HostfileError(
                f'{source}:{number}: host "{excerpt(host.name)}" is already on line {first}. Put all its '
                "slots on one line; for two machines behind one name, give each a name of its own in ssh's "
                "configuration."
            )
        hosts.append(host)
    if not hosts:
        raise HostfileError(f"{source}:1: it names no host; {_EXAMPLE}.")
    return tuple(hosts)


def _host(words: Sequence[str]) -> Host:
    """Returns a line's host; raises ValueError with the fault."""
    name, port = _address(words[0])
    slots: int | None = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key != "slots" or not equals:
            raise ValueError(f'"{excerpt(word)}" is not known here; {_EXAMPLE}.')
        if slots is not None:
            raise ValueError(f'"{excerpt(word)}" comes after slots={slots}; give slots once.')
        slots = _number(value)
        if not slots:
            raise ValueError(f'slots="{excerpt(value)}" must be a whole number of at least 1.')
    if slots is None:
        number = (
            "" if port is None else f' To MPI, "{excerpt(words[0])}" means "{excerpt(name)} slots={port}".'
        )
        raise ValueError(f'host "{excerpt(name)}" has no slots; write "{excerpt(words[0])} slots=N".{number}')
    return Host(name, slots, port)


def _address(word: str) -> tuple[str, int | None]:
    """Returns name and port of ``host``, ``host:port``, ``[address]`` or ``[address]:port``."""
    if "@" in word:
        raise ValueError(
            f'"{excerpt(word)}" names a user; name the host alone and set User for it in ssh\'s '
            "configuration."
        )
    if word.startswith("["):
        name, closed, rest = word[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError(f'"{excerpt(word)}" should read [address] or [address]:port.')
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise ValueError(f'"{excerpt(name)}" in brackets is not an IPv6 address.') from None
        if not _NAME.fullmatch(name.partition("%")[2] or "0"):
            raise ValueError(f'"{excerpt(name)}" in brackets does not name a network interface after the %.')
        return name, _port(rest[1:], word) if rest else None
    if word.count(":") > 1:
        raise ValueError(
            f'"{excerpt(word)}" looks like an IPv6 address; put it in brackets: [{excerpt(word)}] or '
            "[address]:port."
        )
    name, colon, rest = word.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f'"{excerpt(name or word)}" is not the name of a host; {_EXAMPLE}.')
    return name, _port(rest, word) if colon else None


def _port(text: str, word: str) -> int:
    port = _number(text)
    if port is None or not 1 <= port <= _LARGEST_PORT:
        raise ValueError(
            f'"{excerpt(text)}" in "{excerpt(word)}" is not a port; ports are 1 to {_LARGEST_PORT}.'
        )
    return port


def _number(text: str) -> int | None:
    """Returns a whole number in plain digits; ``None`` for any other text, even if int() accepts it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 1000 else None


def choose_slots(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_accelerators: int | None = None,
) -> tuple[HostPlan, ...]:
    """Returns the used hosts and slots, in the hostfile's order.

    Args:
        hosts: the hosts of the hostfile, from :func:`read_hostfile`.
        include: the only ones to use, such as ``host1:0,2@host2``: slots 0 and 2 of host1, and all of host2.
        exclude: those not to use, in the same form.
        num_nodes: the number of remaining hosts to use, the first ones.
        num_accelerators: the number of remaining slots to use on each host, the first ones.

    Raises:
        LaunchOptionError: both filters at once, an unknown host or slot, or too few hosts or slots.
        HostfileError: a host has more slots than a host can run ranks, or the hosts have more than a job can.
    """
    for host in hosts:
        if host.slots > MAX_RANKS_PER_HOST:
            raise HostfileError(
                f'host "{excerpt(host.name)}" has slots={excerpt(str(host.slots))}; a host runs at most '
                f"{MAX_RANKS_PER_HOST} ranks."
            )
    if sum(host.slots for host in hosts) > _MAX_RANKS:
        raise HostfileError(f"the hosts have more than {_MAX_RANKS} slots in all, the most that a job has.")
    if include and exclude:
        raise LaunchOptionError(
            "--include and --exclude cannot be used together; keep the one that is shorter."
        )
    chosen = [HostPlan(host.name, tuple(range(host.slots)), host.port) for host in hosts]
    if include:
        wanted = _parse_filter(include, hosts, "--include")
        chosen = [replace(plan, slots=wanted.get(plan.name, ())) for plan in chosen]
    elif exclude:
        unwanted = _parse_filter(exclude, hosts, "--exclude")
        chosen = [
            replace(plan, slots=tuple(sorted({*plan.slots} - {*unwanted.get(plan.name, ())})))
            for plan in chosen
        ]
    chosen = [plan for plan in chosen if plan.slots]
    if not chosen:
        raise LaunchOptionError(f'--exclude "{excerpt(exclude or "")}" leaves no slot on any host.')
    if num_nodes is not None:
        _at_most(num_nodes, len(chosen), "--num_nodes", "hosts are left to use")
        chosen = chosen[:num_nodes]
    if num_accelerators is not None:
        for plan in chosen:
            there = f'slots are left to use on host "{plan.name}"'
            _at_most(num_accelerators, len(plan.slots), "--num_accelerators", there)
        chosen = [replace(plan, slots=plan.slots[:num_accelerators]) for plan in chosen]
    return tuple(chosen)


def _at_most(wanted: int, there: int, option: str, of_what: str) -> None:
    if not 1 <= wanted <= there:
        raise LaunchOptionError(f"{option} {wanted} must be between 1 and {there}: {there} {of_what}.")


def _parse_filter(text: str, hosts: Sequence[Host], option: str) -> dict[str, tuple[int, ...]]:
    """Returns the slots of each host in a filter."""
    known = {host.name.lower(): host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, slots = _filter_part(part.strip(), option)
        host = known.get(name.lower())
        if host is None:
            there = excerpt(", ".join(known_host.label for known_host in hosts[:100]), 500)
            raise LaunchOptionError(
                f'{option}: there is no host "{excerpt(name)}" in the hostfile; its hosts: {there}.'
            )
        if host.name in named:
            raise LaunchOptionError(f'{option}: host "{host.name}" comes twice; list all its slots at once.')
        missing = [slot for slot in slots or () if slot >= host.slots]
        if missing:
            raise LaunchOptionError(
                f'{option}: host "{host.name}" has no slot {excerpt(str(missing[0]))}; it has {host.slots}, '
                "which count from 0."
            )
        named[host.name] = tuple(range(host.slots)) if slots is None else slots
    return named


def _filter_part(part: str, option: str) -> tuple[str, tuple[int, ...] | None]:
    """Parses ``host`` (no slots: all), ``host:0,2`` or ``[address]:0,2``."""
    if part.startswith("["):
        name, closed, rest = part[1:].partition("]")
        malformed = not closed or bool(rest and not rest.startswith(":"))
    else:
        name, colon, rest = part.partition(":")
        rest, malformed = colon + rest, False
    numbers = [_number(word.strip()) for word in rest[1:].split(",")] if rest else []
    slots = [number for number in numbers if number is not None]
    if malformed or not name or len(slots) < len(numbers):
        raise LaunchOptionError(
            f'{option}: "{excerpt(part)}" should read host (all its slots) or host:0,2; hosts are joined by '
            "@."
        )
    return name, tuple(sorted(set(slots))) if rest else None
