"""Code meant for one vendor's hardware: builds, kernels, runtimes, and tests that replace torch.cuda."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property

import libcst as cst

from acclimate_port.source.cuda_packages import RUNTIMES
from acclimate_port.source.tree import Tree, called_name, string_value, walk

_KERNEL_MARKS = {"triton.jit", "triton.autotune", "numba.cuda.jit", "cutlass.cute.jit", "cutlass.cute.kernel"}
_BUILDS = "torch.utils.cpp_extension."
_TOOLKIT = re.compile(r"^(CUDA|ROCM)_(HOME|PATH)$")
_REPLACES = {"patch", "object", "multiple", "setattr"}
_SETS_UP = re.compile(r"setUp|setup|asyncSetUp")
"""Functions that a test class runs before each of its tests."""
_NUMBERED = re.compile(r"cuda:\d+$")
_COMMAND = "nvidia-smi"


class VendorCode:
    """Finds the code that a port must leave because it is meant for one vendor's hardware.

    Args:
        tree: the file.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def reason(self, node: cst.CSTNode, is_test: bool) -> str:
        """Why a node is code for one vendor; ``""`` if it is not.

        Args:
            node: the node.
            is_test: whether it is a test of the device, which may control a build.
        """
        around = list(self._tree.ancestors(node))
        if any(isinstance(ancestor, cst.Call) and self._is_build(ancestor) for ancestor in around):
            return "it builds a native extension for one vendor's hardware"
        marks = [self._kernel_mark(one) for one in around if isinstance(one, cst.FunctionDef)]
        if any(mark.startswith("triton.") for mark in marks):
            return "code of a Triton kernel, which has no device of torch"
        if any(marks):
            return "a kernel for one vendor's hardware"
        if is_test and self._decides_build(node, around):
            return "it controls the build of a native extension for one vendor's hardware"
        if self._replacing and any(ancestor in self._replacing for ancestor in around):
            return "the test replaces names of torch.cuda"
        for holder in around:
            if isinstance(holder, cst.FunctionDef) and holder in self.of_runtimes:
                return f"the function uses {self.of_runtimes[holder]}, which only NVIDIA GPUs have"
        if (_NUMBERED.match(string_value(node) or "") or isinstance(node, cst.Call)) and any(
            ancestor in self._only_comparing for ancestor in around
        ):
            return "the test compares devices with different indices, and a CPU-only machine has one device"
        return ""

    def _is_build(self, call: cst.Call) -> bool:
        name = self._tree.qualified(call.func) or ""
        return name.startswith(_BUILDS) or called_name(call) in ("CUDAExtension", "load_inline")

    def _kernel_mark(self, function: cst.FunctionDef) -> str:
        """The full name of the decorator that makes a function a kernel; ``""`` if it is none."""
        for decorator in function.decorators:
            called = decorator.decorator
            called = called.func if isinstance(called, cst.Call) else called
            name = self._tree.qualified(called) or ""
            if name in _KERNEL_MARKS:
                return name
        return ""

    def _decides_build(self, node: cst.CSTNode, around: list[cst.CSTNode]) -> bool:
        statement = self._tree.statement(node)
        test = statement.test if isinstance(statement, cst.If) else statement
        names = {descendant.value for descendant in walk(test) if isinstance(descendant, cst.Name)}
        if any(_TOOLKIT.match(name) for name in names):
            return True
        function = self._tree.around(node, cst.FunctionDef)
        return function is not None and function in self._building

    @cached_property
    def _building(self) -> set[cst.CSTNode]:
        """The functions that build an extension."""
        if not any(name.startswith("torch.utils.cpp_extension") for name in self._imports):
            return set()
        return {
            function
            for call in self._tree.of_type(cst.Call)
            if self._is_build(call)
            for function in self._functions(call)
        }

    @cached_property
    def _replacing(self) -> set[cst.CSTNode]:
        """The functions and classes in which a test replaces names of torch.cuda.

        Their calls of torch.cuda get the replacement's answers.
        """
        found: set[cst.CSTNode] = set()
        for call in self._tree.of_type(cst.Call):
            if called_name(call) not in _REPLACES or not call.args:
                continue
            first = call.args[0].value
            name = string_value(first) or self._tree.qualified(first) or ""
            if name == "torch.cuda" or name.startswith("torch.cuda."):
                function, owner = (
                    self._tree.around(call, cst.FunctionDef),
                    self._tree.around(call, cst.ClassDef),
                )
                sets_up = function is None or _SETS_UP.match(function.name.value)
                holder = (owner or function) if sets_up else function
                found |= {holder} if holder is not None else set()
        return found

    @cached_property
    def of_runtimes(self) -> dict[cst.CSTNode, str]:
        """The functions that use a runtime of NVIDIA GPUs, with the runtime's name."""
        used = {first for first in (name.partition(".")[0] for name in self._imports) if first in RUNTIMES}
        found: dict[cst.CSTNode, str] = {}
        for function in self._tree.of_type(cst.FunctionDef) if _COMMAND in self._tree.text else []:
            if self._has_command(function) and self._uses_torch_only_for_cuda(function):
                helpers = [self._functions_by_name.get(called_name(call) or "") for call in _calls(function)]
                asking = [helper for helper in helpers if helper and self._uses_torch_only_for_cuda(helper)]
                found |= dict.fromkeys([function, *asking], _COMMAND)
        if not used:
            return found
        for name in self._tree.of_type(cst.Name):
            home = (self._tree.qualified(name) or "").partition(".")[0]
            if home in used:
                found |= dict.fromkeys(self._functions(name), RUNTIMES[home])
        return found

    def _has_command(self, function: cst.FunctionDef) -> bool:
        """Whether a string of a function, and not its docstring or a comment, names the command."""
        if _COMMAND not in self._tree.source(function):
            return False
        strings = (cst.SimpleString, cst.FormattedString)
        return any(
            isinstance(node, strings)
            and _COMMAND in self._tree.source(node)
            and not isinstance(self._tree.parent(node), cst.Expr)
            for node in walk(function.body)
        )

    @cached_property
    def _functions_by_name(self) -> dict[str, cst.FunctionDef]:
        return {node.name.value: node for node in self._tree.of_type(cst.FunctionDef)}

    def _uses_torch_only_for_cuda(self, function: cst.FunctionDef) -> bool:
        """Whether a function uses torch only to query GPUs, and computes nothing with it."""
        for node in walk(function.body):
            name = self._tree.qualified(node) if isinstance(node, cst.Attribute) else None
            if name and name.startswith("torch.") and not name.startswith("torch.cuda"):
                return False
        return True

    @cached_property
    def _only_comparing(self) -> set[cst.CSTNode]:
        """The tests that name several device indices and put nothing on those devices."""
        numbered: dict[cst.CSTNode, set[str]] = defaultdict(set)
        for text in self._tree.of_type(cst.SimpleString):
            if _NUMBERED.match(string_value(text) or ""):
                for function in self._functions(text):
                    numbered[function].add(string_value(text) or "")
        return {
            function
            for function, names in numbered.items()
            if len(names) > 1 and _asserts(function) and not self._puts_on_device(function)
        }

    def _puts_on_device(self, function: cst.CSTNode) -> bool:
        """Whether a call gets a device with an index, or a name that holds one, as its device."""
        devices = {
            target.target.value
            for assign in walk(function)
            if isinstance(assign, cst.Assign) and self._names_numbered(assign.value)
            for target in assign.targets
            if isinstance(target.target, cst.Name)
        }
        for call in _calls(function):
            if self._tree.qualified(call.func) == "torch.device":
                continue
            for argument in call.args:
                word = argument.keyword.value if argument.keyword is not None else ""
                takes = word in ("device", "map_location") or called_name(call) in ("to", "cuda", "to_empty")
                names = {
                    descendant.value
                    for descendant in walk(argument.value)
                    if isinstance(descendant, cst.Name)
                }
                if takes and (names & devices or self._names_numbered(argument.value)):
                    return True
        return False

    @staticmethod
    def _names_numbered(node: cst.CSTNode) -> bool:
        return any(_NUMBERED.match(string_value(descendant) or "") for descendant in walk(node))

    @cached_property
    def _imports(self) -> set[str]:
        """The modules that the file imports, or imports from, by their full names."""
        found: set[str] = set()
        for alias in self._tree.of_type(cst.ImportAlias):
            statement = self._tree.parent(alias)
            name = alias.evaluated_name
            if isinstance(statement, cst.ImportFrom):
                module = self._tree.source(statement.module) if statement.module is not None else ""
                name = f"{'.' * len(statement.relative)}{module}.{name}"
            found.add(name)
        return found

    def _functions(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The innermost function around a node, if there is one."""
        function = self._tree.around(node, cst.FunctionDef)
        return [] if function is None else [function]


def _calls(function: cst.CSTNode) -> list[cst.Call]:
    return [descendant for descendant in walk(function) if isinstance(descendant, cst.Call)]


def _asserts(function: cst.CSTNode) -> bool:
    """Whether a function is a test: it asserts, with the statement or a method of unittest's."""
    return any(isinstance(descendant, cst.Assert) for descendant in walk(function)) or any(
        (called_name(call) or "").startswith("assert") for call in _calls(function)
    )
