"""A walk over collectives: any of them in any order, in several groups at once, waited for in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import HostStream
from acclimate_conformance.checks.assertions import in_thread, is_host, short
from acclimate_conformance.checks.communication.observer import Observer

_STEPS = 300
_PATIENCE_S = 20.0
_PENDING = 4
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (33,), (4, 5), (3, 2, 5), (2, 12), (1025,))
_GUARD = 9
"""What is beside a tensor that is a part of another one."""
_REDUCTIONS = ("SUM", "MIN", "MAX", "PRODUCT")

_Waited = Callable[[], None]
_Work = Callable[[], Any]


def _in_a_thread(here: Observer, call: _Work) -> Any:
    index = here.accelerator.current_device()

    def run() -> Any:
        here.accelerator.set_device(index)  # a new thread may begin on another device
        return call()

    return in_thread(run)


def _within(block: Callable[[Observer], AbstractContextManager[Any]]) -> Callable[[Observer, _Work], Any]:
    def run(here: Observer, call: _Work) -> Any:
        with block(here):
            return call()

    return run


_SURROUNDINGS: dict[str, Callable[[Observer, _Work], Any]] = {
    "": lambda here, call: call(),
    "without gradients": _within(lambda here: torch.no_grad()),
    "in inference_mode": _within(lambda here: torch.inference_mode()),
    "within autocast": _within(lambda here: torch.autocast(here.accelerator.device_type)),
    "in another thread": _in_a_thread,
}
"""Where a collective may begin."""


class _Call:
    """One collective of one group: the shape and dtype of its tensors, and each rank's numbers."""

    def __init__(self, here: Observer, choose: random.Random, number: int, moves: bool = False) -> None:
        self.here, self.number, self.moves = here, number, moves
        dtypes = (torch.float32, *here.accelerator.supported_dtypes(), torch.int64, torch.int32)
        self.dtype = choose.choice(dtypes)
        self.shape = choose.choice(_SHAPES)
        self.is_part = choose.random() < 0.4
        self.is_later = choose.random() < 0.5
        takes_stacks = not is_host(here.accelerator) and here.accelerator.communication_backend != "gloo"
        self.is_stacked = choose.random() < 0.3 and takes_stacks  # gloo ends the process
        self.by_place = choose.random() < 0.5
        self.where = choose.choice(list(_SURROUNDINGS))
        if self.where == "in inference_mode":  # out of which a backend may not write to what was made there
            self.is_later = False
        self.root = choose.randrange(here.count)
        self.reduction = choose.choice(_REDUCTIONS)
        self.splits = [[choose.randrange(3) for _ in range(here.count)] for _ in range(here.count)]
        self.before: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self.parts: list[tuple[torch.Tensor, int]] = []

    @property
    def told(self) -> str:
        return (
            f"of {short(self.dtype)}{list(self.shape)} {'in a part of a tensor ' * self.is_part}"
            f"in a group of ranks {list(self.here.ranks)}{', ' * bool(self.where)}{self.where}"
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.here.group, "async_op": self.is_later}

    def numbers(self, place: int, *shape: int, salt: int = 0) -> torch.Tensor:
        """What a rank of the group gives, on the host: with all digits of the dtype where nothing is
        computed, else small, so that sums and products are exact."""
        seed = torch.Generator().manual_seed(self.number * 1009 + self.here.ranks[place] * 31 + salt)
        if not self.moves:
            return torch.randint(1, 6, shape, generator=seed).to(self.dtype)
        if self.dtype.is_floating_point:
            return torch.rand(shape, generator=seed, dtype=torch.float64).add(1).to(self.dtype)
        return torch.randint(torch.iinfo(self.dtype).max, shape, generator=seed, dtype=self.dtype)

    def every(self, *shape: int) -> list[torch.Tensor]:
        return [self.numbers(place, *shape) for place in range(self.here.count)]

    def there(self, values: torch.Tensor) -> torch.Tensor:
        """The same on the device, perhaps in the middle of a longer tensor."""
        device = self.here.accelerator.current_device_name()
        if not self.is_part:
            return values.to(device, copy=True)
        count = values.numel()
        whole = torch.full((count + 5,), _GUARD, dtype=values.dtype, device=device)
        self.parts.append((whole, count))
        part = whole[3 : 3 + count].view(values.shape)
        part.copy_(values)
        return part

    def given(self, values: torch.Tensor) -> torch.Tensor:
        """As :meth:`there`, of what the collective may only read."""
        tensor = self.there(values)
        self.before.append((tensor, values, "what it only reads"))
        return tensor

    def empty(self, *shape: int) -> torch.Tensor:
        return self.there(torch.zeros(shape, dtype=self.dtype))

    def reduced(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack([tensor.double() for tensor in tensors])
        found = {
            "SUM": whole.sum(0), "MIN": whole.amin(0), "MAX": whole.amax(0), "PRODUCT": whole.prod(0),
        }[self.reduction]  # fmt: skip
        return found.to(self.dtype)

    @property
    def operation(self) -> Any:
        return getattr(distributed.ReduceOp, self.reduction)

    def from_root(self) -> dict[str, Any]:
        """The root that sends, by its rank in the group or among all."""
        return {"group_src": self.root} if self.by_place else {"src": self.here.ranks[self.root]}

    def to_root(self) -> dict[str, Any]:
        """The root that receives."""
        return {"group_dst": self.root} if self.by_place else {"dst": self.here.ranks[self.root]}

    def neighbour(self, step: int, name: str = "peer") -> dict[str, Any]:
        """The rank that comes so many places later, as an argument."""
        place = (self.here.place + step) % self.here.count
        return {f"group_{name}": place} if self.by_place else {name: self.here.ranks[place]}

    def seen(self, what: str, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Notes results that are wrong, inputs that changed, and what was written beside a part."""
        for found, wanted in results:
            self.here.same(found, wanted, f"{what} {self.told}")
        for tensor, values, kind in self.before:
            self.here.same(tensor, values, f"{what} {self.told}: {kind}")
        for whole, count in self.parts:
            beside = [*whole[:3].tolist(), *whole[3 + count :].tolist()]
            self.here.holds(set(beside) == {_GUARD}, f"{what} {self.told} writes {beside} beside a tensor")


_Results = list[tuple[torch.Tensor, torch.Tensor]]
_Begun = tuple[Any, _Results]


def _all_reduce(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    mine = call.there(tensors[call.here.place])
    return distributed.all_reduce(mine, op=call.operation, **call.options), [(mine, call.reduced(tensors))]


def _broadcast(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    mine = call.there(tensors[call.here.place])
    return distributed.broadcast(mine, **call.from_root(), **call.options), [(mine, tensors[call.root])]


def _all_gather(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    found = [call.empty(*call.shape) for _ in tensors]
    work = distributed.all_gather(found, call.given(tensors[call.here.place]), **call.options)
    return work, list(zip(found, tensors, strict=True))


def _all_gather_into_tensor(call: _Call) -> _Begun:
    shape = call.shape or (1,)
    tensors = call.every(*shape)
    joined = torch.stack(tensors) if call.is_stacked else torch.cat(tensors)
    found = call.empty(*joined.shape)
    work = distributed.all_gather_into_tensor(found, call.given(tensors[call.here.place]), **call.options)
    return work, [(found, joined)]


def _reduce(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    mine = call.there(tensors[call.here.place])
    work = distributed.reduce(mine, **call.to_root(), op=call.operation, **call.options)
    return work, [(mine, call.reduced(tensors))] if call.here.place == call.root else []


def _reduce_scatter_tensor(call: _Call) -> _Begun:
    shape = call.shape or (1,)
    tensors = call.every(call.here.count * shape[0], *shape[1:])
    found = call.empty(*shape)
    mine = tensors[call.here.place]
    given = call.given(mine.view(call.here.count, *shape) if call.is_stacked else mine)
    work = distributed.reduce_scatter_tensor(found, given, op=call.operation, **call.options)
    return work, [(found, call.reduced(tensors).chunk(call.here.count)[call.here.place])]


def _reduce_scatter(call: _Call) -> _Begun:
    """In lists, of parts that each lie somewhere else in memory."""
    tensors = call.every(call.here.count, *call.shape)
    found = call.empty(*call.shape)
    given = [call.given(part) for part in tensors[call.here.place]]
    work = distributed.reduce_scatter(found, given, op=call.operation, **call.options)
    return work, [(found, call.reduced(tensors)[call.here.place])]


def _all_to_all(call: _Call) -> _Begun:
    tensors = call.every(call.here.count, *call.shape)
    found = [call.empty(*call.shape) for _ in tensors]
    work = distributed.all_to_all(found, [call.given(p) for p in tensors[call.here.place]], **call.options)
    return work, [(ours, theirs[call.here.place]) for ours, theirs in zip(found, tensors, strict=True)]


def _all_reduce_coalesced(call: _Call) -> _Begun:
    """Several tensors at once, of this shape and of a single number."""
    tensors, numbers = call.every(*call.shape), [call.numbers(p, 1, salt=3) for p in range(call.here.count)]
    mine = [call.there(several[call.here.place]) for several in (tensors, numbers)]
    work = distributed.all_reduce_coalesced(mine, op=call.operation, **call.options)
    return work, [(mine[0], call.reduced(tensors)), (mine[1], call.reduced(numbers))]


def _gather(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    found = [call.empty(*call.shape) for _ in tensors] if call.here.place == call.root else None
    given = call.given(tensors[call.here.place])
    work = distributed.gather(given, found, **call.to_root(), **call.options)
    return work, list(zip(found or [], tensors if found else [], strict=True))


def _scatter(call: _Call) -> _Begun:
    tensors = call.every(*call.shape)
    given = [call.given(tensor) for tensor in tensors] if call.here.place == call.root else None
    found = call.empty(*call.shape)
    work = distributed.scatter(found, given, **call.from_root(), **call.options)
    return work, [(found, tensors[call.here.place])]


def _all_to_all_single(call: _Call) -> _Begun:
    mine, row = call.here.place, call.shape[1:]
    tensors = [call.numbers(place, sum(call.splits[place]), *row) for place in range(call.here.count)]
    coming = [call.splits[place][mine] for place in range(call.here.count)]
    wanted = torch.cat([tensors[place].split(call.splits[place])[mine] for place in range(call.here.count)])
    found = call.empty(*wanted.shape)
    work = distributed.all_to_all_single(
        found, call.given(tensors[mine]), coming, call.splits[mine], **call.options
    )
    return work, [(found, wanted)]


def _messages(call: _Call) -> _Begun:
    tensors, mine, group = call.every(*call.shape), call.here.place, call.here.group
    found = call.empty(*call.shape)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, call.given(tensors[mine]), group=group, **call.neighbour(1)),
            distributed.P2POp(distributed.irecv, found, group=group, **call.neighbour(-1)),
        ]
    )
    return works, [(found, tensors[mine - 1])]


def _messages_one_by_one(call: _Call) -> _Begun:
    tensors, mine, group = call.every(*call.shape), call.here.place, call.here.group
    found = call.empty(*call.shape)
    send = partial(distributed.send, call.given(tensors[mine]), group=group, **call.neighbour(1, "dst"))
    receive = partial(distributed.recv, found, group=group, **call.neighbour(-1, "src"))
    for step in (send, receive) if mine % 2 == 0 else (receive, send):
        step()
    return None, [(found, tensors[mine - 1])]


def _barrier(call: _Call) -> _Begun:
    return distributed.barrier(**call.options), []


def _objects(call: _Call) -> _Begun:
    found: list[Any] = [None] * call.here.count
    distributed.all_gather_object(found, {"of": call.here.number, "in": call.number}, group=call.here.group)
    wanted = [{"of": rank, "in": call.number} for rank in call.here.ranks]
    call.here.holds(found == wanted, f"all_gather_object {call.told} gives {found}, not {wanted}")
    sent: list[Any] = [("from", call.here.place, call.number)]
    distributed.broadcast_object_list(sent, **call.from_root(), group=call.here.group)
    from_root = [("from", call.root, call.number)]
    call.here.holds(sent == from_root, f"broadcast_object_list {call.told} gives {sent}, not {from_root}")
    return None, []


_COLLECTIVES: dict[str, tuple[Callable[[_Call], _Begun], bool]] = {
    "all_reduce": (_all_reduce, False), "broadcast": (_broadcast, False), "all_gather": (_all_gather, False),
    "barrier": (_barrier, False), "all_gather_into_tensor": (_all_gather_into_tensor, True),
    "reduce": (_reduce, True), "reduce_scatter_tensor": (_reduce_scatter_tensor, True),
    "gather": (_gather, True), "scatter": (_scatter, True), "all_to_all_single": (_all_to_all_single, True),
    "batch_isend_irecv": (_messages, True), "all_gather_object": (_objects, True),
    "reduce_scatter": (_reduce_scatter, True), "all_to_all": (_all_to_all, True),
    "all_reduce_coalesced": (_all_reduce_coalesced, True), "send": (_messages_one_by_one, True),
}  # fmt: skip
"""By name: the collective, and whether a backend may lack it."""
_COMPLETE_ONCE_WAITED_FOR = ("batch_isend_irecv", "reduce_scatter", "reduce_scatter_tensor")
"""Those whose work gloo ends in wait()."""
_MOVES = (
    "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all_single",
    "batch_isend_irecv", "all_to_all", "send",
)  # fmt: skip
"""Those that compute nothing."""
_OF_STACKS = ("all_gather_into_tensor", "reduce_scatter_tensor")


def collectives_in_any_order(here: Observer) -> None:
    choose, own = random.Random(61), random.Random(here.number)
    members = _groups(here)
    pending: list[_Waited] = []
    side = None if issubclass(here.accelerator.Stream, HostStream) else here.accelerator.Stream()
    for number in range(_STEPS):
        name, place = choose.choice(list(_COLLECTIVES)), choose.randrange(len(members))
        ranks, member = members[place]
        numbers = random.Random(number)
        on_a_stream = choose.random() < 0.3 and side is not None
        if here.number not in ranks or member is None:
            continue
        call = _Call(member, numbers, number, moves=name in _MOVES)
        key = f"{name}{' of stacks' * (call.is_stacked and name in _OF_STACKS)} of {short(call.dtype)}"
        is_optional = _COLLECTIVES[name][1]

        def begin(stream: Any = None, call: _Call = call, name: str = name) -> None:
            pending.extend(_begun(call, name, _COLLECTIVES[name][0], stream))

        if is_optional:
            here.form(key, f"{name} {call.told}", begin)
        else:
            begin(side if on_a_stream else None)
        while len(pending) > _PENDING or (pending and own.random() < 0.4):
            pending.pop(own.randrange(len(pending)))()
    for waited in pending:
        waited()


def _begun(call: _Call, name: str, function: Callable[[_Call], _Begun], side: Any) -> list[_Waited]:
    """Begins a collective, on another stream if one is given; what is left is to wait and to compare."""
    accelerator = call.here.accelerator
    if side is not None:
        side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side) if side is not None else nullcontext():
        around = _SURROUNDINGS["" if side is not None else call.where]
        work, results = around(call.here, lambda: function(call))

    def waited() -> None:
        with accelerator.stream(side) if side is not None else nullcontext():
            ways = _WAITS[:2] if name in _COMPLETE_ONCE_WAITED_FOR else _WAITS
            for part in work if isinstance(work, list) else [work]:
                if isinstance(part, torch._C.Future):  # of several tensors
                    part.wait()
                elif part is not None:
                    ways[call.number % len(ways)](call.here, part, f"{name} {call.told}")
        if side is not None:
            accelerator.current_stream().wait_stream(side)
        call.seen(name, results)

    return [waited]


def _polled(here: Observer, work: Any, told: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.0005)
    here.holds(work.is_completed(), f"{told} is not complete after {_PATIENCE_S:.0f} s without a wait()")
    work.wait()  # a device's stream waits for the collective here


_WAITS: tuple[Callable[[Observer, Any, str], object], ...] = (
    lambda here, work, told: work.wait(),
    lambda here, work, told: work.wait(timedelta(seconds=_PATIENCE_S)),
    _polled,
)


def _groups(here: Observer) -> list[tuple[Sequence[int], Observer | None]]:
    """The group of all ranks, another one of all, and each pair, with what this rank is in it."""
    everyone = list(range(here.count))
    pairs = [[a, b] for a in everyone for b in everyone if a < b] if here.count > 2 else []
    found: list[tuple[Sequence[int], Observer | None]] = [(everyone, here)]
    for ranks in (everyone, *pairs):
        group = distributed.new_group(ranks)
        found.append((ranks, here.within(group, ranks) if here.number in ranks else None))
    return found
