"""Where an operator runs: the host or a device, each with its own copy of the inputs, in their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

HOST = "cpu"
Layout = Callable[["Place", torch.Tensor], torch.Tensor]
"""Puts a tensor of the host at a place, with the same elements, in some layout."""


class Place:
    """The host or a device.

    Args:
        device: its name in torch.
        layout: how tensors lie in memory; as on the host if ``None``.
        exact: whether floating-point numbers become float64 there, with the same values.
    """

    def __init__(self, device: str, layout: Layout | None = None, exact: bool = False) -> None:
        self.device, self._layout, self.exact = device, layout, exact
        self.made = 0
        """How many tensors it has been given."""

    @property
    def lies_otherwise(self) -> bool:
        """Whether tensors lie in memory in another way than the host's."""
        return self._layout is not None

    def exactly(self) -> Place:
        """The same place, where floating-point numbers become float64."""
        return Place(self.device, self._layout, exact=True)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that numbers of a dtype have here."""
        return widened(dtype) if self.exact else dtype

    def put(self, value: Any) -> Any:
        """A copy of a tensor, or of a structure of tensors; the host's name becomes this place's."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.put, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.put, value))
        if isinstance(value, dict):
            return {key: self.put(part) for key, part in value.items()}
        is_host = isinstance(value, (str, torch.device)) and str(value) == HOST
        return type(value)(self.device) if is_host else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made += 1
        with torch.no_grad():
            given = tensor.detach()
            if given.layout != torch.strided:
                moved = given.to(self.device, self.dtype(given.dtype), copy=True)
            elif self._layout is not None and given.dim() and given.numel():
                moved = self._layout(self, given)
            else:
                moved = self.as_it_lies(given)
        return moved.requires_grad_(tensor.requires_grad)

    def as_it_lies(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the host and of the memory around it."""
        if tensor.is_conj():
            return self.as_it_lies(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self.as_it_lies(torch._neg_view(tensor)))
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (length,), (1,))
        there: torch.Tensor = whole.to(self.device, self.dtype(whole.dtype), copy=True)
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor of the host."""
        resolved = tensor.resolve_conj().resolve_neg().contiguous()
        return resolved.to(self.device, self.dtype(tensor.dtype), copy=True)


def widened(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128, for a dtype of 16 or 32 bits."""
    if dtype.itemsize == 1:
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype


def _from_the_third(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    around = torch.cat([tensor.new_zeros(3), tensor.resolve_conj().resolve_neg().reshape(-1)])
    return place.whole(around)[3:].view(tensor.shape)


def _transposed(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return _every_second(place, tensor)
    return place.whole(tensor.transpose(0, -1)).transpose(0, -1)


def _every_second(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    return place.whole(torch.stack([tensor, torch.ones_like(tensor)], -1))[..., 0]


def _every_second_row(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    return place.whole(torch.stack([torch.ones_like(tensor), tensor], 1))[:, 1]


def _every_second_transposed(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    return _transposed(place, tensor) if place.made % 2 else place.whole(tensor)


def _conjugated(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    return place.whole(tensor.conj()).conj() if tensor.is_complex() else place.whole(tensor)


def _every_second_conjugated(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    return _conjugated(place, tensor) if place.made % 2 else place.whole(tensor)


def _channels_last(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 3:
        return place.whole(tensor)
    return place.whole(tensor.movedim(1, -1)).movedim(-1, 1)


def _of_one_row(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The first row instead of each; whole numbers may be places, of which each may be written once."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return place.whole(tensor)
    return place.whole(tensor[:1]).expand(tensor.shape)


def _of_windows(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Each row begins one element after the one before, as windows over a sequence do."""
    if tensor.dim() < 2 or not (tensor.is_floating_point() or tensor.is_complex()):
        return place.whole(tensor)
    whole = place.whole(tensor)
    return whole.as_strided(whole.shape, (1, *whole.stride()[1:]))


def _with_odd_steps(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The step of a dimension of one element has no meaning, and may be any."""
    whole = place.whole(tensor)
    steps = [1 if length == 1 else step for length, step in zip(whole.shape, whole.stride(), strict=True)]
    if whole.dim() and whole.shape[-1] == 1:
        steps[-1] = 7
    return whole.as_strided(whole.shape, steps)


def _channels_last_of_the_second(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """With channels last, of all but the first image of a batch."""
    if tensor.dim() < 3:
        return place.whole(tensor)
    return _channels_last(place, torch.cat([torch.ones_like(tensor[:1]), tensor]))[1:]


def _negated(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return place.whole(tensor)
    return torch._neg_view(place.whole(tensor.resolve_neg().neg()))


LAYOUTS: dict[str, Layout] = {
    "that begin at the third element of their memory": _from_the_third,
    "that are transposed": _transposed,
    "that are every second element": _every_second,
    "that are every second row": _every_second_row,
    "of which every second is transposed": _every_second_transposed,
}
"""Each keeps the elements of a tensor that has some."""
OF_COMPLEX: dict[str, Layout] = {
    "that are conjugated when they are read": _conjugated,
    "of which every second is conjugated when it is read": _every_second_conjugated,
}
"""Of complex numbers, as x.conj() and x.mH leave them: a mark on the tensor, and other numbers in memory."""
OF_IMAGES: dict[str, Layout] = {
    "with channels last": _channels_last,
    "with channels last, that begin at the second image": _channels_last_of_the_second,
}
OF_SINGLE_ROWS: dict[str, Layout] = {"with other steps in dimensions of one element": _with_odd_steps}
EXPANDED: dict[str, Layout] = {"of one row, expanded": _of_one_row}
"""Takes the elements of the first row for those of each."""
OVERLAPPING: dict[str, Layout] = {**EXPANDED, "of windows that overlap": _of_windows}
"""Of which several elements are one in memory, and which have other elements than the tensor."""
OF_NUMBERS: dict[str, Layout] = {"that are negated when they are read": _negated}
"""As the imaginary part of x.conj() is left: a mark on the tensor, and other numbers in memory."""


def layouts_for(inputs: Any) -> dict[str, Layout]:
    """The layouts that differ for these inputs."""
    tensors = [t for t in tensors_in(inputs) if isinstance(t, torch.Tensor)]
    found = LAYOUTS | (OF_IMAGES if any(t.dim() > 2 for t in tensors) else {})
    return found | (OF_SINGLE_ROWS if any(1 in t.shape for t in tensors) else {})


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors and numbers of a structure, in order."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    else:
        yield value


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure, with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(part, change) for part in value)
    return value
