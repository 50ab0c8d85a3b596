"""The rules of the house, which reviewers would otherwise have to remember (docs/architecture.md).

Everything is read from the source's syntax tree, so comments and docstrings may name what they like.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from acclimate import errors
from acclimate_port.errors import PortError
from fresh_process import plain_environment

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "acclimate"
TOOLS = {
    "acclimate_port": ROOT / "tools" / "acclimate-port" / "src" / "acclimate_port",
    "acclimate_conformance": ROOT / "tools" / "acclimate-conformance" / "src" / "acclimate_conformance",
}

HARDWARE_ROOMS = ("backends", "compat", "acclimate_port")
"""Besides each op's own place, the only places that may name a vendor's hardware."""

OF_ONE_OP = re.compile(
    r"ops/(?!build/|optimizers/)\w+/|ops/optimizers/(adagrad|adam|lamb|lion)\.py|llm/kernels/"
)
"""An op's own folder or module: not what builds them all, nor what the optimizers share."""

VENDORS = {"cuda", "hip", "xpu", "npu", "sdaa", "mps", "hpu", "mlu", "mtia", "musa"}
LIBRARIES = {"nccl", "rccl", "hccl", "lccl", "cncl", "tccl", "xccl", "eccl"}
VENDOR_PACKAGES = {
    *(f"torch_{vendor}" for vendor in VENDORS),
    "habana_frameworks",
    "intel_extension_for_pytorch",
    "intel_extension_for_deepspeed",
}
HARDWARE = VENDORS | LIBRARIES | {"xpu.external"}


@dataclass(frozen=True)
class Source:
    """One module of acclimate, with its path in that package, or of a tool, with its package's name too."""

    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def texts(self) -> tuple[ast.Constant, ...]:
        """Every string that is no docstring, nor one below an attribute."""
        statements = {node.value for node in self.nodes if isinstance(node, ast.Expr)}
        return tuple(
            node
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in statements
        )

    @property
    def name(self) -> str:
        return self.path.as_posix()

    @property
    def room(self) -> str:
        return self.name.partition("/")[0].removesuffix(".py")

    def at(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    @property
    def file(self) -> Path:
        return (TOOLS[self.room].parent if self.room in TOOLS else PACKAGE) / self.path


Rule: TypeAlias = Callable[[Source], Iterator[str]]
"""Tells what breaks it in one module."""


@cache
def sources() -> tuple[Source, ...]:
    roots = {PACKAGE: PACKAGE, **{folder: folder.parent for folder in TOOLS.values()}}
    gc.disable()  # it would look through the trees again and again
    try:
        found = tuple(
            Source(path.relative_to(root), ast.parse(path.read_text(encoding="utf-8")))
            for folder, root in roots.items()
            for path in sorted(folder.rglob("*.py"))
        )
        assert all(source.nodes for source in found)
        gc.freeze()
    finally:
        gc.enable()
    return found


def may_name_hardware(source: Source) -> bool:
    return bool(OF_ONE_OP.match(source.name)) or source.room in HARDWARE_ROOMS


# -- 1: hardware is named only where it belongs ------------------------------------------------------


def hardware_names(source: Source) -> Iterator[str]:
    if may_name_hardware(source):
        return
    for node in source.nodes:
        where = dotted(node.value) if isinstance(node, ast.Attribute) and node.attr in VENDORS else ""
        if where in ("torch", "torch.backends"):
            yield f"{source.at(node)} uses {dotted(node)}"
        for module in imported_modules(source, node):
            top, *rest = module.split(".")
            if top in VENDOR_PACKAGES or (top == "torch" and VENDORS & set(rest)):
                yield f"{source.at(node)} imports {module}"
    for text in source.texts:
        if text.value.partition(":")[0] in HARDWARE:
            yield f'{source.at(text)} has "{text.value}"'


def test_hardware_is_named_only_in_backends_compat_and_ops() -> None:
    assert collect(hardware_names) == []


def imported_modules(source: Source, node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"{source.at(node)} imports relatively"
    module = node.module or ""
    # A name imported from these may be a module of theirs.
    is_package = module in ("acclimate", "torch")
    return [f"{module}.{alias.name}" if is_package else module for alias in node.names]


# -- 2: rooms import only rooms below them, and none in a circle: contracts in pyproject.toml ---------


def check_imports(*folders: Path) -> tuple[int, str]:
    """What import-linter says of the packages in these folders."""
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports\n"
         "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))", str(ROOT / "pyproject.toml")],
        cwd=folders[0], env={**plain_environment(), "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


def test_imports_keep_every_contract() -> None:
    code, said = check_imports(PACKAGE.parent, *(folder.parent for folder in TOOLS.values()))
    assert code == 0, said


def test_import_contracts_find_their_breaches(tmp_path: Path) -> None:
    for package in (PACKAGE, *TOOLS.values()):
        shutil.copytree(
            package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "csrc")
        )
    for name, code in {
        "backends/cpu.py": "from acclimate.selection import get_accelerator",
        "accelerator/ops.py": "def f():\n    import acclimate.ops.build.builder",
        "host/topology/read.py": "if TYPE_CHECKING:\n    from acclimate.accelerator import Accelerator",
        "errors.py": "from acclimate.host import topology",
        "ops/build/recipe.py": "from acclimate import get_accelerator",
        "ops/aio/handle.py": "from acclimate.ops.optimizers import simd",
        "cache/folder.py": "import acclimate.cache.lock",
        "selection.py": "def f():\n    import acclimate_conformance",
        "../acclimate_port/source/tree.py": "from acclimate_port.dataflow import sinks",
        "../acclimate_port/settings.py": "from acclimate.errors import AcclimateError",
        "../acclimate_conformance/result.py": "import acclimate.ops.build.builder",
        "llm/gguf/header.py": "def f():\n    from acclimate.llm.loading import load",
        "new_room.py": "",
    }.items():
        with (tmp_path / "acclimate" / name).open("a") as file:
            file.write(f"\n{code}\n")
    code, said = check_imports(tmp_path)
    assert code == 1, said
    broken = set(re.findall(r"^(.*) BROKEN", said, re.MULTILINE))
    assert broken >= {
        "Each room imports only rooms below it",
        "The cache is built in layers",
        "The runtime does not know its tools",
        "acclimate-port needs neither acclimate nor torch",
        "The port is built in layers",
        "A build is described, run, kept and offered in layers",
        "Language models are found, loaded and run in layers",
        "Families of ops do not know each other",
        "No circles of imports",
    }
    for breach in (
        "acclimate.backends.cpu -> acclimate.selection",
        "acclimate.errors -> acclimate.host.topology",
        "acclimate.accelerator.ops -> acclimate.ops.build.builder",
        "new_room",
    ):
        assert breach in said


# Strings that are resolved when needed. import-linter does not see them.
MAY_NAME_ROOMS_ABOVE = {
    "accelerator/ops.py": "the table of op builders",
    "backends/cpu.py": "the table of op builders; the backend shm, which registers when it is chosen",
    "backends/cuda.py": "the table of op builders",
    "backends/probes.py": "DeepSpeed's names, which Intel's extension imports",
    "backends/staged.py": "the backend staged, which registers when it is chosen",
    "llm/commands/chat_ranks.py": "the launcher of the ranks with which the user talks",
    "llm/commands/on_ranks.py": "the program of the ranks that a command starts",
}
OUR_MODULE = re.compile(r"acclimate\.(\w+)(\.\w+)*(:\w+)?")


@cache
def rooms() -> tuple[str, ...]:
    """All rooms, those above first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["id"] == "rooms")
    return ("__init__", "__main__", *contract["layers"])


def names_of_rooms_above(source: Source) -> Iterator[str]:
    for text in source.texts:
        named = OUR_MODULE.fullmatch(text.value)
        if not named or named[1] not in rooms() or source.room not in rooms():
            continue
        if rooms().index(named[1]) < rooms().index(source.room):
            yield f'{source.at(text)} names "{text.value}", which is above it'


def test_only_declared_files_name_a_module_of_a_room_above_them() -> None:
    found = {source.name for source in sources() if list(names_of_rooms_above(source))}
    assert found == set(MAY_NAME_ROOMS_ABOVE)


# -- 3: no code outside backends/ compares accelerator names -----------------------------------------

NAMING = {"name", "device_type", "device_name", "current_device_name", "communication_backend_name"}
NAMING |= {"communication_backend", "_name"}


def name_comparisons(source: Source) -> Iterator[str]:
    if may_name_hardware(source):
        return
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(inner for case in node.cases for inner in ast.walk(case.pattern))]
        elif isinstance(node, ast.Call) and last_name(node) == "startswith":
            sides = [*ast.walk(node.func), *node.args]
        else:
            continue
        literals = {
            inner.value.partition(":")[0]
            for side in sides
            for inner in ast.walk(side)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
        }
        # The host is also a place: `tensor.device.type == "cpu"` asks where a tensor lies.
        asked = {last_name(side) for side in sides}
        if literals & HARDWARE or ("cpu" in literals and asked & NAMING):
            yield f"{source.at(node)} compares {ast.unparse(node)[:80]}"


def last_name(node: ast.AST) -> str:
    """``name`` for ``accelerator.name`` and ``name()``."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """``torch.cuda`` for that expression; empty for anything but names and attributes."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_no_code_outside_the_backends_compares_accelerator_names() -> None:
    assert collect(name_comparisons) == []


# -- 4: importing acclimate is cheap -----------------------------------------------------------------


def test_importing_acclimate_imports_neither_torch_nor_a_vendors_package_nor_rich() -> None:
    code = """
import sys
before = set(sys.modules)
import acclimate
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(imported - {"acclimate", "__future__"} - set(sys.stdlib_module_names)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain_environment(), timeout=600
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


@pytest.mark.usefixtures("warm_starts")
def test_torch_comes_with_the_first_accelerator_and_prints_nothing() -> None:
    code = """
import sys
import acclimate.selection, acclimate.backends, acclimate.host.topology, acclimate.cli
assert "torch" not in sys.modules and "rich" not in sys.modules
acclimate.get_accelerator()
assert "torch" in sys.modules and "rich" not in sys.modules
"""
    environment = {**plain_environment(), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# -- 5: no print, no bare except, no assert, no name that says nothing -------------------------------


def careless_statements(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield f"{source.at(node)} prints; log through logging.getLogger('acclimate')"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{source.at(node)} catches everything, KeyboardInterrupt too"
        if isinstance(node, ast.Assert):
            yield f"{source.at(node)} asserts; python -O takes that away"
        if "each" in (getattr(node, "arg", ""), getattr(node, "id", "")):
            yield f"{source.at(node)} has the name each; say what it is"


def test_library_code_has_no_print_no_bare_except_no_assert_and_no_name_each() -> None:
    assert collect(careless_statements) == []


# -- 6: a file holds one idea ------------------------------------------------------------------------


def test_no_file_of_the_runtime_is_more_than_three_folders_deep() -> None:
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.*") if "__pycache__" not in path.parts]
    assert [path.as_posix() for path in files if len(path.parts) > 4] == []


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by that name alone, and fails where two in folders without __init__.py share it."""
    folders = (ROOT / "tests", ROOT / "extensions", ROOT / "tools")
    names = Counter(path.name for folder in folders for path in folder.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_benchmarks_import_of_the_packages_exists() -> None:
    """No test runs them, and most import within functions: a name that moved was found months later."""
    missing = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition("_")[0].startswith(
                "acclimate"
            ):
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{path.name}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
                ]
    assert missing == []


# -- 7: nothing tells of the machine it was written on -----------------------------------------------

OF_ONE_MACHINE = re.compile(r"(?<![\w./:~-])/(?:home|Users|root|work|workspace)/[\w.+-]+")


def test_no_tracked_file_holds_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # binary, or just removed
        found += [f"{name}: {match[0]}" for match in OF_ONE_MACHINE.finditer(text)]
    assert found == []


# -- 8: every error says what it is ------------------------------------------------------------------


def error_classes() -> list[type[BaseException]]:
    modules = (errors, *(importlib.import_module(f"{package}.errors") for package in TOOLS))
    declared = dict.fromkeys(
        item for module in modules for item in vars(module).values() if isinstance(item, type)
    )
    return [error for error in declared if issubclass(error, BaseException)]


BASES = (errors.AcclimateError, PortError)


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_an_error_is_ours_and_a_built_in_type(error: type[BaseException]) -> None:
    assert issubclass(error, BASES)
    assert error.__doc__
    if error not in BASES:
        built_in = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert built_in[0] not in (Exception, BaseException, object)


def stray_errors(source: Source) -> Iterator[str]:
    """Errors declared elsewhere than in an errors.py, or raised under a name that tells nothing.

    A plain Exception may be declared anywhere: it carries control within one room and never reaches a user.
    """
    telling = {error.__name__ for error in error_classes()} | {
        name for name, value in vars(builtins).items() if isinstance(value, type) and name.endswith("Error")
    }
    for node in source.nodes:
        bases = {last_name(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        if bases & telling and source.path.name != "errors.py":
            yield f"{source.at(node)} declares {node.name}; errors live in errors.py"
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if raised in ("AcclimateError", "PortError", "Exception", "BaseException"):
                yield f"{source.at(node)} raises {raised}; it needs a type of its own"


def test_errors_are_declared_in_one_place_and_raised_under_their_own_type() -> None:
    assert collect(stray_errors) == []


# -- 9: other packages' names are theirs -------------------------------------------------------------

MAY_PATCH = {
    "host/lazy.py": "sets public names of acclimate's own packages on their first use",
    # Only if a program or a user asks for it: DeepSpeed, and names of DeepSpeed without DeepSpeed.
    "compat/deepspeed/__init__.py": "gives DeepSpeed an accelerator that it does not know",
    "compat/deepspeed/names.py": "answers imports of deepspeed where it is not installed",
    "acclimate_deepspeed_shim.py": "does so without a call",
    # Only on the emulated device: torch and safetensors know devices by names that cannot be added.
    "acclimate_sim/after_import.py": "registers the device with torch's compiler, when that is imported",
    "acclimate_sim/device.py": "gives the device the name of a vendor's, to try out that vendor's code",
    "acclimate_sim/float64_inside_torch.py": "prints tensors and scales gradients without float64",
    "acclimate_sim/lists_of_devices.py": "lets DLPack export tensors of the device",
    "acclimate_sim/safetensors_names.py": "loads files to the device by its name",
    "acclimate_sim/untied_weights.py": "emulates devices that replace parameters when a module moves",
}
"""The only files that change names of other packages, or Python's modules and import hooks."""

SHARED = {"builtins", "sys.modules", "sys.meta_path", "sys.path_hooks"}
CHANGING = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
LOOKING_UP = {"getattr", "vars", "zip", "list", "values", "get", "import_module", "__import__"}


def all_sources() -> Iterator[Source]:
    """The runtime, its tools and its extensions."""
    yield from sources()
    for folder in sorted((ROOT / "extensions").glob("*/src")):
        for path in sorted(folder.rglob("*.py")):
            yield Source(path.relative_to(folder), ast.parse(path.read_text(encoding="utf-8")))


def meanings(node: ast.AST, names: dict[str, set[str]]) -> set[str]:
    """The modules, and the things in them, that an expression may stand for.

    The result of a call stands for nothing here: it is the caller's own object.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id, set())
    if isinstance(node, ast.Attribute):
        return {f"{item}.{node.attr}" for item in meanings(node.value, names)}
    if isinstance(node, (ast.Tuple, ast.List)):
        return set().union(*(meanings(element, names) for element in node.elts))
    if isinstance(node, ast.Subscript):
        found = meanings(node.value, names)
        return {"a module"} if "sys.modules" in found else found
    if isinstance(node, ast.Call) and last_name(node) in LOOKING_UP:
        if "import" in last_name(node):
            return {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
        called_on = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        found = set().union(*(meanings(argument, names) for argument in (*called_on, *node.args)))
        return {"a module"} if "sys.modules" in found else found
    return set()


def scopes(node: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes of each outermost function, and those outside of functions."""
    outside: list[ast.AST] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield list(ast.walk(node))
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    yield outside


def imported_names(source: Source) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names.setdefault(alias.asname or top, set()).add(alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
    return names


def with_aliases(names: dict[str, set[str]], scope: list[ast.AST]) -> dict[str, set[str]]:
    """Adds the names that a function gives to what it imported, and those of its loops over such things."""
    names = {name: set(found) for name, found in names.items()}
    for _ in range(3):  # a name may be given to a second one, and that to a third
        for node in scope:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets, value = [node.target], node.iter
            else:
                continue
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Name):
                        names.setdefault(part.id, set()).update(meanings(value, names))
    return names


def is_anothers(meaning: str) -> bool:
    """Whether something is another package's, or Python's table of modules or of import hooks."""
    top = meaning.partition(".")[0]
    own = top.startswith("acclimate") or top in sys.stdlib_module_names or top == "__future__"
    return not own or any(f"{meaning}.".startswith(f"{name}.") for name in SHARED)


def replaced_names(source: Source) -> Iterator[str]:
    imported = imported_names(source)
    for scope in scopes(source.tree):
        names = with_aliases(imported, scope)
        for node in scope:
            for changed in changed_expressions(node):
                if any(map(is_anothers, meanings(changed, names) | meanings(changed.value, names))):
                    yield f"{source.at(node)} changes {ast.unparse(changed)[:80]}"
            if "unittest.mock" in imported_modules(source, node):
                yield f"{source.at(node)} imports unittest.mock"


def changed_expressions(node: ast.AST) -> Iterator[ast.Attribute | ast.Subscript]:
    """The attributes and entries that a statement sets or deletes."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        yield node
    if isinstance(node, ast.Call) and last_name(node) in ("setattr", "delattr") and node.args:
        yield ast.Attribute(node.args[0], "…", ast.Store())
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        yield ast.Subscript(node.func.value, ast.Constant(...), ast.Store())


def test_only_declared_files_change_names_of_other_packages_or_hook_imports() -> None:
    found = {source.name: list(replaced_names(source)) for source in all_sources()}
    assert {name for name, breaches in found.items() if breaches} == set(MAY_PATCH), found


# -- the public names --------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", ["acclimate", "acclimate.llm", "acclimate.ops", "acclimate.llm.split"])
def test_every_public_name_resolves_to_what_its_home_holds(lazy: str) -> None:
    package = importlib.import_module(lazy)
    for name in package.__all__:
        assert getattr(package, name) is getattr(importlib.import_module(package._HOMES[name]), name)
    assert set(package._HOMES) == set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


# -- the rules themselves ----------------------------------------------------------------------------

BREACHES = [
    (replaced_names, "llm/a.py", "import torch\ntorch._dynamo = package"),
    (replaced_names, "llm/a.py", "import sys\nsys.modules[name], y = 1, 2"),
    (replaced_names, "llm/a.py", "import sys\ndef f():\n    del sys.modules['transformers']"),
    (replaced_names, "llm/a.py", "import sys\nsys.modules.pop('transformers')"),
    (replaced_names, "llm/a.py", "import sys\nsys.meta_path = [Finder(), *sys.meta_path]"),
    (replaced_names, "llm/a.py", "from sys import meta_path\nmeta_path.insert(0, Finder())"),
    (replaced_names, "llm/a.py", "from transformers import utils as u\nu.is_torch_distributed_available = f"),
    (replaced_names, "llm/a.py", "from transformers.utils import import_utils\nsetattr(import_utils, n, f)"),
    (replaced_names, "llm/a.py", "import torch\ntorch.nn.Linear.forward = f"),
    (
        replaced_names,
        "llm/a.py",
        "from torch import nn\nfor k, m in zip((nn.Linear, nn.Embedding), b):\n    k.f = m",
    ),
    (replaced_names, "llm/a.py", "import sys\nfor m in list(sys.modules.values()):\n    m.safe_open = f"),
    (
        replaced_names,
        "llm/a.py",
        "from importlib import import_module\nx = import_module('torch.nn')\nx.Linear = f",
    ),
    (replaced_names, "llm/a.py", "import builtins\nbuiltins.open = f"),
    (replaced_names, "llm/a.py", "def f():\n    from unittest.mock import patch"),
    (hardware_names, "selection.py", "import torch\nx = torch.cuda.device_count()"),
    (hardware_names, "comm/shm.py", "from torch import cuda"),
    (hardware_names, "comm/shm.py", "import torch.cuda.nvtx"),
    (hardware_names, "llm/a.py", "def f():\n    import torch_npu"),
    (hardware_names, "ops/build/builder.py", "backend = 'nccl'"),
    (hardware_names, "ops/optimizers/base.py", "backend = 'nccl'"),
    (hardware_names, "launch/a.py", "device = f'cuda:{rank}'"),
    (name_comparisons, "llm/a.py", "if accelerator.name == 'cpu': pass"),
    (name_comparisons, "llm/a.py", "if 'cuda' == acc.device_name(): pass"),
    (name_comparisons, "llm/a.py", "fast = acc.device_type in ('cuda', 'xpu')"),
    (name_comparisons, "llm/a.py", "match acc.name:\n    case 'npu' | 'mlu': pass"),
    (name_comparisons, "llm/a.py", "if acc.current_device_name().startswith('cuda'): pass"),
    (names_of_rooms_above, "host/topology/a.py", "resolve_name('acclimate.backends.cpu:CPUAccelerator')"),
    (names_of_rooms_above, "launch/a.py", "import_module('acclimate.compat')"),
    (careless_statements, "cli.py", "print('hello')"),
    (careless_statements, "cli.py", "try:\n    f()\nexcept:\n    pass"),
    (careless_statements, "cli.py", "assert isinstance(x, int), 'x'"),
    (careless_statements, "cli.py", "x = [f(each) for each in y]"),
    (careless_statements, "cli.py", "def f(each):\n    pass"),
    (stray_errors, "ops/build/builder.py", "class OpError(RuntimeError): pass"),
    (stray_errors, "ops/build/builder.py", "class OpError(errors.OpBuildError): pass"),
    (stray_errors, "ops/build/builder.py", "raise AcclimateError('no')"),
]
ALLOWED = [
    (replaced_names, "llm/a.py", "from torch import nn\nx = nn.Linear(1, 1)\nx.forward = f"),
    (replaced_names, "llm/a.py", "import sys, os\nsys.stdout = f\nos.environ['A'] = '1'"),
    (replaced_names, "llm/a.py", "def f():\n    x = torch.int8\ndef g(x):\n    x.length = 1"),
    (replaced_names, "llm/a.py", "import sys\nx = {}\nx['a'] = sys.modules['torch']\nx.pop('a')"),
    (hardware_names, "backends/cuda.py", "x = torch.cuda.device_count() or 'nccl'"),
    (hardware_names, "ops/optimizers/adam.py", "import torch.cuda"),
    (hardware_names, "ops/aio/buffers.py", "import torch.cuda"),
    (hardware_names, "cli.py", "def f():\n    'Like torch.cuda.'\n    # cuda\n    return acc.cuda, 'CUDA'"),
    (name_comparisons, "llm/a.py", "if tensor.device.type == 'cpu': pass"),
    (name_comparisons, "backends/cuda.py", "if self.name == 'cuda': pass"),
    (names_of_rooms_above, "launch/a.py", "run('acclimate.launch.remote.agent', 'acclimate.host.topology')"),
    (stray_errors, "acclimate_conformance/a.py", "class Signal(Exception): pass"),
]


@pytest.mark.parametrize(("rule", "name", "code"), BREACHES)
def test_a_rule_finds_its_breach(rule: Rule, name: str, code: str) -> None:
    assert list(rule(Source(Path(name), ast.parse(code))))


@pytest.mark.parametrize(("rule", "name", "code"), ALLOWED)
def test_a_rule_leaves_the_rest_alone(rule: Rule, name: str, code: str) -> None:
    assert list(rule(Source(Path(name), ast.parse(code)))) == []


# Written with bars, as this file is tracked too.
@pytest.mark.parametrize("text", ["see |home|ann", "'|work|main'", "(|root|.cache)", "=|Users|ann"])
def test_a_path_of_one_machine_is_recognised(text: str) -> None:
    assert OF_ONE_MACHINE.search(text.replace("|", "/"))


@pytest.mark.parametrize("text", ["https://example.org/home/ann", "src/work/x", "~/work/x", "/dev/dri"])
def test_other_paths_are_not(text: str) -> None:
    assert not OF_ONE_MACHINE.search(text)


def collect(rule: Rule) -> list[str]:
    """What breaks a rule anywhere in the package."""
    return [breach for source in sources() for breach in rule(source)]
