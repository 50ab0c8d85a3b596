"""What a file defines and imports."""

from __future__ import annotations

from acclimate_port.source.outline import Outline, outline

TEXT = """
import a.b
import c.d as e
from . import f
from ..g import H as I, j
from k import *

L: int = 1
if L:
    M = 2


class N(I, H[str], e.O, P()):
    Q = 3

    def r(self):
        from s import t


def u():
    v = 1
"""


def test_an_outline_has_the_names_of_the_module_and_its_imports() -> None:
    found = outline(TEXT)
    assert found.defines == {"L", "M", "N", "u"}
    assert found.names == {
        "a": "a", "e": "c.d", "f": ".f", "I": "..g.H", "j": "..g.j", "t": "s.t",
    }  # fmt: skip
    assert found.stars == ("k",)
    assert {"a.b", "c.d", ".", "..g", "k", "s", "..g.H"} <= found.imports
    assert found.bases == {("N", "from:..g.H"), ("N", "star:H"), ("N", "from:c.d.O")}


def test_a_file_that_python_cannot_parse_has_no_outline() -> None:
    assert outline(b"def f(:\n") == Outline()
