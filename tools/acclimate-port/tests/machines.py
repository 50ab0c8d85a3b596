"""Fake machines: torch and acclimate as a program sees them on CUDA, on a host, and on another accelerator.

``run`` executes a piece of a program on one of them, and records what it did: the calls that it made, the
devices that it used, the result and the error. Names that the program does not define are recorders.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TYPES = {"CUDA": "cuda", "HOST": "cpu", "OTHER": "other"}
BACKENDS = {"CUDA": "nccl", "HOST": "gloo", "OTHER": "ccl"}


class NotHereError(RuntimeError):
    """What torch raises where there is no CUDA."""


@dataclass(frozen=True)
class Outcome:
    """What a piece of a program did."""

    error: str
    result: str
    calls: tuple[str, ...]

    def renamed(self, machine: str) -> Outcome:
        """The outcome with the names of a CUDA machine."""

        def rename(text: str) -> str:
            return text.replace(TYPES[machine], "cuda").replace(BACKENDS[machine], "nccl")

        return Outcome(self.error, rename(self.result), tuple(map(rename, self.calls)))


class Name(str):
    """A device's name, with the parts of a device, so that a program may get it in place of one."""

    __slots__ = ()

    @property
    def type(self) -> str:
        """The name without the index."""
        return str(self).partition(":")[0]

    @property
    def index(self) -> int | None:
        """The number after the name."""
        return int(str(self).partition(":")[2]) if ":" in self else None


class Device(Name):
    """A device, which no string is equal to."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = Name.__hash__


class Tensor:
    """A tensor or a module, which knows its device."""

    def __init__(self, machine: Machine, device: Any) -> None:
        self._machine, self.device = machine, machine.checked(device)

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a CUDA device."""
        return self.device.type == "cuda"

    def cuda(self, device: Any = None, **_: Any) -> Tensor:
        """A copy on CUDA."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def to(self, device: Any, *_: Any, **__: Any) -> Tensor:
        """A copy on a device."""
        moved = Tensor(self._machine, device)
        self._machine.calls.append(f"to {moved.device}")
        return moved

    def pin_memory(self) -> Tensor:
        """A copy in pinned memory."""
        if self._machine.name == "HOST":
            raise NotHereError("cannot pin")
        self._machine.calls.append("pin")
        return self

    def eval(self) -> Tensor:
        """Itself, as a module."""
        return self

    def load_state_dict(self, _: Any) -> None:
        """Does nothing."""

    def half(self) -> Tensor:
        """A copy in 16 bits."""
        self._machine.calls.append("half")
        return self

    def __repr__(self) -> str:
        return f"Tensor on {self.device}"


class Autocast:
    """An autocast of one device type; entering it records whether the machine's own device then autocasts."""

    def __init__(self, machine: Machine, device: str, enabled: Any = True, dtype: Any = None) -> None:
        self._machine, self._device = machine, device
        has_device = device in ("cpu", machine.type) and not (device == "cuda" and machine.name != "CUDA")
        self._on = (
            bool(enabled) and has_device and (device == "cuda" or dtype in (None, "float16", "bfloat16"))
        )

    def __enter__(self) -> None:
        states = self._machine.autocasts
        self._before = states.get(self._device, False)
        states[self._device] = self._on
        self._machine.calls.append(f"autocast {states.get(self._machine.type, False)}")

    def __exit__(self, *_: object) -> None:
        self._machine.autocasts[self._device] = self._before

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            with self:
                return function(*args)

        return called


class Event:
    """An event, which only an accelerator can record; acclimate's of a host measures with a clock."""

    def __init__(self, machine: Machine, fails: bool) -> None:
        self._machine, self._fails = machine, fails

    def record(self) -> None:
        """Records it."""
        if self._fails:
            raise NotHereError("no events here")
        self._machine.calls.append("record")

    def elapsed_time(self, _: Event) -> float:
        """The time up to another event."""
        return 1.0


class Machine:
    """One machine, and what a program did on it."""

    def __init__(self, name: str, devices: int = 2, bf16: bool = True) -> None:
        self.name, self.type, self.devices, self.bf16 = name, TYPES[name], devices, bf16
        self.calls: list[str] = []
        self.autocasts: dict[str, bool] = {}
        """Whether each device type autocasts."""
        self.environ: dict[str, str] = {}
        """The environment variables of the program."""

    @property
    def has_cuda(self) -> bool:
        """Whether the program finds CUDA: a variable of its environment may hide the devices."""
        return self.name == "CUDA" and self.environ.get("CUDA_VISIBLE_DEVICES", "0")[:1].isdigit()

    @property
    def is_host(self) -> bool:
        """Whether the program finds no accelerator."""
        return self.name == "HOST" or (self.name == "CUDA" and not self.has_cuda)

    def checked(self, device: Any) -> Device:
        """A device of this machine."""
        if isinstance(device, int):
            device = f"{self.type if self.name != 'HOST' else 'cuda'}:{device}"
        kind = str(device).partition(":")[0]
        if kind not in ("cpu", "meta", self.type) or (kind == "cuda" and not self.has_cuda):
            raise NotHereError(f"no {device} here")
        has_index = kind != self.type or kind == "cpu" or ":" in str(device)
        return Device(device if has_index else f"{device}:0")

    def memory(self, device: Any = None, device_index: Any = None) -> int:
        """The memory in use on a device; of a host, that of the process, and of a CPU beside CUDA, unused, 0."""
        device = device_index if device is None else device
        if device is not None and self.checked(device).type != self.type:
            if self.name != "CUDA":
                raise NotHereError("not the accelerator's device")
            return 0
        return 7

    def record(self, name: str, result: Any = None) -> Callable[..., Any]:
        """A function that is recorded."""

        def called(*args: Any, **_: Any) -> Any:
            shown = tuple(value for value in args if isinstance(value, (str, int, float, Tensor)))
            self.calls.append(f"{name} {shown}" if args else name)
            return result

        return called

    def only_here(self, *machines: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that raises on other machines."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                if self.name not in machines:
                    raise NotHereError("not here")
                return function(*args, **options)

            return called

        return wrap

    def scaler(self, device: str) -> Callable[..., Any]:
        """``GradScaler`` of a device type; torch turns CUDA's off where there is none."""

        def made(
            _scale: float = 1,
            _growth: float = 1,
            _backoff: float = 1,
            _interval: int = 1,
            enabled: Any = True,
        ) -> str:
            on = bool(enabled) and not (device == "cuda" and self.name != "CUDA")
            self.calls.append(f"scaler {on}")
            return f"scaler {on}"

        return made

    def seeds(self, on_host: bool) -> dict[str, Callable[..., Any]]:
        """Functions of random numbers, which without a device do nothing, or change the CPU's generator."""
        is_silent = self.name != "CUDA" and not on_host
        names = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")

        def seeding(name: str) -> Callable[..., Any]:
            called = self.record(name)
            return lambda *args: None if is_silent or (self.is_host and not on_host) else called(*args)

        found = {name: seeding(name) for name in names}
        return {**found, "get_rng_state_all": lambda: [] if is_silent else ["state"]}

    # -- torch -------------------------------------------------------------------------------------------

    def torch(self) -> types.SimpleNamespace:
        """The package."""
        has_cuda, has_any = self.name == "CUDA", self.name != "HOST"
        on_cuda, on_any = self.only_here("CUDA"), self.only_here("CUDA", "OTHER")

        def device(kind: Any, index: int | None = None) -> Device:
            if isinstance(kind, int):
                return self.checked(kind)
            return Device(kind if index is None else f"{kind}:{index}")

        def make(*_: Any, device: Any = "cpu", pin_memory: bool = False, **__: Any) -> Tensor:
            if pin_memory and self.name == "HOST":
                raise NotHereError("cannot pin")
            self.calls.append(f"make {device}{' pinned' if pin_memory else ''}")
            return Tensor(self, device)

        def load(_: Any, map_location: Any = None, **__: Any) -> Tensor:
            if map_location is None and not has_cuda:
                raise NotHereError("the file was saved on CUDA")
            if str(map_location).startswith("cpu:"):
                raise NotHereError(f"no {map_location} here")
            return Tensor(self, "cuda" if map_location is None else map_location)

        module = {
            "is_available": lambda: self.has_cuda, "device_count": lambda: self.devices if self.has_cuda else 0,
            "is_bf16_supported": lambda *_, **__: has_cuda and self.bf16, "is_initialized": lambda: has_cuda,
            "current_device": on_cuda(lambda: 0),
            "empty_cache": lambda: None, **self.seeds(on_host=False),
            "get_device_capability": on_cuda(lambda *_: (8, 0)),
            "synchronize": on_cuda(self.record("synchronize")), "set_device": on_cuda(self.record("set_device")),
            "max_memory_allocated": lambda device=None: self.memory(device) if has_cuda else 0,
            # Without CUDA an event can be made by a build for CUDA, but not recorded.
            "Event": lambda enable_timing=False: Event(self, fails=not has_cuda),
            "OutOfMemoryError": MemoryError, "nvtx": types.SimpleNamespace(),
            "amp": types.SimpleNamespace(
                GradScaler=self.scaler("cuda"),
                autocast=lambda enabled=True, dtype="float16", cache_enabled=True: Autocast(self, "cuda", enabled, dtype),
            ),
        }  # fmt: skip
        accelerator = types.SimpleNamespace(
            is_available=lambda: not self.is_host,
            device_count=lambda: 0 if self.is_host else self.devices,
            current_accelerator=lambda check_available=False: None if self.is_host else Device(self.type),
            synchronize=on_any(self.record("synchronize")),
            set_device_index=on_any(self.record("set_device")),
            current_device_index=on_any(lambda: 0),
            max_memory_allocated=on_any(self.memory),
            empty_cache=on_any(lambda: None),
        )
        any_module = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: self.devices if has_any else 1,
            **(self.seeds(on_host=True) if has_any else {}),
            get_device_capability=lambda *_: (8, 0) if self.name == "CUDA" else {"version": 1},
            Event=on_any(lambda enable_timing=False: Event(self, fails=False)),
        )
        if has_any:
            any_module.is_bf16_supported = lambda *_, **__: self.bf16

        def autocast(
            device_type: str, dtype: Any = None, enabled: Any = True, cache_enabled: Any = None
        ) -> Autocast:
            return Autocast(self, device_type, enabled, dtype)

        def scaler(device: str = "cuda", *args: Any, **options: Any) -> Any:
            return self.scaler(device)(*args, **options)

        backend = BACKENDS[self.name]
        distributed = types.SimpleNamespace(
            init_process_group=lambda backend=None, **_: self.record("group")(backend),
            get_default_backend_for_device=lambda _: backend,
            is_nccl_available=lambda: has_cuda,
            is_backend_available=lambda _: True,
        )
        made = types.SimpleNamespace(
            cuda=types.SimpleNamespace(**module), accelerator=accelerator, device=device, load=load,
            get_device_module=lambda _=None: any_module, distributed=distributed, Tensor=Tensor,
            version=types.SimpleNamespace(cuda="12.8" if has_cuda else None, hip=None),
            amp=types.SimpleNamespace(GradScaler=scaler, autocast=autocast), autocast=autocast,
            nn=types.SimpleNamespace(Module=Tensor), is_tensor=lambda x: isinstance(x, Tensor),
            manual_seed=self.record("seed the host"), is_autocast_enabled=lambda kind: self.autocasts.get(kind, False),
            bfloat16="bfloat16", float16="float16", float32="float32",
            ones=make, empty=make, zeros=make, ones_like=make, randn=make, OutOfMemoryError=MemoryError,
        )  # fmt: skip
        return made

    def accelerator(self) -> types.SimpleNamespace:
        """What acclimate's ``get_accelerator()`` gives."""
        quiet = self.name == "HOST"

        def name(index: int | None = None) -> str:
            if self.is_host:
                return "cpu"
            return self.type if index is None else f"{self.type}:{index}"

        return types.SimpleNamespace(
            device_name=name, current_device_name=lambda: name(0), current_device=lambda: 0,
            is_available=lambda: True, device_count=lambda: 1 if quiet else self.devices, is_initialized=lambda: True,
            is_bf16_supported=lambda **_: quiet or self.bf16, communication_backend_name=lambda: BACKENDS[self.name],
            on_accelerator=lambda x: x.device.type == self.type, **self.seeds(on_host=True), empty_cache=lambda: None,
            get_device_capability=lambda *_: (8, 0) if self.name == "CUDA" else (0, 0),
            synchronize=(lambda: None) if quiet else self.record("synchronize"),
            set_device=(lambda _: None) if quiet else self.record("set_device"),
            max_memory_allocated=self.memory, pin_memory=lambda x: x if quiet else x.pin_memory(),
            amp=types.SimpleNamespace(
                GradScaler=self.scaler(self.type),
                autocast=lambda enabled=True, dtype=None, cache_enabled=True: Autocast(self, self.type, enabled, dtype),
            ),
            OutOfMemoryError=MemoryError, Event=lambda enable_timing=False: Event(self, fails=False),
        )  # fmt: skip


class _Names(dict):  # type: ignore[type-arg]
    """Global names; one that is not defined is a recorder."""

    def __init__(self, machine: Machine, given: dict[str, Any]) -> None:
        super().__init__(given)
        self._machine = machine

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return self._machine.record(name)


def run(
    source: str, name: str, call: str = "", given: dict[str, Any] | None = None, **machine: Any
) -> Outcome:
    """What a piece of a program does on one machine; ``call`` is evaluated at its end."""
    here = Machine(name, **machine)
    torch, accelerator = here.torch(), here.accelerator()
    packages = {
        "torch": torch,
        "torchaudio": types.SimpleNamespace(
            load=lambda _: (Tensor(here, "cpu"), 16000),
            transforms=types.SimpleNamespace(Resample=lambda *_: Tensor(here, "cpu")),
        ),
        "torchvision": types.SimpleNamespace(
            models=types.SimpleNamespace(resnet18=lambda: Tensor(here, "cpu"))
        ),
        "acclimate": types.SimpleNamespace(get_accelerator=lambda: accelerator),
        "torch.distributed": torch,
        "os": types.SimpleNamespace(
            environ=here.environ, getenv=here.environ.get, putenv=here.environ.__setitem__
        ),
    }

    def load(module: str, _globals: Any = None, _locals: Any = None, names: Any = (), _level: int = 0) -> Any:
        if module not in packages and module.partition(".")[0] in ("torch", "acclimate"):
            at: Any = torch
            for part in module.split(".")[1:]:
                at = getattr(at, part)
            return at if names else torch
        return packages.get(module) or builtins.__import__(module, _globals, _locals, names)

    space = _Names(here, {"__builtins__": {**vars(builtins), "__import__": load}, "__name__": "piece"})
    result, error = "", ""
    try:
        exec(compile(source, "piece", "exec"), space)
        arguments = {key: value(here) if callable(value) else value for key, value in (given or {}).items()}
        result = repr(eval(call, space, arguments)) if call else ""
    except Exception as raised:  # the program's error is what is compared
        error = type(raised).__name__
    return Outcome(error, result, tuple(here.calls))
