"""Reads small files of the kernel, and parses the lists and masks of processors in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from acclimate.errors import TopologyError

LIVE = Path("/")
"""The root of the running machine. Any other root is that of a recorded machine."""

# Linux supports 8,192 processors and 1,024 memory nodes. The bound keeps a typing error such as
# "0-99999999999" from filling the memory.
_HIGHEST_NUMBER = 1 << 20

_ITEM = re.compile(r"\s*([0-9]{1,18})(?:-([0-9]{1,18})(?::([0-9]{1,18})/([0-9]{1,18}))?)?\s*", re.ASCII)
_MASK = re.compile(r"[0-9a-fA-F]+(?:,[0-9a-fA-F]{8})*", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses a CPU list of the kernel, such as ``0-3,8,10-11``, and keeps its order.

    A range may have a stride: ``0-30:2/4`` means the first two of every four. The list may be empty.
    Lists of memory nodes have the same form.

    Raises:
        TopologyError: an item is neither a number nor a range, a range descends, or a number appears twice.
    """
    if not text.strip():
        return ()
    numbers: dict[int, None] = {}  # a set that keeps the order
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise TopologyError(
                f'"{item.strip()}" in the CPU list "{text.strip()}" is neither a number nor a range;'
                ' write it as in "0-3,8,10-11"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        used, group = int(match[3] or 1), int(match[4] or 1)
        if last < first:
            raise TopologyError(f'the range "{item.strip()}" descends; write it as "{last}-{first}"')
        if last > _HIGHEST_NUMBER:
            raise TopologyError(f'"{item.strip()}" is beyond the processors that Linux supports')
        if not 0 < used <= group:
            raise TopologyError(f'the stride of "{item.strip()}" must be USED/GROUP with 0 < USED <= GROUP')
        chosen = [n for n in range(first, last + 1) if (n - first) % group < used]
        if repeated := [n for n in chosen if n in numbers]:
            raise TopologyError(
                f'{format_cpu_list(repeated)} appears more than once in the CPU list "{text.strip()}"'
            )
        numbers.update(dict.fromkeys(chosen))
    return tuple(numbers)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Writes numbers as the kernel does: ascending, and neighbours as a range (``0-3,8``)."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_cpu_mask(text: str) -> tuple[int, ...]:
    """Parses a CPU mask of the kernel: hexadecimal words of 32 bits, highest first (``ff,00000000``).

    Raises:
        TopologyError: the text is not of that form.
    """
    if _MASK.fullmatch(text.strip()) is None:
        raise TopologyError(f'"{text.strip()}" is not a CPU mask such as "00000000,0000ffff"')
    bits = int(text.replace(",", ""), 16)
    return tuple(n for n in range(bits.bit_length()) if bits >> n & 1)


def under(root: Path, path: str) -> str:
    """The path under ``root`` of a file with this absolute path on the machine."""
    return os.path.join(root, path.lstrip("/"))


def read(path: str) -> str | None:
    """The text of a file up to its first NUL, or ``None`` if it is absent or may not be read.

    Some programs that record a machine write the kernel's C strings with the NUL at their end. A missing file
    is no error: containers hide some, and the files of a processor that goes offline disappear.
    """
    try:
        # Unbuffered: half the time of Path.read_text, and memory methods are called often.
        with open(path, "rb", buffering=0) as file:
            return file.read().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return None


def read_number(path: str) -> int | None:
    """The whole number in a file, or ``None`` if the file is absent or empty.

    Raises:
        TopologyError: the file holds something else.
    """
    text = (read(path) or "").strip()
    if not text:
        return None
    if re.fullmatch(r"-?[0-9]{1,20}", text, re.ASCII) is None:
        raise TopologyError(f'{path} holds "{text[:80]}", but must hold an integer')
    return int(text)


def parse_cpus(text: str, path: str) -> frozenset[int]:
    """The set in a CPU list that was read from ``path``.

    Raises:
        TopologyError: the text is not a CPU list; the message names the file.
    """
    try:
        return frozenset(parse_cpu_list(text))
    except TopologyError as error:
        raise TopologyError(f"{path} cannot be understood: {error}") from error


def read_cpus(list_path: str, mask_path: str | None = None) -> frozenset[int] | None:
    """The numbers in a list file, or else in a mask file; ``None`` if neither file exists.

    Raises:
        TopologyError: the file holds no such list or mask.
    """
    text = read(list_path)
    if text is not None:
        return parse_cpus(text, list_path)
    mask = None if mask_path is None else read(mask_path)
    if mask is None:
        return None
    try:
        return frozenset(parse_cpu_mask(mask))
    except TopologyError as error:
        raise TopologyError(f"{mask_path} cannot be understood: {error}") from error


def numbered_entries(folder: str, prefix: str) -> list[int]:
    """The numbers N of all entries ``<prefix>N`` of a folder, ascending; none if there is no folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    tails = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return sorted(int(tail) for tail in tails if re.fullmatch(r"[0-9]+", tail, re.ASCII))
