"""A walk over what is current: devices and streams, by thread, after errors, within blocks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.errors import InvalidDeviceError
from acclimate_conformance.checks.assertions import exactly, is_host, refused, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import has_indices
from acclimate_conformance.checks.errors import DeliberateError
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 18, 60
_DEEPEST = 4
_MOST_STREAMS = 8
_TOO_LARGE = 1 << 60
_ASKED_OF_A_DEVICE = (
    "synchronize", "get_device_properties", "get_device_name", "get_device_capability", "memory_allocated",
    "max_memory_allocated", "reset_max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached", "reset_max_memory_cached", "reset_peak_memory_stats",
    "reset_accumulated_memory_stats", "memory_stats", "memory_summary", "mem_get_info", "total_memory",
    "available_memory", "default_generator", "get_rng_state", "current_stream", "default_stream",
)  # fmt: skip
_ASKED = (
    "current_device", "current_device_name", "device_count", "device_name", "is_available", "is_initialized",
    "init", "synchronize", "is_synchronized_device", "use_host_timers", "resolves_data_dependency",
    "handles_memory_backpressure", "empty_cache", "ipc_collect", "seed", "seed_all", "initial_seed",
    "get_rng_state_all", "random", "is_bf16_supported", "is_fp16_supported",
    "is_fp64_supported", "supported_dtypes", "communication_backend_name", "is_triton_supported",
    "get_compile_backend", "export_envs", "visible_devices_envs", "pin_memory_alignment",
    "is_current_stream_capturing", "range_pop", "toolkit_version",
)  # fmt: skip


def named(walked: Walk, choose: random.Random, index: int, here: int) -> DeviceLike:
    """One of the ways to name a device; its type and ``None`` too if it is the current one."""
    kind, name = walked.accelerator.device_type, walked.names[index]
    ways: list[DeviceLike] = [index, name, torch.device(name)]
    if index == here:
        ways += [None, kind, torch.device(kind)]
    return choose.choice(ways)


class _Block:
    """A block that was entered, with what must be current again after it."""

    def __init__(
        self, manager: AbstractContextManager[Any], told: str, here: int, streams: list[Any]
    ) -> None:
        self.manager, self.told, self.here, self.streams = manager, told, here, streams
        self.restores_the_device = False
        self.is_of_a_stream = False


class _Current(Walk):
    """What is current: for each thread a device, and a stream of each device."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.indices = range(len(self.names))
        self.start = accelerator.current_device()
        self.is_host = is_host(accelerator)  # which is not told within a block of torch.device()
        self.streams = [accelerator.default_stream(index) for index in self.indices]
        self.defaults = list(self.streams)
        self.streams += [accelerator.Stream(device=name) for name in self.names for _ in range(2)]
        self.here: dict[int, int] = {}
        self.chosen: dict[int, list[Any]] = {}
        self.blocks: dict[int, list[_Block]] = {0: [], 1: []}
        for actor in (0, 1):
            self.in_actor(actor, self._begin_here)
        self.before = list(self.chosen[0])

    def _begin_here(self) -> None:
        self.here[self.actor] = self.accelerator.current_device()
        self.chosen[self.actor] = [self.accelerator.current_stream(index) for index in self.indices]

    def _other(self, choose: random.Random) -> int:
        return choose.choice(self.indices)

    def _named(self, choose: random.Random, index: int) -> DeviceLike:
        return named(self, choose, index, self.here[self.actor])

    @move(6)
    def sets_device(self, choose: random.Random) -> None:
        index = self._other(choose)
        device = choose.choice((index, self.names[index], torch.device(self.names[index])))
        self.say(f"set_device({device!r})")
        self.accelerator.set_device(device)
        self.here[self.actor] = index

    @move(2)
    def sets_a_device_that_is_not_there(self, choose: random.Random) -> None:
        device = self._absent(choose)
        way = choose.choice(("set_device", "device"))
        self.say(f"{way}({device!r}), which is refused,")
        with refused(f"{way}({device!r})", InvalidDeviceError):
            if way == "device":
                with self.accelerator.device(device):
                    pass
            else:
                self.accelerator.set_device(device)

    def _absent(self, choose: random.Random) -> DeviceLike:
        absent: list[DeviceLike] = ["meta", torch.device("meta"), "no such device"]
        if has_indices(self.accelerator):
            beyond = f"{self.accelerator.device_type}:{len(self.names)}"
            absent += [len(self.names), -1, beyond, torch.device(beyond)]
        return choose.choice(absent)

    @move(5)
    def enters_device(self, choose: random.Random) -> None:
        if len(self.blocks[self.actor]) >= _DEEPEST:
            return
        index = self._other(choose)
        device = self._named(choose, index)
        self.say(f"entering device({device!r})")
        self._enter(self.accelerator.device(device), f"device({device!r})")
        self.blocks[self.actor][-1].restores_the_device = device is not None
        self.here[self.actor] = index

    @move(5)
    def enters_stream(self, choose: random.Random) -> None:
        if len(self.blocks[self.actor]) >= _DEEPEST:
            return
        stream = choose.choice([None, *self.streams])
        self.say(f"entering stream({stream!r})")
        self._enter(self.accelerator.stream(stream), "stream(s)")
        self.blocks[self.actor][-1].is_of_a_stream = True
        if stream is not None:
            self._choose(stream)

    @move(6)
    def enters_a_block_of_torch(self, choose: random.Random) -> None:
        if len(self.blocks[self.actor]) >= _DEEPEST:
            return
        name = self.names[self._other(choose)]
        blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "torch.inference_mode()": torch.inference_mode,
            "torch.no_grad()": torch.no_grad,
            f"torch.device({name!r})": lambda: torch.device(name),
            "amp.autocast()": lambda: self.accelerator.amp.autocast(dtype=torch.bfloat16),
        }
        told = choose.choice(list(blocks))
        self.say(f"entering {told}")
        self._enter(blocks[told](), told)

    def _enter(self, manager: AbstractContextManager[Any], told: str) -> None:
        block = _Block(manager, told, self.here[self.actor], list(self.chosen[self.actor]))
        manager.__enter__()
        self.blocks[self.actor].append(block)

    @move(16)
    def leaves(self, choose: random.Random) -> None:
        if not self.blocks[self.actor]:
            return
        by_error = choose.random() < 0.5
        told = self.blocks[self.actor][-1].told
        self.say(f"leaving {'by an error ' * by_error}the block of {told} that was entered last")
        self._leave(by_error)

    def _leave(self, by_error: bool) -> None:
        block = self.blocks[self.actor].pop()
        if by_error:
            error = DeliberateError()
            suppressed = block.manager.__exit__(DeliberateError, error, None)
            require(not suppressed, "the error within the block does not come out of it")
        else:
            block.manager.__exit__(None, None, None)
        self._restored(block)

    def _restored(self, block: _Block) -> None:
        """Notes what is current after a block."""
        now = self.accelerator.current_device()
        if block.restores_the_device or now != self.here[self.actor]:
            # A device that was set within stream(s) or device(None) stays, or not, as the library has it.
            self.here[self.actor] = block.here
        if block.is_of_a_stream:
            self.chosen[self.actor] = block.streams

    def _choose(self, stream: Any) -> None:
        index = self._index_of(stream)
        self.chosen[self.actor][index] = stream
        now = self.accelerator.current_device()
        # Some devices make the stream's device the current one.
        require(
            now in (self.here[self.actor], index),
            f"current_device() is {now}, neither {self.here[self.actor]} nor the stream's, {index}",
        )
        self.here[self.actor] = now

    def _index_of(self, stream: Any) -> int:
        return torch.device(stream.device).index or 0 if len(self.names) > 1 else 0

    @move(8)
    def sets_stream(self, choose: random.Random) -> None:
        # What a stream's block restores on other devices, if streams are set within it, is left open.
        if any(block.is_of_a_stream for block in self.blocks[self.actor]):
            return
        stream = choose.choice([None, *self.streams])
        self.say(f"set_stream({stream!r})")
        self.accelerator.set_stream(stream)
        if stream is not None:
            self._choose(stream)

    @move(3)
    def makes_a_stream(self, choose: random.Random) -> None:
        index = self._other(choose)
        device = choose.choice((self.names[index], torch.device(self.names[index])))
        priority = choose.choice((0, -1))
        if len(self.streams) >= len(self.names) + _MOST_STREAMS:
            return
        if index == self.here[self.actor] and choose.random() < 0.5:
            self.say("Stream()")
            made = self.accelerator.Stream()
        else:
            self.say(f"Stream(device={device!r}, priority={priority})")
            made = self.accelerator.Stream(device=device, priority=priority)
        require(
            self._index_of(made) == index, f"the stream is one of {made.device}, not of {self.names[index]}"
        )
        require(made != self.defaults[index], "the stream is the default one")
        self.streams.append(made)

    @move(8)
    def asks_of_a_device(self, choose: random.Random) -> None:
        name = choose.choice(_ASKED_OF_A_DEVICE)
        device = self._named(choose, self._other(choose))
        self.say(f"{name}({device!r})")
        getattr(self.accelerator, name)(device)

    @move(3)
    def asks_of_a_device_that_is_not_there(self, choose: random.Random) -> None:
        name, device = choose.choice(_ASKED_OF_A_DEVICE), self._absent(choose)
        self.say(f"{name}({device!r}), which is refused,")
        with refused(f"{name}({device!r})", InvalidDeviceError):
            getattr(self.accelerator, name)(device)

    @move(4)
    def asks(self, choose: random.Random) -> None:
        name = choose.choice(_ASKED)
        if name == "range_pop":
            self.say("range_push('walk') and range_pop()")
            self.accelerator.range_push("walk")
            self.accelerator.range_pop()
            return
        self.say(f"{name}()")
        getattr(self.accelerator, name)()

    @move(8)
    def uses_a_device(self, choose: random.Random) -> None:
        index = self._other(choose)
        name = self.names[index]
        other = self.names[self._other(choose)]
        uses: dict[str, Callable[[], object]] = {
            f"a sum on {name}": lambda: torch.ones(9, device=name).sum(),
            f"a copy from {other} to {name}": lambda: torch.ones(9, device=other).to(name),
            f"a copy from {name} to the host": lambda: torch.ones(9, device=name).cpu(),
            f"a copy without waiting from the host to {name}": lambda: torch.ones(9, device="cpu").to(
                name, non_blocking=True
            ),
            f"a gradient on {name}": lambda: (
                torch.ones(9, device=name).requires_grad_().exp().sum().backward()
                if not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
                else None
            ),
            f"new_zeros() of a tensor on {name}": lambda: torch.ones(9, device=name).new_zeros(3),
            f"a deep copy of a tensor on {name}": lambda: copy.deepcopy(torch.ones(9, device=name)),
            f"a draw on {name}": lambda: torch.rand(9, device=name),
            f"an event on a stream of {name}": lambda: self.accelerator.Event().record(self.defaults[index]),
            f"a seed for all devices, with {name}": lambda: self.accelerator.manual_seed_all(3),
            f"a state for {name}": lambda: self.accelerator.set_rng_state(
                self.accelerator.get_rng_state(index), index
            ),
            f"module.to({name!r})": lambda: torch.nn.Linear(2, 2).to(name),
        }
        told = choose.choice(list(uses))
        self.say(told)
        uses[told]()

    @move(4)
    def pins(self, choose: random.Random) -> None:
        host = torch.ones(3, device="cpu")
        pins: dict[str, Callable[[], torch.Tensor]] = {
            "pin_memory()": lambda: self.accelerator.pin_memory(host),
            "pin_memory(make_copy=False)": lambda: self.accelerator.pin_memory(host, make_copy=False),
            "pin_empty()": lambda: self.accelerator.pin_empty(3, dtype=torch.float32),
            "pin_empty_like()": lambda: self.accelerator.pin_empty_like(host),
        }
        told = choose.choice(list(pins))
        self.say(told)
        pinned = pins[told]()
        require(pinned.device.type == "cpu", f"its result is on {pinned.device}")
        on_it = self.accelerator.on_accelerator(pinned)
        require(on_it == self.is_host, f"on_accelerator() of its result is {on_it}")

    @move(3)
    def fails_on_a_device(self, choose: random.Random) -> None:
        name = self.names[self._other(choose)]
        ones = torch.ones(3, 5, device=name)
        fails: dict[str, Callable[[], object]] = {
            f"a product of wrong shapes on {name}": lambda: ones @ ones,
            f"cat() of wrong shapes on {name}": lambda: torch.cat([ones, ones[:, 0]]),
            f"a view of the wrong size on {name}": lambda: ones.view(4),
            f"a cast of no dtype on {name}": lambda: ones.masked_fill(ones, 1),
        }
        if not self.is_host:
            fails[f"an allocation on {name} that does not fit"] = lambda: torch.empty(
                _TOO_LARGE, dtype=torch.uint8, device=name
            )
            fails[f"a result on {name} that does not fit"] = lambda: (
                torch.ones(1, device=name).expand(_TOO_LARGE // 8).contiguous()
            )
        told = choose.choice(list(fails))
        self.say(told)
        with refused(told, RuntimeError, TypeError):
            fails[told]()

    @move(1)
    def begins_another_thread(self, choose: random.Random) -> None:
        if self.actor or self.blocks[1]:
            return
        self.say("a new thread instead of the second")
        self.renew_second_thread()
        self.in_actor(1, self._begin_here)
        now = self.chosen[1]
        require(now == self.defaults, f"a new thread starts with the streams {now}, not {self.defaults}")

    def look_here(self) -> None:
        here, where = self.here[self.actor], " in a second thread" * self.actor
        now = exactly(self.ask("current_device"), int, "current_device()")
        require(now == here, f"current_device(){where} is {now}, not {here}")
        name = self.ask("current_device_name")
        require(
            name == self.names[here], f"current_device_name(){where} is {name!r}, not {self.names[here]!r}"
        )
        for index in self.indices:
            found, wanted = self.ask("current_stream", index), self.chosen[self.actor][index]
            require(found == wanted, f"current_stream({index}){where} is {found}, not {wanted}")
            default = self.ask("default_stream", self.names[index])
            require(
                default == self.defaults[index],
                f"default_stream({self.names[index]!r}){where} is {default}, not {self.defaults[index]}",
            )
        if has_indices(self.accelerator):
            made = torch.empty(1, device=self.accelerator.device_type).device.index
            require(made == here, f"a tensor of the bare device type{where} is made on {made}, not {here}")
            unnamed = self.ask("current_stream")
            require(
                unnamed == self.chosen[self.actor][here],
                f"current_stream(){where} is {unnamed}, not {self.chosen[self.actor][here]}",
            )

    def end_here(self) -> None:
        while self.blocks[self.actor]:
            with suppress(Exception):
                self.blocks[self.actor].pop().manager.__exit__(None, None, None)

    def end(self) -> None:
        for stream in self.before:
            self.accelerator.set_stream(stream)
        self.accelerator.set_device(self.start)


@check(
    "set_device", "device", "stream", "set_stream", "current_device", "current_device_name", "current_stream",
    "default_stream",
    promise="After any sequence of calls, in any thread, after errors and in nested blocks, the current "
    "device and the current stream of each device are those that were set.",
    once=True,
)  # fmt: skip
def walks_over_what_is_current(accelerator: Accelerator) -> None:
    walk(accelerator, _Current, _WALKS, _MOVES)
