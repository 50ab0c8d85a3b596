import ctypes
import sys
from pathlib import Path
from types import ModuleType

from acclimate.ops import OpBuilder, Source

answers: list[int] = []
"""What each library that was loaded says, in order."""


class TinyBuilder(OpBuilder):
    name = "tiny"

    def sources(self) -> list[str | Source]:
        return ["csrc/tiny.cpp", Source("csrc/flagged.cpp", flags=("-DTINY_FLAG=7",))]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def open_library(self, path: Path) -> None:
        answers.append(ctypes.CDLL(str(path)).tiny_answer())

    def module(self) -> ModuleType:
        return sys.modules[__name__]
