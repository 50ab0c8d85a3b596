"""The manifest of a converted model's folder; it detects a damaged folder, which is converted again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from acclimate.llm.files.folder import check_safetensors
from acclimate.llm.quiet import first_line

logger = logging.getLogger("acclimate.llm")

MANIFEST = "acclimate.json"
_READ_WHOLE = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 32, 4 << 10


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the manifest: how the folder was made, and the size and digest of each file in it."""
    files = {
        path.name: {"bytes": path.stat().st_size, "digest": digest(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps(facts | {"files": files}, indent=1) + "\n")


def is_whole(folder: Path) -> bool:
    """Whether a folder matches its manifest; takes milliseconds, since large files are only sampled.

    Warns of a folder with a manifest that it does not match.
    """
    if not (folder / MANIFEST).exists():
        return False
    damage = _damage(folder)
    if damage is not None:
        logger.warning("the converted model in %s is damaged (%s); converting it again", folder, damage)
    return damage is None


def fact(folder: Path, name: str) -> str | None:
    """Returns what the manifest says of how a folder was made; ``None`` for a folder without one."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes()).get(name)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def model_name(folder: Path) -> str:
    """Returns a model's name for people: not the key of a folder in a cache.

    It is the name of the GGUF file that was converted to the folder, the id of a model of the hub, or the
    folder's name.
    """
    source = fact(folder, "source")
    if source is not None:
        return Path(source).stem
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def _damage(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, recorded in files.items():
            path = folder / name
            if path.stat().st_size != recorded["bytes"] or digest(path) != recorded["digest"]:
                return f"{name} has changed"
        if "model.safetensors" in files:
            check_safetensors(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return first_line(error)
    return None


def discard(folder: Path) -> None:
    """Marks a folder as damaged, so that its next use converts the model again."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file of up to 1 MiB, or of 32 evenly spread samples of a larger one."""
    size = path.stat().st_size
    content = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _READ_WHOLE:
            content.update(file.read())
        else:
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                content.update(file.read(_SAMPLE_BYTES))
    return content.hexdigest()
