"""A file as the rules see it: its tree, the kinds of its values, and the target's code."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import libcst as cst

from acclimate_port.new_code.added_functions import ACCELERATOR_TYPE, ON_ANY_DEVICE
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget, Target, TorchTarget
from acclimate_port.source.kernels import Kernels
from acclimate_port.source.survey import Survey, may_autocast_on_host
from acclimate_port.source.torchscript import TorchScript
from acclimate_port.source.tree import (
    Binding,
    Span,
    Tree,
    called_name,
    child_nodes,
    dotted,
    modules_of,
    packages_of,
    positional,
    string_value,
    walk,
)
from acclimate_port.source.values import Kind, Values
from acclimate_port.source.vendor_code import VendorCode
from acclimate_port.source.vendors import FLAG_WORDS, OWN_WORDS, kinds_in

_WITHOUT_TORCH = {
    "acclimate", "numpy", "yaml", "click", "fire", "tqdm", "requests", "rich", "typer", "psutil", "packaging",
    "pandas", "absl", "attr", "attrs", "pydantic", "dotenv", "toml", "tomli", "colorama", "omegaconf",
}  # fmt: skip
"""Packages that import no torch."""
_BUILD_MODULES = ("setuptools", "distutils.core", "distutils")
_BUILD_CALLS = ("setup", "Extension", "CUDAExtension", "CppExtension", "BuildExtension", "build_ext")
_BUILDERS = re.compile(r"torch\.utils\.(ffi\.create_extension|cpp_extension\.\w*Extension)$")
_FOR_COMPILERS = {"define_macros", "extra_compile_args", "extra_objects", "include_dirs", "with_cuda"}
"""Keywords that, beside ``sources``, only a call has which builds an extension, whoever defines it."""
_DEVICE_IN_TEXT = re.compile(r"device[\"'\\]*\s*[=:]\s*[\"'\\]*cuda")
_HOME_OF_ACCELERATOR = {
    "acclimate.get_accelerator": False,
    "deepspeed.accelerator.get_accelerator": True,
    "deepspeed.get_accelerator": True,
    "deepspeed.accelerator.real_accelerator.get_accelerator": True,
}
_ASK_FOR_DEVICES = {"torch.cuda.is_available", "torch.accelerator.is_available"}
_USE_DEVICES = {"cuda", "to", "device_count"}
_GIVE_TEXT = {"lower", "strip", "casefold", "split", "partition"}
_STARTS_PROGRAM = re.compile(r"(^|_)(main|run|train|test|cli|app|launch|fire)($|_)", re.IGNORECASE)
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_MODEL_NAME = re.compile(r"(^|_)model(_?(name|id|path|type))?$")
_LONGEST_NAME = 40
"""A longer string is prose or a program."""


Given = ParamSpec("Given")
Result = TypeVar("Result")


def kept(
    function: Callable[Concatenate[SourceFile, Given], Result],
) -> Callable[Concatenate[SourceFile, Given], Result]:
    """Makes a function of a file look once for each node: the others that ask get the same result."""

    @wraps(function)
    def look(file: SourceFile, /, *given: Given.args, **named: Given.kwargs) -> Result:
        results = file.results[function]
        key = (*map(id, given), *named.items())
        if key not in results:
            results[key] = function(file, *given, **named)
        return cast(Result, results[key])

    return look


class SourceFile:
    """A file as the rules see it.

    Args:
        text: its source.
        target: ``acclimate`` or ``torch``.
        is_build_script: whether it is a build script, or one imports it.
        is_package_init: whether it is an ``__init__.py``, whose names others import.
        known: facts from other files about the classes that this one uses.
        compiles_all: whether another file may give any module of this one to TorchScript.
    """

    def __init__(
        self,
        text: str,
        target: str,
        is_build_script: bool = False,
        is_package_init: bool = False,
        known: Survey | None = None,
        compiles_all: bool = False,
    ) -> None:
        self.tree = Tree(text)
        self.survey = known or Survey()
        self.kernels = Kernels(self.tree, self.survey.extensions, self.survey.for_torch)
        self.values = Values(self.tree, self.survey.is_module)
        self.torchscript = TorchScript(self.tree, self.survey.compiled, compiles_all)
        self.vendor_code = VendorCode(self.tree)
        self.results: dict[Hashable, dict[Hashable, Any]] = defaultdict(dict)
        """Results of the functions that :func:`kept` wraps."""
        self.tests_in_blocks: dict[int, list[tuple[cst.CSTNode, bool]]] = {}
        """Results of ``conditions/class_tests.py`` for the blocks that it read."""
        self.compared: dict[Hashable, list[Any] | None] = {}
        """Results of ``conditions/proofs.py`` for the texts that it compared; ``None``: too complex."""
        self.device_tests: dict[int, list[cst.CSTNode]] | None = None
        """Results of ``conditions/device_tests.py``: the tests of each value that is compared."""
        self.is_build_script = is_build_script
        self.is_package_init = is_package_init
        self.torch = self._module_name("torch") or "torch"
        self.needs_torch_import = self._module_name("torch") is None
        self.imports_torch_in_functions = self.needs_torch_import and self._imports_in_functions("torch")
        """Whether torch is imported where it is needed, so that the file can be imported without it."""
        if self.imports_torch_in_functions:
            self.torch = self._alias_in_functions("torch")
        self.accelerator, self.accelerator_is_deepspeed, self.needs_import = self._accelerator_name()
        self.helper, self.needs_helper = self._helper_name()
        self.on_any_device, self.needs_on_any_device = self._wrapper_name()
        self.target: Target = (
            AcclimateTarget(self.torch, self.accelerator, self.accelerator_is_deepspeed)
            if target == "acclimate"
            else TorchTarget(self.torch, self.helper)
        )

    def forget(self) -> None:
        """Frees what it holds, whose parts hold each other; it cannot be used any more."""
        self.tree.forget()
        vars(self).clear()

    def _imports_in_functions(self, package: str) -> bool:
        """Whether the file imports a package, and only in functions."""
        own = [
            one for one in self.tree.imports if package in packages_of(one) and not self._is_for_types(one)
        ]
        return bool(own) and all(self.tree.function(one) is not None for one in own)

    def _alias_in_functions(self, module: str) -> str:
        """The name that all functions which import a module have for it; its own if they differ."""
        statements = (one for one in self.tree.imports if isinstance(one, cst.Import))
        aliases = (alias for one in statements for alias in one.names if dotted(alias.name) == module)
        names = {alias.evaluated_alias or module for alias in aliases}
        return names.pop() if len(names) == 1 else module

    def _module_name(self, module: str) -> str | None:
        for statement in self.module_imports:
            if isinstance(statement, cst.Import):
                for alias in statement.names:
                    if dotted(alias.name) == module:
                        return alias.evaluated_alias or module
                    if alias.asname is None and dotted(alias.name).startswith(f"{module}."):
                        return module
        # A lazy loader may be bound to the name: `torch = LazyLoader("torch")`.
        own = (statement for statement in self.tree.module.body if not _is_for_type_checkers(statement))
        return module if any(_binds(statement, module) for statement in own) else None

    def _accelerator_name(self) -> tuple[str, bool, bool]:
        in_functions = [one for one in self.tree.imports if self.tree.function(one) is not None]
        for statement in (*self.module_imports, *in_functions):
            if isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
                home = dotted(statement.module) if statement.module is not None else ""
                is_local = self.tree.function(statement) is not None
                for alias in statement.names:
                    known = _HOME_OF_ACCELERATOR.get(f"{home}.{dotted(alias.name)}")
                    if known is not None and not statement.relative and not (is_local and known):
                        return alias.evaluated_alias or "get_accelerator", known, is_local
        name = "get_accelerator"
        return ("current_accelerator" if name in self.names else name), False, True

    def _helper_name(self) -> tuple[str, bool]:
        name = "accelerator_type"
        for node in self.tree.module.body:
            if isinstance(node, cst.FunctionDef) and node.name.value == name:
                if "current_accelerator" in self.tree.source(node):
                    return name, False
                return f"_{name}", f"def _{name}" not in self.tree.text
        return (f"_{name}" if name in self.names else name), True

    def _wrapper_name(self) -> tuple[str, bool]:
        name = "on_any_device"
        for node in self.tree.module.body:
            if not isinstance(node, cst.FunctionDef) or not node.name.value.endswith(name):
                continue
            if "register_forward_pre_hook" in self.tree.source(node):
                return node.name.value, False
        return (f"_{name}" if name in self.names else name), True

    @property
    def helper_text(self) -> str:
        """The source of the function that returns the device type, with this file's names."""
        text = ACCELERATOR_TYPE
        if self.imports_torch_in_functions:
            text = text.replace(
                "    accelerator = torch.", f"    {self._import_of_torch}\n\n    accelerator = torch."
            )
        return self._spelled(text)

    @property
    def on_any_device_text(self) -> str:
        """The source of the function that runs a ``DataParallel`` on any device, with this file's names."""
        text = ON_ANY_DEVICE.replace("on_any_device", self.on_any_device)
        hook = "_move_inputs"
        text = text.replace(hook, f"{hook}_to_device" if hook in self.names else hook)
        if not self._has_plain_import_of_torch:  # an annotation is evaluated when the module is imported
            text = re.sub(r"((?:parallel: |-> )(?!tuple))(torch\.[\w.]+)", r'\1"\2"', text)
        if self.imports_torch_in_functions:
            own = f"    {self.import_of_accelerator}\n" if self.imports_in_functions else ""
            text = text.replace(
                "    device = next(", f"    {self._import_of_torch}\n{own}\n    device = next("
            )
            if own:
                text = text.replace("    if {device_type}", f"{own}\n    if {{device_type}}")
        return self._spelled(text).replace("{device_type}", self.target.device_type)

    @property
    def import_of_accelerator(self) -> str:
        """The statement that imports ``get_accelerator``, under the name that this file has for it."""
        alias = "" if self.accelerator == "get_accelerator" else f" as {self.accelerator}"
        return f"from acclimate import get_accelerator{alias}"

    @property
    def imports_in_functions(self) -> bool:
        """Whether new imports of acclimate go to the functions that import torch."""
        return self.imports_torch_in_functions and self.needs_import and self.target.name == "acclimate"

    @property
    def _import_of_torch(self) -> str:
        return "import torch" if self.torch == "torch" else f"import torch as {self.torch}"

    def _spelled(self, text: str) -> str:
        return text.replace("torch.", f"{self.torch}.").replace("accelerator_type()", f"{self.helper}()")

    @cached_property
    def _has_plain_import_of_torch(self) -> bool:
        """Whether torch is imported at the head of the file, outside any ``if`` or ``try``."""
        if self.needs_torch_import:  # the port adds a plain import
            return not self.imports_torch_in_functions
        lines = [
            statement for statement in self.tree.module.body if isinstance(statement, cst.SimpleStatementLine)
        ]
        imports = (one for line in lines for one in line.body if isinstance(one, cst.Import))
        return any("torch" in packages_of(statement) for statement in imports)

    @cached_property
    def names_of_new_code(self) -> dict[str, str]:
        """What the names in edits mean, for :mod:`acclimate_port.conditions.worlds`."""
        return {self.torch: "torch", self.accelerator: "get_accelerator", self.helper: "accelerator_type"}

    @cached_property
    def other_kinds(self) -> tuple[str, ...]:
        """The other device types in the file's names and strings: ``"mps"``, ``is_npu_available``."""
        texts = self.tree.of_type(cst.SimpleString)
        strings = (one for one in texts if not (self._is_of_port(one) or self._names_model(one)))
        words = {*self.names, *(string_value(node) or "" for node in strings)}
        found = {kind for word in words if len(word) < _LONGEST_NAME for kind in kinds_in(word)}
        return tuple(sorted(found))

    def _names_model(self, text: cst.CSTNode) -> bool:
        """Whether a parameter or an argument for a model's name has a text: ``model_name="mps"``."""
        at = self.tree.parent(text)
        word = at.name if isinstance(at, cst.Param) else at.keyword if isinstance(at, cst.Arg) else None
        return word is not None and _MODEL_NAME.search(word.value) is not None

    def _is_of_port(self, text: cst.CSTNode) -> bool:
        """Whether a string is compared with the accelerator's name: ``accelerator_type() in ("cpu",)``."""
        compared = self.tree.around(text, cst.Comparison)
        if compared is None:
            return False
        held = self.bound_values(compared.left) if isinstance(compared.left, cst.Name) else [compared.left]
        return any(isinstance(one, cst.Call) and self.is_accelerators_name(one) for one in held)

    def is_accelerators_name(self, call: cst.Call) -> bool:
        """Whether a call asks for the accelerator's name, as ported code does."""
        return called_name(call) in ("device_name", self.helper)

    @cached_property
    def names(self) -> set[str]:
        """Every identifier in the file."""
        return self.tree.all_names()

    @cached_property
    def attributes(self) -> dict[str, list[cst.Attribute]]:
        """The chains of attributes that end in each name."""
        found: dict[str, list[cst.Attribute]] = defaultdict(list)
        for node in self.tree.of_type(cst.Attribute):
            found[node.attr.value].append(node)
        return found

    @cached_property
    def loads(self) -> list[cst.Call]:
        """The calls that load a checkpoint."""
        return [
            call
            for call in self.tree.of_type(cst.Call)
            if called_name(call) == "load_state_dict_from_url"
            or self.tree.qualified(call.func) in ("torch.load", "torch.jit.load")
        ]

    @cached_property
    def options(self) -> dict[str, list[cst.Call]]:
        """The calls that define each option of a command line: ``add_argument("--device")``."""
        found: dict[str, list[cst.Call]] = defaultdict(list)
        for call in self.tree.of_type(cst.Call):
            for argument in positional(call) if called_name(call) == "add_argument" else ():
                found[(string_value(argument.value) or "").lstrip("-").replace("-", "_")].append(call)
        return found

    @cached_property
    def exported(self) -> set[str]:
        """The names in ``__all__``."""
        found: set[str] = set()
        for node in self.tree.of_type(cst.Assign):
            if any(dotted(target.target) == "__all__" for target in node.targets):
                found |= {string_value(descendant) or "" for descendant in walk(node.value)}
        return found

    @cached_property
    def methods(self) -> dict[str, list[cst.FunctionDef]]:
        """The methods of the file's classes by their names, the first of each class."""
        found: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        for owner in self.values.classes.values():
            own = {
                one.name.value: one for one in reversed(owner.body.body) if isinstance(one, cst.FunctionDef)
            }
            for name, method in own.items():
                found[name].append(method)
        return found

    @cached_property
    def module_imports(self) -> list[cst.Import | cst.ImportFrom]:
        """The import statements that the module itself runs, in order, also those in blocks."""
        found: list[cst.Import | cst.ImportFrom] = []
        for node in _walk_outside_functions(self.tree.module):
            if isinstance(node, (cst.Import, cst.ImportFrom)) and not self._is_for_types(node):
                found.append(node)
        return found

    def _is_for_types(self, statement: cst.CSTNode) -> bool:
        """Whether an import is for annotations alone: ``if TYPE_CHECKING:``."""
        return any(map(_is_for_type_checkers, self.tree.ancestors(statement)))

    @cached_property
    def is_without_torch(self) -> bool:
        """Whether an import of the module imports no torch, but Python's own modules and small packages."""
        packages = {package for statement in self.module_imports for package in packages_of(statement)}
        return bool(packages) and packages <= sys.stdlib_module_names | _WITHOUT_TORCH

    @cached_property
    def optional_import(self) -> cst.SimpleStatementLine | None:
        """The last line of the block in which alone the module imports torch: of a ``try``, or of an ``if``.

        ``torch = pytest.importorskip("torch")`` is such a line too.
        """
        lines = [self.tree.parent(one) for one in self.module_imports if "torch" in packages_of(one)]
        lines = lines or [line for line in self.tree.module.body if _skips_without(line, "torch")]
        blocks = [self.tree.parent(line) if line is not None else None for line in lines]
        if not lines or any(map(self._always_runs, lines)):
            return None
        own = [line for line, block in zip(lines, blocks, strict=True) if block is blocks[0]]
        is_block = isinstance(blocks[0], (cst.IndentedBlock, cst.Module))
        return own[-1] if is_block and isinstance(own[-1], cst.SimpleStatementLine) else None

    def _always_runs(self, line: cst.CSTNode | None) -> bool:
        """Whether the module runs a line in any case, outside ``if`` and ``try``."""
        around = self.tree.ancestors(line) if line is not None else ()
        is_in_block = any(isinstance(one, (cst.If, cst.Try)) for one in around)
        return line is None or not (is_in_block or _skips_without(line, "torch"))

    @cached_property
    def own_words(self) -> str:
        """A vendor's word beside "cuda" in a list of the program's own names of devices, or ``""``."""
        lists: list[cst.List | cst.Tuple | cst.Set] = [*self.tree.of_type(cst.List)]
        lists += [*self.tree.of_type(cst.Tuple), *self.tree.of_type(cst.Set)]
        held: list[list[cst.CSTNode]] = [[element.value for element in one.elements] for one in lists]
        held += [
            [element.key for element in one.elements if isinstance(element, cst.DictElement)]
            for one in self.tree.of_type(cst.Dict)
        ]
        for listed in held:
            texts = [string_value(one) for one in listed]
            if "cuda" in texts and (word := next((text for text in texts if text in OWN_WORDS), "")):
                return word
        return ""

    @cached_property
    def classes_for_cuda(self) -> dict[cst.CSTNode, str]:
        """The classes for CUDA beside those for other devices: ``CudaPlatform``, and ``RocmPlatform``.

        The other one may be a module of the project: ``xpu_accelerator``.
        """
        known = {name.lower(): name for name in (*self.survey.modules, *self.values.classes)}
        found: dict[cst.CSTNode, str] = {}
        for name, definition in self.values.classes.items():
            before, cuda, after = name.lower().partition("cuda")
            others = (f"{before}{word}{after}" for word in (*FLAG_WORDS, *sorted(OWN_WORDS)) if cuda)
            beside = next((known[one] for one in others if one in known), "") if before or after else ""
            found |= {definition: beside} if beside else {}
        return found

    @cached_property
    def imports_build_tools(self) -> bool:
        """Whether the file builds native extensions."""
        imported = (module for statement in self.module_imports for module in modules_of(statement))
        names = [node for node in self.tree.of_type(cst.Name) if node.value in _BUILD_CALLS]
        called = any(isinstance(self.tree.parent(node), (cst.Call, cst.Attribute)) for node in names)
        if called and any(module in _BUILD_MODULES for module in imported):
            return True
        return any(self._builds_extension(call) for call in self.tree.of_type(cst.Call))

    def _builds_extension(self, call: cst.Call) -> bool:
        keywords = {argument.keyword.value for argument in call.args if argument.keyword is not None}
        if "sources" in keywords and keywords & _FOR_COMPILERS:
            return True
        return _BUILDERS.match(self.tree.qualified(call.func) or "") is not None

    # -- positions -----------------------------------------------------------------------------------

    def runs_at_import(self, node: cst.CSTNode) -> bool:
        """Whether a node is evaluated when the module is imported or run."""
        function = self.tree.function(node)
        return function is None or id(function) in self._calls_at_import

    def is_of_program(self, node: cst.CSTNode) -> bool:
        """Whether a node is in ``if __name__ == "__main__":``, which an import does not run."""
        around = (one for one in self.tree.ancestors(node) if isinstance(one, cst.If))
        return any("__name__" in self.tree.source(one.test) for one in around)

    @cached_property
    def uses_devices_at_import(self) -> bool:
        """Whether importing the module uses a device, or counts the devices, in any case."""
        nodes = _walk_outside_functions(self.tree.module)
        of_module = [one for one in nodes if isinstance(one, cst.Call) and not self.is_of_program(one)]
        always = [
            call for called in self._calls_at_import.values() for call in called if self._is_plain(call)
        ]
        return any(
            called_name(call) in _USE_DEVICES
            or (self.tree.qualified(call.func) or "").startswith("torch.cuda.")
            for call in [*of_module, *always]
        )

    def _is_plain(self, call: cst.Call) -> bool:
        """Whether a function makes a call in any case, outside ``if`` and ``try``."""
        for around in self.tree.ancestors(call):
            if isinstance(around, (cst.FunctionDef, cst.Lambda)):
                return True
            if isinstance(around, (cst.If, cst.IfExp, cst.Try, cst.BooleanOperation)):
                return False
        return True

    @cached_property
    def _calls_at_import(self) -> dict[int, list[cst.Call]]:
        """The functions that an import of the module runs, by their identity, and the calls that each makes.

        ``config = Config()`` runs ``Config.__init__``. A program's ``main()`` is no part of an import.
        """
        by_function: dict[int, list[cst.Call]] = defaultdict(list)
        for call in self.tree.of_type(cst.Call):
            by_function[id(self.tree.function(call))].append(call)
        waiting = [call for call in by_function[id(None)] if not self._runs_program(call)]
        found: dict[int, list[cst.Call]] = {}
        while waiting:
            for function in self.functions_called(waiting.pop()):
                if id(function) not in found:
                    found[id(function)] = by_function[id(function)]
                    waiting += found[id(function)]
        return found

    def _runs_program(self, call: cst.Call) -> bool:
        """Whether a call of the module itself starts the program: ``main()``, or anything in its ``if``."""
        is_start = _STARTS_PROGRAM.search(called_name(call) or "") is not None
        return is_start or self.is_of_program(call)

    @cached_property
    def _calls(self) -> tuple[list[int], list[cst.Call]]:
        """The calls in source order, and where each starts."""
        calls = sorted(self.tree.of_type(cst.Call), key=lambda call: self.span(call).start)
        return [self.span(call).start for call in calls], calls

    def calls_within(self, place: Span) -> list[cst.Call]:
        """The calls that start in a range."""
        starts, calls = self._calls
        return calls[bisect_left(starts, place.start) : bisect_left(starts, place.end)]

    @cached_property
    def _references(self) -> tuple[list[int], list[cst.FunctionDef]]:
        """The functions of the file that code names without a call, in source order, and where."""
        found: list[tuple[int, cst.FunctionDef]] = []
        defined = {one.name.value for one in self.tree.of_type(cst.FunctionDef)}
        for name in self.tree.of_type(cst.Name):
            if name.value not in defined:
                continue
            at = self.tree.parent(name)
            if isinstance(at, cst.Attribute) and at.attr is name and dotted(at.value) in ("self", "cls"):
                around = self.tree.around(name, cst.ClassDef)
                named = _defined(around, name.value) if around is not None else []
            elif isinstance(at, (cst.IfExp, cst.Assign, cst.Return, cst.Arg)):
                bound = self.tree.assignments(name)
                named = [one.node for one in bound if isinstance(one.node, cst.FunctionDef)]
            else:
                continue
            found += [(self.span(name).start, one) for one in named]
        found.sort(key=lambda one: one[0])
        return [start for start, _ in found], [function for _, function in found]

    def functions_named(self, place: Span) -> list[cst.FunctionDef]:
        """The functions of the file that code in a range names: ``self.op = self.op_cuda``."""
        starts, functions = self._references
        return functions[bisect_left(starts, place.start) : bisect_left(starts, place.end)]

    def functions_called(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The functions of the file that a call runs; of a class, its constructor."""
        owners: list[cst.ClassDef] = []
        name, called = called_name(call) or "", call.func
        if isinstance(called, cst.Name):
            bound = self.tree.binding(called).definitions
            owners = [one for one in bound if isinstance(one, cst.ClassDef)]
            functions = [one for one in bound if isinstance(one, cst.FunctionDef)]
            return [*functions, *(own for owner in owners for own in _defined(owner, *_CONSTRUCTORS))]
        held = called.value if isinstance(called, cst.Attribute) else None
        if isinstance(held, cst.Name) and held.value in ("self", "cls"):
            around = self.tree.around(call, cst.ClassDef)
            owners = [around] if around is not None else []
        elif isinstance(held, cst.Name):
            owners = [one for one in self.tree.binding(held).definitions if isinstance(one, cst.ClassDef)]
        return [
            *(own for owner in owners for own in _defined(owner, name)),
            *(
                own
                for owner in owners
                for inner in _inner(owner, name)
                for own in _defined(inner, *_CONSTRUCTORS)
            ),
        ]

    def is_guarded(self, node: cst.CSTNode) -> bool:
        """Whether a node runs only where a test of the device is true."""
        for below, around in self.tree.upwards(node):
            if isinstance(around, cst.If) and below is around.body and self.tests_device(around.test):
                return True
            if isinstance(around, cst.IfExp) and below is around.body and self.tests_device(around.test):
                return True
            if self._is_second_of_and(around, below):
                return True
            if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
                return False
        return False

    def _is_second_of_and(self, around: cst.CSTNode, node: cst.CSTNode) -> bool:
        if not isinstance(around, cst.BooleanOperation) or node is not around.right:
            return False
        return isinstance(around.operator, cst.And) and self.tests_device(around.left)

    def tests_device(self, test: cst.CSTNode, depth: int = 3) -> bool:
        """Whether a condition is true only if there is a device other than the CPU."""
        if isinstance(test, (cst.Name, cst.Attribute, cst.Subscript)) and self._is_cleared_before(test):
            return True
        if isinstance(test, cst.Name) and depth:
            return self._holds_test(test, depth - 1)
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self.tests_device(test.left, depth) or self.tests_device(test.right, depth)
        if isinstance(test, cst.Call):
            name = self.tree.qualified(test.func)
            return name in _ASK_FOR_DEVICES
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            right = test.comparisons[0]
            said = string_value(right.comparator) or string_value(test.left)
            if said == "cuda":
                return isinstance(right.operator, (cst.Equal, cst.In))
            among = right.comparator.elements if isinstance(right.comparator, cst.Tuple) else ()
            names_host = said == "cpu" or any(string_value(element.value) == "cpu" for element in among)
            # A `torch.device` differs from every string, so such a test is true on a host too.
            compared = right.comparator if string_value(test.left) == "cpu" else test.left
            is_unlike = isinstance(right.operator, (cst.NotEqual, cst.NotIn))
            return names_host and is_unlike and self._is_text(compared)
        return isinstance(test, cst.Attribute) and test.attr.value == "is_cuda"

    def _is_text(self, value: cst.CSTNode) -> bool:
        """Whether the file shows that a device is a string: ``x.device.type``, ``str(device)``."""
        if isinstance(value, cst.Attribute) and value.attr.value == "type":
            return True
        if isinstance(value, cst.Call):
            gives_text = dotted(value.func) == "str" or called_name(value) in _GIVE_TEXT
            return gives_text or self.is_accelerators_name(value)
        return self.values.of(value).kind is Kind.STRING

    def _is_cleared_before(self, flag: cst.CSTNode) -> bool:
        """Whether an earlier statement makes a flag false without a device.

        ``if use_cuda and not torch.cuda.is_available(): use_cuda = False``, or without the first part.
        """
        if not self._clearings:
            return False
        clearings = self._clearings.get(self.tree.source(flag), {})
        last = None
        for below, around in self.tree.upwards(flag) if clearings else ():
            one = clearings.get(id(around))
            if one is not None and self.tree.number_in_block(one) < self.tree.number_in_block(below):
                last = one
                break
            if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
                break
        bound = self.tree.assignments(flag) if isinstance(flag, cst.Name) else ()
        starts = [self.tree.span(one.node).start for one in bound] if last is not None else []
        first = bisect_left(starts, self.tree.span(last).end) if last is not None else 0
        return last is not None and first >= bisect_left(starts, self.tree.span(flag).start)

    @cached_property
    def _clearings(self) -> dict[str, dict[int, cst.CSTNode]]:
        """By a flag's text, the first statement of each block that makes the flag false without a device."""
        found: dict[str, dict[int, cst.CSTNode]] = defaultdict(dict)
        for statement in self.tree.of_type(cst.If):
            flags = [
                self.tree.source(target.target)
                for line in statement.body.body
                for small in (line.body if isinstance(line, cst.SimpleStatementLine) else ())
                if isinstance(small, cst.Assign) and dotted(small.value) == "False"
                for target in small.targets
            ]
            if flags:
                for flag in (one for one in flags if self._is_true_without_device(statement.test, one)):
                    block = id(self.tree.parent(statement))
                    known = found[flag].get(block)
                    if known is None or self.tree.span(statement).start < self.tree.span(known).start:
                        found[flag][block] = statement
        return found

    def _is_true_without_device(self, test: cst.BaseExpression, flag: str) -> bool:
        """Whether a condition is true if there is no device and a flag is set."""
        if isinstance(test, cst.BooleanOperation):
            sides = [self._is_true_without_device(side, flag) for side in (test.left, test.right)]
            return all(sides) if isinstance(test.operator, cst.And) else any(sides)
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            asked = test.expression.func if isinstance(test.expression, cst.Call) else test
            return self.tree.qualified(asked) in _ASK_FOR_DEVICES
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            target = test.comparisons[0]
            return isinstance(target.operator, cst.Equal) and string_value(target.comparator) == "cpu"
        return self.tree.source(test) == flag

    def bound_values(self, name: cst.Name) -> list[cst.BaseExpression | None]:
        """What the file binds to a name; ``None`` for a parameter, a loop's variable and other bindings.

        The first of the names that share the parts of a text gets the text: ``a, b = device.split(":")``.
        """
        return self._values_of(self.tree.binding(name))

    @kept
    def _values_of(self, binding: Binding) -> list[cst.BaseExpression | None]:
        values: list[cst.BaseExpression | None] = []
        for assignment in binding.assignments:
            at = self.tree.parent(assignment.node)
            names = self.tree.parent(at) if isinstance(at, cst.Element) else None
            is_first = isinstance(names, cst.Tuple) and names.elements[0] is at
            value = self.tree.value_of(names if is_first else assignment.node)
            values.append(None if is_first and isinstance(value, cst.Tuple) else value)
        return values

    def returns(self, call: cst.Call) -> list[cst.Return]:
        """The statements by which a called function of the file returns values."""
        called = [one for one in self.functions_called(call) if one.name.value not in _CONSTRUCTORS]
        return [
            one for function in called for one in self.tree.returns[id(function)] if one.value is not None
        ]

    def _holds_test(self, name: cst.Name, depth: int) -> bool:
        """Whether every value that a name gets is such a condition, or False."""
        values = self.bound_values(name)
        return bool(values) and all(
            value is not None and (dotted(value) == "False" or self.tests_device(value, depth))
            for value in values
        )

    @cached_property
    def autocasts_on_host(self) -> bool:
        """Whether this file, or another of the project, may turn on the autocast of the CPU."""
        return self.survey.autocasts_on_host or may_autocast_on_host(self.tree.bytes)

    def quote(self, node: cst.CSTNode) -> str:
        """The quote for a new string: the same as the literal's, or one that no enclosing string uses."""
        text = node if isinstance(node, cst.FormattedString) else self.tree.around(node, cst.FormattedString)
        if text is not None:
            return "'" if '"' in text.start else '"'
        return node.quote[0] if isinstance(node, cst.SimpleString) else '"'

    def text_names_device(self, node: cst.CSTNode) -> bool:
        """Whether a string near a node, such as a command line or YAML, names CUDA as the device.

        A comparison with "cuda" of a value read from such a string is a comparison of data.
        """
        around = self.tree.function(node)
        return around is not None and self._has_text_with_device(around)

    @kept
    def _has_text_with_device(self, code: cst.CSTNode) -> bool:
        return any(
            isinstance(descendant, cst.SimpleString) and _DEVICE_IN_TEXT.search(descendant.value) is not None
            for descendant in walk(code)
        )

    def in_fstring(self, node: cst.CSTNode) -> bool:
        """Whether a node is part of an f-string."""
        return any(isinstance(around, cst.FormattedString) for around in self.tree.ancestors(node))

    def device_at(self, index: Span | str) -> tuple[Part, ...]:
        """The expression for device number ``index``."""
        if isinstance(index, Span) and isinstance(self.target, TorchTarget):
            text = self.tree.source(index)
            # Edits in it may add quotes, which would end the f-string before Python 3.12.
            if any(letter in text for letter in "(\"'{}\\\n#") or "is_cuda" in text:
                return (f'({self.target.device_type} + ":" + str(', index, "))")
        return self.target.device_at(index)

    def span(self, node: cst.CSTNode) -> Span:
        """The bytes of a node."""
        return self.tree.span(node)


def _is_for_type_checkers(statement: cst.CSTNode) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``."""
    return isinstance(statement, cst.If) and dotted(statement.test).rpartition(".")[2] == "TYPE_CHECKING"


def _binds(statement: cst.CSTNode, name: str) -> bool:
    """Whether a statement of a module binds a name by an assignment or an import."""
    return any(
        (isinstance(node, cst.AssignTarget) and dotted(node.target) == name)
        or (isinstance(node, cst.ImportAlias) and node.evaluated_alias == name)
        or (isinstance(node, cst.ImportAlias) and node.evaluated_name == name)
        for node in _walk_outside_functions(statement)
    )


def _skips_without(line: cst.CSTNode, package: str) -> bool:
    """Whether a line ends a module of tests if a package is missing: ``torch = importorskip("torch")``."""
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    call = small.value if isinstance(small, (cst.Assign, cst.Expr)) else None
    is_one = isinstance(call, cst.Call) and called_name(call) == "importorskip" and call.args
    return bool(is_one) and isinstance(call, cst.Call) and string_value(call.args[0].value) == package


def _inner(owner: cst.CSTNode, name: str) -> list[cst.ClassDef]:
    """The class of a name that a class defines in itself."""
    body = owner.body.body if isinstance(owner, cst.ClassDef) else ()
    return [one for one in body if isinstance(one, cst.ClassDef) and one.name.value == name]


def _defined(owner: cst.CSTNode, *names: str) -> list[cst.FunctionDef]:
    """The methods of a class that have one of these names."""
    body = owner.body.body if isinstance(owner, cst.ClassDef) else ()
    return [one for one in body if isinstance(one, cst.FunctionDef) and one.name.value in names]


def _walk_outside_functions(node: cst.CSTNode) -> list[cst.CSTNode]:
    """A node and its descendants, without the bodies of functions and classes."""
    found: list[cst.CSTNode] = []
    waiting = [node]
    while waiting:
        at = waiting.pop()
        found.append(at)
        if not isinstance(at, (cst.FunctionDef, cst.ClassDef)):
            waiting.extend(reversed(child_nodes(at)))
    return found


_MODULE_PREFIX = "torch.cuda"
_SUBMODULES = ("random", "memory", "streams", "graphs")


def cuda_name(file: SourceFile, node: cst.CSTNode) -> str | None:
    """The name below ``torch.cuda`` of a name or a chain of attributes; ``""`` for the module itself."""
    kind = type(node)
    if kind is not cst.Name and kind is not cst.Attribute:
        return None
    full = file.tree.qualified(node)
    if full == _MODULE_PREFIX:
        return ""
    if full is None or not full.startswith(f"{_MODULE_PREFIX}."):
        return None
    name = full.removeprefix(f"{_MODULE_PREFIX}.")
    first, _, rest = name.partition(".")
    return rest if rest and first in _SUBMODULES else name


def is_assigned(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether something is assigned to a node."""
    parent = file.tree.parent(node)
    if isinstance(parent, cst.AnnAssign):
        return parent.target is node
    return (
        isinstance(parent, (cst.AssignTarget, cst.AugAssign, cst.Del))
        and getattr(parent, "target", node) is node
    )
