"""Random numbers: a device's seeds, states and generators."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch

from acclimate.accelerator.devices import DeviceLike, Devices
from acclimate.errors import UnsupportedError


class RandomNumbers(Devices):
    """Random number generators, one per device."""

    def random(self) -> types.ModuleType:
        """torch's module of random number functions.

        Delegates to: ``torch.random``, for every device.
        CPU: same.
        CUDA: same.
        """
        return torch.random

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        """The generator that random operations on a device use by default.

        Delegates to: ``torch.<device>.default_generators[i]``, else the module's ``default_generator``.
        CPU: ``torch.default_generator``.
        CUDA: ``torch.cuda.default_generators[i]``.

        Raises:
            InvalidDeviceError: there is no such device.
            UnsupportedError: torch's module for the device does not expose its generators.
        """
        index = self._index(device_index)
        module = self.torch_module
        self.init()  # torch creates a device's generators with its context
        generators: Sequence[torch.Generator] | None = getattr(module, "default_generators", None)
        if generators:
            return generators[index]
        generator = getattr(module, "default_generator", None)
        if generator is None:
            raise UnsupportedError(
                f"torch.{self.device_type} exposes no default generators. {self._advice_on_generators(index)}"
            )
        found: torch.Generator = generator(index) if callable(generator) else generator
        return found

    def _advice_on_generators(self, index: int) -> str:
        name = self.device_name(index)
        try:
            torch.Generator(device=name)
        except RuntimeError:  # also NotImplementedError
            return "Draw the numbers on the host, and copy them to the device."
        return f'Pass your own: torch.Generator(device="{name}").'

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The default generators of all devices, by index.

        Delegates to: :meth:`default_generator` of each device.
        CPU: torch's single host generator, once for each device.
        CUDA: ``torch.cuda.default_generators``.

        Raises:
            UnsupportedError: torch's module for the device does not expose its generators.
        """
        return tuple(self.default_generator(index) for index in range(self.device_count()))

    def get_rng_state(self, device_index: DeviceLike = None) -> torch.Tensor:
        """The state of a device's generator: a uint8 tensor on the host.

        Delegates to: ``torch.<device>.get_rng_state``, else the default generator's ``get_state``.
        CPU: ``torch.get_rng_state``.
        CUDA: ``torch.cuda.get_rng_state``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        get = self._offered("get_rng_state")
        if get is None:
            return self.default_generator(index).get_state()
        state: torch.Tensor = get(torch.device(self.device_type, index))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        """Restores a state from :meth:`get_rng_state`.

        Delegates to: ``torch.<device>.set_rng_state``, else the default generator's ``set_state``.
        CPU: ``torch.set_rng_state``, for any index.
        CUDA: ``torch.cuda.set_rng_state``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        restore = self._offered("set_rng_state")
        if restore is None:
            self.default_generator(index).set_state(new_state)
        else:
            restore(new_state, torch.device(self.device_type, index))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of every device's generator, by index.

        Delegates to: :meth:`get_rng_state` of each device.
        CPU: a single state, since torch has one host generator.
        CUDA: as ``torch.cuda.get_rng_state_all``.
        """
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        """Restores the states from :meth:`get_rng_state_all`.

        Delegates to: :meth:`set_rng_state` of each device.
        CPU: takes the single state.
        CUDA: as ``torch.cuda.set_rng_state_all``.

        Raises:
            InvalidDeviceError: there are more states than devices.
        """
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        """Seeds the current device's generator.

        Delegates to: ``torch.<device>.manual_seed``, else ``manual_seed_all`` if there is one device, else
            the default generator's ``manual_seed``.
        CPU: torch's host generator only.
        CUDA: ``torch.cuda.manual_seed``.
        """
        seed = int(seed)  # torch.cuda takes a float too, such as the time
        apply = self._offered("manual_seed")
        if apply is None and self.device_count() == 1:
            apply = self._offered("manual_seed_all")  # every device has it, since torch.manual_seed needs it
        if apply is None:
            self.default_generator().manual_seed(seed)
        else:
            apply(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the generators of all devices.

        Delegates to: ``torch.<device>.manual_seed_all``, else the default generator of each device.
        CPU: torch's host generator only.
        CUDA: ``torch.cuda.manual_seed_all``.
        """
        seed = int(seed)
        apply = self._offered("manual_seed_all")
        if apply is not None:
            apply(seed)
        elif self.device_count() == 1:
            self.manual_seed(seed)
        else:
            for generator in self.default_generators:
                generator.manual_seed(seed)

    def seed(self) -> int:
        """Seeds the current device's generator with a random number, and returns the number.

        Delegates to: the default generator's ``seed``.
        CPU: torch's host generator.
        CUDA: as ``torch.cuda.seed``.
        """
        return int(self.default_generator().seed())

    def seed_all(self) -> int:
        """Seeds the generators of all devices with one random number, and returns the number.

        Delegates to: :meth:`seed`, then :meth:`manual_seed_all`.
        CPU: torch's host generator.
        CUDA: as ``torch.cuda.seed_all``.
        """
        seed = self.seed()
        self.manual_seed_all(seed)
        return seed

    def initial_seed(self) -> int:
        """The last seed of the current device's generator.

        Delegates to: ``torch.<device>.initial_seed``, else the default generator's ``initial_seed``.
        CPU: ``torch.initial_seed``.
        CUDA: ``torch.cuda.initial_seed``.
        """
        initial = self._offered("initial_seed")
        return int(initial() if initial is not None else self.default_generator().initial_seed())
