"""What tests of building ops share: a compiler that is watched, and a place to build in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fresh_process import FreshProcesses, Outcome

DATA = Path(__file__).parent / "data"
COMPILER = shutil.which("c++")

# Notes each source that it compiles. While the file `slow` exists it says that it started, and waits.
# What the compiler has made of the same files and flags for another test of this run is copied.
_WATCHED = """#!/bin/sh
case " $* " in *" -c "*)
    echo "$*" >> {folder}/compiled
    if [ -e {folder}/slow ]; then
        echo $$ >> {folder}/started
        while [ -e {folder}/slow ]; do sleep 0.02; done
    fi
    for each; do
        case $previous in -c) source=$each ;; -o) object=$each ;; esac
        previous=$each
    done
    flags=$(echo "${{*%% -c *}}" | sed "s|{folder}||g")
    key=$( (echo "$flags $source" | sed "s|.*/||"; echo "$flags"; cat "${{source%/*}}"/*) | sha256sum)
    made={shared}/${{key%% *}}
    cp "$made" "$object" 2> /dev/null && exit
    {compiler} "$@" || exit
    cp "$object" "$made.$$" && mv "$made.$$" "$made"
    exit ;;
esac
exec {compiler} "$@"
"""


@dataclass(frozen=True)
class Workshop:
    """A copy of the test packages, a cache of its own, and the watched compiler."""

    folder: Path
    fresh: FreshProcesses

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def tiny(self) -> Path:
        """The sources of the op that compiles fast."""
        return self.folder / "tiny" / "tiny_op" / "csrc"

    @property
    def env(self) -> dict[str, str]:
        return {"ACCLIMATE_CACHE": str(self.cache), "CXX": str(self.folder / "watched-c++")}

    @property
    def without_compiler(self) -> dict[str, str]:
        return {"ACCLIMATE_CACHE": str(self.cache), "CXX": "", "PATH": str(self.folder / "nothing")}

    def compiled(self) -> list[str]:
        """The command of each compilation so far, without those that link."""
        path = self.folder / "compiled"
        return path.read_text().splitlines() if path.exists() else []

    def run(self, code: str, env: Mapping[str, str] | None = None, **options: Any) -> Outcome:
        """Runs code in a fresh process, which has to end well."""
        path = [self.folder / "tiny", self.folder / "acme"]
        # Nothing in the environment of the tests' own run may name another compiler or cache.
        return self.fresh.check(code, path=path, env={**self.env, **(env or {})}, **options)

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("ops/*/*/*.so"))

    def leftovers(self) -> list[Path]:
        return sorted(self.cache.glob("ops/*/.*.partial"))


def set_up(folder: Path, shared: Path, fresh: FreshProcesses) -> Workshop:
    for package in ("tiny", "acme"):
        shutil.copytree(DATA / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "watched-c++"
    script.write_text(_WATCHED.format(folder=folder, shared=shared, compiler=COMPILER))
    script.chmod(0o755)
    return Workshop(folder, fresh)


def command_line(*arguments: str) -> str:
    """Code that runs ``acclimate`` with these arguments and tells its exit code."""
    return f"from acclimate.cli import main\ntell(code=main({list(arguments)!r}))"


def python_environment(workshop: Workshop) -> dict[str, str]:
    """For a process that does not come from ``fresh``."""
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), str(workshop.folder / "tiny"), str(workshop.folder / "acme")])
    return {**os.environ, **workshop.env, "PYTHONPATH": path, "PYTHONEXECUTABLE": sys.executable}
