"""Files of settings that a program names, such as ``conf/config.yaml``, and the devices that they give it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from acclimate_port.source.named_in_texts import Names, Text, points_declared

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".cfg")
_YAML = re.compile(
    r"""^\s*(?:-\s*)?([\w.-]*(?:device|backend|accelerator)[\w.-]*)\s*:\s*["']?(cuda(?::\d+)?|nccl)["']?\s*(?:#.*)?$"""
)
_OTHER = re.compile(
    r"""([\w.-]*(?:device|backend|accelerator)[\w.-]*)["']?\s*[:=]\s*["'](?:cuda(?::\d+)?|nccl)["']"""
)
_DEFAULTS = re.compile(r"^defaults:[ \t]*\n((?:[ \t]*(?:-[^\n]*|#[^\n]*)?\n)+)", re.M)
_CHOICE = re.compile(
    r"^\s*-\s*(?:(?:override\s+)?/?([\w/]+)(?:@[\w.]*)?\s*:\s*)?([\w./-]+)\s*(?:#.*)?$", re.M
)
_NAME = re.compile(r"""[:=\-]\s*["']?((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)(?:["',\s}]|$)""", re.M)
_NO_NAME = re.compile(
    r"^(torch|numpy|transformers)\.|\.(py|pth?|ckpt|bin|json|ya?ml|txt|csv|np[yz]|png|jpe?g|md|log|pkl|gz|zip)$"
)
"""Texts with dots that name nothing of a project."""
_SAID = re.compile(rb"--?([\w-]*device[\w-]*)[ \t=]+[\"']?cuda")
_COMMANDS = (".sh", ".bash", ".md", ".rst")
"""Files with command lines."""
_MOST_FILES = 3_000
_UNREAD = {"node_modules", "__pycache__", "site-packages", "venv"}
_LARGEST = 1_000_000
"""Longer files hold data and no settings."""


def yaml_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a YAML file that name a device or a backend; they are reported and not edited."""
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if _YAML.match(line)]


def devices_given(name: str, text: str) -> dict[str, int]:
    """The keys by which a file of settings gives a device or a backend of CUDA, each with its first line."""
    form = _YAML if name.endswith((".yaml", ".yml")) else _OTHER
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for given in form.finditer(line):
            found.setdefault(given[1].rpartition(".")[2].replace("-", "_"), number)
    return found


def chosen_by(text: str) -> Iterator[Text]:
    """The files that a file of hydra's chooses: ``model/small.yaml`` of ``defaults: [{model: small}]``."""
    for found in _DEFAULTS.finditer(text):
        for choice in _CHOICE.finditer(found[1]):
            name = f"{choice[1]}/{choice[2]}" if choice[1] else choice[2]
            yield Text(Names.SETTINGS, f"{name.removesuffix('.yaml')}.yaml")


def named_by(text: str) -> Iterator[Text]:
    """The classes and functions that settings name: ``_target_: lib.model.Net``, and entry points."""
    for found in _NAME.finditer(text):
        if not _NO_NAME.search(found[1]):
            yield Text(Names.NAME, found[1])
    if "entry" in text or "plugins" in text or "scripts" in text:
        yield from points_declared(text)


def read_all(paths: Iterable[Path]) -> dict[Path, str]:
    """All files of settings beside the files of a project and below, with their texts."""
    return {path: path.read_text(errors="replace") for path in _files_below(paths, SUFFIXES)}


def options_said(paths: Iterable[Path]) -> frozenset[str]:
    """The options that command lines in scripts and pages of a project set to a device of CUDA."""
    texts = (path.read_bytes() for path in _files_below(paths, _COMMANDS))
    return frozenset(one.decode().replace("-", "_") for text in texts for one in _SAID.findall(text))


def _files_below(paths: Iterable[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """The small files with some suffixes in the folder that holds all files of a project, and below."""
    parents = [one.parent for one in paths]
    if not parents:
        return
    is_mixed = len({one.is_absolute() for one in parents}) > 1
    root = os.path.commonpath([os.path.abspath(one) if is_mixed else one for one in parents])
    count = 0
    for where, folders, names in os.walk(root or "."):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _UNREAD)
        for name in sorted(names):
            path = Path(where, name)
            if path.suffix in suffixes and count < _MOST_FILES and _is_small_file(path):
                count += 1
                yield path


def nearest(path: Path, name: str) -> Iterator[Path]:
    """The files that a name in a file may mean, the nearest first: beside it, and in folders around it."""
    return (Path(os.path.normpath(folder / name)) for folder in path.parents)


def read_named(named: Iterable[tuple[Path, Text]], paths: Iterable[Path]) -> dict[Path, str]:
    """The files of settings that others name, also through each other, with their texts.

    Args:
        named: files, each with what it names in a text.
        paths: the files of the project; others outside the folder that holds all of these are not read.
    """
    waiting = [pair for pair in named if pair[1].names is Names.SETTINGS]
    if not waiting:
        return {}
    root = Path(os.path.commonpath([os.path.abspath(one.parent) for one in paths]))
    found: dict[Path, str] = {}
    for path, text in waiting:
        near = (one for one in nearest(path, text.text) if Path(os.path.abspath(one)).is_relative_to(root))
        file = next((one for one in near if one in found or _is_small_file(one)), None)
        if file is not None and file not in found:
            found[file] = file.read_text(errors="replace")
            waiting += ((file, one) for one in chosen_by(found[file]))
    return found


def _is_small_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size < _LARGEST and os.access(path, os.R_OK)
    except OSError:
        return False
