"""Calls that need CUDA: of compiled extensions, packages for NVIDIA GPUs, and functions that call those."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

import libcst as cst

from acclimate_port.source.calls_by_text import IMPORTING_BY_NAME
from acclimate_port.source.cuda_packages import CUDA_PACKAGES, KERNEL_LANGUAGES
from acclimate_port.source.tree import Span, Tree, called_name, dotted, string_value, walk

_CUDA_FUNCTION = re.compile(
    r"_cuda(_(kernel|fwd|bwd|forward|backward|impl|ext|op))?$|^cuda_|^Cuda[A-Z]|Cuda$"
)
_MOVES_OR_ASKS = re.compile(r"(^|_)(to|move|use|uses|is|has|on|no|set|seed|init|load)_cuda$")
_NATIVE_MODULE = re.compile(r"^_C$|_C$|_ext$|_cuda(_(lib|kernels?|binding|backend|impl))?$")


class Kernels:
    """The calls in a file that need CUDA.

    Args:
        tree: the file.
        extensions: the names of the project's own extensions for CUDA.
        for_torch: the modules of packages for NVIDIA GPUs that hold no kernel.
    """

    def __init__(
        self,
        tree: Tree,
        extensions: frozenset[str] = frozenset(),
        for_torch: frozenset[str] = frozenset(),
    ) -> None:
        self._tree = tree
        self._extensions = extensions
        self._for_torch = for_torch

    @cached_property
    def are_for_cuda_alone(self) -> bool:
        """Whether the file defines kernels in a language that only NVIDIA GPUs run."""
        return not KERNEL_LANGUAGES.isdisjoint(self._tree.imported_packages)

    def called_in(self, places: list[Span]) -> str:
        """The name of a CUDA-only function called in one of the ranges; ``""`` if there is none."""
        return next((name for place in places for name in _names_in(place, self._calls)), "")

    @cached_property
    def _calls(self) -> list[tuple[Span, str]]:
        """The range and the function's name of each call of a CUDA-only function."""
        calls = self._calls_by_name
        native = [(span, name) for _, span, name in self._of_extensions]
        named = [(span, name) for _, span, name in calls if _is_cuda_function(name)]
        native += [(span, name) for _, span, name in calls if _is_cudnn(name)]
        # A function that calls an extension needs CUDA, and so do its callers, however many calls away. A
        # function known only by its name is followed to its direct callers, as a name may mislead.
        count = -1
        while count != len(native):
            count = len(native)
            native = self._with_callers(calls, native)
        return [*native, *self._with_callers(calls, named)]

    @cached_property
    def _calls_by_name(self) -> list[tuple[cst.Call, Span, str]]:
        """The calls of functions that have a name and are not torch's, with their places and names."""
        calls = ((node, dotted(node.func)) for node in self._tree.of_type(cst.Call))
        found = [(node, self._tree.span(node), name) for node, name in calls if name]
        return [call for call in found if not self._is_torch(call[0].func)]

    @cached_property
    def _of_extensions(self) -> list[tuple[cst.Call, Span, str]]:
        """The calls of functions of compiled extensions, and of packages for NVIDIA GPUs."""
        bound = self._bound
        return [
            call
            for call in self._calls_by_name
            if self._is_native(call[0].func)
            or any(call[2] == imported or call[2].startswith(f"{imported}.") for imported in bound)
        ]

    @cached_property
    def callers(self) -> dict[int, str]:
        """The functions that call an extension in any case, by their identity, and what they call."""
        found: dict[int, str] = {}
        # Tests beside calls of these are judged without them, as they choose between kernels of the project.
        own = self._calls_by_name if self._extensions else []
        built = [one for one in own if self._is_of_project(one[0].func)]
        for call, _, name in (*self._of_extensions, *built):
            for around in self._tree.ancestors(call):
                if isinstance(around, (cst.If, cst.IfExp, cst.Try, cst.BooleanOperation, cst.Lambda)):
                    break
                if isinstance(around, cst.FunctionDef):
                    found.setdefault(id(around), name)
                    break
        return found

    def _with_callers(
        self, calls: list[tuple[cst.Call, Span, str]], found: list[tuple[Span, str]]
    ) -> list[tuple[Span, str]]:
        """The calls, and the calls of the file's functions and classes that contain them."""
        own = {name for name, place in self._definitions if any(_names_in(place, found))}
        own |= {target for target, value in self._aliases if value.partition(".")[0] in own}
        known = set(found)
        added = [
            (span, name)
            for _, span, name in calls
            if (span, name) not in known and own & {name.partition(".")[0], _of_self(name)}
        ]
        return [*found, *added]

    @cached_property
    def _definitions(self) -> list[tuple[str, Span]]:
        """The name and range of each function, class and method of the file; a method is ``self.name``."""
        found: list[tuple[str, Span]] = []
        for node in self._tree.module.body:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                found.append((node.name.value, self._tree.span(node)))
            if isinstance(node, cst.ClassDef):
                found += [
                    (f"self.{statement.name.value}", self._tree.span(statement))
                    for statement in node.body.body
                    if isinstance(statement, cst.FunctionDef)
                    and statement.name.value not in ("__init__", "forward")
                ]
        return found

    @cached_property
    def _aliases(self) -> list[tuple[str, str]]:
        """Pairs of a name and the name assigned to it: ``attend = AttendFunction.apply``."""
        return [
            (dotted(target.target), dotted(node.value))
            for node in self._tree.of_type(cst.Assign)
            if dotted(node.value)
            for target in node.targets
            if dotted(target.target)
        ]

    @cached_property
    def _bound(self) -> set[str]:
        """Names bound to an extension or to its functions: ``self.norm = FusedNormFunction``."""
        found: set[str] = set()
        for node in self._tree.of_type(cst.Assign):
            if self._gives_native(node.value):
                found |= {dotted(target.target) for target in node.targets}
        return found - {""}

    def _gives_native(self, value: cst.CSTNode) -> bool:
        if isinstance(value, (cst.Name, cst.Attribute)):
            return self._is_native(value, is_call=False)
        if isinstance(value, cst.IfExp):
            return self._gives_native(value.body) or self._gives_native(value.orelse)
        if not isinstance(value, cst.Call):
            return False
        qualified = self._tree.qualified(value.func) or dotted(value.func)
        if qualified in IMPORTING_BY_NAME and value.args:
            said = (string_value(value.args[0].value) or "").split(".")
            return any(_NATIVE_MODULE.search(module) for module in said) or said[0] in CUDA_PACKAGES
        if called_name(value) == "load_ext":  # mmcv's loader of its own extension
            return True
        if qualified.startswith("torch.utils.cpp_extension.load") or called_name(value) == "load_inline":
            return any(".cu" in text or "cuda" in text for text in _texts(value))
        return False

    def _is_native(self, node: cst.CSTNode, is_call: bool = True) -> bool:
        """Whether a name comes from an imported extension, or from a package that only NVIDIA GPUs run."""
        for full in self._tree.may_be(node):
            parts = full.split(".")
            modules = parts[:-1] if is_call else parts
            if parts[0] in CUDA_PACKAGES and ".".join(modules) not in self._for_torch:
                return True
            # Programs that use yacs call their configuration `_C` too.
            is_settings = any("config" in part or "default" in part for part in parts)
            if not is_settings and any(_NATIVE_MODULE.search(module) for module in modules):
                return parts[0] != "torch"
        return False

    def _is_of_project(self, function: cst.CSTNode) -> bool:
        """Whether a function belongs to an extension for CUDA that the project builds."""
        names = (full.split(".")[:-1] for full in self._tree.may_be(function))
        return any(not self._extensions.isdisjoint(modules) for modules in names)

    def _is_torch(self, node: cst.CSTNode) -> bool:
        """Whether a function belongs to torch, and its name does not say that it needs CUDA."""
        name = self._tree.qualified(node) or ""
        return name.startswith("torch.") and not name.startswith("torch.ops.") and not _is_cudnn(name)


def _texts(node: cst.CSTNode) -> Iterator[str]:
    """The strings in an expression."""
    for descendant in walk(node):
        if isinstance(descendant, (cst.SimpleString, cst.FormattedStringText)):
            yield descendant.value


def _of_self(name: str) -> str:
    """``self.f`` for ``self.f``, ``self.f.g`` and ``cls.f``."""
    first, *rest = name.split(".")
    return f"self.{rest[0]}" if first in ("self", "cls") and rest else ""


def _names_in(place: Span, calls: list[tuple[Span, str]]) -> Iterator[str]:
    """The names of the calls inside a range."""
    return (name for span, name in calls if place.start <= span.start and span.end <= place.end)


def _is_cudnn(name: str) -> bool:
    """Whether a function of torch is an operator of cuDNN, or looks operators up by their names."""
    last = name.rpartition(".")[2]
    return last == "_jit_get_operation" or last.startswith("cudnn_")


def _is_cuda_function(name: str) -> bool:
    """Whether a function's name says that it needs CUDA: ``scan_cuda``, ``scan_cuda.forward``."""
    *modules, last = name.split(".")
    own = _CUDA_FUNCTION.search(last) and not _MOVES_OR_ASKS.search(last)
    return bool(own) or any(module.endswith("_cuda") for module in modules)
