"""What tests port, and how."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from acclimate_port.engine import Ported, Settings, Site, Status, port_text
from acclimate_port.files.workers import FileResult, port_files
from machines import Machine, Name, Outcome, Tensor, run

BOTH = pytest.mark.parametrize("target", ["acclimate", "torch"])
EACH_TARGET = pytest.mark.parametrize("target", ["acclimate", pytest.param("torch", marks=pytest.mark.slow)])
"""Of what is decided, `make test` tries one target, since it is nearly the same for both; of rules, of new code
and of programs that are run (`test_worlds.py`) it tries both."""
AVAILABLE = "torch.cuda.is_available()"


def ported_once_for_all(source: str, target: str) -> str:
    """A text with all edits; fails where another run would edit it again."""
    settings = Settings(target, unsafe=True)
    once = port_text(source, settings).text
    assert port_text(once, settings).text == once
    return once


def program(body: str, head: str = "import torch") -> str:
    """A program with one function; ``x`` and ``y`` are tensors on the host, ``model`` is something else."""
    return f"{head}\n\n\ndef f(x, y: torch.Tensor, model, flag, other, device):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


def outcome(source: str, machine: str, flag: bool, other: bool, device: str) -> Outcome:
    kind = Machine(machine).type
    given = {
        **dict.fromkeys(("x", "y", "model"), lambda here: Tensor(here, "cpu")),
        "flag": flag,
        "other": other,
        "device": lambda here: Name(kind if device == "own" else "cpu"),
    }
    call = "f(x, y, model, flag, other, device)" if "def f(" in source else ""
    return run(source, machine, call, given)


def differing(before: str, after: str) -> list[str]:
    """The cases in which a ported program does something else."""
    found = []
    for flag, other, device in itertools.product((False, True), (False, True), ("own", "cpu")):
        case = (flag, other, device)
        for machine in ("CUDA", "HOST"):
            old, new = outcome(before, machine, *case), outcome(after, machine, *case)
            if not old.error and old != new:
                found.append(f"{machine} {case}: {old} became {new}")
        on_cuda, unported = outcome(before, "CUDA", *case), outcome(before, "OTHER", *case)
        new = outcome(after, "OTHER", *case)
        if not on_cuda.error and new.renamed("OTHER") != on_cuda and new != unported:
            found.append(f"OTHER {case}: {unported} became {new}")
    return found


def check(source: str, target: str, *, changed: bool | None = None) -> Ported:
    """Ports a program without unsafe edits, runs it, and returns what ``--unsafe`` would do."""
    safe, unsafe = (port_text(source, Settings(target, unsafe=both)) for both in (False, True))
    assert not differing(source, safe.text), safe.text
    for ported, both in ((safe, False), (unsafe, True)):
        assert port_text(ported.text, Settings(target, unsafe=both)).text == ported.text
    if changed is not None:
        assert (safe.text != source) == changed, safe.text
    return unsafe


def reasons(ported: Ported) -> str:
    return "; ".join(site.reason for site in ported.sites if not site.safe or site.status is Status.LEFT)


def ported_project(
    folder: Path, files: dict[str, str], target: str, *, apply: bool = False, refused: Sequence[str] = ()
) -> dict[str, FileResult]:
    """Writes a project and ports it; the results by the names of its files, of which some are refused."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    paths = sorted(folder.rglob("*.py"))
    results = port_files(paths, Settings(target), apply, 1, lambda: None)
    assert [one.path.name for one in results if one.failure] == [*refused]
    return {one.path.relative_to(folder).as_posix(): one for one in results}


def site(result: FileResult, text: str) -> Site:
    """The only entry on a piece of code."""
    return site_of(result, text)


def site_of(result: FileResult | Ported, text: str) -> Site:
    """The only entry on a piece of code, also of a text that is no file."""
    found = [one for one in result.sites if one.text == text]
    assert len(found) == 1, result.sites
    return found[0]
