"""Every error a user of acclimate can cause.

Each type is an :class:`AcclimateError` and also the built-in type that code written for the same
situation already catches (``ValueError`` for a bad ``DS_ACCELERATOR``, as the specification shows;
``RuntimeError`` for a device that does not exist, as torch raises).
"""

from __future__ import annotations

from collections.abc import Iterable


def excerpt(text: str, longest: int = 100) -> str:
    """A value as an error quotes it: on one line, without control characters, and cut where it is long."""
    shown = text[:longest]
    if not shown.isprintable():
        shown = shown.encode("unicode_escape", "surrogatepass").decode()
    return shown if len(text) <= longest else f"{shown}…"


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Names as an error lists them: sorted, the first few of them, and how many there are besides."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


class AcclimateError(Exception):
    """Base of all errors raised on purpose by acclimate.

    The message is a sentence to a person: the wrong value, what was expected, what to do next.
    """


# -- selection -----------------------------------------------------------------------------------


class UnknownAcceleratorError(AcclimateError, ValueError):
    """A name that no accelerator here has, in ``DS_ACCELERATOR``, ``ACCLIMATE_ACCELERATOR`` or a call."""


class ConflictingChoiceError(AcclimateError, ValueError):
    """``DS_ACCELERATOR`` and ``ACCLIMATE_ACCELERATOR`` name different accelerators."""


class AcceleratorUnavailableError(AcclimateError, ValueError):
    """An accelerator was chosen explicitly and cannot be used on this machine."""


class SelectionInProgressError(AcclimateError, RuntimeError):
    """A backend's module asked for the accelerator while it was being imported to become that."""


class InvalidBackendError(AcclimateError, TypeError):
    """An object given as an accelerator, or a plug-in's record, is not of the required type."""


# -- the interface -------------------------------------------------------------------------------


class InvalidDeviceError(AcclimateError, RuntimeError):
    """A device index or name that this accelerator does not have."""


class WorkingDirectoryError(AcclimateError, FileNotFoundError):
    """The directory that a command was started in was deleted."""


class InvalidEnvironmentError(AcclimateError, ValueError):
    """An environment variable set by a launcher holds something it cannot hold."""


class UnsupportedError(AcclimateError, NotImplementedError):
    """This accelerator, or the torch it runs on, does not offer what was asked for."""


class UnknownCompileBackendError(AcclimateError, ValueError):
    """A ``torch.compile`` backend that torch does not know."""


class GraphCaptureError(AcclimateError, RuntimeError):
    """A captured graph would not replay to the right result, so it was refused."""


# -- the machine ---------------------------------------------------------------------------------


class TopologyError(AcclimateError, ValueError):
    """A list of processors, or a file of the kernel that describes them, says something it cannot say."""


# -- models and text generation ------------------------------------------------------------------


class MissingExtraError(AcclimateError, ImportError):
    """What was asked for needs a package that an optional extra brings."""


class ModelNotFoundError(AcclimateError, FileNotFoundError):
    """There is no model where one was asked for: no such folder, file or hub id, or nothing in it."""


class CorruptModelError(AcclimateError, ValueError):
    """A model's files are truncated, unreadable or do not fit together."""


class UnsupportedModelError(AcclimateError, ValueError):
    """A readable model of a kind that cannot be run here."""


class RemoteCodeError(AcclimateError, PermissionError):
    """A model brings Python code of its own, which runs only with ``trust_remote_code``."""


class PromptError(AcclimateError, ValueError):
    """A prompt that is empty, is not text, or is longer than the model's context."""


class GenerationOptionError(AcclimateError, ValueError):
    """An option of text generation holds a value it cannot hold."""


class UnsupportedDtypeError(AcclimateError, ValueError):
    """The accelerator does not compute in the dtype asked for."""


class CacheWriteError(AcclimateError, OSError):
    """The user's cache cannot be written: the disk is full, or the folder is not ours to write."""


class UntrustedCacheError(CacheWriteError, PermissionError):
    """Other users could have put code into the cache, or could change what is in it."""


class DeviceMemoryError(AcclimateError, MemoryError):
    """The model or its context does not fit into the accelerator's memory."""


# -- native ops ----------------------------------------------------------------------------------


class CompilerNotFoundError(AcclimateError, RuntimeError):
    """No program here compiles the kind of source that an op has."""


class OpBuildError(AcclimateError, RuntimeError):
    """An op's native source did not compile or link, or the library made from it does not load."""


class OpLockTimeoutError(AcclimateError, TimeoutError):
    """Another process has been building the same op for longer than this one was willing to wait."""


class UnknownOpError(AcclimateError, ValueError):
    """A name that no op of this accelerator has."""


# -- asynchronous I/O ----------------------------------------------------------------------------


class AsyncIOError(AcclimateError, OSError):
    """A read or a write that failed: ``errno``, ``filename`` and ``offset`` say how and where."""

    offset: int | None = None
    """In the file, of the first byte that was not moved; None where it did not come to that."""

    errors: tuple[AsyncIOError, ...] = ()
    """Where one call tells of several failed requests: all of them."""


class AsyncIOFileNotFoundError(AsyncIOError, FileNotFoundError):
    """There is no such file, or no such folder to make it in."""


class AsyncIOPermissionError(AsyncIOError, PermissionError):
    """The file is not ours to read or write."""


class AsyncIOIsADirectoryError(AsyncIOError, IsADirectoryError):
    """The name is a folder's."""


class ShortFileError(AsyncIOError, EOFError):
    """A file ended before the bytes that were asked for."""


class BufferTooSmallError(AsyncIOError, ValueError):
    """The rest of a file does not fit into the tensor it is read to."""


class ClosedHandleError(AsyncIOError, ValueError):
    """A handle was used after it was closed."""


class InvalidBufferError(AcclimateError, ValueError):
    """A tensor whose bytes in memory are not the tensor's elements in order."""


class AsyncIOSettingError(AcclimateError, ValueError):
    """A setting of an I/O handle, or an argument of a transfer, that it cannot have."""


class AsyncIOEngineError(AcclimateError, RuntimeError):
    """``ACCLIMATE_AIO`` names what is not an I/O engine, or one that cannot be used on this machine."""


# -- optimizers ----------------------------------------------------------------------------------


class InvalidOptimizerArgumentError(AcclimateError, ValueError):
    """A setting of an optimizer, or an argument of its step, that it cannot have."""


class UnsupportedParameterError(AcclimateError, TypeError):
    """A parameter or gradient of a dtype, layout or device that an optimizer does not take."""


class InstructionSetError(AcclimateError, ValueError):
    """``ACCLIMATE_CPU_ISA`` names no instruction set, or one that this machine lacks."""


# -- communication ------------------------------------------------------------------------------


class ConflictingRanksError(AcclimateError, ValueError):
    """The variables of two launchers give this process different ranks."""


class InvalidRankError(AcclimateError, ValueError):
    """A rank and a number of ranks that do not fit together, or one without the other."""


# -- the launcher --------------------------------------------------------------------------------


class BindingError(AcclimateError, ValueError):
    """Ranks cannot be bound to cores as asked: a bad core list, too few cores, a conflicting variable."""


class LaunchOptionError(AcclimateError, ValueError):
    """An option of ``acclimate run`` holds what it cannot hold, or goes with no other that was given."""


class ScriptNotFoundError(AcclimateError, FileNotFoundError):
    """There is no script, module or program of the name that ranks were to run."""


class RankStartError(AcclimateError, OSError):
    """The system refused a process, a pipe or a log file that a rank needs; no rank is left running."""


class HostfileError(AcclimateError, ValueError):
    """A line of a hostfile cannot be understood, names a host again, or there is no host in it."""


class HostfileNotFoundError(AcclimateError, FileNotFoundError):
    """There is no hostfile where one was asked for, or it cannot be read."""


class HostFilterError(AcclimateError, ValueError):
    """``--include``, ``--exclude`` or a limit names a host or slot that is not there, or leaves none."""


class UnknownEngineError(AcclimateError, ValueError):
    """``--launcher`` names no engine."""


class EngineNotFoundError(AcclimateError, FileNotFoundError):
    """The program of an engine for many hosts is not installed here."""


class HostUnreachableError(AcclimateError, ConnectionError):
    """A host cannot be reached, or cannot run an agent: nothing was started on any."""


class LaunchProtocolError(AcclimateError, ValueError):
    """What the launcher and an agent tell each other cannot be understood."""


# -- conformance ---------------------------------------------------------------------------------


class ConformanceError(AcclimateError, RuntimeError):
    """An accelerator cannot be checked: it does not load, or what was asked for is no check."""


# -- port ----------------------------------------------------------------------------------------


class InvalidPortSettingsError(AcclimateError, ValueError):
    """An option or a setting of ``acclimate port`` that is not known, or does not go with another."""
