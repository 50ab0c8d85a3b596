"""The base class of native ops' builders: a subclass declares the op, and ``load()`` builds and loads it."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from acclimate.accelerator.ops import CXX_SUFFIXES
from acclimate.errors import (
    CacheWriteError,
    CompilerNotFoundError,
    InvalidEnvironmentError,
    OpBuildError,
)
from acclimate.ops.build import store
from acclimate.ops.build.recipe import Recipe, Source, Unit
from acclimate.ops.build.toolchain import Toolchain

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator
    from acclimate.ops.build.compile import Progress

_logger = logging.getLogger("acclimate")
_Builder = TypeVar("_Builder", bound="OpBuilder")

_lock = threading.RLock()
_defined: set[type[OpBuilder]] = set()
_modules: dict[tuple[str, type[OpBuilder], str], ModuleType] = {}
_opened: set[Path] = set()
_warned: set[tuple[str, str]] = set()
_FALLBACK = "fallback"


class OpBuilder:
    """One native op: its sources and flags, its Python module, and how to build and load it.

    A subclass provides :attr:`name`, :meth:`sources`, :meth:`define` and :meth:`module`; an accelerator lists
    it in its ``op_builders``. Paths are relative to the folder of the module that defines the subclass, so an
    op's builder and its native source can move together to any package.

    Args:
        accelerator: the accelerator to build for; ``None``: this process's.
    """

    name: ClassVar[str]
    """The name of the op and its library: letters, digits and "_"."""
    NAME: ClassVar[str]
    """The same name under DeepSpeed's attribute."""
    BUILD_VAR: ClassVar[str]
    """DeepSpeed's variable for building the op while it is installed; without effect here."""
    error_log: str | None = None
    """Why the op cannot be built here, set by :meth:`is_compatible`; ``None`` if it can."""

    stable_abi: ClassVar[bool] = True
    """Whether the source uses torch's stable ABI, including only ``torch/csrc/stable`` and
    ``torch/headeronly``. One library then serves torch 2.10 and all later releases. ``False``: the source may
    include pybind11 and any of torch's headers, and a library serves only the torch and Python that it was
    built with."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = vars(cls).get("name")
        if isinstance(name, str):
            cls.NAME, cls.BUILD_VAR = name, f"DS_BUILD_{name.upper()}"

    @classmethod
    def for_accelerator(cls: type[_Builder], accelerator: Accelerator) -> _Builder:
        """Returns a builder for an accelerator; ``create_op_builder()`` calls this."""
        builder = cls()
        builder._accelerator = accelerator
        return builder

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator to build for."""
        if self._accelerator is None:
            from acclimate.selection import get_accelerator

            self._accelerator = get_accelerator()
        return self._accelerator

    # -- what a subclass declares ----------------------------------------------------------------

    def sources(self) -> Sequence[str | Source]:
        """Returns the native source files; none for an op without native code.

        A :class:`Source` has its own flags, such as ``-mavx512f`` for a file whose functions are called only
        on processors with AVX-512.
        """
        return []

    def include_paths(self) -> list[str]:
        """Returns the folders of the op's own headers; the included headers are part of the cache key."""
        return []

    def cxx_args(self) -> list[str]:
        """Returns flags for all C++ sources; they follow the common ones and the accelerator's."""
        return []

    def link_args(self) -> list[str]:
        """Returns flags for the linker, such as ``["-fopenmp"]``; they follow the accelerator's."""
        return []

    def define(self) -> None:
        """Defines the op in Python: ``torch.library`` schemas, fake kernels, and the plain torch fallback,
        registered as ``CompositeExplicitAutograd`` so that a native kernel takes precedence.

        Called once per process and subclass, before a native library is loaded. Native files only register
        implementations: a second library that defines the same schema would abort the process.
        """

    def module(self) -> ModuleType:
        """Returns the module for :meth:`load`; for an op of DeepSpeed, it has DeepSpeed's functions."""
        raise NotImplementedError(f"{type(self).__name__} must define module(), which load() returns.")

    def open_library(self, path: Path) -> None:
        """Loads the built library into this process; its initialisers register the kernels.

        Called once per library and process. If the library is a Python module (``PYBIND11_MODULE`` with
        ``TORCH_EXTENSION_NAME``), override this and call :meth:`import_library`.
        """
        import torch

        torch.ops.load_library(str(path))

    def import_library(self, path: Path) -> ModuleType:
        """Imports a built library that is a Python module."""
        loader = ExtensionFileLoader(self.name, str(path))
        module = module_from_spec(ModuleSpec(self.name, loader, origin=str(path)))
        loader.exec_module(module)
        return module

    # -- what a caller uses ----------------------------------------------------------------------

    def incompatibility(self) -> str | None:
        """Returns why the op cannot be built here, or ``None`` if it can."""
        if not self.sources():
            return None
        try:
            return self._toolchain().missing
        except InvalidEnvironmentError as error:
            return str(error)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be built here.

        Args:
            verbose: logs the reason, if it cannot, as a warning.
        """
        self.error_log = self.incompatibility()
        if self.error_log is not None and verbose:
            _logger.warning('The op "%s" cannot be built: %s.', self.name, self.error_log)
        return self.error_log is None

    def built_library(self) -> Path | None:
        """Returns the existing library that :meth:`load` would use; ``None`` if there is none yet, or the op
        has no native source."""
        if not self.sources():
            return None
        return self._find()[0]

    def build(self, progress: Progress | None = None) -> Path | None:
        """Builds the library into the cache, unless it is there, without loading it.

        Args:
            progress: called after each step with the steps done, their total, and the step's name.

        Returns:
            The library; ``None`` for an op without native source.

        Raises:
            CompilerNotFoundError: there is no compiler and no existing library.
            OpBuildError: the source does not compile; the message has the compiler's output, the command and
                the path of the log.
            OpLockTimeoutError: another process was still building it after ``ACCLIMATE_BUILD_TIMEOUT``.
        """
        if not self.sources():
            return None
        library, recipe, key = self._find()
        if library is not None:
            return library
        if key is None:
            raise CompilerNotFoundError(f'The op "{self.name}" cannot be built: {self.incompatibility()}.')
        return store.obtain(recipe, key, progress)

    def load(self, verbose: bool = False) -> ModuleType:
        """Loads the op, building its library first if needed, and returns its module.

        If the op cannot be built (:meth:`incompatibility` says why), the module uses the plain torch
        fallback, with the same results, and logs one warning. Modules are cached by accelerator, op and
        build key, so another accelerator never gets this one's.

        Args:
            verbose: logs the library's path as information.

        Raises:
            OpBuildError: the source does not compile, or the library does not load.
            OpLockTimeoutError: another process was still building it after ``ACCLIMATE_BUILD_TIMEOUT``.
        """
        with _lock:
            if type(self) not in _defined:
                self.define()
                _defined.add(type(self))
            if not self.sources():
                return self.module()
            library, recipe, key = self._find()
            found = key or (library.parent.name if library is not None else _FALLBACK)
            identity = (self.accelerator.name, type(self), found)
            if identity in _modules:
                return _modules[identity]
            reason = self.incompatibility() if library is None and key is None else None
            if library is None and key is not None:
                library, reason = self._obtain(recipe, key)
            if library is None:
                self._warn_of_fallback(reason)
            elif self._open(library, key) and verbose:
                _logger.info('The op "%s" is %s.', self.name, library)
            module = _modules[identity] = self.module()
            return module

    def loaded_key(self) -> str | None:
        """Returns the key of the build that :meth:`load` found, from its source, flags and compiler; ``None``
        before that."""
        keys = (key for name, kind, key in _modules if (name, kind) == (self.accelerator.name, type(self)))
        return next(keys, None)

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Builds and loads the op; the same as :meth:`load`."""
        return self.load(verbose)

    def absolute_name(self) -> str:
        """Returns the dotted name of the op, of which the last part is that of its library."""
        return f"{type(self).__module__.rpartition('.')[0]}.{self.name}"

    def builder(self) -> Any:
        """Returns the setuptools extension that builds the op ahead of time, into its builder's package.

        Pass it as ``ext_modules=[…]``, with ``cmdclass={"build_ext": accelerator.build_extension()}``.
        :meth:`load` finds the result by the key of its source, so a changed source is never ignored.
        """
        return _extension(self.recipe(), type(self).__module__.rpartition(".")[0])

    # -- how the library is found ----------------------------------------------------------------

    def recipe(self, portable: bool = False) -> Recipe:
        """Returns how to make the library; a missing compiler is an empty command.

        Args:
            portable: compile for all devices of the accelerator's kind, not only for those present.
        """
        toolchain = self._toolchain()
        return self._recipe(toolchain.portable(self.accelerator) if portable else toolchain)

    def _recipe(self, toolchain: Toolchain) -> Recipe:
        return Recipe(
            name=self.name,
            base=self._base(),
            units=tuple(self._unit(source, toolchain) for source in self._sources()),
            include_paths=tuple(self._found(path) for path in self.include_paths()),
            system_paths=toolchain.include_paths,
            linker=toolchain.compilers[".cpp"],
            link_flags=(*toolchain.link_flags, *self.link_args()),
            stable_abi=self.stable_abi,
        )

    def _toolchain(self) -> Toolchain:
        # The C++ compiler links all kinds of sources.
        suffixes = dict.fromkeys([*(Path(source.path).suffix for source in self._sources()), ".cpp"])
        return Toolchain.of(self.accelerator, list(suffixes))

    def _find(self) -> tuple[Path | None, Recipe, str | None]:
        """Returns the library if there is one, its recipe, and its key if it can be built here."""
        toolchain = self._toolchain()
        recipe = self._recipe(toolchain)
        versions = store.versions(recipe) if toolchain.missing is None else None
        key = recipe.key(versions) if versions is not None else None
        library = self._built(recipe, versions)
        if library is None:
            # A machine without a device, such as one that builds an image, makes a portable library.
            library = self._built(self._recipe(toolchain.portable(self.accelerator)), versions)
        return library, recipe, key

    def _obtain(self, recipe: Recipe, key: str) -> tuple[Path | None, str | None]:
        """Returns the library, built if needed, or why no folder can hold a loadable one."""
        reason = store.unloadable_reason()
        if reason is not None:
            return None, reason
        try:
            return store.obtain(recipe, key), None
        except CacheWriteError as error:
            return None, str(error)

    def _built(self, recipe: Recipe, versions: list[str] | None) -> Path | None:
        library = self._built_ahead(recipe)
        if library is None and versions is not None:
            library = store.find(recipe, recipe.key(versions))
        elif library is None:
            library = store.find_built_elsewhere(recipe)
        return library

    def _built_ahead(self, recipe: Recipe) -> Path | None:
        """Returns the library that :meth:`builder` installed beside the builder, unless it is outdated."""
        found = (path for folder in self._folders() for path in folder.glob(f"{recipe.full_name}*.so"))
        return next(found, None)

    def _open(self, library: Path, key: str | None) -> bool:
        """Loads the library, if possible; raises if that fails for one that was built here."""
        if library in _opened:
            return True
        try:
            self.open_library(library)
        except (OSError, ImportError) as error:
            reason = store.unloadable_reason(library.parent)
            if key is not None and reason is None:
                raise OpBuildError(f'The op "{self.name}" was built but does not load: {error}.') from error
            self._warn_of_fallback(reason or f"{library} was built elsewhere and does not load: {error}")
            return False
        _opened.add(library)
        return True

    def _warn_of_fallback(self, reason: str | None) -> None:
        warning = f'The op "{self.name}" runs on plain torch, with the same results but slower: {reason}.'
        if (self.accelerator.name, warning) not in _warned:  # several builders may share a library
            _warned.add((self.accelerator.name, warning))
            _logger.warning("%s", warning)

    def _unit(self, source: Source, toolchain: Toolchain) -> Unit:
        suffix = Path(source.path).suffix
        own = self.cxx_args() if suffix in CXX_SUFFIXES else []
        return Unit(
            # Without folders, so that the key does not depend on where the sources are.
            label=Path(source.path).name if Path(source.path).is_absolute() else source.path,
            path=self._found(source.path),
            compiler=toolchain.compilers[suffix],
            flags=(*toolchain.flags[suffix], *own, *source.flags),
        )

    def _sources(self) -> list[Source]:
        return [Source(source) if isinstance(source, str) else source for source in self.sources()]

    def _folders(self) -> list[Path]:
        """Returns the folders of the modules that define this class and its base classes."""
        modules = [
            sys.modules[cls.__module__] for cls in type(self).__mro__ if cls not in (OpBuilder, object)
        ]
        files = [module.__file__ for module in modules if getattr(module, "__file__", None)]
        return list(dict.fromkeys(_folder_of(file) for file in files if file is not None))

    def _base(self) -> Path:
        """Returns the folder with the sources: a subclass in another folder shares the library."""
        names = [source.path for source in self._sources()]
        folders = self._folders()
        return next(
            (folder for folder in folders if any((folder / name).exists() for name in names)), folders[0]
        )

    def _found(self, path: str) -> Path:
        for folder in self._folders():
            if (folder / path).exists():
                return folder / path
        raise OpBuildError(
            f'The op "{self.name}" needs {path}, but there is none in {self._folders()[0]}, the folder of '
            f"{type(self).__module__}."
        )


@functools.cache  # asked for each source, at each load
def _folder_of(file: str) -> Path:
    return Path(file).resolve().parent


def _extension(recipe: Recipe, package: str) -> Any:
    from setuptools import Extension  # slow, and few programs need it

    class OpExtension(Extension):  # type: ignore[misc]
        """The library of one op, installed beside its builder's module.

        Its name contains the key of its source, so ``load()`` ignores it once the source has changed.
        """

        def build_to(self, target: Path) -> None:
            """Compiles the op into the cache, as ``load()`` would, and copies it.

            The command of ``build_extension()`` calls this.
            """
            shutil.copy(store.obtain(recipe, recipe.key(store.versions(recipe))), target)

    return OpExtension(
        name=".".join(part for part in (package, recipe.full_name) if part),
        sources=[_relative(unit.path) for unit in recipe.units],
    )


def _relative(path: Path) -> str:
    """Returns the path as setuptools wants it: relative, if it is below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
