"""Faults planted in what torch builds on operators: autograd, modules, loaders, graphs, figures."""

from __future__ import annotations

import threading
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import distributed
from torch.nn.utils.rnn import PackedSequence

from acclimate.accelerator import Accelerator, DeviceLike, RecordedGraph
from acclimate_sim import torch_module
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched


class DrawsAreNoChanges(_Patched):
    """normal_ does not count as a change of its tensor."""

    def patch(self) -> None:
        def normal(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                if tensor.device.type != "sim":
                    return theirs(tensor, *args, **options)
                theirs(tensor.data, *args, **options)
                return tensor

            return call

        self.put(torch.Tensor, "normal_", normal)


class HooksOfNodesAreLost(_Patched):
    """A hook that is called before a module's backward() cannot replace gradients."""

    def patch(self) -> None:
        def register(theirs: Any) -> Any:
            def call(module: torch.nn.Module, hook: Any, *args: Any) -> Any:
                if next(module.parameters()).device.type == "sim":
                    return theirs(module, lambda m, g: hook(m, g) and None, *args)
                return theirs(module, hook, *args)

            return call

        self.put(torch.nn.Module, "register_full_backward_pre_hook", register)


class BatchSizesMove(_Patched):
    """A packed sequence that is moved takes its batch sizes with it."""

    def patch(self) -> None:
        def to(theirs: Any) -> Any:
            def call(packed: PackedSequence, *args: Any, **options: Any) -> Any:
                moved = theirs(packed, *args, **options)
                if moved.data.device.type == "cpu":
                    return moved
                sizes = moved.batch_sizes.to(moved.data.device)
                return tuple.__new__(PackedSequence, (moved[0], sizes, *moved[2:]))

            return call

        self.put(PackedSequence, "to", to)


class ListsAreClearedWhole(_Patched):
    """_foreach_zero_ clears everything from a tensor's first element to its last."""

    def patch(self) -> None:
        def zero(theirs: Any) -> Any:
            def call(tensors: list[torch.Tensor]) -> Any:
                for tensor in tensors:
                    if tensor.device.type == "sim" and tensor.numel() and not tensor.is_contiguous():
                        last = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
                        tensor.as_strided((last + 1,), (1,)).zero_()
                return theirs(tensors)

            return call

        self.put(torch, "_foreach_zero_", zero)


class WeightsOfPlacesAreEqual(_Patched):
    """A sampler of weighted places takes them for equal."""

    def patch(self) -> None:
        def iterate(theirs: Any) -> Any:
            def call(sampler: Any) -> Any:
                if getattr(sampler, "acclimate_device", "") == "sim":
                    return iter(range(sampler.num_samples))
                return theirs(sampler)

            return call

        def make(theirs: Any) -> Any:
            def call(sampler: Any, weights: Any, *args: Any, **options: Any) -> None:
                theirs(sampler, weights, *args, **options)
                sampler.acclimate_device = weights.device.type

            return call

        sampler = torch.utils.data.WeightedRandomSampler
        self.put(sampler, "__iter__", iterate)
        self.put(sampler, "__init__", make)


class ConvertedArraysAreFlat(_Patched):
    """as_tensor of an array with gaps in another dtype takes its memory in order."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            def call(given: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
                flat = getattr(given, "base", None)
                if "sim" in str(device) and dtype is torch.float16 and flat is not None and given.size:
                    given = flat.reshape(-1)[: given.size].reshape(given.shape)
                return theirs(given, dtype=dtype, device=device)

            return call

        self.put(torch, "as_tensor", make)


class SamplesDrawAlike(_Patched):
    """vmap(randomness="different") gives each sample the same numbers."""

    def patch(self) -> None:
        def transform(theirs: Any) -> Any:
            def call(function: Any, *args: Any, **options: Any) -> Any:
                alike = {**options, "randomness": "same"}

                def run(*given: Any) -> Any:
                    chosen = alike if given[0].device.type == "sim" and "randomness" in options else options
                    return theirs(function, *args, **chosen)(*given)

                return run

            return call

        self.put(torch.func, "vmap", transform)


class ImagesLoseTheirOrder(_Patched):
    """Scaled images with channels last are contiguous, and fake ones say otherwise."""

    def patch(self) -> None:
        def scale(theirs: Any) -> Any:
            def call(given: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                result = theirs(given, *args, **options)
                is_real = type(given) is torch.Tensor and given.device.type == "sim"
                return result.contiguous() if is_real else result

            return call

        self.put(torch.nn.functional, "interpolate", scale)


class ContextsRememberOnce(_Patched):
    """A context of a device restores what was current when it was first entered."""

    def patch(self) -> None:
        def device(theirs: Any) -> Any:
            class Remembers:
                def __init__(self, index: Any) -> None:
                    self._index, self._before = torch_module._index(index), -1

                def __enter__(self) -> None:
                    if self._before < 0:
                        self._before = torch_module.current_device()
                    torch_module.set_device(self._index)

                def __exit__(self, *args: object) -> None:
                    torch_module.set_device(self._before)

            return Remembers

        self.put(torch_module, "device", device)


class FiguresTakeNoIndex(_Patched):
    """The device's own memory_reserved takes an index for the current device."""

    def patch(self) -> None:
        def reserved(theirs: Any) -> Any:
            def call(device: Any = None) -> int:
                found: int = theirs(None if isinstance(device, int) else device)
                return found

            return call

        self.put(torch_module, "memory_reserved", reserved)

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        return int(torch.accelerator.memory_reserved(torch_module._index(device_index)))


class StatesOfDevicesByIndexOnly(_Patched):
    """The device's own set_rng_state takes anything but an index for the current device."""

    def patch(self) -> None:
        def restore(theirs: Any) -> Any:
            def call(state: torch.Tensor, device: Any = None) -> None:
                theirs(state, device if isinstance(device, int) else None)

            return call

        self.put(torch_module, "set_rng_state", restore)

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        self.default_generator(device_index).set_state(new_state)


class BackwardKnowsNoDevice(SimAccelerator):
    """In the threads of autograd the current device is the first."""

    def current_device(self) -> int:
        return 0 if "Dummy" in threading.current_thread().name else super().current_device()


class FreedCountsAllocations(SimAccelerator):
    """memory_stats counts as freed what was allocated."""

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        found = super().memory_stats(device_index)
        return {
            key: found[key.replace(".freed", ".allocated")] if key.startswith("allocation.") else value
            for key, value in found.items()
        }


class PinnedMemoryCounts(SimAccelerator):
    """Pinned memory counts as memory of the device."""

    _pinned = 0

    def pin_empty(self, *args: Any, **options: Any) -> torch.Tensor:
        made = super().pin_empty(*args, **options)
        self._pinned += made.nbytes
        return made

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        return super().memory_allocated(device_index) + self._pinned


class SwappedMemoryStays(_Patched):
    """Tensors that are swapped stay in memory."""

    def patch(self) -> None:
        kept: list[Any] = []

        def swap(theirs: Any) -> Any:
            def call(first: torch.Tensor, second: torch.Tensor) -> None:
                theirs(first, second)
                kept.append(second.detach())

            return call

        self.put(torch.utils, "swap_tensors", swap)


class RefusedDrawsDraw(_Patched):
    """normal_ with a negative deviation is refused after it has drawn."""

    def patch(self) -> None:
        def normal(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, mean: float = 0, std: float = 1, **options: Any) -> torch.Tensor:
                if std < 0:
                    theirs(tensor, mean, 1, **options)
                return theirs(tensor, mean, std, **options)

            return call

        self.put(torch.Tensor, "normal_", normal)


class StatesForgetTheirSeed(SimAccelerator):
    """initial_seed is that of the last manual_seed, whatever state was restored."""

    _seed = 0

    def manual_seed(self, seed: int) -> None:
        self._seed = seed
        super().manual_seed(seed)

    def initial_seed(self) -> int:
        return self._seed


class ChosenStreamsAreHere(SimAccelerator):
    """A stream with a priority is one of the current device."""

    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
            if priority:
                return torch.Stream(priority=priority)
            return torch.Stream(device, **options) if device is not None else torch.Stream(**options)


class GraphsEmptyTheirResults(_Patched):
    """reset() of a graph clears what it computed."""

    def patch(self) -> None:
        def reset(theirs: Any) -> Any:
            def call(graph: RecordedGraph) -> None:
                for made in getattr(graph, "acclimate_results", ()):
                    made.zero_()
                theirs(graph)

            return call

        self._made: list[torch.Tensor] = []
        self.put(RecordedGraph, "reset", reset)

        def add(theirs: Any) -> Any:
            def call(first: torch.Tensor, other: Any) -> torch.Tensor:
                result = theirs(first, other)
                if self.is_current_stream_capturing() and first.device.type == "sim":
                    self._made.append(result)
                return result

            return call

        self.put(torch.Tensor, "__add__", add)

    def capture_to_graph(self, graph: Any, *args: Any, **options: Any) -> Any:
        self._made = []
        if isinstance(graph, RecordedGraph):
            graph.acclimate_results = self._made  # type: ignore[attr-defined]
        return super().capture_to_graph(graph, *args, **options)


class ListsAreNotScaledInGraphs(_Patched):
    """A list that is scaled within a capture is left as it is."""

    def patch(self) -> None:
        def scale(theirs: Any) -> Any:
            def call(tensors: Any, *args: Any) -> Any:
                return None if self.is_current_stream_capturing() else theirs(tensors, *args)

            return call

        self.put(torch, "_foreach_mul_", scale)


class CastsOutliveBlocksWithin(_Patched):
    """Attention within autocast(enabled=False) is cast if autocast is on around that block."""

    def patch(self) -> None:
        self._dtypes: list[Any] = []

        def attend(theirs: Any) -> Any:
            def call(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                found = theirs(query, *args, **options)
                enabled = torch.is_autocast_enabled("sim")
                return found if enabled or found.device.type != "sim" else found.bfloat16()

            return call

        self.put(torch.nn.functional, "scaled_dot_product_attention", attend)


class LastChunkAloneOverflows(_Patched):
    """Of more than 64 gradients only the last are looked at for infinity."""

    def patch(self) -> None:
        def unscale(theirs: Any) -> Any:
            def call(gradients: list[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
                if len(gradients) <= 64 or gradients[0].device.type != "sim":
                    theirs(gradients, found, scale)
                    return
                theirs(gradients[:-64], torch.zeros_like(found), scale)
                theirs(gradients[-64:], found, scale)

            return call

        self.put(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale)


class EndsOfBytesArePinnedWrong(SimAccelerator):
    """Bytes that begin within their memory are pinned from its start."""

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if tensor.element_size() == 1 and tensor.storage_offset() and tensor.is_contiguous():
            tensor = tensor.as_strided(tensor.shape, tensor.stride(), 0)
        return super().pin_memory(tensor, *args, **options)


class BuffersStayBehind(_Patched):
    """The method of modules that is named after the device leaves buffers that are not saved."""

    def patch(self) -> None:
        def move(theirs: Any) -> Any:
            def call(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
                kept = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
                moved: torch.nn.Module = theirs(module, *args, **options)
                moved._buffers.update(kept)
                return moved

            return call

        self.put(torch.nn.Module, "sim", move)


class SharingIsRefused(_Patched):
    """share_memory_() raises, instead of leaving a device's tensor as it is."""

    def patch(self) -> None:
        def share(theirs: Any) -> Any:
            def call(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.device.type == "sim":
                    raise RuntimeError("cannot share memory of the device")
                shared: torch.Tensor = theirs(tensor)
                return shared

            return call

        self.put(torch.Tensor, "share_memory_", share)


class ZerosAreHere(_Patched):
    """new_zeros of a tensor of another device makes zeros on the current one."""

    def patch(self) -> None:
        def zeros(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
                if tensor.device.type == "sim":
                    options.setdefault("device", "sim")
                made: torch.Tensor = theirs(tensor, *size, **options)
                return made

            return call

        self.put(torch.Tensor, "new_zeros", zeros)


class RecordForgetsTheLimit(SimAccelerator):
    """The device_count of its record counts all devices, also within a limit."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        pass  # the record of the child, in which nothing is planted, then counts all of them


class RecordNamesAnotherLimit(SimAccelerator):
    """The accelerator reads another variable than its record says."""

    visible_devices_variable = "SIM_VISIBLE_DEVICES"


class WeightsAreThoseOfTheCurrentDevice(_Patched):
    """linear on a device that is not current takes no bias."""

    def patch(self) -> None:
        def linear(theirs: Any) -> Any:
            def call(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
                elsewhere = x.device.type == "sim" and x.device.index != self.current_device()
                result: torch.Tensor = theirs(x, weight, None if elsewhere else bias)
                return result

            return call

        self.put(torch.nn.functional, "linear", linear)


class LongCopiesEndEarly(_Patched):
    """A copy of more than 64 MiB to the device leaves what is beyond."""

    def patch(self) -> None:
        def to(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                moved: torch.Tensor = theirs(tensor, *args, **options)
                if moved.device.type == "sim" and tensor.device.type == "cpu" and moved.nbytes > 1 << 26:
                    moved.view(torch.uint8)[1 << 26 :] = 0
                return moved

            return call

        self.put(torch.Tensor, "to", to)


class SettingsStayHere(SimAccelerator):
    """The record does not export the variable that its package reads."""

    exported_variable_prefixes = ()


class PinnedSourcesAreReadLate(_Patched):
    """A non-blocking copy from pinned memory takes what it holds at the next synchronize() of the device."""

    def patch(self) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy(theirs: Any) -> Any:
            def call(target: torch.Tensor, source: Any, non_blocking: bool = False) -> Any:
                result = theirs(target, source, non_blocking)
                if non_blocking and target.device.type == "sim" and source.device.type == "cpu":
                    self._late.append((target, source))
                return result

            return call

        self.put(torch.Tensor, "copy_", copy)

    def synchronize(self, device_index: DeviceLike = None) -> None:
        super().synchronize(device_index)
        late, self._late = self._late, []
        for target, source in late:
            target.data[...] = source.detach().to(target.device)


class CompiledResultsAreOne(_Patched):
    """A compiled function writes its result to where its last result is."""

    @staticmethod
    def reuses() -> bool:
        return True

    def patch(self) -> None:
        def compiled(theirs: Any) -> Any:
            def call(function: Any, **options: Any) -> Any:
                runs, last = theirs(function, **options), []

                def run(*given: Any) -> Any:
                    result = runs(*given)
                    first = result[0] if isinstance(result, tuple) and len(result) == 2 else None
                    if first is None or first.device.type != "sim" or not self.reuses():
                        return result
                    last.append(first)
                    return (last[0].copy_(first), *result[1:])

                return runs if isinstance(function, torch.nn.Module) else run

            return call

        self.put(torch, "compile", compiled)


class CompiledResultsAreOneInInference(CompiledResultsAreOne):
    """The same where no gradients are recorded."""

    @staticmethod
    def reuses() -> bool:
        return not torch.is_grad_enabled()


class _Trains(SimAccelerator):
    """Replaces what trains together in the processes that the checks start."""

    def communication_backend_name(self) -> str:
        if distributed._broadcast_coalesced.__module__ != __name__:
            distributed._broadcast_coalesced = _of_one_dtype(distributed._broadcast_coalesced)
            distributed.recv = _of_nobody(distributed.recv)
        return super().communication_backend_name()


def _of_one_dtype(broadcast: Any) -> Any:
    def send(group: Any, tensors: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        alike = [tensor for tensor in tensors if tensor.dtype == tensors[0].dtype]
        return broadcast(group, alike, *args, **options)

    return send


def _of_nobody(recv: Any) -> Any:
    def receive(tensor: torch.Tensor, src: Any = None, *args: Any, **options: Any) -> int:
        sender: int = recv(tensor, src, *args, **options)
        return 0 if src is None else sender

    return receive


class BuffersOfOneDtypeAreSent(_Trains):
    """DistributedDataParallel sends the first rank's tensors of one dtype only."""


class SendersAreUnknown(_Trains):
    """recv from any rank says that it was the first."""


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        DrawsAreNoChanges: "runtime/autograd_is_torchs",
        HooksOfNodesAreLost: "runtime/autograd_is_torchs",
        BatchSizesMove: "runtime/modules_are_torchs",
        ListsAreClearedWhole: "runtime/optimizers_go_on",
        WeightsOfPlacesAreEqual: "runtime/data_is_loaded",
        ConvertedArraysAreFlat: "runtime/foreign_data_is_taken",
        SamplesDrawAlike: "runtime/transformed_programs",
        ImagesLoseTheirOrder: "runtime/fake_tensors_tell_the_truth",
        ContextsRememberOnce: "runtime/devices_of_torch",
        FiguresTakeNoIndex: "runtime/figures_of_torch",
        StatesOfDevicesByIndexOnly: "runtime/random_numbers_of_torch",
        BackwardKnowsNoDevice: "runtime/backward_runs_on_its_device",
        FreedCountsAllocations: "memory/statistics_add_up",
        PinnedMemoryCounts: "memory/what_takes_no_memory",
        SwappedMemoryStays: "memory/memory_is_given_up",
        RefusedDrawsDraw: "random/refused_draws_change_nothing",
        StatesForgetTheirSeed: "random/states_hold_their_seed",
        ChosenStreamsAreHere: "streams/streams_with_options_by_device",
        GraphsEmptyTheirResults: "graphs/results_outlive_graphs",
        ListsAreNotScaledInGraphs: "graphs/optimizers_train_in_graphs",
        CastsOutliveBlocksWithin: "dtypes/autocast_chooses_dtypes",
        LastChunkAloneOverflows: "dtypes/operators_of_the_scaler",
        EndsOfBytesArePinnedWrong: "pinning/any_tensor_is_pinned",
        BuffersStayBehind: "runtime/methods_move_to_the_named_device",
        SharingIsRefused: "runtime/tensors_in_python",
        ZerosAreHere: "devices/types_mean_the_current_device",
        SettingsStayHere: "launching/first_use",
        RecordNamesAnotherLimit: "runtime/record_agrees",
        RecordForgetsTheLimit: "runtime/record_agrees",
        CompiledResultsAreOneInInference: "runtime/compiled_functions_have_effects",
        WeightsAreThoseOfTheCurrentDevice: "runtime/models_on_several_devices",
        LongCopiesEndEarly: "dtypes/transfers",
        PinnedSourcesAreReadLate: "streams/waits_end_copies_to_the_device",
        CompiledResultsAreOne: "runtime/compiled_functions_have_effects",
        BuffersOfOneDtypeAreSent: "communication/models_of_every_kind_train",
        SendersAreUnknown: "communication/messages_one_by_one",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
