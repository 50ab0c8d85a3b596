"""Finds the code that TorchScript compiles, which cannot call the functions that choose the accelerator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import libcst as cst

from acclimate_port.source.tree import Tree, called_name, dotted, walk

_COMPILERS = {f"torch.jit.{name}" for name in ("script", "script_method", "script_if_tracing", "export")}
_COMPILERS |= {"torch.jit._script.script", "torch.jit._script_if_tracing", "torch.jit.interface"}
_LEFT_TO_PYTHON = {"torch.jit.ignore", "torch.jit.unused", "torch.jit.ignore.ignore"}
_MARKS = {"torch.jit.export", "torch.jit.ignore", "torch.jit.unused"}
_QUESTIONS = {"torch.jit.is_scripting", "torch.jit.is_scripting.is_scripting"}
_NAME_OF_COMPILER = re.compile(
    r"(^|_)jit(_(script|fuser|fuse))?$|^(maybe_|_)?(script|torchscript)(_method|_if_\w+)?$|^jit_"
)
_MAY_CONCERN = re.compile(r"jit(?!ter)|torchscript|script_method|@\w*script")
_DEEPEST = 4


class TorchScript:
    """The functions of a file that TorchScript compiles.

    Args:
        tree: the file.
        elsewhere: the names of classes that other files may give to the compiler.
        all_modules: whether another file may give any of the modules to the compiler.
    """

    def __init__(
        self, tree: Tree, elsewhere: frozenset[str] = frozenset(), all_modules: bool = False
    ) -> None:
        self._tree = tree
        self._elsewhere = elsewhere
        self._all_modules = all_modules
        self._compilers: dict[tuple[int, int], bool] = {}
        """Which expressions are compilers, by their identity and how far their names are followed."""
        self._compiling: dict[str, bool] = {}
        """Which functions of the file pass a parameter to the compiler."""

    def holds(self, node: cst.CSTNode) -> bool:
        """Whether a node is part of a compiled function, in a branch that the compiler reads."""
        if not self._compiled:
            return False
        around = self._tree.function(node)
        while around is not None:
            if around in self._compiled:
                return not self._is_for_python(node, around)
            around = self._tree.function(around)
        return False

    @cached_property
    def _compiled(self) -> set[cst.CSTNode]:
        is_named = self._all_modules or bool(self._elsewhere & self._classes.keys())
        if not is_named and not _MAY_CONCERN.search(self._tree.text):
            return set()
        found = _Found()
        definitions: list[cst.FunctionDef | cst.ClassDef] = [*self._tree.of_type(cst.FunctionDef)]
        definitions += self._tree.of_type(cst.ClassDef)
        for node in definitions:
            if any(self._is_compiler(decorator) for decorator in decorators(node)):
                self._add(found, node)
            elif isinstance(node, cst.ClassDef) and self._is_meant_for_it(node):
                self._add_module(found, node)
        for call in self._tree.of_type(cst.Call):
            if self._is_compiler(call.func):
                for argument in call.args:
                    self._add_value(found, argument.value, _DEEPEST)
            elif self._tree.qualified(call.func) in _QUESTIONS:
                asks = self._tree.function(call)
                if isinstance(asks, cst.FunctionDef):
                    self._add(found, asks)
        return found.functions

    # -- values given to the compiler ----------------------------------------------------------------

    def _is_compiler(self, node: cst.CSTNode, depth: int = _DEEPEST) -> bool:
        """Whether an expression is a TorchScript compiler, as shown by the file or by its name."""
        key = (id(node), depth)
        if key not in self._compilers:
            self._compilers[key] = self._looks_like_compiler(node, depth)
        return self._compilers[key]

    def _looks_like_compiler(self, node: cst.CSTNode, depth: int) -> bool:
        if isinstance(node, cst.Call):
            held = [node.func, *(argument.value for argument in node.args)]
            return any(self._is_compiler(decorator, depth) for decorator in held)
        if not isinstance(node, (cst.Name, cst.Attribute)):
            return False
        meanings = self._tree.may_be(node)
        if meanings & _COMPILERS:
            return True
        if any(
            meaning.startswith(("torch.", "numba.", "jax.", "triton.", "cutlass.")) for meaning in meanings
        ):
            return False
        name = dotted(node)
        if depth and name in self._aliases:
            return any(self._is_compiler(alias, depth - 1) for alias in self._aliases[name])
        if name in self._functions:
            if name not in self._compiling:
                self._compiling[name] = self._compiles_argument(self._functions[name])
            return self._compiling[name]
        return bool(_NAME_OF_COMPILER.search(name.rpartition(".")[2])) and self._is_decorator(node)

    def _compiles_argument(self, function: cst.FunctionDef) -> bool:
        """Whether a function passes a parameter to the compiler, as the file's own decorators do."""
        given = {parameter.name.value for parameter in function.params.params}
        return any(
            isinstance(descendant, cst.Call)
            and bool(self._tree.may_be(descendant.func) & _COMPILERS)
            and any(dotted(argument.value) in given for argument in descendant.args)
            for descendant in walk(function.body)
        )

    def _is_decorator(self, node: cst.CSTNode) -> bool:
        at = self._tree.parent(node)
        return isinstance(at, cst.Decorator) or (
            isinstance(at, cst.Call) and isinstance(self._tree.parent(at), cst.Decorator)
        )

    @cached_property
    def _aliases(self) -> dict[str, list[cst.CSTNode]]:
        """The expressions that the file assigns to each name: ``script = torch.jit.script``."""
        found: dict[str, list[cst.CSTNode]] = defaultdict(list)
        for assign in self._tree.of_type(cst.Assign):
            for target in assign.targets:
                found[dotted(target.target)].append(assign.value)
        bindings: list[cst.AnnAssign | cst.NamedExpr] = [*self._tree.of_type(cst.AnnAssign)]
        bindings += self._tree.of_type(cst.NamedExpr)
        for bound in bindings:
            if bound.value is not None:
                found[dotted(bound.target)].append(bound.value)
        loops: list[cst.For | cst.CompFor] = [*self._tree.of_type(cst.For)]
        loops += self._tree.of_type(cst.CompFor)
        for loop in loops:
            found[dotted(loop.target)].append(loop.iter)
        found.pop("", None)
        return found

    @cached_property
    def _functions(self) -> dict[str, cst.FunctionDef]:
        """The functions that are in no class, by name."""
        return {
            node.name.value: node for node in self._tree.of_type(cst.FunctionDef) if not self._class_of(node)
        }

    @cached_property
    def _classes(self) -> dict[str, cst.ClassDef]:
        return {node.name.value: node for node in self._tree.of_type(cst.ClassDef)}

    def _class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        holder = self._tree.parent(self._tree.parent(node) or node)
        return holder if isinstance(holder, cst.ClassDef) else None

    def _is_meant_for_it(self, node: cst.ClassDef) -> bool:
        """Whether a class's objects are compiled: its base, a method's decorator or another file shows it."""
        if node.name.value in self._elsewhere:
            return True
        if self._all_modules and any(method.name.value == "forward" for method in methods(node)):
            return True
        if any("torch.jit.ScriptModule" in self._tree.may_be(base.value) for base in node.bases):
            return True
        return any(
            bool(self._tree.may_be(decorator) & _MARKS)
            for method in methods(node)
            for decorator in decorators(method)
        )

    def _add_value(self, found: _Found, value: cst.CSTNode, depth: int) -> None:
        """Adds the functions and classes of a compiled value: ``Net(…)``, ``net``, ``self.step``."""
        if value in found.values:
            return
        found.values.add(value)
        for node in walk(value):
            if type(node) not in (cst.Name, cst.Attribute):
                continue
            name = dotted(node)
            if name in self._classes:
                self._add_module(found, self._classes[name])
            elif name in self._functions:
                self._add_function(found, self._functions[name], node, depth)
            elif isinstance(node, cst.Attribute) and name.startswith("self."):
                self._add_method(found, node)
            if depth:
                for alias in self._aliases.get(name, []):
                    self._add_value(found, alias, depth - 1)

    def _add_function(self, found: _Found, function: cst.FunctionDef, node: cst.CSTNode, depth: int) -> None:
        """Adds a function or, if it is called, the modules that it returns."""
        call = self._tree.parent(node)
        if not (isinstance(call, cst.Call) and call.func is node):
            self._add(found, function)
        elif depth:
            for descendant in walk(function.body):
                if isinstance(descendant, cst.Call) and called_name(descendant) in self._classes:
                    self._add_module(found, self._classes[called_name(descendant) or ""])

    def _add_method(self, found: _Found, node: cst.Attribute) -> None:
        for around in self._tree.ancestors(node):
            if isinstance(around, cst.ClassDef):
                for method in methods(around):
                    if method.name.value == node.attr.value:
                        self._add(found, method)
                return

    # -- functions compiled with them ----------------------------------------------------------------

    def _add(self, found: _Found, node: cst.FunctionDef | cst.ClassDef) -> None:
        """Adds a function, or each method of a class, and the functions that they call."""
        if isinstance(node, cst.ClassDef):
            for method in methods(node):
                self._add(found, method)
            return
        if node in found.functions or self._is_left_to_python(node):
            return
        found.functions.add(node)
        of_class = self._class_of(node)
        for descendant in walk(node.body):
            if not isinstance(descendant, (cst.Name, cst.Attribute)) or self._is_for_python(descendant, node):
                continue
            name = dotted(descendant)
            if name in self._functions:
                self._add(found, self._functions[name])
            elif name in self._classes:
                self._add(found, self._classes[name])
            elif (
                isinstance(descendant, cst.Attribute)
                and name == f"self.{descendant.attr.value}"
                and of_class is not None
            ):
                self._add_methods(found, of_class, descendant.attr.value)

    def _add_methods(self, found: _Found, of_class: cst.ClassDef, name: str) -> None:
        """Adds the methods of one name, of a class and of its bases in the file."""
        for definition in self._with_bases(of_class):
            for method in methods(definition):
                if method.name.value == name:
                    self._add(found, method)

    def _add_module(self, found: _Found, node: cst.ClassDef) -> None:
        """Adds the compiled parts of a module: the functions that ``forward`` calls, and its submodules."""
        for definition in self._with_bases(node):
            if definition in found.modules:
                continue
            found.modules.add(definition)
            is_chosen = self._chooses_methods(definition)
            for method in methods(definition):
                is_root = method.name.value in ("forward", "__call__") and not is_chosen
                if is_root or any(self._tree.may_be(one) & _COMPILERS for one in decorators(method)):
                    self._add(found, method)
            for below in walk(definition.body):
                if isinstance(below, cst.Call) and called_name(below) in self._classes:
                    self._add_module(found, self._classes[called_name(below) or ""])

    def _chooses_methods(self, node: cst.ClassDef) -> bool:
        """Whether a ``ScriptModule`` compiles the methods alone that it marks with ``script_method``."""
        is_script = any("torch.jit.ScriptModule" in self._tree.may_be(base.value) for base in node.bases)
        marks = (one for method in methods(node) for one in decorators(method))
        return is_script and any("torch.jit.script_method" in self._tree.may_be(one) for one in marks)

    def _with_bases(self, node: cst.ClassDef) -> list[cst.ClassDef]:
        found, waiting = [node], [node]
        while waiting:
            for base in waiting.pop().bases:
                known = self._classes.get(dotted(base.value))
                if known is not None and known not in found:
                    found.append(known)
                    waiting.append(known)
        return found

    # -- code that the compiler skips ----------------------------------------------------------------

    def _is_left_to_python(self, node: cst.FunctionDef) -> bool:
        return any(bool(self._tree.may_be(decorator) & _LEFT_TO_PYTHON) for decorator in decorators(node))

    def _is_for_python(self, node: cst.CSTNode, function: cst.CSTNode) -> bool:
        """Whether a node runs in Python only: behind ``not torch.jit.is_scripting()``."""
        for below, around in self._tree.upwards(node):
            if around is function:
                return False
            if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test:
                test, positive = around.test, below is around.body
                if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
                    test, positive = test.expression, not positive
                asks = isinstance(test, cst.Call) and self._tree.qualified(test.func) in _QUESTIONS
                if asks and not positive:
                    return True
        return False


class _Found:
    """The compiled functions, and the classes whose objects are compiled."""

    def __init__(self) -> None:
        self.functions: set[cst.CSTNode] = set()
        self.modules: set[cst.CSTNode] = set()
        self.values: set[cst.CSTNode] = set()


def decorators(node: cst.FunctionDef | cst.ClassDef) -> Iterator[cst.BaseExpression]:
    """The decorators of a function or a class; ``f`` for ``@f(…)`` too."""
    for decorator in node.decorators:
        yield decorator.decorator
        if isinstance(decorator.decorator, cst.Call):
            yield decorator.decorator.func


def methods(node: cst.ClassDef) -> list[cst.FunctionDef]:
    """The functions that a class defines."""
    return [statement for statement in node.body.body if isinstance(statement, cst.FunctionDef)]
