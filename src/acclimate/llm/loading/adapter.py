"""A folder of a PEFT adapter, such as LoRA: its base model is loaded, and the adapter merged into it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import AcclimateError, CorruptModelError, MissingExtraError, UnsupportedModelError
from acclimate.host.install_hints import pip_install
from acclimate.llm.files.folder import ADAPTER, has_tokenizer, read_settings
from acclimate.llm.loading.locate import find_model
from acclimate.llm.loading.weight_report import read_whole
from acclimate.llm.quiet import first_line, quiet_transformers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adapter:
    """An adapter and the model for which it was trained."""

    folder: Path
    base: str
    """The base model's folder, GGUF file or hub id."""

    def load(
        self, dtype: torch.dtype, *, trust_remote_code: bool, ignore_extra: tuple[str, ...]
    ) -> tuple[Any, Path]:
        """Loads the whole base model on the host and merges the adapter into it.

        Returns:
            The merged model, and the folder of its tokenizer: the adapter's, or else the base's.

        Raises:
            ModelNotFoundError: there is no such base model.
            UnsupportedModelError: peft cannot load or merge the adapter.
            MissingExtraError: peft is not installed.
            AcclimateError: the other errors of :func:`acclimate.llm.load_model` for the base.
        """
        try:
            peft = import_module("peft")
        except ImportError as error:
            raise MissingExtraError(
                f"{self.folder} is an adapter, for which peft is needed: {pip_install('peft')}"
            ) from error
        name = str(dtype).removeprefix("torch.")
        found = find_model(self.base, partial(str, name), trust_remote_code=trust_remote_code)
        module = read_whole(found.folder, dtype, trust_remote_code, ignore_extra)
        with quiet_transformers():
            try:
                merged = peft.PeftModel.from_pretrained(module, str(self.folder)).merge_and_unload()
            except AcclimateError:
                raise
            except Exception as error:  # any type: the adapter's files may hold anything
                raise UnsupportedModelError(
                    f"peft cannot merge the adapter in {self.folder} into {self.base}: {first_line(error)}"
                ) from error
        return merged, self.folder if has_tokenizer(self.folder) else found.folder


def find_adapter(model: Any) -> Adapter | None:
    """Returns the adapter that a folder holds; ``None`` if it is no such folder, or holds a whole model.

    Raises:
        CorruptModelError: its settings cannot be read, or name no base model.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    # Not pathlib's: these raise nothing for a name that can be no folder, or a folder that cannot be read.
    folder = Path(os.path.expanduser(os.fspath(model)))
    if not os.path.isfile(folder / ADAPTER) or os.path.lexists(folder / "config.json"):
        return None
    base = read_settings(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CorruptModelError(
            f"{folder / ADAPTER} names no base model: base_model_name_or_path is {base!r}"
        )
    return Adapter(folder.resolve(), base)
