"""A walk over memory: what is allocated is the sum of what the program holds, after any sequence of calls."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, exactly, is_host, refused, require
from acclimate_conformance.checks.capturing import offers_graphs, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.devices.walks import named
from acclimate_conformance.checks.memory.allocations import release, require_figures, settle
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 8, 50
_ROOM = 2 * MIB
"""By how much an allocator may count a tensor as more than its bytes: it takes parts of blocks."""
_SIZES = (3 * MIB, 5 * MIB + 512, 4 * MIB - 8, 2 * MIB, 9 * MIB + 1000)
_MOST = 10
_OF_GENERATORS = 4096
_RESETS = (
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
)  # fmt: skip


class _Held:
    """Memory of a device that the program holds, through one tensor or several."""

    def __init__(self, index: int, counted: int, value: int, tensors: list[torch.Tensor]) -> None:
        self.index, self.counted, self.value, self.tensors = index, counted, value, tensors
        self.is_recorded = False


class _Graphed:
    """A graph whose replays fill a tensor with a number, and how much memory both take."""

    def __init__(self, index: int, counted: int, graph: Any, number: torch.Tensor, result: torch.Tensor):
        self.index, self.counted, self.graph, self.number, self.result = index, counted, graph, number, result
        self.value = -1
        """What the result holds: nothing is known before the first replay."""


class _Memory(Walk):
    """What the program holds, and the figures that follow from it."""

    figures: ClassVar = {  # and how a move begins that sets them
        "max_memory_allocated": "reset_", "max_memory_reserved": "reset_", "memory_stats": "reset_",
        "memory_reserved": "empty_cache",
    }  # fmt: skip

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.start = accelerator.current_device()
        self.indices = range(len(self.names))
        self.held: list[_Held] = []
        self.graphed: list[_Graphed] = []
        self.here = {0: self.start, 1: self.start}
        self.values = 0
        self.has_graphs = offers_graphs(accelerator)
        release(accelerator)
        for index in self.indices:
            accelerator.reset_peak_memory_stats(index)
        self.base = [accelerator.memory_allocated(index) for index in self.indices]
        self.peak = [accelerator.max_memory_allocated(index) for index in self.indices]
        self.peak_of_reserved = [accelerator.max_memory_reserved(index) for index in self.indices]
        self.refusals = [self._statistic(index, "num_ooms") for index in self.indices]
        self.has_streams = not issubclass(accelerator.Stream, HostStream)
        self.sides = [accelerator.Stream(device=name) for name in self.names] if self.has_streams else []
        self.passing: list[int] = []
        """The devices on which the present move holds memory that it does not tell."""

    def step(self, name: str, seed: int) -> None:
        self.passing = []
        super().step(name, seed)

    def _go(self, choose: random.Random) -> int:
        """Makes any device the current one, and returns the device that is meant."""
        here = choose.choice(self.indices)
        if self.ask("current_device") != here:
            self.accelerator.set_device(here)
        self.here[self.actor] = here
        return choose.choice(self.indices)

    def _statistic(self, index: int, key: str) -> int:
        return int(self.accelerator.memory_stats(index).get(key, -1))

    def _any(self, choose: random.Random) -> _Held | None:
        there = [held for held in self.held if held.tensors[0].untyped_storage().nbytes()]
        return choose.choice(there) if there else None

    def _where(self, held: _Held) -> str:
        return f"the tensor on {self.names[held.index]}"

    def _bytes(self, held: _Held) -> torch.Tensor:
        """All of its memory as bytes, without taking any."""
        storage = held.tensors[0].untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _fill(self, held: _Held) -> None:
        self._bytes(held).fill_(held.value)
        self.accelerator.synchronize(held.index)

    def _hold(self, index: int, make: Callable[[], torch.Tensor], size: int) -> None:
        """Notes a tensor, of which the memory is filled with a value of its own."""
        before = self.ask("memory_allocated", index)
        made = make()
        counted = self.ask("memory_allocated", index) - before
        require(
            size <= counted <= size + _ROOM,
            f"memory_allocated({index}) grows by {counted} for {size} bytes on {self.names[index]}",
        )
        self.values = self.values % 250 + 1
        self.held.append(_Held(index, counted, self.values, [made]))
        self._fill(self.held[-1])

    @move(10)
    def makes(self, choose: random.Random) -> None:
        index = self._go(choose)
        if len(self.held) >= _MOST:
            return
        name, size = self.names[index], choose.choice(_SIZES)
        dtype = choose.choice((torch.uint8, torch.float32, torch.int64, torch.float16))
        count = size // dtype.itemsize
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "torch.empty": lambda: torch.empty(count, dtype=dtype, device=name),
            "torch.zeros": lambda: torch.zeros(1, count, dtype=dtype, device=name),
            "torch.full": lambda: torch.full((count,), 3, dtype=dtype, device=torch.device(name)),
            "torch.empty_strided": lambda: torch.empty_strided((count, 1), (1, 1), dtype=dtype, device=name),
            "new_empty": lambda: torch.empty(0, dtype=dtype, device=name).new_empty(count),
            "an untyped storage": lambda: torch.empty(0, dtype=dtype, device=name).set_(
                torch.UntypedStorage(count * dtype.itemsize, device=torch.device(name))
            ),
            "to() of a tensor of the host": lambda: torch.ones(count, dtype=dtype).to(name),
        }
        kind = choose.choice(list(kinds))
        plainly = make = kinds[kind]
        if self.sides and choose.random() < 0.25:
            side = self.sides[index]

            def on_a_side_stream() -> torch.Tensor:
                with self.accelerator.stream(side):
                    return plainly()

            make = on_a_side_stream
            kind += ", within stream(s)"
        self.say(f"{size} bytes by {kind} on {name}")
        self._hold(index, make, count * dtype.itemsize)

    @move(6)
    def views(self, choose: random.Random) -> None:
        self._go(choose)
        held = self._any(choose)
        if held is None or len(held.tensors) > 3:
            return
        given = choose.choice(held.tensors)
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "a slice": lambda: given[..., given.shape[-1] // 2 :],
            "detach()": given.detach, "data": lambda: given.data,
            "a view of bytes": lambda: given.reshape(-1).view(torch.uint8),
            "an expanded view": lambda: given.expand(3, *given.shape),
            "as_strided()": lambda: given.as_strided((4,), (2,), 1),
            "torch.as_tensor()": lambda: torch.as_tensor(given), "unsqueeze()": lambda: given.unsqueeze(0),
            "contiguous()": lambda: given.detach() if not given.is_contiguous() else given.contiguous(),
            "set_()": lambda: given.new_empty(0).set_(given.untyped_storage(), 0, (3,), (1,)),
            "a parameter": lambda: torch.nn.Parameter(given, requires_grad=False),
        }  # fmt: skip
        kind = choose.choice(list(kinds))
        if given.numel() < 16:
            kind = "detach()"
        self.say(f"{kind} of {self._where(held)}")
        held.tensors.append(kinds[kind]())

    @move(10)
    def drops(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.held:
            return
        held = choose.choice(self.held)
        if choose.random() < 0.5:
            held.tensors[:] = held.tensors[:1]  # all its views
        is_last = len(held.tensors) == 1
        recorded = ", which was used on a stream by record_stream()," * held.is_recorded
        self.say(
            f"dropping {self._where(held)}{recorded}"
            if is_last
            else f"dropping a view of {self._where(held)}"
        )
        held.tensors.pop(choose.randrange(len(held.tensors)))
        if is_last:
            self.held.remove(held)
            self.accelerator.synchronize(held.index)
            if held.is_recorded:  # some allocators look for such memory when they are asked for more
                self.passing.append(held.index)
                del held
                torch.empty(_SIZES[0], dtype=torch.uint8, device=self.names[self.passing[0]])

    @move(4)
    def copies(self, choose: random.Random) -> None:
        index = self._go(choose)
        held = self._any(choose)
        if held is None or len(self.held) >= _MOST:
            return
        given = held.tensors[0].detach()
        if given.numel() * given.itemsize < 2 * MIB or given.untyped_storage().nbytes() > 10 * MIB:
            return
        name, size = self.names[index], given.numel() * given.itemsize
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            f"to({name!r}, copy=True)": lambda: given.to(name, copy=True),
            f"to({name!r}, copy=True, non_blocking=True)": lambda: given.to(
                name, copy=True, non_blocking=True
            ),
        }
        if index == held.index:
            kinds |= {"clone()": given.clone, "a copy of its memory": lambda: given + 0}
        kind = choose.choice(list(kinds))
        self.say(f"{kind} of {self._where(held)}")
        self._hold(index, kinds[kind], size)

    @move(4)
    def resizes(self, choose: random.Random) -> None:
        self._go(choose)
        held = self._any(choose)
        if held is None:
            return
        given, size = held.tensors[0], choose.choice(_SIZES)
        if held.is_recorded or not given.is_contiguous() or given.storage_offset():
            return
        before, storage = self.ask("memory_allocated", held.index), given.untyped_storage()
        count, there = size // given.itemsize, storage.nbytes()
        del storage
        of_storage = choose.random() < 0.4
        told = f"untyped_storage().resize_({size})" if of_storage else f"resize_({count})"
        self.say(f"{told} of {self._where(held)} of {there} bytes")
        self.passing.append(held.index)
        if of_storage:
            if size < there:  # other tensors of it may not reach beyond its end
                held.tensors[:] = [given.view(-1)[:1].view(-1)]
            held.tensors[0].untyped_storage().resize_(size)
        else:
            given.resize_(count)
        now = held.tensors[0].untyped_storage().nbytes()
        more = self.ask("memory_allocated", held.index) - before
        if of_storage:
            require(now == size, f"the storage has {now} bytes")
        else:
            require(now == max(there, count * given.itemsize), f"the storage has {now} bytes")
        del given
        # Shrunk storages may keep their memory or move into less.
        low, high = now - held.counted, now + _ROOM - held.counted
        if now < there:
            high = max(high, 0)
        require(
            low <= more <= high,
            f"memory_allocated({held.index}) changes by {more}, with {held.counted} bytes counted before",
        )
        held.counted += more
        self._fill(held)

    @move(2)
    def empties(self, choose: random.Random) -> None:
        self._go(choose)
        held = self._any(choose)
        if held is None or held.is_recorded:
            return
        self.say(f"untyped_storage().resize_(0) of {self._where(held)}")
        held.tensors[0].untyped_storage().resize_(0)
        held.counted = 0

    @move(3)
    def replaces(self, choose: random.Random) -> None:
        self._go(choose)
        one, other = self._any(choose), self._any(choose)
        if one is None or other is None or one is other or one.index != other.index or one.is_recorded:
            return
        tensor = one.tensors[-1]
        if isinstance(tensor, torch.nn.Parameter) or tensor.dtype != other.tensors[0].dtype:
            return
        way = choose.choice(("data", "set_"))
        self.say(f"{way} of a tensor set to another on {self.names[one.index]}")
        if way == "data":
            tensor.data = other.tensors[0]
        else:
            tensor.set_(other.tensors[0].detach())  # type: ignore[call-overload]
        # It may be there twice: contiguous() and torch.as_tensor() return the tensor that they are given.
        other.tensors += [t for t in one.tensors if t is tensor]
        one.tensors[:] = [t for t in one.tensors if t is not tensor]
        if not one.tensors:
            self.held.remove(one)
            self.accelerator.synchronize(one.index)

    @move(3)
    def uses_on_a_stream(self, choose: random.Random) -> None:
        self._go(choose)
        held = self._any(choose)
        if held is None or not self.sides:
            return
        side = self.sides[held.index]
        self.say(f"record_stream() of {self._where(held)}")
        held.tensors[0].record_stream(side)
        held.is_recorded = True

    @move(5)
    def fails(self, choose: random.Random) -> None:
        index = self._go(choose)
        name, size = self.names[index], choose.choice(_SIZES)
        rows = size // 4 // 1024

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(*shape, device=name)

        fails: dict[str, Callable[[], object]] = {
            "a product": lambda: ones(rows, 1024) @ ones(rows, 1024),
            "cat()": lambda: torch.cat([ones(rows, 1024), ones(rows)]),
            "a sum": lambda: ones(rows, 1024) + ones(rows, 1023),
            "gather()": lambda: ones(rows, 1024).gather(0, ones(rows, 1024)),
            "index_select()": lambda: ones(rows, 1024).index_select(2, ones(rows).long()),
            "where()": lambda: torch.where(ones(rows, 1024), ones(rows, 1024), ones(3, 1024)),
            "a view": lambda: ones(rows, 1024).t().view(-1),
            "conv1d()": lambda: torch.nn.functional.conv1d(ones(1, rows, 1024), ones(2, rows + 1, 3)),
            "embedding()": lambda: torch.nn.functional.embedding(ones(rows), ones(rows, 1024)),
            "copy_()": lambda: ones(rows, 1024).copy_(ones(rows, 1023)),
            "an addition in place": lambda: ones(rows, 1024).add_(ones(2, rows, 1024)),
            "linalg.inv()": lambda: torch.linalg.inv(ones(rows, 1024)[:, 1:]),
            "out=": lambda: torch.add(ones(rows, 1024), 1, out=ones(rows, 1024).int()),
            "layer_norm()": lambda: torch.nn.functional.layer_norm(ones(rows, 1024), (1023,)),
            "backward() without a graph": lambda: ones(rows, 1024).sum().backward(),
            "to() of no device": lambda: ones(rows, 1024).to("no such device"),
            "numpy()": lambda: ones(rows, 1024).requires_grad_().numpy(),
            "cross_entropy()": lambda: torch.nn.functional.cross_entropy(
                ones(rows, 1024), ones(rows - 1).long()
            ),
            "scaled_dot_product_attention()": lambda: torch.nn.functional.scaled_dot_product_attention(
                ones(rows, 4, 256), ones(rows, 4, 255), ones(rows, 4, 256)
            ),
        }
        told = choose.choice(list(fails))
        self.say(f"{told} with tensors of {size} bytes on {name}, which is refused,")
        self.passing.append(index)
        with refused(told, Exception):
            fails[told]()
        settle(self.accelerator)  # an error may be one of a ring with its own frames

    @move(3)
    def runs_out(self, choose: random.Random) -> None:
        index = self._go(choose)
        name, size = self.names[index], 2 * self.accelerator.total_memory(index)
        self.say(f"torch.empty of {size} bytes on {name}, which does not fit,")
        try:
            torch.empty(size, dtype=torch.uint8, device=name)
        except RuntimeError as error:
            require(self.accelerator.is_out_of_memory(error), f"is_out_of_memory() is False for {error!r}")
        else:
            require(False, "it fits")
        if self.refusals[index] >= 0:
            self.refusals[index] += 1

    @move(4)
    def holds_for_a_moment(self, choose: random.Random) -> None:
        index = self._go(choose)
        name, size = self.names[index], choose.choice(_SIZES)
        count = size // 4

        def ones() -> torch.Tensor:
            return torch.ones(count, device=name)

        kinds: dict[str, Callable[[], object]] = {
            "a sum of two results": lambda: ones() * 2 + ones(),
            "a gradient": lambda: ones().requires_grad_().exp().square().sum().backward(),
            "item()": lambda: ones().sum().item(),
            "a copy to the host": lambda: ones().cpu(),
            "a copy to pinned memory": lambda: self.accelerator.pin_empty(count, dtype=torch.float32).copy_(
                ones(), non_blocking=True
            ),
            "a copy from pinned memory": lambda: self.accelerator.pin_memory(torch.ones(count)).to(
                name, non_blocking=True
            ),
            "a deep copy": lambda: copy.deepcopy(ones()),
            "sort()": lambda: ones().sort(),
            "a module": lambda: torch.nn.Linear(1024, count // 1024, device=name),
            "a graph that raises": lambda: _raises_within_a_graph(self.accelerator, ones),
            "a block of inference_mode()": lambda: _within_inference_mode(ones),
            "a result of a side stream": lambda: self._within_a_side_stream(index, ones),
            "an error that is kept": lambda: _raised_and_kept(ones),
            "a tensor that is used on every stream": lambda: self._on_every_stream(index, ones),
        }
        told = choose.choice(list(kinds))
        self.say(f"{told} of {size} bytes on {name}, dropped at once,")
        self.passing.append(index)
        kinds[told]()
        settle(self.accelerator)
        torch.empty(_SIZES[0], dtype=torch.uint8, device=name)

    def _within_a_side_stream(self, index: int, ones: Callable[[], torch.Tensor]) -> None:
        if self.sides:
            with self.accelerator.stream(self.sides[index]):
                result = ones() * 2
            self.sides[index].synchronize()
            del result

    def _on_every_stream(self, index: int, ones: Callable[[], torch.Tensor]) -> None:
        used = ones()
        for _ in range(3) if self.sides else ():
            side = self.accelerator.Stream(device=self.names[index])
            used.record_stream(side)
            with self.accelerator.stream(side):
                event = side.record_event()
            self.accelerator.current_stream(index).wait_event(event)

    @move(3)
    def captures(self, choose: random.Random) -> None:
        self._go(choose)
        index = self.here[self.actor]
        if self.actor or not self.has_graphs or len(self.graphed) > 2:
            return
        name, size = self.names[index], choose.choice(_SIZES)
        others = [held.graph for held in self.graphed if held.index == index and hasattr(held.graph, "pool")]
        shares = bool(others) and choose.random() < 0.6
        self.say(f"capture_to_graph() of {size} bytes on {name}{', into the pool of another graph' * shares}")
        self.passing.append(index)
        before = self.ask("memory_allocated", index)
        number = torch.ones((), dtype=torch.uint8, device=name)

        def work() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8, device=name) + number

        warm_up(self.accelerator, work)
        graph = self.accelerator.create_graph()
        with self.accelerator.capture_to_graph(graph, pool=choose.choice(others).pool() if shares else None):
            result = work()
        settle(self.accelerator)
        counted = self.ask("memory_allocated", index) - before
        require(counted >= size, f"memory_allocated({index}) grows by {counted} for a result of {size} bytes")
        self.graphed.append(_Graphed(index, counted, graph, number, result))

    @move(4)
    def replays(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.graphed:
            return
        held = choose.choice(self.graphed)
        self.say(f"replay_graph() of a graph on {self.names[held.index]}")
        self.passing.append(held.index)
        self.values = held.value = self.values % 250 + 1
        with self.accelerator.device(held.index):
            held.number.fill_(held.value)
            self.accelerator.replay_graph(held.graph)
        settle(self.accelerator)

    @move(3)
    def drops_a_graph(self, choose: random.Random) -> None:
        self._go(choose)
        if not self.graphed:
            return
        held = self.graphed.pop(choose.randrange(len(self.graphed)))
        index, counted, name = held.index, held.counted, self.names[held.index]
        before = self.ask("memory_allocated", index)
        if choose.random() < 0.5 and hasattr(held.graph, "reset"):
            self.say(f"Graph.reset() of a graph on {name}, and dropping it and its result")
            held.graph.reset()
        else:
            self.say(f"dropping a graph on {name} and its result")
        order = ["graph", "result"]
        choose.shuffle(order)
        for part in order:
            delattr(held, part)
            settle(self.accelerator)
        del held
        settle(self.accelerator)
        less = before - self.ask("memory_allocated", index)
        # A driver's first graph may also hold the state of the random generator, until the last one goes.
        require(
            abs(less - counted) <= _OF_GENERATORS,
            f"memory_allocated({index}) falls by {less}, and the graph took {counted}",
        )
        self.base[index] += counted - less

    @move(4)
    def resets(self, choose: random.Random) -> None:
        index = self._go(choose)
        device = named(self, choose, index, self.here[self.actor])
        name = choose.choice(_RESETS)
        self.say(f"{name}({device!r})")
        getattr(self.accelerator, name)(device)
        for figure in ("memory", "max_memory"):
            older, newer = self.ask(f"{figure}_cached", index), self.ask(f"{figure}_reserved", index)
            require(older == newer, f"{figure}_cached({index}) is {older}, and {figure}_reserved() {newer}")
        allocated = self.ask("memory_allocated", index)
        reserved = self.ask("memory_reserved", index)
        if name != "reset_accumulated_memory_stats":
            self.peak[index], self.peak_of_reserved[index] = allocated, reserved
        if name == "reset_accumulated_memory_stats" and self.refusals[index] >= 0:
            self.refusals[index] = self._statistic(index, "num_ooms")

    @move(2)
    def empties_the_cache(self, choose: random.Random) -> None:
        self._go(choose)
        before = [self.ask("memory_reserved", index) for index in self.indices]
        self.say("empty_cache()")
        self.accelerator.empty_cache()
        for index in self.indices:
            now = self.ask("memory_reserved", index)
            require(now <= before[index], f"memory_reserved({index}) grows from {before[index]} to {now}")

    @move(1)
    def collects_what_was_shared(self, choose: random.Random) -> None:
        self._go(choose)
        self.say("ipc_collect()")
        self.accelerator.ipc_collect()

    def look(self) -> None:
        for index in self.indices:
            self._look_at(index)
        for held in self.held:
            if held.counted and held.tensors[0].untyped_storage().nbytes():
                there = self._bytes(held)
                ends = [
                    *there[:1].tolist(),
                    *there[-1:].tolist(),
                ]  # one with a step needs memory to be copied
                require(
                    set(ends) == {held.value},
                    f"{self._where(held)} holds {ends} at its ends, not {held.value}: other memory overlaps",
                )

        for graphed in self.graphed:
            if graphed.value >= 0:
                seen = {int(graphed.result[0]), int(graphed.result[-1])}
                require(
                    seen == {graphed.value},
                    f"the result of a graph on {self.names[graphed.index]} holds {seen} at its ends, not "
                    f"{graphed.value}: other memory overlaps",
                )

    def _look_at(self, index: int) -> None:
        name = self.names[index]
        statistics = self.ask("memory_stats", index)
        refusals = int(statistics.get("num_ooms", -1))
        require(
            refusals == self.refusals[index],
            f'memory_stats({index})["num_ooms"] is {refusals}, not {self.refusals[index]}',
        )
        holders: list[_Held | _Graphed] = [*self.held, *self.graphed]
        wanted = self.base[index] + sum(held.counted for held in holders if held.index == index)
        found = exactly(self.ask("memory_allocated", index), int, f"memory_allocated({index})")
        require(
            found == wanted,
            f"memory_allocated({index}) is {found}, {found - wanted:+d} bytes from what is held",
        )
        peak = self.ask("max_memory_allocated", name)
        lowest = max(self.peak[index], wanted)
        is_right = peak >= lowest if index in self.passing else peak == lowest
        require(is_right, f"max_memory_allocated({index}) is {peak}, not {lowest}")
        self.peak[index] = peak
        reserved = self.ask("memory_reserved", torch.device(name))
        require(reserved >= found, f"memory_reserved({index}) is {reserved}, of which {found} are allocated")
        most = self.ask("max_memory_reserved", index)
        lowest = max(self.peak_of_reserved[index], reserved)
        require(most >= lowest, f"max_memory_reserved({index}) is {most}, and was {lowest} before")
        self.peak_of_reserved[index] = most
        for key, value in (
            ("allocated_bytes.all.current", found), ("allocated_bytes.all.peak", peak),
            ("reserved_bytes.all.current", reserved), ("reserved_bytes.all.peak", most),
        ):  # fmt: skip
            told = statistics.get(key, value)
            require(told == value, f'memory_stats({index})["{key}"] is {told}, not {value}')

    def end(self) -> None:
        self.held.clear()
        self.graphed.clear()
        with suppress(Exception):
            release(self.accelerator)
        self.accelerator.set_device(self.start)


def _raised_and_kept(ones: Callable[[], torch.Tensor]) -> None:
    try:
        ones() @ ones()[1:]
    except RuntimeError as error:
        error.args = (str(error),)


def _within_inference_mode(ones: Callable[[], torch.Tensor]) -> None:
    with torch.inference_mode():
        ones().mul_(2).sum().item()


def _raises_within_a_graph(accelerator: Accelerator, ones: Callable[[], torch.Tensor]) -> None:
    try:
        x = ones().requires_grad_()
        y = x.exp()
        raise ValueError(len(y) + accelerator.current_device())
    except ValueError as error:
        error.__traceback__ = None


@check(
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "empty_cache", "ipc_collect", "memory_stats",
    promise="After any sequence of calls, in any thread, on any device, what is allocated is what the "
    "program holds, peaks are the highest since their reset, and no memory is used twice.",
    once=True,
)  # fmt: skip
def walks_over_memory(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    walk(accelerator, _Memory, _WALKS, _MOVES)
