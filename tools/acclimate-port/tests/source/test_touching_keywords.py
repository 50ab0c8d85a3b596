"""Where a keyword touches another token, a file is read like any other, and each node has its own bytes."""

from __future__ import annotations

import libcst as cst
import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.source.tree import Tree
from porting import EACH_TARGET

TOUCHING = [
    "assert(a if b else c)",
    "x = 'é' if(a if b else c)else(lambda: a)",
    "x = [i for i in(a if b else c)if(a if b else c)]",
    "return(lambda: a), (a if b else c)or(b)",
    "return 1.if(b)else...is(a if b else c)",
    # In fields of f-strings, also in a format, in a string within a field, and over several lines.
    "x = f'é{{if(é {(a if b else c)or(b)!r:>{(a if b else c)or(b)}} else(' 'é'",
    'x = F"""{a:%H if(} {\n[i for i in(a if b else c)if(b != c)]:{b}}""", f\'{a}\'if(a if b else c)else 2',
    "x = rf'{f\"{not(lambda: a)}\"}{ {1: {2: not(lambda: b)}}[a or(lambda: c)]}', f'{a=}'",
]


@pytest.mark.parametrize("line", TOUCHING)
def test_each_node_has_its_own_bytes(line: str) -> None:
    text = f"def f(a, b, c):\n    é = 1; {line}\n"
    tree = Tree(text)
    assert tree.source(tree.module) == text
    for name in tree.of_type(cst.Name):
        assert tree.source(name) == name.value
    for choice in tree.of_type(cst.IfExp):
        source = tree.source(choice)
        assert source in line
        assert source.startswith(tree.source(choice.body))
        assert source.rstrip(")").endswith(tree.source(choice.orelse).rstrip(")"))


@EACH_TARGET
@pytest.mark.parametrize("line", TOUCHING)
def test_only_the_code_of_the_edit_is_changed(line: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(a, b, c):\n    torch.cuda.empty_cache()\n    {line}\n    torch.cuda.empty_cache()\n"
    ported = port_text(source, Settings(target))
    assert [site.status for site in ported.sites] == [Status.CONVERTED] * 2
    assert f"    {line}\n" in ported.text


@EACH_TARGET
def test_a_statement_in_parentheses_is_ported_within_them(target: str) -> None:
    source = "import torch\n\n\ndef f():\n    (torch.cuda.manual_seed(1))\n"
    ported = port_text(source, Settings(target))
    assert [site.status for site in ported.sites] == [Status.CONVERTED]
    assert ".manual_seed(1) if " in ported.text
