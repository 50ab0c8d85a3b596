"""Makes random inputs for what a model's ``forward`` names, and random weights, to trace its data flow."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 2, 5
Numbers = Callable[..., Tensor]
"""Makes random numbers of a shape."""


@dataclass
class Inputs:
    """Inputs for one call."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments; empty if ``forward`` has no argument that this module knows."""
    entries: list[Tensor] = field(default_factory=list)
    """The arguments that may have gradients."""


def tokens_for(model: nn.Module) -> Tensor:
    """Returns a few tokens of a model's vocabulary."""
    config = getattr(model, "config", None)
    get_text = getattr(config, "get_text_config", None)
    text = get_text() if get_text is not None else config
    size = getattr(text, "vocab_size", 16)
    count = min(size, 1 << 20) if isinstance(size, int) and size > 0 else 16
    return (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) + 3) % count


def random_inputs(model: nn.Module, tokens: Tensor, numbers: Numbers) -> Iterator[Callable[[], Inputs]]:
    """Yields functions that make inputs, to be tried in order; text only comes first if possible."""
    names = inspect.signature(model.forward).parameters
    text = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in names}
    if "use_cache" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
        text["use_cache"] = False  # type: ignore[assignment]
    if "input_ids" in names:
        yield partial(Inputs, dict(text))
    required = {n: tokens for n, p in names.items() if n.endswith("input_ids") and p.default is p.empty}
    found = False
    for other in _other_inputs(model, names, numbers):
        found = True
        yield partial(Inputs, {**text, **required, **other}, _entries(other))
    if "input_ids" in names:
        yield from richer_inputs(model, tokens, numbers)
    elif not found:
        yield partial(Inputs, dict(text))
        if any(p.kind is p.VAR_KEYWORD for p in names.values()):  # a wrapper, which passes on what it gets
            yield partial(Inputs, {**text, "input_ids": tokens})


def richer_inputs(model: nn.Module, tokens: Tensor, numbers: Numbers) -> Iterator[Callable[[], Inputs]]:
    """Yields functions that make inputs beyond text: an encoder's states, or text with images."""
    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    if "input_ids" not in names:
        return
    text = {"input_ids": tokens, "use_cache": False}
    if "pixel_values" in names and {"aspect_ratio_ids", "image_attention_mask"} & set(names):
        for other in _other_inputs(model, names, numbers):
            yield partial(Inputs, {**text, **other}, _entries(other))
    if "pixel_values" in names:
        yield from _with_tokens_for(model, text, "image", _images(config, numbers))
    if "input_features" in names:
        yield from _with_tokens_for(model, text, "audio", _sounds(config, numbers))
    encoded = {"encoder_hidden_states", "cross_attention_states"} & set(names)
    if encoded and "decoder_input_ids" not in names:
        for name in ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size"):
            if width := _setting(config, name, 0):
                states = numbers(BATCH, LENGTH + 2, width).requires_grad_()
                yield partial(Inputs, {**text, **dict.fromkeys(encoded, states)}, [states])


def _entries(given: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in given.values() if tensor.is_floating_point()]


def _with_tokens_for(
    model: nn.Module, text: dict[str, Any], kind: str, inputs: Iterator[dict[str, Tensor]]
) -> Iterator[Callable[[], Inputs]]:
    """Yields functions that make text with placeholder tokens for images or audio."""
    names = inspect.signature(model.forward).parameters
    config, getter = getattr(model, "config", None), f"get_{kind}_features"
    tokens = text["input_ids"]
    token = _setting(config, f"{kind}_token_id", _setting(config, f"{kind}_token_index", -1))
    holder: Any = next((m for m in model.modules() if hasattr(m, getter)), None)
    if holder is None or token < 0:
        return
    getter_of_features = getattr(holder, getter)

    def with_tokens(given: dict[str, Tensor]) -> Inputs:
        found = getter_of_features(**given)
        found = getattr(found, "pooler_output", found)
        parts = [found] if isinstance(found, Tensor) else [p for p in found if isinstance(p, Tensor)]
        count = sum(part.numel() // part.shape[-1] for part in parts) // BATCH
        ids = torch.cat([tokens.new_full((BATCH, count), token), tokens], 1)
        made = {**text, "input_ids": ids, **given}
        if "mm_token_type_ids" in names:
            made["mm_token_type_ids"] = (ids == token).long()
        return Inputs(made, _entries(given))

    known = inspect.signature(getter_of_features).parameters
    for given in inputs:
        if set(given) <= set(known):
            yield partial(with_tokens, given)


def _sounds(config: Any, numbers: Numbers) -> Iterator[dict[str, Tensor]]:
    """Yields audio as models with text take it."""
    mels, length = _setting(config, "num_mel_bins", 80), 2 * _setting(config, "max_source_positions", 10)
    sounds = {"input_features": numbers(BATCH, mels, length).requires_grad_()}
    yield sounds
    for mask in ("input_features_mask", "feature_attention_mask"):
        yield {**sounds, mask: torch.ones(BATCH, length, dtype=torch.long)}


def _images(config: Any, numbers: Numbers) -> Iterator[dict[str, Tensor]]:
    """Yields images as models with text take them."""
    height, width = _image_size(config)
    channels = _setting(config, "num_channels", _setting(config, "in_channels", 3))
    pixels = numbers(BATCH, channels, height, width).requires_grad_()
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]] * BATCH)}
    yield {"pixel_values": numbers(BATCH, 1, channels, height, width).requires_grad_()}
    patches = _patches(config, numbers)
    yield {"pixel_values": patches["hidden_states"], "image_grid_thw": patches["grid_thw"]}


def _patches(config: Any, numbers: Numbers) -> dict[str, Tensor]:
    """Returns the patches of two images in a row, as Qwen2-VL's encoder takes them."""
    patch = _setting(config, "patch_size", 14)
    width = patch * patch * _setting(config, "temporal_patch_size", 1)
    width *= _setting(config, "in_channels", _setting(config, "in_chans", 3))
    side = 2 * _setting(config, "spatial_merge_size", 2)
    patches = numbers(BATCH * side * side, width).requires_grad_()
    return {"hidden_states": patches, "grid_thw": torch.tensor([[1, side, side]] * BATCH)}


def _other_inputs(model: nn.Module, names: Any, numbers: Numbers) -> Iterator[dict[str, Tensor]]:
    """Yields images, audio and patches in the shapes that models take."""

    def entry(*shape: int) -> Tensor:
        return numbers(*shape).requires_grad_()

    config = getattr(model, "config", None)
    if "grid_thw" in names and "hidden_states" in names:
        yield _patches(config, numbers)
    if "input_features" in names:
        mels, positions = _setting(config, "num_mel_bins", 80), _setting(config, "max_source_positions", 10)
        yield {"input_features": entry(BATCH, mels, 2 * positions)}
        width = _setting(config, "input_feat_per_channel", _setting(config, "input_dim", mels))
        yield {"input_features": entry(BATCH, 32, width)}
        if "input_features_mask" in names:
            mask = torch.ones(BATCH, 2 * positions, dtype=torch.bool)
            yield {"input_features": entry(BATCH, mels, 2 * positions), "input_features_mask": mask}
    if "pixel_values" in names:
        yield from _images_alone(config, names, entry)
    if "flattened_patches" in names:
        patch = _setting(config, "patch_size", 16)
        yield {"flattened_patches": entry(BATCH, 6, 2 + 3 * patch * patch)}
    if "query_embeds" in names:
        width = _setting(config, "encoder_hidden_size", _setting(config, "hidden_size", 64))
        queries = entry(BATCH, 4, _setting(config, "hidden_size", 64))
        yield {"query_embeds": queries, "encoder_hidden_states": entry(BATCH, LENGTH, width)}
    if "hidden_states" in names and "grid_thw" not in names:
        for name in ("input_dim", "hidden_size"):
            yield {"hidden_states": entry(BATCH, 32, _setting(config, name, 64))}
    if "input_values" in names:
        yield {"input_values": entry(BATCH, 8000)}
        yield {"input_values": entry(BATCH, 1, 8000)}
    if "inputs" in names:
        # A speech encoder with a decoder.
        yield {"inputs": entry(BATCH, 8000)}
        yield {"inputs": entry(BATCH, 32, _setting(config, "num_mel_bins", 80))}


def _images_alone(config: Any, names: Container[str], entry: Numbers) -> Iterator[dict[str, Tensor]]:
    """Yields images as models take them that get them without placeholder tokens."""
    height, width = _image_size(config)
    channels = _setting(config, "num_channels", 3)
    if "spatial_shapes" in names:  # patches in a row, as SigLIP 2 takes them
        mask, shapes = torch.ones(BATCH, 4, dtype=torch.long), torch.tensor([[2, 2]] * BATCH)
        patches = entry(BATCH, 4, channels * _setting(config, "patch_size", 16) ** 2)
        yield {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    if "aspect_ratio_ids" in names:  # tiles of an image, as Llama 3.2 takes them
        tiles = _setting(config, "max_num_tiles", 4)
        given = {"pixel_values": entry(BATCH, 1, tiles, channels, height, width)}
        given["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
        given["aspect_ratio_mask"] = torch.ones(BATCH, 1, tiles, dtype=torch.long)
        if "cross_attention_mask" in names:
            given["cross_attention_mask"] = torch.ones(BATCH, LENGTH, 1, tiles, dtype=torch.long)
        yield given
    yield {"pixel_values": entry(BATCH, channels, height, width)}
    several = {"pixel_values": entry(BATCH, 1, channels, height, width)}
    if "image_attention_mask" in names:
        several["image_attention_mask"] = torch.ones(BATCH, LENGTH, 1, dtype=torch.long)
    yield several


def _configs(config: Any) -> Iterator[Any]:
    """Yields a configuration, and then its inner configurations."""
    if config is not None:
        yield config
        for var in vars(config).values():
            if hasattr(var, "model_type"):
                yield from _configs(var)


def _value(config: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # an attribute may be a property that raises
        return getattr(config, name)
    return None


def _setting(config: Any, name: str, default: int) -> int:
    """Returns a number from a configuration or an inner configuration."""
    values = (_value(inner_config, name) for inner_config in _configs(config))
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def _image_size(config: Any) -> tuple[int, int]:
    for inner_config in _configs(config):
        size = _value(inner_config, "image_size")
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
    return 32, 32


def fill_weights(modules: Iterable[nn.Module], left_out: Container[int], numbers: Numbers) -> None:
    """Replaces parameters and buffers on the meta device by random ones, except parameters left out by id."""
    filled: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, p in module._parameters.items():
            if p is not None and id(p) not in left_out:
                if id(p) not in filled:
                    floating = p.is_floating_point()
                    new = numbers(*p.shape) if floating else torch.zeros_like(p, device="cpu")
                    filled[id(p)] = nn.Parameter(new, floating)
                module._parameters[name] = filled[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                if b.is_floating_point():
                    module._buffers[name] = numbers(*b.shape).to(b.dtype)
                elif b.dtype == torch.bool:
                    module._buffers[name] = torch.ones(b.shape, dtype=b.dtype)
                else:
                    module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
            elif b is not None:
                module._buffers[name] = b.cpu()
