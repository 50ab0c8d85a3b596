"""Caches transformers' index of models for the next start.

At import transformers reads all of its 2,500 model files twice to index the names in them, which takes 0.4 s
of the 1 s import. The cached index is used as long as those files keep their sizes and modification times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from acclimate.cache.texts import TextCache

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "create_import_structure_from_path"
_INDEXES = TextCache(
    "transformers",
    "index.json",
    "the index of transformers' models",
    "transformers builds it again",
    logging.getLogger("acclimate.llm"),
)


@contextlib.contextmanager
def kept_model_index() -> Iterator[None]:
    """Makes transformers read its index from the cache if it is imported in the ``with`` block."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Replaces transformers' function in its module, once the module has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        loader: Any = found.loader if found is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return None
        run = loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            made = getattr(module, _FUNCTION, None)
            if callable(made):
                setattr(module, _FUNCTION, _kept(made, module))

        loader.exec_module = run_and_replace
        return found


def _kept(make: Callable[[Any], Any], module: ModuleType) -> Callable[[Any], Any]:
    """Wraps the function that builds an index: for the folder of all models, it reads the cache."""
    models = os.path.join(os.path.dirname(os.path.dirname(str(module.__file__))), "models")
    texts: dict[str, str] = {}

    def index(path: Any) -> Any:
        folder = os.path.dirname(path) if os.path.isfile(path) else os.fspath(path)
        if folder != models:
            return make(path)
        key = _key(folder, str(module.__file__))
        found = _read(texts[key]) if key in texts else _INDEXES.load(key, _read)
        if found is None:
            found = make(path)
            texts[key] = json.dumps(_encoded(found))
            _INDEXES.save(key, texts[key])
        return found

    return index


def _key(folder: str, code: str) -> str:
    """Returns a digest of the names, sizes and times of all files from which the index is built."""
    content = hashlib.sha256(f"{sys.version} {folder} {_facts(os.stat(code))}".encode())
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.name == "__pycache__":
                    continue
                if entry.is_dir():
                    folders.append(entry.path)
                else:
                    content.update(os.fsencode(f"{entry.path} {_facts(entry.stat())}\0"))
    return content.hexdigest()[:32]


def _facts(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


# JSON has no sets. A folder's index maps folder names to their indices, and sets of packages to the modules
# that need them.
def _encoded(index: dict[Any, Any]) -> list[list[Any]]:
    return [
        [sorted(name), {module: sorted(names) for module, names in held.items()}]
        if isinstance(name, frozenset)
        else [name, _encoded(held)]
        for name, held in index.items()
    ]


def _read(text: str) -> dict[Any, Any]:
    return _decoded(json.loads(text))


def _decoded(index: list[list[Any]]) -> dict[Any, Any]:
    return {
        frozenset(name) if isinstance(name, list) else name: (
            {module: set(names) for module, names in held.items()}
            if isinstance(name, list)
            else _decoded(held)
        )
        for name, held in index
    }
