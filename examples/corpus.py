"""Text as byte tokens, and the order in which a training run reads it."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
"""One token per byte: any text can be read, and there is no tokenizer to download."""

_SEPARATOR = b"\0"
_NOT_PROSE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


class TextError(ValueError):
    """There is no text to train on, or too little of it."""


@dataclass(frozen=True)
class Windows:
    """Windows of a text. Each is read once per epoch, in an order that depends only on seed and epoch: sample
    70 of a run is the same after a resume, and on any number of ranks."""

    tokens: Tensor
    context: int
    seed: int = 0

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first`` to ``first + count``: inputs, and the tokens that follow each of them."""
        starts = [self._start(number) for number in range(first, first + count)]
        windows = torch.stack([self.tokens[start : start + self.context + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, len(self))
        return int(_order(len(self), self.seed, epoch)[place]) * self.context


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def read_text(path: Path | None) -> bytes:
    """A file, all text files below a folder, or by default the Python standard library's source.

    Raises:
        TextError: there is no text.
    """
    if path is not None and not path.exists():
        raise TextError(f"There is no {path}. Name a text file, or a folder of them: --data.")
    if path is not None and path.is_file():
        text = path.read_bytes()
    else:
        folder = path or Path(sysconfig.get_path("stdlib"))
        found = sorted(folder.rglob("*" if path else "*.py"))
        files = [path for path in found if _is_wanted(path.relative_to(folder)) and path.is_file()]
        random.Random(0).shuffle(files)  # so that the end, which validates, is like the rest
        text = _SEPARATOR.join(content for file in files if _SEPARATOR not in (content := file.read_bytes()))
    if not text:
        raise TextError(
            f"{path or 'the standard library'} holds no text. Name a text file, or a folder of them: --data."
        )
    return text


def _is_wanted(path: Path) -> bool:
    return not any(part in _NOT_PROSE or part.startswith(".") for part in path.parts)


def split(text: bytes, context: int, seed: int) -> tuple[Windows, Windows]:
    """Windows for training, and windows of the last twentieth of the text for validation.

    Raises:
        TextError: the text is too short for one window of each.
    """
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    border = len(tokens) - max(len(tokens) // 20, context + 1)
    if border < context + 1:
        raise TextError(
            f"The text has {len(tokens):,} bytes, and a context of {context} needs {2 * (context + 1):,}: "
            "a window to train on and one to validate with. Give more text (--data) or a smaller --context."
        )
    return Windows(tokens[:border], context, seed), Windows(tokens[border:], context)
