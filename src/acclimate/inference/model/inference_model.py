"""The transformers model that ``init_inference`` returns: the same object and methods, for a model of several
ranks."""

from __future__ import annotations

import copy
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import InvalidRankError, UnsupportedError
from acclimate.inference.files.mapped import MappedFile
from acclimate.inference.packing.packer import Packer
from acclimate.inference.ranks import ModelRanks
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    from acclimate.parallel import Plan


@dataclass(frozen=True)
class Whole:
    """Facts about a model before it was split."""

    parameters: int
    """The number of parameters; tied ones count once."""
    config: Any
    """The whole model's configuration; a rank's copy may hold the rank's number of heads."""
    tokens: int
    """The number of rows of its input embeddings."""
    folder: Path | None
    """The folder of its files."""

    @classmethod
    def of(cls, model: Any, folder: Path | None = None) -> Whole:
        """Describes a model that is whole."""
        try:
            tokens = int(model.get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError):  # it has none, or is not of transformers
            tokens = 0
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(count, copy.deepcopy(getattr(model, "config", None)), tokens, folder)


class InferenceModel:
    """The class that ``init_inference`` adds to a model's own class."""

    tp_plan_applied: Any  # transformers evaluates these annotations, where no Plan is imported
    """How the model is split; ``None`` if it is whole."""
    model_ranks: ModelRanks
    """The ranks that share the model."""
    whole: Whole
    """Facts about the model before it was split."""
    packing: Packer
    """How its weights are stored."""
    mapped_files: tuple[MappedFile, ...] = ()
    """The files whose content its weights are, if they were not copied."""

    @property
    def module(self) -> InferenceModel:
        """The model itself, for code that expects an engine around it."""
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates like transformers' ``generate``; every rank must make the same call.

        Raises:
            InvalidRankError: the ranks' prompts differ.
            CorruptModelError: a file that holds the weights was written to, before the call or during it.
        """
        if self.model_ranks.size > 1:
            self._agree_on_randomness(args, kwargs)
        for file in self.mapped_files:
            file.check_unchanged()
        made = super().generate(*args, **kwargs)  # type: ignore[misc]
        for file in self.mapped_files:
            file.check_unchanged()
        return made

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """The part of transformers' ``generate`` that takes one token after the other."""
        from acclimate.inference.decode.loop import lean_sample

        tokens = lean_sample(self, *args, **kwargs)
        if tokens is not None:
            return tokens
        return super()._sample(*args, **kwargs)  # type: ignore[misc]

    def _agree_on_randomness(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives all ranks rank 0's random state, since they have to sample the same tokens."""
        import torch

        accelerator = get_accelerator()
        states = torch.get_rng_state(), accelerator.get_rng_state()
        prompt = _digest([*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids"))])
        told = self.model_ranks.exchange(
            (
                prompt,
                tuple(state.numpy().tobytes() for state in states) if self.model_ranks.is_first else None,
            )
        )
        for rank, (other, _) in enumerate(told):
            if other != told[0][0]:
                raise InvalidRankError(
                    f"rank {rank} generates from another prompt than rank 0; all ranks that share a model "
                    "must make the same call"
                )
        host, device = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in told[0][1])
        torch.set_rng_state(host)
        accelerator.set_rng_state(device)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Saves the whole model as one folder that transformers loads; every rank must make this call.

        The folder appears complete or not at all. The arguments are transformers'.

        Raises:
            UnsupportedError: the model's weights are quantised.
        """
        if self.packing.packed:
            schemes = ", ".join(sorted(self.packing.packed))
            raise UnsupportedError(
                f"the model's weights are quantised ({schemes}), which transformers' files cannot hold; load "
                "it with dtype set, to bfloat16 for example, and without quantize, and save that"
            )
        if self.tp_plan_applied is None:
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        from acclimate.inference.model.saving import save_split_model

        return save_split_model(self, save_directory, *args, **kwargs)


def as_inference_model(model: Any, plan: Plan | None, ranks: ModelRanks, whole: Whole) -> Any:
    """Returns the same object, of a class that adds :class:`InferenceModel` to its own."""
    own = type(model)
    if not issubclass(own, InferenceModel):
        # transformers writes the class name into config.json, and looks for the model's code in its module.
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        model.__class__ = type(own.__name__, (InferenceModel, own), names)
    model.tp_plan_applied, model.model_ranks, model.whole = plan, ranks, whole
    settings = getattr(model, "generation_config", None)
    if settings is not None and settings.eos_token_id == []:
        settings.eos_token_id = None  # transformers takes the first of a list that is there, and fails
    return model


def _digest(values: list[Any]) -> str:
    """A digest of those values that are tensors."""
    import torch

    content = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            content.update(f"{tuple(value.shape)} {value.dtype} ".encode())
            content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
