"""A walk over tensors that are saved, copied, moved and loaded: values, devices and shared memory survive."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import is_on, require, shares_memory, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 8, 30
_MOST = 6
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (7,), (5, 4), (2, 3, 5), (1025,))


class _Kept:
    """A tensor on a device, and one of the host that must hold the same."""

    def __init__(self, there: torch.Tensor, mine: torch.Tensor, name: str) -> None:
        self.there, self.mine, self.name = there, mine, name


class _Saved(Walk):
    """Tensors with their copies on the host: those of the host share memory where the others must."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.start = accelerator.current_device()
        self.kept: list[_Kept] = []
        self.dtypes = [torch.float32, *accelerator.supported_dtypes(), torch.int64, torch.uint8, torch.bool]
        self.files = 0
        self.folder = tempfile.TemporaryDirectory()

    @move(6)
    def makes(self, choose: random.Random) -> None:
        if len(self.kept) >= _MOST:
            return
        name, dtype, shape = choose.choice(self.names), choose.choice(self.dtypes), choose.choice(_SHAPES)
        self.say(f"a tensor of {short(dtype)}{list(shape)} on {name}")
        seed = torch.Generator().manual_seed(choose.randrange(99))
        mine = torch.randint(0, 2, shape, generator=seed).to(dtype)
        there = mine.to(name, copy=True)
        if dtype.is_floating_point and choose.random() < 0.3:
            there.requires_grad_()
            mine.requires_grad_()
        if choose.random() < 0.2:
            there = torch.nn.Parameter(there, requires_grad=there.requires_grad)
        self.kept.append(_Kept(there, mine, name))

    @move(5)
    def views(self, choose: random.Random) -> None:
        if not self.kept or len(self.kept) >= _MOST:
            return
        given = choose.choice(self.kept)
        views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "a slice": lambda t: t.reshape(-1)[1:] if t.is_contiguous() else t[..., :1],
            "t()": lambda t: t.t() if t.dim() == 2 else t[None],
            "every other element": lambda t: t[..., ::2] if t.dim() else t[None],
            "an expanded view": lambda t: t.expand(2, *t.shape),
        }
        told = choose.choice(list(views))
        self.say(f"{told} of a tensor on {given.name}")
        there, mine = views[told](given.there.detach()), views[told](given.mine.detach())
        self.kept.append(_Kept(there, mine, given.name))

    @move(4)
    def changes(self, choose: random.Random) -> None:
        if not self.kept:
            return
        kept = choose.choice(self.kept)
        if 0 in kept.mine.stride():  # elements of an expanded view cannot be written one by one
            return
        self.say(f"zero_() of a tensor on {kept.name}")
        kept.there.detach().zero_()
        kept.mine.detach().zero_()

    @move(8)
    def loads(self, choose: random.Random) -> None:
        if not self.kept:
            return
        index = choose.randrange(len(self.names))
        self.accelerator.set_device(index)
        place, names = self._place(choose)
        weights_only, mmap = choose.random() < 0.5, choose.random() < 0.4
        zipped = mmap or choose.random() < 0.7
        things = {"tensors": [kept.there for kept in self.kept], "number": 3}
        told = f"map_location={getattr(place, '__name__', place)!r}, mmap={mmap}, weights_only={weights_only}"
        self.say(f"torch.save({'zipped' if zipped else 'in the older format'}) and torch.load({told})")
        self.files += 1  # what is loaded with mmap goes on to use its file
        path = Path(self.folder.name) / f"{self.files}.pt"
        torch.save(things, path, _use_new_zipfile_serialization=zipped)
        found = torch.load(path, map_location=place, weights_only=weights_only, mmap=mmap)
        require(found["number"] == 3, f"a number beside the tensors is {found['number']}")
        self._take(found["tensors"], names)

    def _place(self, choose: random.Random) -> tuple[Any, dict[str, str]]:
        """A map_location, and where it puts tensors of each device."""
        name = choose.choice(self.names)
        everywhere = dict.fromkeys([*self.names, "cpu"], name)
        shifted = dict(zip(self.names, [*self.names[1:], self.names[0]], strict=True))

        def to_the_next(storage: Any, told: str) -> Any:
            return storage.to(device=torch.device(shifted[told])) if told in shifted else storage

        places: list[tuple[Any, dict[str, str]]] = [
            (None, {}), (name, everywhere), (torch.device(name), everywhere), (shifted, shifted),
            ("cpu", dict.fromkeys(self.names, "cpu")),
        ]  # fmt: skip
        if len(self.names) > 1:
            places.append((to_the_next, shifted))
        return choose.choice(places)

    @move(5)
    def copies(self, choose: random.Random) -> None:
        if not self.kept:
            return
        self.accelerator.set_device(choose.randrange(len(self.names)))
        ways: dict[str, Callable[[Any], Any]] = {
            "copy.deepcopy()": copy.deepcopy, "pickle": lambda things: pickle.loads(pickle.dumps(things)),
            "torch.save() into memory": _through_memory,
        }  # fmt: skip
        told = choose.choice(list(ways))
        # Each by itself is a leaf; a deep copy of others is refused.
        things = [kept.there if kept.there.is_leaf else kept.there.detach() for kept in self.kept]
        self.say(f"{told} of {len(things)} tensors")
        found = ways[told](things)
        if told == "pickle":  # torch pickles each storage with each tensor of it
            for kept in self.kept:
                kept.mine = kept.mine.detach().clone().requires_grad_(kept.there.requires_grad)
        self._take(found, {}, shared=told != "pickle")

    def _take(self, found: list[torch.Tensor], names: dict[str, str], shared: bool = True) -> None:
        """Compares tensors that were made anew with what they must be, and goes on with them."""
        require(len(found) == len(self.kept), f"there are {len(found)} tensors, not {len(self.kept)}")
        for kept, now in zip(self.kept, found, strict=True):
            require(type(now) is type(kept.there), f"a {type(kept.there).__name__} is a {type(now).__name__}")
            require(
                not now.numel() or not shares_memory(now, kept.there),
                "the new tensor shares the old's memory",
            )
            kept.name = names.get(kept.name, kept.name)
        if shared:
            for one, mine in zip(found, self.kept, strict=True):
                for other, theirs in zip(found, self.kept, strict=True):
                    if not one.numel() or not other.numel():
                        continue
                    wanted = shares_memory(mine.mine, theirs.mine)
                    require(
                        shares_memory(one, other) == wanted,
                        f"two tensors {'no longer' if wanted else 'now'} share memory",
                    )
        old = self.kept
        # What shared memory still does; what was copied on the host as well shares with nothing that is old.
        hosts: list[torch.Tensor] = copy.deepcopy([kept.mine.detach() for kept in old])
        self.kept = [
            _Kept(now, host.requires_grad_(kept.mine.requires_grad), kept.name)
            for now, host, kept in zip(found, hosts, old, strict=True)
        ]

    @move(2)
    def drops(self, choose: random.Random) -> None:
        if self.kept:
            self.say("dropping a tensor")
            self.kept.pop(choose.randrange(len(self.kept)))

    def look(self) -> None:
        for kept in self.kept:
            there, mine = kept.there, kept.mine
            told = f"a tensor of {short(mine.dtype)}{list(mine.shape)}"
            require(is_on(there, kept.name), f"{told} is on {there.device}, not on {kept.name}")
            require(
                (there.dtype, there.shape) == (mine.dtype, mine.shape),
                f"{told} is of {short(there.dtype)}{list(there.shape)}",
            )
            require(
                there.requires_grad == mine.requires_grad, f"{told} has requires_grad={there.requires_grad}"
            )
            require(
                torch.equal(there.detach().cpu(), mine.detach()), f"{told} on {kept.name} has other values"
            )

    def end(self) -> None:
        self.kept.clear()
        self.folder.cleanup()
        self.accelerator.set_device(self.start)


def _through_memory(things: Any) -> Any:
    file = io.BytesIO()
    torch.save(things, file)
    return torch.load(io.BytesIO(file.getvalue()))


@check(
    "device_name", "current_device", "set_device",
    promise="Tensors that are saved, loaded with any map_location, copied and changed in any order keep "
    "their values, devices and shared memory.",
    once=True,
    of="tensors",
)  # fmt: skip
def walks_over_saved_tensors(accelerator: Accelerator) -> None:
    walk(accelerator, _Saved, _WALKS, _MOVES)
