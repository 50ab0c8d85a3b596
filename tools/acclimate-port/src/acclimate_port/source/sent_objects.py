"""Where a program sends other processes objects with tensors of its device, which torch does for CUDA alone.

An actor whose constructor moves a network, in a list, in a function of another file that starts processes:
each step is a pair of symbols, and the files of a project are joined by them. Python's own parser reads it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from acclimate_port.source.bindings import Bindings, dotted
from acclimate_port.source.cuda_tensors import moved_names
from acclimate_port.source.tree import last_python_name, module_of, python_nodes

_PASS_ON = {"zip", "enumerate", "list", "tuple", "iter", "reversed", "sorted", "tqdm"}
"""Functions that give what they are given."""
_DEPTH = 8


@dataclass(frozen=True)
class SentObjects:
    """The objects of a file that hold tensors of the device, and where they go; symbols as texts."""

    holding: dict[str, int] = field(default_factory=dict)
    """The classes whose objects hold such tensors from their start, and the line."""
    sent: tuple[tuple[str, str], ...] = ()
    """Pairs of a class or a parameter, and the code that sends one to another process."""
    passed: tuple[tuple[str, str], ...] = ()
    """Pairs of a class or a parameter, and the parameter of another function that gets one."""


def sent_objects(source: str | bytes) -> SentObjects:
    """The objects that a file sends to other processes; none if this Python cannot parse it."""
    module = module_of(source)
    return SentObjects() if module is None else _Reader(module).read()


class _Reader(Bindings):
    """Reads one module."""

    def read(self) -> SentObjects:
        """What the module does with objects."""
        holding: dict[str, int] = {}
        sent: dict[tuple[str, str], None] = {}
        passed: dict[tuple[str, str], None] = {}
        for node in self._nodes:
            if isinstance(node, ast.ClassDef):
                if (line := _line_that_holds(node)) is not None:
                    holding[f"here:{node.name}(=)"] = line
            elif isinstance(node, ast.Call):
                if last_python_name(node.func) == "Process":
                    given = next((one.value for one in node.keywords if one.arg == "args"), None)
                    sent |= {(text, home): None for text in self._objects(given) for home in self._home(node)}
                elif called := self._called(node):
                    ends = [(f"#{at}", one) for at, one in enumerate(node.args)]
                    ends += [(one.arg, one.value) for one in node.keywords if one.arg is not None]
                    passed |= {
                        (text, f"{called}({end})"): None for end, one in ends for text in self._objects(one)
                    }
        return SentObjects(holding, tuple(sent), tuple(passed))

    def _objects(self, node: ast.AST | None, part: int = -1, depth: int = _DEPTH) -> set[str]:
        """The symbols of the classes of an object, or of the parameters that give it."""
        if node is None or not depth:
            return set()
        if isinstance(node, ast.Name):
            found = set(self._parameter(node))
            for _, value, at in self._bindings(node):
                found |= self._objects(value, at, depth - 1)
            return found
        if isinstance(node, (ast.For, ast.comprehension)):
            return self._objects(node.iter, part, depth - 1)
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._objects(node.value, -1, depth - 1)
        if isinstance(node, (ast.List, ast.Tuple)):
            return {text for one in node.elts for text in self._objects(one, -1, depth - 1)}
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self._objects(node.elt, -1, depth - 1)
        if isinstance(node, ast.IfExp):
            return self._objects(node.body, -1, depth - 1) | self._objects(node.orelse, -1, depth - 1)
        if not isinstance(node, ast.Call):
            return set()
        name = dotted(node.func)
        if name in _PASS_ON:
            given = node.args[part : part + 1] if name == "zip" and part >= 0 else node.args
            return {text for one in given for text in self._objects(one, -1, depth - 1)}
        called = self._called(node)
        is_class = called.startswith(("here:", "from:")) and name.rpartition(".")[2][:1].isupper()
        return {f"{called}(=)"} if is_class else set()


def _line_that_holds(owner: ast.ClassDef) -> int | None:
    """Where a constructor keeps what it has moved to a device: ``self.net = net.to(device)``."""
    makers = (one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    for maker in makers:
        held = {one for one in moved_names(maker) if one.startswith("self.")}
        for node in python_nodes(maker) if held else ():
            if isinstance(node, ast.Attribute) and dotted(node) in held:
                return node.lineno
    return None
