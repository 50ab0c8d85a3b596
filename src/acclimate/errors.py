"""The errors that a user of acclimate can cause.

Each type is an :class:`AcclimateError` and also the built-in type that existing code catches in the same
situation: ``ValueError`` for a bad ``DS_ACCELERATOR``, as in DeepSpeed's specification; ``RuntimeError`` for
a device that does not exist, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable


def excerpt(text: str, longest: int = 100) -> str:
    """Returns a value for a message: on one line, without control characters, cut if it is long."""
    shown = text[:longest]
    if not shown.isprintable():
        shown = shown.encode("unicode_escape", "surrogatepass").decode()
    return shown if len(text) <= longest else f"{shown}…"


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Returns names for a message: sorted, the first few of them, and the number of the others."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


class AcclimateError(Exception):
    """The base of all errors that acclimate raises on purpose.

    The message contains the wrong value, the expected one, and what to do next.
    """

    is_of_all_ranks: bool = False
    """Whether all ranks that share a model raise it, so that one report is enough."""


# -- selection -----------------------------------------------------------------------------------


class UnknownAcceleratorError(AcclimateError, ValueError):
    """``DS_ACCELERATOR``, ``ACCLIMATE_ACCELERATOR`` or a call names an unknown accelerator."""


class AcceleratorUnavailableError(AcclimateError, ValueError):
    """An accelerator that was chosen explicitly cannot be used on this machine."""


class SelectionInProgressError(AcclimateError, RuntimeError):
    """A backend's module called ``get_accelerator()`` while it was being imported for the selection."""


class InvalidBackendError(AcclimateError, TypeError):
    """An object given as an accelerator, or a plug-in's record, has the wrong type."""


# -- the interface -------------------------------------------------------------------------------


class InvalidDeviceError(AcclimateError, RuntimeError):
    """A device index or name that this accelerator does not have."""


class InvalidEnvironmentError(AcclimateError, ValueError):
    """An environment variable has an invalid value, or two contradict each other."""


class MissingFileError(AcclimateError, FileNotFoundError):
    """A file, program or directory that a command needs does not exist, or cannot be read."""


class AutocastArgumentError(AcclimateError, TypeError):
    """An argument of autocast is of the wrong type."""


class UnsupportedError(AcclimateError, NotImplementedError):
    """This accelerator, or its torch, does not support the requested function."""


class UnknownCompileBackendError(AcclimateError, ValueError):
    """A ``torch.compile`` backend that torch does not know."""


class GraphCaptureError(AcclimateError, RuntimeError):
    """A graph cannot be captured or replayed with correct results."""


# -- the machine ---------------------------------------------------------------------------------


class TopologyError(AcclimateError, ValueError):
    """A list of processors, or a file of the kernel that describes them, is invalid."""


# -- models and text generation ------------------------------------------------------------------


class MissingExtraError(AcclimateError, ImportError):
    """A package of an optional extra is not installed."""


class ModelNotFoundError(AcclimateError, FileNotFoundError):
    """There is no such folder, file or hub id, or it holds no model."""


class CorruptModelError(AcclimateError, ValueError):
    """A model's files are truncated, unreadable or do not fit together."""


class UnsupportedModelError(AcclimateError, ValueError):
    """A readable model of a kind that cannot be run here."""


class RemoteCodeError(AcclimateError, PermissionError):
    """A model needs its own Python code, which runs only with ``trust_remote_code``."""


class PromptError(AcclimateError, ValueError):
    """A prompt that is empty, is not text, or is longer than the model's context."""


class GenerationOptionError(AcclimateError, ValueError):
    """An option of text generation, or of loading its model, has an invalid value."""


class ModelChangedError(AcclimateError, RuntimeError):
    """A model was changed while it generated a text."""


class LogitsError(AcclimateError, ArithmeticError):
    """A model's logits are infinite or NaN, so no token can be chosen."""


class QuantizationError(AcclimateError, ValueError):
    """Weights cannot be quantised as asked."""


class CacheWriteError(AcclimateError, OSError):
    """The user's cache cannot be written: the disk is full, or permission is denied."""


class UntrustedCacheError(CacheWriteError, PermissionError):
    """Other users could have put code into the cache, or could change its content."""


class SaveError(AcclimateError, OSError):
    """A model's folder cannot be written."""


class DeviceMemoryError(AcclimateError, MemoryError):
    """The model or its context does not fit into the accelerator's memory."""


# -- native ops ----------------------------------------------------------------------------------


class CompilerNotFoundError(AcclimateError, RuntimeError):
    """There is no compiler for an op's source."""


class OpBuildError(AcclimateError, RuntimeError):
    """An op's native source does not compile or link, or its library does not load."""


class OpLockTimeoutError(AcclimateError, TimeoutError):
    """Another process was still building the same op after the time limit."""


class UnknownOpError(AcclimateError, ValueError):
    """This accelerator has no op of that name."""


# -- asynchronous I/O ----------------------------------------------------------------------------


class AsyncIOError(AcclimateError, OSError):
    """A read or write failed; ``errno``, ``filename`` and ``offset`` say how and where."""

    offset: int | None = None
    """The file offset of the first byte that was not moved; ``None`` if the transfer did not start."""

    errors: tuple[AsyncIOError, ...] = ()
    """The errors of all failed requests that one call reports."""


class AsyncIOFileNotFoundError(AsyncIOError, FileNotFoundError):
    """There is no such file, or no folder to create it in."""


class AsyncIOPermissionError(AsyncIOError, PermissionError):
    """Permission to read or write the file is denied."""


class AsyncIOIsADirectoryError(AsyncIOError, IsADirectoryError):
    """The name is that of a folder."""


class ShortFileError(AsyncIOError, EOFError):
    """A file ended before the requested bytes."""


class BufferTooSmallError(AsyncIOError, ValueError):
    """The rest of a file does not fit into the tensor."""


class ClosedHandleError(AsyncIOError, ValueError):
    """A handle was used after it was closed."""


class AsyncIOSettingError(AcclimateError, ValueError):
    """A setting of an I/O handle, or an argument of a transfer, such as its tensor, is invalid."""


# -- optimizers ----------------------------------------------------------------------------------


class InvalidOptimizerArgumentError(AcclimateError, ValueError):
    """A setting of an optimizer, or an argument of its step, is invalid."""


class UnsupportedParameterError(AcclimateError, TypeError):
    """A parameter or gradient has a dtype, layout or device that an optimizer does not support."""


# -- inference ops -------------------------------------------------------------------------------


class WeightError(AcclimateError, ValueError):
    """A weight cannot be packed, cut or multiplied as asked: its format, shape or dtype does not allow it."""


# -- communication ------------------------------------------------------------------------------


class InvalidRankError(AcclimateError, ValueError):
    """A rank is not less than the number of ranks, was given without it, or differs between two launchers."""


class RankFailedError(AcclimateError, RuntimeError):
    """Another rank of a split model failed with an error that acclimate did not raise."""


class GroupCreationError(AcclimateError, RuntimeError):
    """A rank did not join the creation of a process group in time, or ended meanwhile."""


# -- the launcher --------------------------------------------------------------------------------


class BindingError(AcclimateError, ValueError):
    """Ranks cannot be bound to cores: a bad core list, too few cores, or a conflicting variable."""


class LaunchOptionError(AcclimateError, ValueError):
    """An option of ``acclimate run`` is invalid, conflicts with another, or leaves no host or slot."""


class RankStartError(AcclimateError, OSError):
    """The system refused a process, a pipe or a log file for a rank; no rank is left running."""


class HostfileError(AcclimateError, ValueError):
    """A line of a hostfile is invalid or repeats a host, or the file names no host."""


class EngineNotFoundError(AcclimateError, FileNotFoundError):
    """The program of an engine for many hosts is not installed here, or does not answer."""


class HostUnreachableError(AcclimateError, ConnectionError):
    """A host cannot be reached or cannot run an agent; nothing was started on any host."""


class LaunchProtocolError(AcclimateError, ValueError):
    """A message between the launcher and an agent is invalid."""


# -- compat --------------------------------------------------------------------------------------


class ImportOrderError(AcclimateError, ImportError):
    """A library was imported before acclimate could register an accelerator with it."""


# -- parallel ------------------------------------------------------------------------------------


class PlanError(AcclimateError, ValueError):
    """A model cannot be split as asked, or its split gives other results than the whole model."""


class TraceError(PlanError):
    """A model cannot be traced without its weights to find what can be split."""

    def __init__(self, module: object, message: str) -> None:
        super().__init__(message)
        self.module = module
        """The module whose code failed, or ``None``."""


class TiedSplitsError(PlanError):
    """Two modules share a parameter, and would split it in two ways."""

    def __init__(self, owners: frozenset[str], message: str) -> None:
        super().__init__(message)
        self.owners = owners
        """The names of the modules."""


class BlockError(PlanError):
    """A split block of a model gives another result than the whole block, or raises."""

    def __init__(self, block: str, message: str) -> None:
        super().__init__(message)
        self.block = block
        """The block's name in the model."""
