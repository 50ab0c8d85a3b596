"""The transformers model that ``init_inference`` returns: the same object and methods, for a model of several
ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import InvalidRankError, PlanError, UnsupportedError
from acclimate.llm.files.open_file import MappedFile
from acclimate.llm.kernels.torch_threads import within_quota
from acclimate.llm.loading.packer import Packer
from acclimate.llm.ranks import ModelRanks
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    from acclimate.llm.loading.shared_call import SharedCall
    from acclimate.llm.split import Plan

logger = logging.getLogger("acclimate.llm")

_WHOLE_ONLY = {
    "resize_token_embeddings": "Resize the whole model",
    "resize_position_embeddings": "Resize the whole model",
    "set_input_embeddings": "Replace the embeddings of the whole model",
    "set_output_embeddings": "Replace the output head of the whole model",
    "set_encoder": "Replace the encoder of the whole model",
    "set_decoder": "Replace the decoder of the whole model",
    "prune_heads": "Prune the whole model",
    "add_adapter": "Add the adapter to the whole model",
    "load_adapter": "Load the adapter into the whole model",
    "init_weights": "Initialize the whole model",
    "initialize_weights": "Initialize the whole model",
    "dequantize": "Dequantize the whole model",
    "push_to_hub": "Save it with save_pretrained, and upload the folder; or push the whole model",
}
"""Methods that cannot work on a rank's shards, each with what to do before the model is split."""


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

    # The values are those of a new object of this class, as type(model).from_pretrained makes one.
    tp_plan_applied: Any = None  # transformers evaluates these annotations, where no Plan is imported
    """How the model is split; ``None`` if it is whole."""
    model_ranks: ModelRanks = ModelRanks()
    """The ranks that share the model."""
    whole: Whole
    """Facts about the model before it was split."""
    packing: Packer = Packer(None, "the model")
    """How its weights are stored."""
    kv_cache_dtype: str = "auto"
    """The dtype of keys and values in acclimate's own loop: ``int8``, or ``auto``, the model's."""
    hooks_of_split: frozenset[int] = frozenset()
    """The identities of the hooks that run a split model's collectives."""
    mapped_files: tuple[MappedFile, ...] = ()
    """The files whose content its weights are, if they were not copied."""
    _shared_call: Any = None
    """What the ranks agreed on for the call of ``generate`` that runs now."""

    @property
    def module(self) -> InferenceModel:
        """The model itself, for code that expects an engine around it."""
        return self

    @property
    def dtype(self) -> Any:
        """The dtype of the parameters, or what quantised weights compute in if there are no others."""
        return self._a_weight().dtype

    @property
    def device(self) -> Any:
        """The device of the weights."""
        return self._a_weight().device

    def _a_weight(self) -> Any:
        own: Any = self
        parameters = (weight for weight in own.parameters() if weight.is_floating_point())
        quantised = (m._buffers["compute"] for m in own.modules() if "compute" in m._buffers)
        return next(itertools.chain(parameters, quantised))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates like transformers' ``generate``; every rank must make the same call.

        Only streamers, logits processors and stopping criteria may differ. If one rank's criteria end a text,
        it ends on all ranks; if one rank's streamer, processor or criterion raises, all ranks raise.

        Raises:
            InvalidRankError: the ranks' arguments differ, or they chose different tokens.
            PlanError: a split module was replaced.
            CorruptModelError: a file that holds the weights was written to, before the call or during it.
        """
        for file in self.mapped_files:
            file.check_unchanged()
        with within_quota():
            made = self._generated(args, kwargs)
        for file in self.mapped_files:
            file.check_unchanged()
        return made

    def _generated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.model_ranks.size == 1:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        from acclimate.llm.loading.shared_call import by_name

        args, named = by_name(super().generate, args, kwargs)  # type: ignore[misc]
        before, self._shared_call = self._shared_call, self._agree(args, named)
        try:
            call = self._shared_call
            if named.get("streamer") is not None:
                named["streamer"] = call.streamer(named["streamer"])
            found = super().generate(*args, **named)  # type: ignore[misc]
            call.finish()
            return found
        finally:
            self._shared_call = before

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """The part of transformers' ``generate`` that takes one token after the other."""
        from acclimate.llm.decode.loop import lean_sample

        tokens = lean_sample(self, *args, **kwargs)
        if tokens is not None:
            return tokens
        if self.kv_cache_dtype != "auto":
            logger.warning(
                "kv_cache_dtype='%s' does not apply to this text: transformers' own loop writes it, with "
                "keys and values in the dtype of its cache",
                self.kv_cache_dtype,
            )
        return super()._sample(*args, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(
        self, generation_config: Any, input_ids_seq_length: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The part of transformers' ``generate`` that lists what changes logits; adds a check of them."""
        from acclimate.llm.decode.finite_logits import with_finite_logits, without_check

        made = super()._get_logits_processor(generation_config, input_ids_seq_length, *args, **kwargs)  # type: ignore[misc]
        if input_ids_seq_length is None:  # continuous batching, which may record logits in a CUDA graph
            return made
        checked = with_finite_logits(made, self.dtype)
        if self._shared_call is None:
            return checked
        others = without_check(checked)
        if others is None:
            return self._shared_call.processors(checked)
        return with_finite_logits(self._shared_call.processors(others), self.dtype)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """The part of transformers' ``generate`` that prepares stopping criteria."""
        own = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        return own if self._shared_call is None else self._shared_call.criteria(own)

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SharedCall:
        """Compares a call on all ranks, and gives them rank 0's random state to sample the same tokens."""
        import torch

        from acclimate.llm.loading.shared_call import SharedCall, described, different, user_code
        from acclimate.llm.split.layers.intact import split_of

        accelerator = get_accelerator()
        states = torch.get_rng_state(), accelerator.get_rng_state()
        random = tuple(state.numpy().tobytes() for state in states) if self.model_ranks.is_first else None
        settings = {"generation_config of the model": getattr(self, "generation_config", None)}
        call = described(args, kwargs | settings)
        split = split_of(self)  # type: ignore[arg-type]
        change = None if split is None else split.change()
        told = self.model_ranks.exchange((change, call, user_code(kwargs), random))
        for change, _, _, _ in told:
            if change is not None:
                raise PlanError(change)
        for rank, (_, other, _, _) in enumerate(told):
            if (name := different(told[0][1], other)) is not None:
                how = "from" if name == "prompt" else "with"
                raise InvalidRankError(
                    f"rank {rank} generates {how} another {name} than rank 0; all ranks that share a model "
                    "must make the same call"
                )
        host, device = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in told[0][3])
        torch.set_rng_state(host)
        accelerator.set_rng_state(device)
        return SharedCall(self.model_ranks, frozenset().union(*(answer[2] for answer in told)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's part of the model's tensors, marked with the rank."""
        found = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        metadata = getattr(found, "_metadata", None)
        if self.tp_plan_applied is not None and metadata is not None:
            metadata[kwargs.get("prefix", "")[:-1]]["acclimate_rank"] = self._place
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a whole model's tensors, of which this rank takes its part, or this rank's ``state_dict()``.

        Raises:
            PlanError: the tensors are another rank's part.
        """
        if self.tp_plan_applied is None:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        from acclimate.llm.split.apply import part_of_rank

        with self.model_ranks.all_or_none():
            of = getattr(state_dict, "_metadata", {}).get("", {}).get("acclimate_rank")
            if of not in (None, self._place):
                raise PlanError(
                    f"the state dict holds the part of rank {of[0]} of {of[1]}, and this is rank "
                    f"{self._place[0]} of {self._place[1]}; save each rank's state_dict() in its own file, "
                    "or save the whole model with save_pretrained"
                )
            present = self.state_dict()
            own = part_of_rank(self.tp_plan_applied, state_dict, present, self.model_ranks.rank)
            return super().load_state_dict(own, *args, **kwargs)  # type: ignore[misc]

    @property
    def _place(self) -> tuple[int, int]:
        return self.model_ranks.rank, self.model_ranks.size

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy that is split over the same ranks."""
        made = self.__copy__()
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __copy__(self) -> Any:
        """Returns another object with the same modules."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a whole model.

        Raises:
            UnsupportedError: the model is split.
        """
        if self.tp_plan_applied is not None:
            raise UnsupportedError(
                "a model that is split over ranks cannot be pickled, as torch.save(model) does; save it with "
                "model.save_pretrained, called on every rank, and load the folder with init_inference"
            )
        return _restored, (_own_class(type(self)),), vars(self)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Saves the whole model as one folder that transformers loads; every rank must make this call.

        The folder appears complete or not at all. The arguments are transformers'.

        Raises:
            UnsupportedError: the model's weights are quantised.
        """
        if self.packing.packed:
            formats = ", ".join(sorted(self.packing.packed))
            raise UnsupportedError(
                f"the model's weights are quantised ({formats}), which transformers' files cannot hold; load "
                "it with dtype set, to bfloat16 for example, and without quantize, and save that"
            )
        if self.tp_plan_applied is None:
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        from acclimate.llm.loading.saving import save_split_model

        return save_split_model(self, save_directory, *args, **kwargs)


def as_inference_model(model: Any, plan: Plan | None, ranks: ModelRanks, whole: Whole) -> Any:
    """Returns the same object, of a class that adds :class:`InferenceModel` to its own."""
    from acclimate.llm.decode.staleness import own_hooks

    own = type(model)
    if not issubclass(own, InferenceModel):
        # transformers writes the class name into config.json, and looks for the model's code in its module.
        model.__class__ = _inference_class(own)
    model.tp_plan_applied, model.model_ranks, model.whole = plan, ranks, whole
    model.hooks_of_split = own_hooks(model) if plan is not None else frozenset()
    settings = getattr(model, "generation_config", None)
    if settings is not None and settings.eos_token_id == []:
        settings.eos_token_id = None  # transformers takes the first of a list that is there, and fails
    return model


def _inference_class(own: type) -> type:
    """Returns the class that adds :class:`InferenceModel` to a model's own."""
    names: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    refused = {name: _whole_only(getattr(own, name), name) for name in _WHOLE_ONLY if hasattr(own, name)}
    return type(own.__name__, (InferenceModel, own), names | refused)


def _own_class(made: type) -> type:
    return next(base for base in made.__mro__[1:] if base is not InferenceModel)


def _restored(own: type) -> Any:
    """Returns an empty object for a pickled model's attributes."""
    made: Any = _inference_class(own)
    return made.__new__(made)


def _whole_only(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a method of a model that a split model refuses."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.tp_plan_applied is None:
            return method(self, *args, **kwargs)
        raise UnsupportedError(
            f"{name} does not work on a model that is split over {self.model_ranks.size} ranks. "
            f"{_WHOLE_ONLY[name]}, and then split it with init_inference"
        )

    return called
