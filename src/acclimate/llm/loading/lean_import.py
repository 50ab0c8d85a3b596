"""Imports transformers without the parts of torch that only training and compiling need.

transformers imports torch's sharded tensors, its compiler and, through them, sympy. A single process that
generates text uses none of these, but they take 2.1 of the 5.5 s of processor time for importing torch and
transformers. transformers does not import sharded tensors if torch was built without ``torch.distributed``,
so this module makes ``torch.distributed`` appear unavailable to it.

torch also imports its sharded tensors when a tensor subclass is first used, to look up their class. This
module substitutes another class. torch caches it, so this process cannot use sharded tensors later.

Use this only in the process of a command: a program that uses the library may train or compile afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from acclimate.imports import import_torch
from acclimate.llm.loading.model_index import kept_model_index

_COMPILER = "torch._dynamo"
_COMPILED_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_SHARDED = "torch.distributed.tensor"


def import_transformers() -> None:
    """Imports the parts of transformers that load a language model; only for the process of a command."""
    # Imported objects are never freed, so garbage collection skips them: saves 0.3 s here and 0.1 s per run.
    was_on = gc.isenabled()
    gc.disable()
    try:
        _import()
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _import() -> None:
    import_torch()  # first, because vendors' packages may need the modules that are left out below
    import torch

    if _COMPILER in sys.modules or any(name.partition(".")[0] == "transformers" for name in sys.modules):
        return
    try:
        with kept_model_index():
            import transformers.utils as utils
        from transformers.utils import import_utils

        import_utils.is_torch_distributed_available = utils.is_torch_distributed_available = _never
        with _late_compiler(torch):
            import transformers.generation.utils
            import transformers.modeling_utils
            import transformers.models.auto.modeling_auto  # noqa: F401
    except Exception:  # noqa: BLE001 - another transformers: it is imported as usual, by what needs it
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return
    _leave_out_sharded_tensors(torch)


def _never() -> bool:
    return False


@contextlib.contextmanager
def _late_compiler(torch: Any) -> Iterator[None]:
    """Replaces two modules of the compiler by small ones; their decorators have no effect without it."""
    package: Any = types.ModuleType(_COMPILER)
    package.disable = package.allow_in_graph = package.assume_constant_result = _undecorated
    masks: Any = types.ModuleType(_COMPILED_MASKS)
    masks.TransformGetItemToIndex = _transform_get_item_to_index
    sys.modules[_COMPILER], sys.modules[_COMPILED_MASKS], torch._dynamo = package, masks, package
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_COMPILED_MASKS], torch._dynamo


def _leave_out_sharded_tensors(torch: Any) -> None:
    """Makes torch cache an unused class as the class of sharded tensors."""
    if _SHARDED in sys.modules or not torch.distributed.is_available():
        return

    class Unused(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (1,), dtype=torch.float32, device="cpu")

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.empty(1)

    package: Any = types.ModuleType(_SHARDED)
    package.DTensor = type("DTensor", (torch.Tensor,), {})
    sys.modules[_SHARDED] = torch.distributed.tensor = package
    try:
        Unused()[...]
    finally:
        del sys.modules[_SHARDED], torch.distributed.tensor


def _undecorated(function: Any = None, *_given: Any, **_options: Any) -> Any:
    return function if callable(function) else lambda decorated: decorated


def _transform_get_item_to_index() -> Any:
    """Returns the context manager for the masks of unusual models; only these models need the compiler."""
    return import_module(_COMPILED_MASKS).TransformGetItemToIndex()
