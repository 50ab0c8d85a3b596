"""Which of an op's own headers its sources include, so that a change in one rebuilds the op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE
)


def included_headers(sources: Iterable[Path], folders: Sequence[Path]) -> dict[Path, bytes]:
    """The content of each header that the sources include, directly or through another header.

    Looked for beside the including file and in ``folders``; what is in neither belongs to the system, the
    compiler or torch, whose versions count in other ways. Conditions are not evaluated, so a header that is
    left out on this machine counts too. Where a header's name is itself a macro, all files of ``folders``
    count.
    """
    found: dict[Path, bytes] = {}
    todo = [(path, path.read_bytes()) for path in sources]
    while todo:
        including, content = todo.pop()
        for quoted, angled, macro in _INCLUDE.findall(content):
            if macro:
                candidates = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
            else:
                name = (quoted or angled).decode(errors="replace")
                beside = [including.parent] if quoted else []
                places = (folder / name for folder in (*beside, *folders))
                candidates = [place for place in places if place.is_file()][:1]
            for header in (candidate.resolve() for candidate in candidates):
                if header not in found:
                    found[header] = header.read_bytes()
                    todo.append((header, found[header]))
    return found
