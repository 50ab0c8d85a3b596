"""Facts from each file that matter for porting the others, found by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from acclimate_port.source.build_scripts import files_imported, is_build_script
from acclimate_port.source.cuda_packages import CUDA_PACKAGES, KERNEL_PACKAGES
from acclimate_port.source.module_classes import is_module_base
from acclimate_port.source.needed_extensions import extensions_built
from acclimate_port.source.resources import resources_given

_CLASS = re.compile(
    rb"^(?P<margin>[ \t]*)class[ \t]+(?P<name>\w+)[ \t]*(?:\((?P<bases>[^)]*)\))?[ \t]*:", re.M
)
_METHOD = re.compile(rb"^(?P<margin>[ \t]+)def[ \t]+(?P<name>cuda|to)[ \t]*\(", re.M)
_TAKES_STATE = re.compile(
    rb"^(?P<margin>[ \t]+)def[ \t]+(?P<name>\w+)[ \t]*\(\s*self\s*,\s*(?P<state>\w+)", re.M
)
_STATE_METHODS = {b"load_state_dict", b"_load_from_state_dict", b"set_extra_state"}
_STATE_HOOK = re.compile(rb"load_state_dict_pre_hook\(\s*self\.(\w+)")
_COPIED = (
    rb"(?![^\n]*(?:super\(|\.to\(|\.cuda\(|_like\(|\.shape|\.size\(|\.item\(|\b(?:len|int|float|bool|str)\())"
)
_KEEPS_STATE = (
    rb"^[ \t]+(?:self\.[\w.]+(?:\[[^\]\n]*\])?[ \t]*="
    rb"|(?:self\.register_buffer|setattr|self\.__dict__\.update)\()%b[^\n]*\b%b\b"
)
_PARTS_OF_STATE = rb"\bfor[ \t]+\w+[ \t]*,[ \t]*(\w+)[ \t]+in[ \t]+[^\n]*\b%b\.items\(\)"
_LOADER = re.compile(rb"^[ \t]+def[ \t]+load_state_dict[ \t]*\(", re.M)
_NAME = re.compile(rb"\b[A-Z]\w*")
_GIVEN = re.compile(rb"\bjit\.script\(\s*(?:[\w.]+\.)?(\w+)\s*[,)]")
_FROM = re.compile(rb"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.M)
_IMPORT = re.compile(rb"^[ \t]*import[ \t]+([\w.]+)(?:[ \t]+as[ \t]+(\w+))?", re.M)
_OLD_PACKAGE = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(?:fairscale|apex)\b", re.M)
_OLD_CONSTRUCTOR = re.compile(rb"Tensor(?<!\wTensor)(?<!class Tensor)\(")
"""Begins with a word, for which Python looks sooner than for a word's start."""
_NOT_OF_HOST = (
    rb"""(?!["']cuda["']\s*[,)]|accelerator_type|get_accelerator|(?:device_type|dtype|enabled)\s*=|[\s)])"""
    rb"""(?![^\n]*enabled\s*=[^\n]*(?:is_available\(\)|[!=]= .cpu))(?![^\n]*["']cuda["'])"""
)
_HOST_AUTOCAST = re.compile(
    rb"\btorch\.(?:amp\.)?autocast\(\s*(?:device_type\s*=\s*)?" + _NOT_OF_HOST + rb"[\w\"'(]"
    rb"|(?<![\w.])autocast\(\s*(?:device_type\s*=\s*)?" + _NOT_OF_HOST + rb"(?:[\"']cpu|[\w.]*device)"
    rb"|\bcpu\.amp\b|\baccelerator\.autocast\("
)
_HOST_AUTOCAST_OF_TRAINERS = re.compile(
    rb"\bTrainingArguments\b|(?<!class )\bAccelerator\(|^[ \t]*(?:from|import)[ \t]+(?:pytorch_)?lightning\b",
    re.M,
)
"""Trainers of other libraries, for which an option turns on autocast, on the CPU too."""
_TRAINERS = (b"TrainingArguments", b"Accelerator(", b"lightning")
_SETS_VISIBLE = re.compile(
    rb"""^[ \t]+(?:os\.)?(?:environ\[\s*["']\w*_VISIBLE_DEVICES["']\s*\]\s*="""
    rb"""|(?:environ\.setdefault|putenv)\(\s*["']\w*_VISIBLE_DEVICES)""",
    re.M,
)
_SETS_VISIBLE_LATE = re.compile(rb"""^os\.environ\[\s*["']\w*_VISIBLE_DEVICES["']\s*\]\s*=""", re.M)
_CALLS_FIRST = re.compile(rb"^(?!print\b)\w+\(", re.M)
"""Calls of functions by a module itself: ``set_seed(0)``."""
_FORKS = re.compile(rb"""\bos\.fork\(|\b(?:get_context|set_start_method)\(\s*["']fork["']""")
_STARTS_PROCESS = re.compile(
    rb"^[ \t]*(?:import|from)[ \t]+(?:torch\.)?multiprocessing\b[\s\S]*\bProcess\(", re.M
)
_CHOOSES_START = re.compile(rb"\bset_start_method\(|\bget_context\(")
_MOCKS = re.compile(
    rb"""["'](?:([\w.]+)\.)?torch\.cuda\.(\w+)["']|(?:patch\.object|setattr)\(\s*torch\.cuda\s*,\s*["'](\w+)["']"""
)
"""How tests replace a function of torch.cuda: ``mock.patch("pkg.mod.torch.cuda.is_available")``."""
_REPLACE = re.compile(rb"\bpatch\b|\bmonkeypatch\b|\bmocker\b")
_HAS_WORKERS = re.compile(rb"\bnum_workers\s*=\s*(?!0\b)[\w(]")
_HOST_BACKENDS = (b"'gloo'", b'"gloo"', b"'mpi'", b'"mpi"')
_DEFAULT_GROUP = re.compile(rb"\binit_process_group\(\s*\)")
_NAMES_GLOO = re.compile(
    rb"""\binit_process_group\([^()]*["'](?:gloo|mpi)["']"""
    rb"""|\b\w+["']?\s*(?:=|,\s*(?:type=str,\s*)?default=)\s*["'](?:gloo|mpi)["']"""
)
_CHOOSES_BACKEND = re.compile(
    rb"""["'](?:\w+:)?nccl\b|communication_backend_name|get_default_backend_for_device"""
)
_ASKS = re.compile(rb"\bcuda\.(?:is_available|device_count)\(")
_HOLDER = re.compile(rb"(\w+)(?:[\"']\])?[ \t]*(?::[^=\n]*)?=(?!=)[^=]*$")
_OPTION = re.compile(
    rb"""[\s\S]*add_argument\(\s*(?:["']-\w["'],\s*)?["']-*([\w-]+)["'][^()]*default\s*=[^=]*$"""
)
_RETURNS = re.compile(rb"\breturn\b[^\n]*$")
_FUNCTION_NAME = re.compile(rb"def[ \t]+(\w+)")
_SET_IN_BRANCH = re.compile(rb"[^\n]*:[ \t]*\n[ \t]+[\w.]*\b(\w+)[ \t]*=[ \t]*(?:True|False)\b")
_STEPS = 2
"""How often a flag is followed to what gets it in the same file."""
_FAR = 1000
"""The most bytes between a condition and an import that it decides about."""
_NEAR = 200
"""The most bytes between a question for CUDA and the name that gets the answer."""
_FUNCTION = re.compile(rb"^[ \t]*def[ \t]+(\w+)[ \t]*\(([^)]*)", re.M)
_BRACKETS = re.compile(rb"\[[^\[\]]*\]")
_DEVICE_PARAMETER = re.compile(rb"^\s*(?:torch_)?device\b")
_NAMES_DEVICE = re.compile(rb"\b(\w+)[ \t]*(?::[ \t]*\w+[ \t]*)?=[ \t]*[\"']cuda(?::\d+)?[\"']")
_CASTS_TO_OTHERS = re.compile(
    rb"autocast\([^()\n]*(?:\([^()]*\)[^()\n]*)*\bdtype[ \t]*=[ \t]*(?!torch\.(?:float16|half)\b)"
)
_PARTS = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(\w+)\.(\w+)", re.M)
_DEVICE_OPTION = re.compile(
    rb"""add_argument\(\s*(?:["']-\w["'],\s*)?["']-*([\w-]+)["'][^()]*\bdefault\s*=[^\n]*["']cuda"""
)
_DEVICE_SETTING = re.compile(
    rb"""^[ \t]*(?!self\.)(?:\w+\.)+(\w+)[ \t]*=[ \t]*[^\n]{0,40}["']cuda(?::\d+)?["']"""
    rb"""|^[ \t]+(\w+)[ \t]*:[ \t]*[\w.\[\]| ]+=[ \t]*[^\n]{0,40}["']cuda(?::\d+)?["']""",
    re.M,
)
_IMPORT_OF_PACKAGE = re.compile(
    rb"^([ \t]+)(?:from|import)[ \t]+(?:"
    + "|".join(sorted(KERNEL_PACKAGES | CUDA_PACKAGES)).encode()
    + rb")\b",
    re.M,
)
_IMPORT_OF_LIGHTNING = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+(?:pytorch_lightning|lightning|lightning_fabric)\b", re.M
)
_SPAWNS = re.compile(rb"[\"'](?:spawn|forkserver)[\"']")
_WORD = re.compile(rb"[A-Za-z_]\w{3,}")
_ARGUMENTS = rb"\(((?:[^()]|\([^()]*\))*)\)"
_TAKES_BACKEND = re.compile(
    rb"\b(?:init_process_group\w*|init_distributed|new_group|new_subgroups\w*)" + _ARGUMENTS
)
_BACKEND = re.compile(rb"\b\w*backend\b(?![ \t]*=[^=])", re.IGNORECASE)
_GETS_BACKEND = re.compile(rb"\b(\w*backend)[ \t]*(?::[^=\n]*)?=(?!=)([^\n,)]*)", re.IGNORECASE)
_GIVES_BACKEND = re.compile(rb"\b(\w+)\(([^()\n]*\b\w*backend\b[^()\n]*)", re.IGNORECASE)
_NOT_FOR_TORCH = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+(?:\.|%b)|cuda\w*_|_cuda|cudnn|torch\.ops\b|cpp_extension"
    % "|".join(sorted(KERNEL_PACKAGES | CUDA_PACKAGES)).encode(),
    re.M,
)
"""What a module has that may need one kind of hardware: kernels, or what it imports of its own package."""
_OF_OTHERS = (b"process_group_backend",)
"""Parameters of libraries that give a backend to torch.distributed."""


@dataclass(frozen=True)
class Survey:
    """Facts about the classes and functions of all files to port."""

    with_own_cuda: frozenset[str] = frozenset()
    """Classes with a method ``cuda`` and no method ``to``, which therefore are not modules."""
    compiled: frozenset[str] = frozenset()
    """Classes that another file imports and instantiates, and may compile with TorchScript."""
    classes: frozenset[tuple[str, str]] = frozenset()
    """Each class with the text of its bases, or ``cuda`` in place of it if it has a method of that name."""
    makers: frozenset[Path] = frozenset()
    """Folders, and files without suffix, with functions whose results others compile with TorchScript."""
    device_names: frozenset[str] = frozenset()
    """Names that are assigned a device's name, also as keyword arguments: ``master_rank="cuda"``."""
    modules: frozenset[str] = frozenset()
    """The names of the files and folders to port, which are not other libraries."""
    old_constructor: bool = False
    """Whether a file, or a library that it imports such as fairscale, calls ``torch.Tensor(…)``."""
    autocasts_on_host: bool = False
    """Whether a file, or a trainer that it uses, may turn on the autocast of the CPU."""
    sets_visible_devices: bool = False
    """Whether a function or block sets a variable such as ``CUDA_VISIBLE_DEVICES``."""
    forks: bool = False
    """Whether a file forks the process: by name, or by default where it uses torch."""
    flags: frozenset[str] = frozenset()
    """Names of variables, attributes, arguments and functions that say whether there is CUDA."""
    device_parameters: frozenset[tuple[str, str, int]] = frozenset()
    """Functions with a parameter ``device``: the module or class, the function, and its position."""
    for_builds: frozenset[Path] = frozenset()
    """Folders, and files without suffix, that a build script imports."""
    package_flags: frozenset[str] = frozenset()
    """Names by which blocks import a package for NVIDIA GPUs: ``if has_flash(): import flash_attn``."""

    extensions: frozenset[str] = frozenset()
    """The names of the extensions that a build script builds for CUDA: ``CUDAExtension("nms_op", …)``."""

    for_torch: frozenset[str] = frozenset()
    """Modules below a folder named like a package for NVIDIA GPUs, which use nothing but torch themselves."""

    has_lightning: bool = False
    """Whether a file imports Lightning, whose trainers choose the device."""

    own_loaders: frozenset[str] = frozenset()
    """Classes with a method ``load_state_dict`` that are no modules, and may keep what it gets."""

    keeps_state: bool = False
    """Whether a module may keep a part of the state that it loads: ``self.bank = state_dict["bank"]``."""

    groups_on_host: bool = False
    """Whether a file may make a process group of the host: of gloo, or without a backend."""
    names_gloo: bool = False
    """Whether a file makes a process group of gloo on every machine."""

    mocked: frozenset[tuple[str, str]] = frozenset()
    """Functions of torch.cuda that tests replace, each with the last name of a module that they are about."""

    loads_by_workers: bool = False
    """Whether a file loads data in other processes: ``num_workers=4``."""

    backends: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a name of a backend and what gets it: a name, ``f()``, or ``""`` for torch.distributed."""

    extensions_of_cuda: frozenset[str] = frozenset()
    """Those of the extensions that can be built with CUDA alone."""

    device_options: frozenset[str] = frozenset()
    """Options and settings whose default, in a file of Python, names a device of CUDA."""

    casts_to_others: bool = False
    """Whether a file turns on an autocast to another type than float16."""

    imported_from: frozenset[tuple[str, str]] = frozenset()
    """The first two parts of the names of imported modules: ``openchem`` and ``models``."""

    resources: frozenset[str] = frozenset()
    """The names by which files tell a scheduler such as Ray of GPUs, and where their values come from."""

    with_code: frozenset[str] = frozenset()
    """The names of the modules, and of the packages with an ``__init__.py``: not those of mere folders."""

    built: frozenset[str] = frozenset()
    """The names of all extensions that a build script builds, also of those that modules are named like."""

    spawns: bool = False
    """Whether a file starts processes that are no copies of its own, as each program of a Mac does."""

    @cached_property
    def backends_used(self) -> frozenset[str]:
        """The names of options and variables whose value torch.distributed gets, also through others."""
        found = {""}
        count = 0
        while count != len(found):
            count = len(found)
            found |= {name for name, getting in self.backends if getting in found}
        return frozenset(found)

    def takes_device(self, full_name: str, index: int | None) -> bool:
        """Whether an argument by position of a function of the project is a device."""
        module, _, name = full_name.rpartition(".")
        return index is not None and (module.rpartition(".")[2], name, index) in self.device_parameters

    def is_module(self, full_name: str) -> bool:
        """Whether a class of the project is a torch module whose ``cuda()`` is torch's."""
        package, _, name = full_name.rpartition(".")
        is_own = full_name.startswith(".") or not self.modules.isdisjoint(package.split("."))
        return is_own and name in self._module_classes

    def with_folders(self, paths: Sequence[Path]) -> Survey:
        """These facts, of whose modules some are packages of folders alone, without ``__init__.py``."""
        shared = set(paths[0].parents).intersection(*(path.parents for path in paths)) if paths else set()
        folders = {one for path in paths for one in path.parents} - shared
        held = {path.with_suffix("") for path in paths} | folders
        pairs = {(one.parent.name, one.name) for one in held if one.parent in folders}
        packages = {first for first, _ in self.imported_from & pairs}
        return replace(self, modules=self.modules | packages, imported_from=frozenset())

    def resolved(self) -> Survey:
        """These facts with the modules alone of all classes, which is less to give to each process."""
        return replace(
            self,
            classes=frozenset((name, "Module") for name in self._module_classes),
            backends=frozenset((name, "") for name in self.backends_used),
            built=self.extensions,
            extensions=self.extensions - self.modules,
            extensions_of_cuda=self.extensions_of_cuda - self.modules,
        )

    @cached_property
    def _module_classes(self) -> frozenset[str]:
        """The names of the classes that are modules wherever the project defines them."""
        found: set[str] = set()
        count = -1
        while count != len(found):
            count = len(found)
            of_modules = {name for name, bases in self.classes if _is_of_module(bases, found)}
            found |= of_modules - {
                name for name, bases in self.classes if not _is_of_module(bases, of_modules)
            }
        return frozenset(found)

    def of_file(self, path: Path) -> Survey:
        """These facts, of which those about tests are the ones about a file."""
        name = path.parent.name if path.name == "__init__.py" else path.stem
        return replace(self, mocked=frozenset(one for one in self.mocked if one[0] == name))

    def is_for_builds(self, path: Path) -> bool:
        """Whether a build script imports a file."""
        module = path.parent if path.name == "__init__.py" else path.with_suffix("")
        return module in self.for_builds

    def may_compile_all(self, path: Path) -> bool:
        """Whether another file may compile any module of this file with TorchScript."""
        return bool(self.makers) and not self.makers.isdisjoint([path.with_suffix(""), *path.parents])


def survey(source: bytes, path: Path | None = None) -> Survey:
    """The facts from one file."""
    makers = frozenset(_makers(source, path)) if path is not None else frozenset()
    classes = list(_classes(source))
    own = (name for name, bases, has in classes if has == {b"cuda"} and "Module" not in bases)
    named = frozenset(
        found[1].decode() for line in _lines(source, b"cuda") for found in _NAMES_DEVICE.finditer(line)
    )
    names_of_host = any(word in source for word in _HOST_BACKENDS)
    modules = frozenset([path.stem, path.parent.name]) if path is not None else frozenset()
    built = [*extensions_built(source)]
    return Survey(
        frozenset(own),
        frozenset(_compiled(source)),
        frozenset((name, "cuda" if b"cuda" in has else bases) for name, bases, has in classes),
        makers,
        named,
        modules,
        _makes_old_tensors(source),
        may_autocast_on_host(source),
        b"_VISIBLE_DEVICES" in source and _sets_visible(source),
        _may_fork(source),
        frozenset(_flags_given(source)),
        frozenset(_device_parameters(source, path)) if path is not None else frozenset(),
        frozenset(files_imported(path, source)) if path and is_build_script(path, source) else frozenset(),
        frozenset(_package_flags(source)),
        frozenset(name for name, _ in built),
        frozenset(_for_torch(source, path)) if path is not None else frozenset(),
        b"lightning" in source and _IMPORT_OF_LIGHTNING.search(source) is not None,
        frozenset(_own_loaders(source)),
        _keeps_state(source),
        names_of_host or (b"init_process_group(" in source and _DEFAULT_GROUP.search(source) is not None),
        takes_gloo(source),
        frozenset(_mocked(source)),
        b"num_workers" in source and _HAS_WORKERS.search(source) is not None,
        frozenset(backends_given(source)),
        frozenset(name for name, needs_cuda in built if needs_cuda),
        frozenset(_device_options(source)),
        b"autocast" in source and _CASTS_TO_OTHERS.search(source) is not None,
        frozenset((one[1].decode(), one[2].decode()) for one in _PARTS.finditer(source)),
        resources_given(source),
        frozenset(
            [path.parent.name if path.name == "__init__.py" else path.stem] if path is not None else []
        ),
        spawns=_SPAWNS.search(source) is not None,
    )


def takes_gloo(source: bytes) -> bool:
    """Whether a file makes a process group of gloo on every machine."""
    is_likely = any(word in source for word in _HOST_BACKENDS) and _NAMES_GLOO.search(source) is not None
    return is_likely and _CHOOSES_BACKEND.search(source) is None


def _lines(source: bytes, word: bytes) -> Iterator[bytes]:
    """The lines that have a word."""
    at = source.find(word)
    while at >= 0:
        end = source.find(b"\n", at)
        end = len(source) if end < 0 else end
        yield source[source.rfind(b"\n", 0, at) + 1 : end]
        at = source.find(word, end)


def _makes_old_tensors(source: bytes) -> bool:
    """Whether a file makes a tensor by ``Tensor(...)``, or imports a package that does."""
    packages = b"fairscale" in source or b"apex" in source
    is_package = packages and _OLD_PACKAGE.search(source) is not None
    return is_package or _OLD_CONSTRUCTOR.search(source) is not None


def _sets_visible(source: bytes) -> bool:
    """Whether a function or a block sets the visible devices, or a module after it has called a function."""
    found = _SETS_VISIBLE_LATE.search(source)
    is_late = found is not None and _CALLS_FIRST.search(source[: found.start()]) is not None
    return is_late or _SETS_VISIBLE.search(source) is not None


def _may_fork(source: bytes) -> bool:
    """Whether a file forks the process: by name, or by default where it uses torch."""
    if b"fork" in source and _FORKS.search(source):
        return True
    is_default = b"Process(" in source and _STARTS_PROCESS.search(source) is not None
    return is_default and b"torch" in source and not _CHOOSES_START.search(source)


def may_autocast_on_host(source: bytes) -> bool:
    """Whether a file may turn on the autocast of the CPU."""
    # Words are found sooner than patterns.
    if any(word in source for word in _TRAINERS) and _HOST_AUTOCAST_OF_TRAINERS.search(source):
        return True
    is_named = b"autocast" in source or b"cpu.amp" in source
    return is_named and _HOST_AUTOCAST.search(source) is not None


def joined(surveys: Sequence[Survey]) -> Survey:
    """The facts from all files."""
    found: dict[str, Any] = {}
    for one in fields(Survey):
        parts = [getattr(own, one.name) for own in surveys]
        found[one.name] = any(parts) if isinstance(one.default, bool) else frozenset().union(*parts)
    return Survey(**found)


def backends_given(source: bytes) -> Iterator[tuple[str, str]]:
    """The names of backends in a file, each with what gets its value."""
    if b"ackend" not in source:
        return
    pairs = [(called[1], b"") for called in _TAKES_BACKEND.finditer(source)]
    pairs += [(found[2], found[1]) for found in _GETS_BACKEND.finditer(source)]
    yield from ((name.decode(), "") for name in _OF_OTHERS)
    for called in _GIVES_BACKEND.finditer(source):
        is_defined = source[: called.start()].endswith((b"def ", b"class "))
        names = _BACKEND.findall(called[2]) + (_GETS_BACKEND.findall(called[2]) if is_defined else [])
        for name in names:
            text = name[0] if isinstance(name, tuple) else name
            pair = (called[1] + b"()", text) if is_defined else (text, called[1] + b"()")
            yield pair[0].decode(), pair[1].decode()
    for value, target in pairs:
        yield from ((name.decode(), target.decode()) for name in _BACKEND.findall(value))


def _own_loaders(source: bytes) -> Iterator[str]:
    """The classes of a file that define ``load_state_dict`` and have no base that is a module."""
    if b"def load_state_dict" not in source:
        return
    classes = [*_CLASS.finditer(source)]
    for method in _LOADER.finditer(source):
        name = _owner(classes, method)
        bases = [one["bases"] or b"" for one in classes if one["name"] == name]
        if name and not any(_is_of_module(one.decode(errors="replace"), set()) for one in bases):
            yield name.decode()


def _mocked(source: bytes) -> Iterator[tuple[str, str]]:
    """The functions of torch.cuda that a test replaces, with the modules that it names or imports."""
    if b"torch.cuda" not in source or not _REPLACE.search(source):
        return
    imported: set[bytes] = set()
    for statement in _FROM.finditer(source):
        imported |= {statement[2].rpartition(b".")[2], *re.findall(rb"\w+", statement[3])}
    imported |= {statement[1].rpartition(b".")[2] for statement in _IMPORT.finditer(source)}
    for found in _MOCKS.finditer(source):
        modules = {found[1].rpartition(b".")[2]} if found[1] else imported
        yield from ((module.decode(), (found[2] or found[3]).decode()) for module in modules)


def _keeps_state(source: bytes) -> bool:
    """Whether a method of a module keeps a part of the state that it loads, wherever that is."""
    if b"state_dict" not in source and b"_extra_state" not in source:
        return False
    names = _STATE_METHODS.union(_STATE_HOOK.findall(source))
    classes = [*_CLASS.finditer(source)]
    with_base = {one["name"] for one in classes if one["bases"] not in (None, b"", b"object")}
    for method in _TAKES_STATE.finditer(source):
        if method["name"] in names and _owner(classes, method) in with_base:
            end = re.compile(rb"^(?![ \t]{%d})[ \t]*\S" % (len(method["margin"]) + 1), re.M).search(
                source, source.find(b":", method.end())
            )
            body = source[method.end() : end.start() if end is not None else None]
            parts = re.findall(_PARTS_OF_STATE % method["state"], body)
            names_of_it = b"(?:%b)" % b"|".join((method["state"], *parts))
            if re.search(_KEEPS_STATE % (_COPIED, names_of_it), body, re.M):
                return True
    return False


def _for_torch(source: bytes, path: Path) -> Iterator[str]:
    """The full name of a module of a package for NVIDIA GPUs that holds no kernel and imports none."""
    names = [*path.with_suffix("").parts]
    first = next((at for at, name in enumerate(names[:-1]) if name in CUDA_PACKAGES), None)
    if first is not None and names[-1] != "__init__" and not _NOT_FOR_TORCH.search(source):
        yield ".".join(names[first:])


def _flags(source: bytes) -> Iterator[str]:
    """The names that get the answer to a question for CUDA."""
    for asked in _ASKS.finditer(source):
        before = source[max(asked.start() - _NEAR, 0) : asked.start()]
        if found := _HOLDER.search(before):
            yield found[1].decode()
        if option := _OPTION.match(before):
            yield option[1].decode().replace("-", "_")
        if _RETURNS.search(before):
            function = _FUNCTION_NAME.match(source, max(source.rfind(b"def ", 0, asked.start()), 0))
            yield from [function[1].decode()] if function is not None else []
        if set_to_true := _SET_IN_BRANCH.match(source, asked.end()):
            yield set_to_true[1].decode()


def _flags_given(source: bytes) -> set[str]:
    """The flags of a file, and the names and functions to which it gives them: ``Net(use_gpu=gpu)``."""
    found = set(_flags(source))
    for _ in range(_STEPS if found else 0):
        flags = "|".join(map(re.escape, found)).encode()
        given = rb"\b(\w+)[ \t]*=[ \t]*(?:\w+\.)*(?:%b)\b[ \t]*(?:[,)#]|$)" % flags
        called = rb"\b(\w+)\((?:[^()]*,)?\s*(?:\w+\.)*(?:%b)\s*[,)]" % flags
        for form in (given, called):
            found |= {one[1].decode() for one in re.finditer(form, source, re.M)}
    return found


def _package_flags(source: bytes) -> Iterator[str]:
    """The names in the conditions of the blocks that import a package for NVIDIA GPUs."""
    for found in _IMPORT_OF_PACKAGE.finditer(source):
        before = source[max(found.start() - _FAR, 0) : found.start()].splitlines()
        outer = (line for line in reversed(before) if line.strip() and _margin(line) < len(found[1]))
        condition = next(outer, b"").lstrip()
        if condition.startswith((b"if ", b"elif ")):
            yield from (name.decode() for name in _WORD.findall(condition))


def _margin(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def _device_parameters(source: bytes, path: Path) -> Iterator[tuple[str, str, int]]:
    """The functions of a file that have a parameter ``device``."""
    classes = [*_CLASS.finditer(source)] if b"device" in source else []
    for function in _FUNCTION.finditer(source) if b"device" in source else ():
        if b"device" in function[2]:
            listed = _BRACKETS.sub(b"", function[2]).split(b",")
            is_bound = listed[0].strip() in (b"self", b"cls")
            owner = _owner(classes, function)
            for index, parameter in enumerate(listed):
                if _DEVICE_PARAMETER.match(parameter):
                    yield path.stem, function[1].decode(), index
                    if owner:
                        yield owner.decode(), function[1].decode(), index - is_bound


def _owner(classes: Sequence[re.Match[bytes]], function: re.Match[bytes]) -> bytes:
    """The name of the last class before a method that is less indented; empty if there is none."""
    margin = len(function[0]) - len(function[0].lstrip())
    before = (one for one in reversed(classes) if one.start() < function.start()) if margin else ()
    return next((one["name"] for one in before if len(one["margin"]) < margin), b"")


def _classes(source: bytes) -> Iterator[tuple[str, str, set[bytes]]]:
    """Each class of a file, with its bases, and those of the methods ``cuda`` and ``to`` that it has."""
    classes = list(_CLASS.finditer(source))
    methods = list(_METHOD.finditer(source)) if b"def cuda" in source else []
    for index, kind in enumerate(classes):
        end = classes[index + 1].start() if index + 1 < len(classes) else len(source)
        own = {found["name"] for found in methods if kind.end() <= found.start() < end}
        yield kind["name"].decode(), (kind["bases"] or b"").decode(errors="replace"), own


def _is_of_module(bases: str, known: set[str]) -> bool:
    """Whether one of the bases of a class is a library's module, or a class that is known to be one."""
    listed = [base.strip() for base in bases.split(",")]
    return any(map(is_module_base, listed)) or any(one.rpartition(".")[2] in known for one in listed)


def _compiled(source: bytes) -> Iterator[str]:
    if not _GIVEN.search(source):
        return
    for statement in _FROM.finditer(source):
        for name in _NAME.findall(statement[3]):
            if re.search(rb"\b" + name + rb"\(", source):
                yield name.decode()


def _device_options(source: bytes) -> Iterator[str]:
    """The options and settings that name a device of CUDA unless a user says something else."""
    if b"cuda" in source:
        yield from (found[1].decode().replace("-", "_") for found in _DEVICE_OPTION.finditer(source))
        yield from ((found[1] or found[2]).decode() for found in _DEVICE_SETTING.finditer(source))


def _makers(source: bytes, path: Path) -> Iterator[Path]:
    """The neighbouring modules whose functions return modules that the file compiles with TorchScript."""
    given = {found[1] for found in _GIVEN.finditer(source)}
    callers: set[bytes] = set()
    for name in given:
        made = rb"\b" + name + rb"(?:[ \t]*,[ \t]*\*?\w+)*[ \t]*=[ \t]*(\w+)[\w.]*\("
        callers |= {found[1] for found in re.finditer(made, source)}
    if not callers:
        return
    for statement in _FROM.finditer(source):
        bound = set(re.findall(rb"\w+", statement[3]))
        if bound & callers:
            up = max(len(statement[1]) - 1, 0)
            yield from _beside(path, up, statement[2])
    for statement in _IMPORT.finditer(source):
        if (statement[2] or statement[1].partition(b".")[0]) in callers:
            yield from _beside(path, 0, statement[1])


def _beside(path: Path, up: int, module: bytes) -> Iterator[Path]:
    """The package or module that an import names, if it is a neighbour of the file."""
    folder = path.parents[up] if up < len(path.parents) else path.parent
    first = module.decode().partition(".")[0]
    found = folder / first if first else folder
    if found.is_dir() or found.with_suffix(".py").is_file():
        yield found
