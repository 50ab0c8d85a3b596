"""Topics of ranks: what a collective returns, what it leaves as it was, and how calls keep apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import HostStream, RecordedGraph
from acclimate_conformance.checks.assertions import device_names, is_host, short
from acclimate_conformance.checks.communication.observer import Observer

_LENGTH = 1003
_PATIENCE_S = 20


def works_keep_apart(here: Observer) -> None:
    """Work of equal sizes is waited for in any order, dropped, told by futures, and put together."""
    total = float(sum(r + 1 for r in here.ranks))
    both = [here.full(_LENGTH, (here.number + 1) * factor) for factor in (1, 10, 100)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in both]
    for place in (2, 0, 1):
        work = works[place]
        if work is not None:
            work.wait()
        here.accelerator.synchronize()
        wanted = torch.full((_LENGTH,), total * 10**place)
        here.same(
            both[place], wanted, f"all_reduce {place + 1} of 3 of one size, waited for in another order,"
        )
    gathered = [[here.tensor(0) for _ in here.ranks] for _ in range(2)]
    begun = [
        distributed.all_gather(parts, here.tensor(here.number + 10 * n), async_op=True)
        for n, parts in enumerate(gathered)
    ]
    for n in (1, 0):
        work = begun[n]
        if work is not None:
            work.wait()
        here.accelerator.synchronize()
        here.same(
            torch.cat(gathered[n]), [r + 10.0 * n for r in here.ranks],
            f"all_gather {n + 1} of 2, waited for in reverse order,",
        )  # fmt: skip
    _dropped(here, total)
    here.optional("get_future() of work", lambda: _futures(here, total))
    here.optional("coalesced all_reduce", lambda: _coalesced(here, total))
    here.optional("coalesced all_gather_into_tensor", lambda: _coalesced_gathers(here))


def _dropped(here: Observer, total: float) -> None:
    """A collective goes on though nobody keeps its work."""
    dropped = here.full(_LENGTH, here.number + 1)
    distributed.all_reduce(dropped, async_op=True)
    later = here.tensor(here.number + 1)
    distributed.all_reduce(later)
    here.same(later, [total], "all_reduce after one whose work was dropped")
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        here.accelerator.synchronize()
        if float(dropped.sum()) == total * _LENGTH:
            break
        time.sleep(0.01)
    here.same(dropped, torch.full((_LENGTH,), total), "all_reduce with async_op whose work was dropped")
    distributed.barrier()


def _futures(here: Observer, total: float) -> None:
    reduced = here.full(_LENGTH, here.number + 1)
    seen: list[Any] = []
    future = distributed.all_reduce(reduced, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    value = future.wait()
    result = doubled.wait()
    here.accelerator.synchronize()
    parts = value if isinstance(value, (list, tuple)) else [value]
    here.holds(len(parts) == 1, f"get_future() of all_reduce completes with {len(parts)} tensors")
    seen += [(part, 1.0) for part in parts] + [(result, 2.0)]
    for found, factor in seen:
        here.same(
            found, torch.full((_LENGTH,), total * factor), "what get_future() of all_reduce completes with"
        )
    sent = here.tensor(here.number + 5)
    told = distributed.broadcast(sent, 0, async_op=True).get_future().wait()
    here.accelerator.synchronize()
    here.same(sent, [5.0], "broadcast whose get_future() was waited for")
    here.holds(told is not None, "get_future() of broadcast completes with nothing")


def _coalesced(here: Observer, total: float) -> None:
    tensors = [here.full(n + 5, (here.number + 1) * (n + 1)) for n in range(3)]
    manager: Any = distributed.distributed_c10d._coalescing_manager
    with manager(async_ops=True) as together:
        for tensor in tensors:
            distributed.all_reduce(tensor)
    together.wait()
    here.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        wanted = torch.full((n + 5,), total * (n + 1))
        here.same(tensor, wanted, f"all_reduce {n + 1} of 3 in a _coalescing_manager")


def _coalesced_gathers(here: Observer) -> None:
    wholes = [here.full(2 * here.count, 0) for _ in range(2)]
    manager: Any = distributed.distributed_c10d._coalescing_manager
    with manager(async_ops=True) as together:
        for n, whole in enumerate(wholes):
            distributed.all_gather_into_tensor(whole, here.full(2, here.number + 10 * n))
    together.wait()
    here.accelerator.synchronize()
    for n, whole in enumerate(wholes):
        wanted = torch.tensor([r + 10.0 * n for r in here.ranks]).repeat_interleave(2)
        here.same(whole, wanted, f"all_gather_into_tensor {n + 1} of 2 in a _coalescing_manager")


def inputs_stay_as_they_are(here: Observer) -> None:
    """Collectives write to what they fill, and to nothing else; some also in place, as FSDP calls them."""
    device = here.accelerator.current_device_name()
    count, number = here.count, here.number
    mine = torch.arange(4.0) + 10 * number
    longer = torch.arange(4.0 * count) + 100 * number
    given = {"one": mine.to(device), "all": longer.to(device), "zero": torch.zeros(4, device=device)}
    parts = list(given["all"].chunk(count))
    is_root = number == here.ranks[-1]
    root = here.ranks[-1]

    def empty(length: int = 4) -> torch.Tensor:
        return torch.full((length,), -1.0, device=device)

    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: distributed.all_gather([empty() for _ in here.ranks], given["one"]),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(empty(4 * count), given["one"]),
        "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(empty(), given["all"]),
        "reduce_scatter": lambda: distributed.reduce_scatter(empty(), parts),
        "all_to_all_single": lambda: distributed.all_to_all_single(empty(4 * count), given["all"]),
        "all_to_all": lambda: distributed.all_to_all([empty() for _ in here.ranks], parts),
        "gather": lambda: distributed.gather(
            given["one"], [empty() for _ in here.ranks] if is_root else None, root
        ),
        "scatter": lambda: distributed.scatter(empty(), parts if is_root else None, root),
    }
    for name, call in calls.items():

        def run(name: str = name, call: Callable[[], object] = call) -> None:
            call()
            here.accelerator.synchronize()
            here.same(given["one"], mine, f"what {name} is given")
            here.same(given["all"], longer, f"what {name} is given in parts")

        here.optional(name, run)
    here.optional("all_to_all of parts of a tensor", lambda: _exchanged_parts(here, parts))
    here.optional("functional collectives", lambda: _functional(here, given, mine, longer))

    def in_place() -> None:
        whole = torch.full((4 * count,), -1.0, device=device)
        own = whole.chunk(count)[here.place]
        own.copy_(given["one"])
        distributed.all_gather_into_tensor(whole, own)
        here.accelerator.synchronize()
        wanted = torch.cat([torch.arange(4.0) + 10 * r for r in here.ranks])
        here.same(whole, wanted, "all_gather_into_tensor of its own part, in place")

    here.optional("all_gather_into_tensor in place", in_place)


def _exchanged_parts(here: Observer, parts: list[torch.Tensor]) -> None:
    """Lists of parts that begin anywhere in their memory, into parts of another tensor."""
    into = here.full(4 * here.count + 1, -1)
    distributed.all_to_all(list(into[1:].chunk(here.count)), parts)
    here.accelerator.synchronize()
    start = 4 * here.place
    wanted = torch.cat([torch.tensor([-1.0]), *((torch.arange(4.0) + start + 100 * r) for r in here.ranks)])
    here.same(into, wanted, "all_to_all of parts of a tensor into parts of another")


def _functional(
    here: Observer, given: dict[str, torch.Tensor], mine: torch.Tensor, longer: torch.Tensor
) -> None:
    # The operators themselves: their Python wrappers import the compiler, which takes longer than all topics.
    functional = torch.ops._c10d_functional
    group = distributed.distributed_c10d._get_default_group().group_name
    total = torch.stack([torch.arange(4.0) + 10 * r for r in here.ranks]).sum(0)
    sums = torch.stack([torch.arange(4.0 * here.count) + 100 * r for r in here.ranks]).sum(0)
    results = {
        "all_reduce": (functional.all_reduce(given["one"], "sum", group), total),
        "all_gather_into_tensor": (
            functional.all_gather_into_tensor(given["one"], here.count, group),
            torch.cat([torch.arange(4.0) + 10 * r for r in here.ranks]),
        ),
        "reduce_scatter_tensor": (
            functional.reduce_scatter_tensor(given["all"], "sum", here.count, group),
            sums[4 * here.place :][:4],
        ),
        "broadcast": (functional.broadcast(given["one"], 0, group), torch.arange(4.0)),
    }  # fmt: skip
    for name, (found, wanted) in results.items():
        here.same(functional.wait_tensor(found), wanted, f"the functional {name}")
        here.same(given["one"], mine, f"what the functional {name} is given")
        here.same(given["all"], longer, f"what the functional {name} is given in parts")


def complex_numbers_move(here: Observer) -> None:
    """Both parts of complex numbers arrive, if the device has these and the backend takes them."""
    device = here.accelerator.current_device_name()

    def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.complex(torch.arange(5.0) + rank, torch.arange(5.0) - 7 * rank - 1).to(dtype)

    def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        here.same(torch.view_as_real(found.cpu()), torch.view_as_real(wanted), what)

    for dtype in (torch.complex64, torch.complex128):
        try:
            mine = numbers(here.number, dtype).to(device)
        except (RuntimeError, TypeError):
            continue
        of = f"of {short(dtype)}"

        def moved(dtype: torch.dtype = dtype, mine: torch.Tensor = mine, of: str = of) -> None:
            for root in here.ranks:
                sent = mine.clone()
                distributed.broadcast(sent, root)
                same(sent, numbers(root, dtype), f"broadcast {of} from rank {root}")

        def gathered(dtype: torch.dtype = dtype, mine: torch.Tensor = mine, of: str = of) -> None:
            parts = [torch.zeros_like(mine) for _ in here.ranks]
            distributed.all_gather(parts, mine)
            for r, part in enumerate(parts):
                same(part, numbers(r, dtype), f"part {r} of an all_gather {of}")

        def summed(dtype: torch.dtype = dtype, mine: torch.Tensor = mine, of: str = of) -> None:
            reduced = mine.clone()
            distributed.all_reduce(reduced)
            same(reduced, torch.stack([numbers(r, dtype) for r in here.ranks]).sum(0), f"all_reduce {of}")

        def messages(dtype: torch.dtype = dtype, mine: torch.Tensor = mine, of: str = of) -> None:
            if here.count < 2 or here.number > 1:
                return
            for sender in (0, 1):
                if here.number == sender:
                    distributed.send(mine, 1 - sender)
                else:
                    received = torch.zeros_like(mine)
                    distributed.recv(received, sender)
                    same(received, numbers(sender, dtype), f"recv {of} from rank {sender}")

        for name, run in (
            ("broadcast", moved), ("all_gather", gathered), ("all_reduce", summed),
            ("send and recv", messages)
        ):  # fmt: skip
            here.optional(f"{name} {of}", run)


def messages_of_any_size(here: Observer) -> None:
    """Several messages at once between two ranks, of unequal sizes and dtypes, arrive in their order."""
    if here.count < 2 or here.number > 1:
        return
    device = here.accelerator.current_device_name()
    other = 1 - here.number
    sizes = (300, 2, 1003, 1, 40)

    def message(rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(sizes[turn]) % 50 + 7 * turn + rank).to(dtype)

    for dtype in (torch.float32, torch.int64, torch.uint8):

        def at_once(dtype: torch.dtype = dtype) -> None:
            sent = [message(here.number, turn, dtype).to(device) for turn in range(len(sizes))]
            received = [torch.zeros_like(tensor) for tensor in sent]
            operations = [distributed.P2POp(distributed.isend, tensor, other) for tensor in sent]
            operations += [distributed.P2POp(distributed.irecv, tensor, other) for tensor in received]
            for work in distributed.batch_isend_irecv(operations):
                work.wait()
            here.accelerator.synchronize()
            for turn, found in enumerate(received):
                what = f"message {turn + 1} of {len(sizes)} of {short(dtype)} in a batch_isend_irecv"
                here.same(found, message(other, turn, dtype), what)

        def in_turn(dtype: torch.dtype = dtype) -> None:
            for sender in (0, 1):
                for turn in range(len(sizes)):
                    wanted = message(sender, turn, dtype)
                    if here.number == sender:
                        distributed.send(wanted.to(device), other)
                    else:
                        found = torch.zeros_like(wanted, device=device)
                        distributed.recv(found, sender)
                        here.same(found, wanted, f"recv of {sizes[turn]} elements of {short(dtype)}")

        here.optional(f"batch_isend_irecv of several messages of {short(dtype)}", at_once)
        here.optional(f"send and recv of {short(dtype)}", in_turn)


def calls_that_are_refused(here: Observer) -> None:
    """A call with arguments that do not fit raises, and the ranks understand each other afterwards."""
    total = float(sum(r + 1 for r in here.ranks))

    def understood(what: str) -> None:
        for _ in range(2):
            reduced = here.tensor(here.number + 1)
            distributed.all_reduce(reduced)
            here.same(reduced, [total], f"all_reduce after {what}")
            gathered = [here.tensor(0) for _ in here.ranks]
            distributed.all_gather(gathered, here.tensor(here.number))
            here.same(torch.cat(gathered), [float(r) for r in here.ranks], f"all_gather after {what}")

    wrong: dict[str, Callable[[], object]] = {
        "a broadcast from a rank that is absent": lambda: distributed.broadcast(
            here.tensor(1), here.count + 3
        ),
        "an all_gather into tensors of another dtype": lambda: distributed.all_gather(
            [here.tensor(0, dtype=torch.int64) for _ in here.ranks], here.tensor(1)
        ),
        "a gather without a list at the root": lambda: distributed.gather(here.tensor(1), None, here.number),
    }
    if not here.is_of_a_vendor:  # which may trust what it is given
        wrong |= {
            "an all_gather into too few tensors": lambda: distributed.all_gather(
                [here.tensor(0) for _ in range(here.count - 1)], here.tensor(1)
            ),
            "an all_gather into tensors of another size": lambda: distributed.all_gather(
                [here.tensor(0, 0) for _ in here.ranks], here.tensor(1)
            ),
        }
    for what, call in wrong.items():
        for only in (None,) if here.tells_all_ranks else (None, 0):
            if only is None or here.number == only:
                try:
                    call()
                except (RuntimeError, ValueError, TypeError):
                    pass
                else:
                    here.holds(here.count < 2, f"{what} is accepted")
            understood(f"{what}{'' if only is None else f' of rank {only} alone'}, which is refused")


def collectives_follow_the_queue(here: Observer) -> None:
    """A collective comes after what is queued before it, on any stream, whichever device is current."""
    accelerator = here.accelerator
    name = accelerator.current_device_name()
    names = device_names(accelerator)
    total = float(sum(r + 1 for r in here.ranks))
    matrix = torch.eye(256, device=name)

    def work() -> torch.Tensor:
        result = matrix
        for _ in range(20):
            result = result @ matrix
        return result[0, 0]

    streams: list[Any] = [None]
    if not issubclass(accelerator.Stream, HostStream):
        streams.append(accelerator.Stream())
    for stream in streams:
        accelerator.synchronize()
        with accelerator.stream(stream):
            value = here.full(_LENGTH, here.number + 1) * work()
            distributed.all_reduce(value)
            doubled = value * 2
            later = here.full(_LENGTH, here.number + 1) * work()
            pending = distributed.all_reduce(later, async_op=True)
            if pending is not None:
                pending.wait()
            tripled = later * 3
        accelerator.synchronize()
        where = "on another stream" if stream is not None else "on the default stream"
        here.same(doubled, torch.full((_LENGTH,), 2 * total), f"what follows all_reduce {where}")
        here.same(tripled, torch.full((_LENGTH,), 3 * total), f"what follows wait() of all_reduce {where}")
    if len(names) > 1 and not is_host(accelerator):

        def elsewhere() -> None:
            value = here.full(_LENGTH, here.number + 1)
            index = accelerator.current_device()
            with accelerator.device((index + 1) % len(names)):
                distributed.all_reduce(value)
            accelerator.synchronize()
            here.same(value, torch.full((_LENGTH,), total), "all_reduce while another device is current")
            here.holds(accelerator.current_device() == index, "all_reduce changes the current device")

        here.optional("all_reduce while another device is current", elsewhere)
    here.optional("all_reduce in a graph", lambda: _captured(here, total))


def _captured(here: Observer, total: float) -> None:
    accelerator = here.accelerator
    if not accelerator.supports_graphs:
        raise NotImplementedError("the device has no graphs")
    graph = accelerator.create_graph()
    if not isinstance(graph, RecordedGraph):
        raise NotImplementedError("whether a driver's graph holds collectives is the driver's matter")
    given, reduced = here.full(5, 1), here.full(5, 0)
    with accelerator.capture_to_graph(graph):
        reduced.copy_(given)
        distributed.all_reduce(reduced)
    for turn in (1, 3):
        given.fill_(float(turn * (here.number + 1)))
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        here.same(reduced, torch.full((5,), turn * total), f"replay {turn} of a graph with all_reduce")
    distributed.barrier()
