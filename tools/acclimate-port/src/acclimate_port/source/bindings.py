"""What the names of a module are bound to, by Python's own parser, for whoever follows a value through it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from acclimate_port.source.tree import LEAVES, python_nodes

MODULE = "<module>"
Bound = tuple[int, ast.AST | None, int]
"""The line of a binding, the value, and which of its parts it is; -1 for the whole."""

_BINDING = {
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For),
    *(ast.comprehension, ast.withitem),
}
"""What gives names their values."""


class Bindings:
    """The names of one module.

    Args:
        module: its tree.
    """

    def __init__(self, module: ast.Module) -> None:
        self._nodes = python_nodes(module)
        self._around: dict[int, ast.AST] = {}
        self._imports: dict[str, str] = {}
        self._packages: set[str] = set()
        self._bound: dict[tuple[int, str], list[Bound]] = defaultdict(list)
        """By the scope and the name, or the text of an attribute: line, value, and index of its part."""
        self._defined = {one.name for one in module.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
        for node in self._nodes:
            if type(node) in LEAVES:
                continue
            for name in node._fields:
                value = getattr(node, name, None)
                for one in value if type(value) is list else (value,):
                    if isinstance(one, ast.AST):
                        self._around[id(one)] = node
        for node in self._nodes:
            if type(node) in _BINDING:
                self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._packages.add(first)
                self._imports[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            self._packages.add(start.partition(".")[0])
            for alias in node.names:
                full = f"{start}{'' if start.endswith('.') else '.'}{alias.name}"
                self._imports[alias.asname or alias.name] = full
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, -1)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._bind_target(node.target, node.value, -1)
        elif isinstance(node, (ast.AugAssign, ast.For, ast.comprehension)):
            self._bind_target(node.target, node, -1)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            called = node.context_expr
            is_shown = isinstance(called, ast.Call) and dotted(called.func).rpartition(".")[2] == "tqdm"
            self._bind_target(node.optional_vars, called if is_shown else None, -1)

    def _bind_target(self, target: ast.AST, value: ast.AST | None, part: int) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for index, one in enumerate(target.elts):
                held = value
                at = index
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                    held, at = value.elts[index], -1
                self._bind_target(one, held, at)
        elif isinstance(target, ast.Name):
            self._bound[id(self._scope(target)), target.id].append((target.lineno, value, part))
        elif isinstance(target, ast.Attribute):
            self._bound[0, dotted(target)].append((target.lineno, value, part))

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        at = self._around.get(id(node))
        while at is not None:
            yield at
            at = self._around.get(id(at))

    def _scope(self, node: ast.AST) -> ast.AST | None:
        """The function around a node, or ``None`` for the module's or a class's code."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return next((one for one in self._ancestors(node) if isinstance(one, kinds)), None)

    def _full(self, node: ast.AST) -> str:
        """The full name of what an import gives; a name of its own stays as it is, and others are ``""``."""
        text = dotted(node)
        first, dot, rest = text.partition(".")
        return f"{self._imports[first]}{dot}{rest}" if first in self._imports else text

    def _home(self, node: ast.AST) -> list[str]:
        """The names by which other code runs or reads the code of a node."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        around = [one for one in self._ancestors(node) if isinstance(one, kinds)]
        if around:
            return [around[-1].name]
        statements = [one for one in (node, *self._ancestors(node)) if isinstance(one, ast.Assign)]
        names = [one.id for held in statements for one in held.targets if isinstance(one, ast.Name)]
        return [*names, MODULE]

    def _bindings(self, name: ast.Name) -> list[Bound]:
        """What is bound to a name: the last of its function before the use, or all that the module binds."""
        scope: ast.AST | None = self._scope(name)
        while scope is not None:
            held = self._bound.get((id(scope), name.id), [])
            before = [one for one in held if one[0] < name.lineno]
            if before or held:
                return [max(before, key=lambda one: one[0])] if before else held
            if name.id in parameters(scope):
                return []
            scope = self._scope(scope)
        held = self._bound.get((id(None), name.id), [])
        before = [one for one in held if one[0] < name.lineno] if self._scope(name) is None else held
        return [max(before, key=lambda one: one[0])] if before is not held and before else before or held

    def _parameter(self, name: ast.Name) -> list[str]:
        """The texts of the symbols of a name that is a parameter."""
        function = self._scope(name)
        while function is not None and name.id not in parameters(function):
            if (id(function), name.id) in self._bound:
                return []
            function = self._scope(function)
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        owner = self._around.get(id(function))
        listed = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(owner, ast.ClassDef):
            is_static = any(dotted(one) == "staticmethod" for one in function.decorator_list)
            listed = listed if is_static else listed[1:]
            is_maker = function.name == "__init__"
            if is_maker and isinstance(self._around.get(id(owner)), ast.Module):
                texts = [f"here:{owner.name}"]
            else:
                texts = [f"self:{owner.name}.{function.name}", f"any:{function.name}"]
        elif isinstance(owner, ast.Module):
            texts = [f"here:{function.name}"]
        else:
            return []
        ends = [name.id, *(f"#{at}" for at, one in enumerate(listed) if one == name.id)]
        return [f"{text}({end})" for text in texts for end in ends]

    def _called(self, call: ast.Call) -> str:
        """The text of the symbol of a function that may be the project's own."""
        text = dotted(call.func)
        first, _, rest = text.partition(".")
        if first in self._imports:
            full = self._full(call.func)
            is_librarys = full.partition(".")[0] in _LIBRARIES
            return "" if is_librarys else f"from:{full}"
        if text in self._defined:
            return f"here:{text}"
        if first == "self" and rest and "." not in rest:
            owner = next((one for one in self._ancestors(call) if isinstance(one, ast.ClassDef)), None)
            return f"self:{owner.name}.{rest}" if owner is not None else ""
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr not in _METHODS_OF_ALL
        return f"any:{call.func.attr}" if is_method and isinstance(call.func, ast.Attribute) else ""


_LIBRARIES = {
    *("torch", "numpy", "os", "sys", "math", "typing", "logging", "collections", "functools"),
    *("transformers", "scipy", "sklearn", "pandas", "matplotlib", "random", "json", "re", "time", "tqdm"),
    *("cv2", "PIL"),
}
_METHODS_OF_ALL = {
    *("append", "extend", "format", "join", "get", "pop", "write", "add", "update", "insert", "plot", "to"),
    *("cuda", "view", "reshape", "mean", "sum", "astype", "copy", "item", "index", "save", "print", "log"),
    *("split", "items", "add_scalar", "imshow", "scatter", "hist", "set_title", "info", "debug", "warning"),
    *("randint", "choice", "step"),
}


def dotted(node: ast.AST | None) -> str:
    """The text of a name with dots; ``""`` if it has other parts."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def parameters(function: ast.AST) -> set[str]:
    """The names of the parameters of a function, but for ``*arguments`` and ``**options``."""
    given = getattr(function, "args", None)
    if not isinstance(given, ast.arguments):
        return set()
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
