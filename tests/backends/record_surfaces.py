"""Records what a device module of torch really has, by reading its source without importing it.

    python tests/backends/record_surfaces.py torch==2.13.0 torch_npu==2.14.0
    python tests/backends/record_surfaces.py torch-2.13.0-cp311-none-macosx_11_0_arm64.whl
    python tests/backends/record_surfaces.py torch_mlu=path/to/a/clone

A wheel is downloaded with pip into a temporary folder and read with ``ast``; a clone is read at its ``HEAD``.
Names that a module takes from others of its package are followed there, so that the data says what
``torch.npu.stream`` takes and not only that it exists. What is written, one file a module, is in
``tests/backends/surfaces``: public names, their arguments, and the methods of classes.

What this cannot see: names that C code or a patch adds while the package is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SURFACES = Path(__file__).parent / "surfaces"

MODULES: dict[str, dict[str, str]] = {
    "torch": {
        **{
            f"torch.{name}": f"torch.{name}"
            for name in ("cuda", "xpu", "mps", "mtia", "accelerator", "backends.mps")
        },
        "torch._C": "torch",
    },
    "torch_npu": {"torch_npu.npu": "torch.npu"},
    "intel_extension_for_pytorch": {"intel_extension_for_pytorch.xpu": "torch.xpu"},
    "torch_mlu": {"torch_mlu.mlu": "torch.mlu"},
    "habana_frameworks": {"habana_frameworks.torch.hpu": "torch.hpu"},
}
"""For each package, where its device modules are and under which name torch has them."""

CLONES = {
    "torch_mlu": ("https://github.com/Cambricon/torch_mlu", ""),
    "habana_frameworks": ("https://github.com/HabanaAI/gaudi-pytorch-bridge", "python_packages/"),
    "torch_sdaa": ("https://github.com/deepspeedai/DeepSpeed", "accelerator/sdaa_accelerator.py"),
}
"""Packages read from a public repository: its address, and the folder in it that holds the package.

torch_sdaa is published nowhere. What is known of it is what its vendor's own code for another project calls;
there the second entry is that file.
"""

USED = {"torch_sdaa": "torch.sdaa"}
"""Packages known only by their use, and the module whose uses are recorded."""

PRIVATE = {"_lazy_call", "_is_in_bad_fork", "_get_default_mps_generator"}
"""Names with an underscore that are recorded too: torch itself asks for them, or nothing public does it."""

SUBMODULES = {"nvtx", "mstx", "cnpx", "itt", "profiler", "amp", "random"}
"""Modules within a device module that are recorded with it."""

OF_TORCH = {"Stream", "Event", "Generator"}
"""What is recorded of ``torch`` itself: what stands in where a device module has no class of its own."""

Names = dict[str, dict[str, Any]]


@dataclass
class Package:
    """The source of one package: module names to text."""

    name: str
    version: str
    source: str
    read: Callable[[str], str | None]
    parsed: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """A module of the package; ``None`` where the package has none of that name."""
        if name not in self.parsed:
            self.parsed[name] = None
            stem = name.replace(".", "/")
            for path in (f"{stem}/__init__.py", f"{stem}.py", f"{stem}/__init__.pyi"):
                text = self.read(path)
                if text is not None:
                    self.parsed[name] = Module(self, name, ast.parse(text), "__init__" in path)
                    break
        return self.parsed[name]

    def find(self, dotted: str) -> Entry | None:
        """What a full name such as ``torch._C.Stream`` means; ``None`` where it is not in the package."""
        if dotted.partition(".")[0] != self.name:
            return None
        holder, _, name = dotted.rpartition(".")
        module = self.module(holder) if holder else None
        entry = module.entries.get(name) if module is not None else None
        if entry is not None and entry.target != dotted:  # else `from . import amp`: the module below
            return self.follow(entry)
        return Entry("module", target=dotted) if self.module(dotted) is not None else None

    def follow(self, entry: Entry) -> Entry:
        """What an imported name is where it is defined."""
        found = self.find(entry.target) if entry.kind == "import" else entry
        return found if found is not None else Entry("reexport")


@dataclass
class Entry:
    """One name of a module."""

    kind: str
    signature: str | None = None
    methods: dict[str, str | None] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    """Base classes whose source is not in the package: their methods are not listed."""
    target: str = ""
    """For an imported name or a module: its full name where it is defined."""

    def data(self) -> dict[str, Any]:
        """As it is written."""
        if self.kind == "value":
            return {"kind": "value"}
        data: dict[str, Any] = {"kind": self.kind, "signature": self.signature}
        if self.kind == "class":
            data["methods"] = dict(sorted(self.methods.items()))
            if self.bases:
                data["bases"] = self.bases
        return data


@dataclass
class Module:
    """One source file, and what its names mean."""

    package: Package
    name: str
    tree: ast.Module
    is_package: bool

    def __post_init__(self) -> None:
        self._found: dict[str, Entry] | None = None

    @property
    def entries(self) -> dict[str, Entry]:
        """Every name that the file binds at its top level, in any branch.

        Files that import each other see what the other has bound so far, as in Python.
        """
        if self._found is None:
            self._found = {}
            for node in statements(self.tree.body):
                self._bind(node, self._found)
        return self._found

    @property
    def exported(self) -> list[str] | None:
        """``__all__``, where it is written out."""
        listed: list[str] = []
        is_there = False
        for node in statements(self.tree.body):
            target = node.target if isinstance(node, ast.AugAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__all__":
                is_there = True
                for item in getattr(node.value, "elts", []):  # type: ignore[union-attr]
                    listed.append(ast.literal_eval(item))
        return listed if is_there else None

    def public(self) -> dict[str, Entry]:
        """What a user finds: what the file itself and those below it define, and what ``__all__`` lists.

        A name imported from elsewhere (``torch.types.Device``) is a tool of the file.
        """
        own = {
            name
            for name, entry in self.entries.items()
            if (not name.startswith("_") or name in PRIVATE)
            and (entry.kind != "import" or entry.target.startswith(f"{self.name}."))
        }
        listed = set(self.exported or ())
        found = {
            name: self.package.follow(self.entries.get(name, Entry("reexport"))) for name in own | listed
        }
        for name in self._below():
            if name not in found or found[name].kind == "reexport":
                found[name] = Entry("module", target=f"{self.name}.{name}")
        return {
            name: found[name] for name in sorted(found) if name in listed or found[name].kind != "reexport"
        }

    def _below(self) -> Iterator[str]:
        """The modules below a package, of those worth recording: importing them makes them its attributes."""
        for name in SUBMODULES:
            if self.is_package and self.package.module(f"{self.name}.{name}") is not None:
                yield name

    def _bind(self, node: ast.stmt, found: dict[str, Entry]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not is_overload(node):
                found[node.name] = Entry("function", signature(node.args))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = self._class(node, found)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            meaning = self._meaning(node.value, found) if node.value is not None else None
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        found[name.id] = meaning or Entry("value")
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node, found)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.pop(target.id, None)

    def _import_from(self, node: ast.ImportFrom, found: dict[str, Entry]) -> None:
        origin = self._origin(node)
        for alias in node.names:
            if alias.name != "*":
                found[alias.asname or alias.name] = Entry("import", target=f"{origin}.{alias.name}")
                continue
            module = self.package.module(origin) if origin.partition(".")[0] == self.package.name else None
            if module is None:
                continue
            for name in module.exported or [name for name in module.entries if not name.startswith("_")]:
                found[name] = Entry("import", target=f"{origin}.{name}")

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _meaning(self, value: ast.expr, found: dict[str, Entry]) -> Entry | None:
        """What an expression names, where it is a name."""
        if isinstance(value, ast.Name):
            named = found.get(value.id)
            return self.package.follow(named) if named is not None else None
        if isinstance(value, ast.Attribute):
            return self.package.find(ast.unparse(value))
        if isinstance(value, ast.Call):  # an object: what can be called on it is its class's methods
            made = self._meaning(value.func, found)
            if made is not None and made.kind == "class":
                return Entry("class", None, made.methods, made.bases)
        return None

    def _class(self, node: ast.ClassDef, found: dict[str, Entry]) -> Entry:
        entry = Entry("class", "()")
        for base in node.bases:
            meant = self._meaning(base, found)
            if meant is None or meant.kind != "class":
                if ast.unparse(base) not in ("object", "Protocol", "NamedTuple"):
                    entry.bases.append(ast.unparse(base))
                    entry.signature = None
                continue
            entry.methods = {**meant.methods, **entry.methods}
            entry.bases += meant.bases
            entry.signature = meant.signature
        constructors: dict[str, str | None] = {}
        for inner in statements(node.body):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                entry.methods[inner.target.id] = None  # a field
            if not isinstance(inner, ast.FunctionDef):
                continue
            if is_overload(inner):  # which of them is meant cannot be told from one signature
                entry.signature = None if inner.name in ("__init__", "__new__") else entry.signature
                continue
            if inner.name in ("__init__", "__new__"):
                constructors[inner.name] = signature(inner.args, bound=True)
            elif not inner.name.startswith("_") or inner.name in ("__enter__", "__exit__"):
                is_static = any(ast.unparse(mark) == "staticmethod" for mark in inner.decorator_list)
                is_property = any(ast.unparse(mark) == "property" for mark in inner.decorator_list)
                entry.methods[inner.name] = None if is_property else signature(inner.args, is_static)
                if is_static:
                    entry.methods[inner.name] = f"static {signature(inner.args)}"
        if constructors:
            entry.signature = constructors.get("__new__", constructors.get("__init__"))
        return entry


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block and of the branches in it, but not of functions and classes."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, []):
                    yield from statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield node


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)


def signature(arguments: ast.arguments, bound: bool = False) -> str:
    """Arguments as text without types; a default that is no constant becomes ``...``."""
    plain = ast.parse(f"lambda {ast.unparse(strip(arguments))}: 0", mode="eval").body
    assert isinstance(plain, ast.Lambda)
    if bound:
        first = plain.args.posonlyargs or plain.args.args
        if first:
            first.pop(0)
    return f"({ast.unparse(plain.args)})"


def strip(arguments: ast.arguments) -> ast.arguments:
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    arguments.defaults = [constant(default) for default in arguments.defaults]
    arguments.kw_defaults = [
        None if default is None else constant(default) for default in arguments.kw_defaults
    ]
    return arguments


def constant(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(...)
    return default


def names_of(module: Module) -> Names:
    """The data of a module's public names, with the submodules worth recording."""
    names: Names = {}
    for name, entry in module.public().items():
        if name.endswith("Storage"):
            continue  # typed storages, deprecated since torch 2.0
        if entry.kind != "module":
            names[name] = entry.data()
        elif name in SUBMODULES:
            inner = module.package.module(entry.target)
            assert inner is not None
            own = {key: found.data() for key, found in inner.public().items() if found.kind != "module"}
            names[name] = {"kind": "module", "names": own}
    return names


# -- where source comes from -------------------------------------------------------------------------


def open_wheel(path: Path) -> Package:
    """A package in a wheel."""
    archive = zipfile.ZipFile(path)
    members = set(archive.namelist())
    name, version = path.name.split("-")[:2]

    def read(member: str) -> str | None:
        return archive.read(member).decode("utf-8") if member in members else None

    return Package(name, version, f"{path.name}, read without importing it", read)


def open_clone(name: str, folder: Path) -> Package:
    """A package in a clone of its public repository, as its ``HEAD`` has it."""
    address, prefix = CLONES[name]

    def git(*arguments: str) -> str | None:
        ended = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
        return ended.stdout if ended.returncode == 0 else None

    head = git("log", "-1", "--format=%H %cd", "--date=format:%Y.%m.%d")
    if head is None:
        raise SystemExit(f"{folder} is no clone of {address}.")
    revision, date = head.split()
    how = f"the uses of it in {prefix}" if name in USED else "read without importing it"
    source = f"{address} at {revision}, {how}"
    return Package(name, date, source, lambda path: git("show", f"HEAD:{prefix}{path}"))


def download(requirement: str, folder: Path) -> Path:
    """A wheel from the package index: the one for Macs where there is one, as it holds no CUDA."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    mac = [f"--platform=macosx_{system}_0_arm64" for system in (11, 14)]
    for options in ([*mac, "--python-version=3.11", "--only-binary=:all:"], []):
        if subprocess.run([*pip, *options, requirement], stderr=subprocess.DEVNULL).returncode == 0:
            return next(folder.glob("*.whl"))
    raise SystemExit(f"{requirement}: the package index has no wheel of it for this machine.")


def names_used(tree: ast.Module, module: str) -> Names:
    """What a file uses of a module; its arguments are not known."""
    names: Names = {}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == module:
            is_call = ast.unparse(node) in called
            names[node.attr] = {"kind": "function" if is_call else "reexport", "signature": None}
    return dict(sorted(names.items()))


def record(package: Package) -> Iterator[Path]:
    """Writes the data files of a package."""
    for inside, outside in MODULES.get(package.name, {package.name: USED.get(package.name, "")}).items():
        if package.name in USED:
            names = names_used(ast.parse(package.read("") or ""), outside)
        else:
            module = package.module(inside)
            if module is None:
                continue  # an older torch has no torch.accelerator
            names = names_of(module)
            if outside == "torch":
                names = {name: data for name, data in names.items() if name in OF_TORCH}
        surface = {
            "package": package.name,
            "version": package.version,
            "source": package.source,
            "module": outside,
        }
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in surface.items())
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in names.items()]
        stem = outside if package.name == "torch" else package.name
        path = SURFACES / f"{stem}-{package.version}.json"
        path.write_text(f'{{\n{head}"names": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="+", help="package==version, a wheel, or package=clone")
    for wanted in parser.parse_args().packages:
        name, is_clone, folder = wanted.partition("=")
        package_name = Path(name).name.partition("-")[0]
        if package_name not in {*MODULES, *USED}:
            parser.error(
                f"{package_name}: which of its modules are a device's is not known; add it to MODULES."
            )
        if is_clone and not folder.startswith("=") and name not in CLONES:
            parser.error(f"{name}: its public repository is not known; add it to CLONES.")
        with tempfile.TemporaryDirectory() as temporary:
            if wanted.endswith(".whl"):
                package = open_wheel(Path(wanted))
            elif is_clone and not folder.startswith("="):
                package = open_clone(name, Path(folder))
            else:
                package = open_wheel(download(wanted, Path(temporary)))
            for path in record(package):
                sys.stdout.write(f"{path.relative_to(SURFACES.parent)}: {package.source}\n")


if __name__ == "__main__":
    main()
