"""Faults planted in the emulated device between calls: owners, threads, queues, other devices."""

# ruff: noqa: RUF012

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate_sim.accelerator import SimAccelerator
from operator_mutants import _there, _WithKernels


class _Patched(SimAccelerator):
    """Replaces attributes of torch's objects until :meth:`uninstall`."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Any, str, Any]] = []
        self.patch()

    def patch(self) -> None:
        """Replaces what the fault is in."""

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute by what is made of it."""
        theirs = getattr(owner, name)
        self._kept.append((owner, name, theirs))
        setattr(owner, name, make(theirs))

    def uninstall(self) -> None:
        """Puts everything back."""
        for owner, name, theirs in reversed(self._kept):
            setattr(owner, name, theirs)


class RefusalsLeaveTheDevice(_Patched):
    """An allocation that is refused on another device makes that device the current one."""

    def patch(self) -> None:
        def empty(theirs: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                try:
                    return theirs(*args, **options)
                except torch.OutOfMemoryError:
                    self.set_device(torch.device(options["device"]).index or 0)
                    raise

            return call

        self.put(torch, "empty", empty)


class TypesMeanNothing(_Patched):
    """to() of the device's type returns a tensor of another device as it is."""

    def patch(self) -> None:
        def to(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                if args == ("sim",) and not options and tensor.device.type == "sim":
                    return tensor
                return theirs(tensor, *args, **options)

            return call

        self.put(torch.Tensor, "to", to)


class StreamsWithoutNamesEnd(SimAccelerator):
    """A stream that only a block refers to is no longer current once garbage is collected."""

    @contextmanager
    def _block(self, stream: Any) -> Any:
        with super().stream(stream):
            before = self.current_stream()

            def collected(phase: str, info: Any) -> None:
                if phase == "stop" and self.current_stream() == before:
                    self.set_stream(self.default_stream())

            gc.callbacks.append(collected)
            try:
                yield
            finally:
                gc.callbacks.remove(collected)
                self.set_stream(before)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return super().stream(stream) if stream is None else self._block(stream)


class CopiesAreReadLate(_Patched):
    """A non-blocking copy to pinned memory takes what its source holds at the next synchronize()."""

    def patch(self) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy(theirs: Any) -> Any:
            def call(target: torch.Tensor, source: Any, non_blocking: bool = False) -> Any:
                if non_blocking and source.device.type == "sim" and target.device.type == "cpu":
                    self._late.append((target, source))
                return theirs(target, source, non_blocking)

            return call

        self.put(torch.Tensor, "copy_", copy)

    def synchronize(self, device_index: DeviceLike = None) -> None:
        super().synchronize(device_index)
        late, self._late = self._late, []
        for target, source in late:
            target.data[...] = source.detach().cpu()


class GeometricNumbersRepeat(_WithKernels):
    """geometric_ draws the same numbers each time."""

    kernels = {
        "geometric_": lambda x, p, *, generator=None: x.fill_(2).copy_(
            torch.arange(1.0, x.numel() + 1).to(x.device)
        )
    }


class StatesOfAnyLength(SimAccelerator):
    """A state of another length is taken, and changes nothing."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        if new_state.numel() == self.get_rng_state(device_index).numel():
            super().set_rng_state(new_state, device_index)


class ComplexNumbersHaveOnePart(_WithKernels):
    """Complex normal numbers have a variance of 1 in both parts."""

    @staticmethod
    def _normal(x: torch.Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> torch.Tensor:
        drawn = torch.empty(x.shape, dtype=x.dtype).normal_(mean, std)
        return x.copy_(drawn * 2**0.5 if x.is_complex() else drawn)

    kernels = {"normal_": _normal}


class PartsBeginAtTheStart(_Patched):
    """A non-blocking copy of a part of pinned memory takes the start of that memory."""

    def patch(self) -> None:
        def to(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                if options.get("non_blocking") and tensor.is_pinned() and tensor.storage_offset():
                    tensor = tensor.as_strided(tensor.shape, tensor.stride(), 0)
                return theirs(tensor, *args, **options)

            return call

        self.put(torch.Tensor, "to", to)


class ConversionsShareMemory(_Patched):
    """Numbers of pinned memory that become integers on the way are put into one piece of memory each time."""

    def patch(self) -> None:
        self._one: torch.Tensor | None = None

        def to(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                found = theirs(tensor, *args, **options)
                if torch.int32 not in args or not tensor.is_pinned():
                    return found
                if self._one is None or self._one.shape != found.shape:
                    self._one = found
                return self._one.copy_(found)

            return call

        self.put(torch.Tensor, "to", to)


class PinsAgain(_Patched):
    """Tensor.pin_memory() copies a tensor that is pinned."""

    def patch(self) -> None:
        self.put(
            torch.Tensor,
            "pin_memory",
            lambda theirs: lambda x, *a: theirs(x.clone() if x.is_pinned() else x, *a),
        )


class CountsByThread(SimAccelerator):
    """Memory that another thread has freed stays counted."""

    _more = 0

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        return super().memory_allocated(device_index) + self._more

    def __init__(self) -> None:
        super().__init__()
        import threading

        self._thread, theirs = threading.Thread, threading.Thread.run
        mutant = weakref.ref(self)

        def run(thread: Any) -> None:
            one = mutant()
            before = SimAccelerator.memory_allocated(one) if one is not None else 0
            theirs(thread)
            if one is not None and SimAccelerator.memory_allocated(one) < before:
                one._more += 512

        threading.Thread.run = run  # type: ignore[method-assign]
        self._theirs = theirs

    def uninstall(self) -> None:
        """Puts Python's own method back."""
        self._thread.run = self._theirs  # type: ignore[method-assign]


class LargeResultsRaisePlainErrors(_WithKernels):
    """neg of which the result does not fit raises an error of no type of its own."""

    @staticmethod
    def _neg(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 2**40:
            raise RuntimeError("launch failed")
        return _there(-x.cpu(), x)

    kernels = {"neg": _neg}


class PlacesAreKept(_WithKernels):
    """nonzero keeps its result."""

    kept: list[torch.Tensor] = []

    @staticmethod
    def _nonzero(x: torch.Tensor) -> torch.Tensor:
        found = _there(x.cpu().nonzero(), x)
        PlacesAreKept.kept.append(found)
        return found

    kernels = {"nonzero": _nonzero}

    def uninstall(self) -> None:
        """Puts the device's own operator back, and frees what it kept."""
        super().uninstall()
        self.kept.clear()


class StoragesCopyWords(_Patched):
    """A storage is copied by words of 4 bytes."""

    def patch(self) -> None:
        def copy(theirs: Any) -> Any:
            def call(target: Any, source: Any, non_blocking: bool = False) -> Any:
                held = target.tolist() if len(target) < 64 else []
                result = theirs(target, source, non_blocking)
                for place in range(len(held) // 4 * 4, len(held)):
                    target[place] = held[place]
                return result

            return call

        self.put(torch.UntypedStorage, "copy_", copy)


class SwapsNothing(_Patched):
    """torch.utils.swap_tensors does nothing."""

    def patch(self) -> None:
        self.put(torch.utils, "swap_tensors", lambda theirs: lambda first, second: None)


class MappedFilesGiveTheFirst(_Patched):
    """torch.load(mmap=True) gives each tensor the numbers of the first."""

    def patch(self) -> None:
        def load(theirs: Any) -> Any:
            def call(file: Any, *args: Any, **options: Any) -> Any:
                found = theirs(file, *args, **options)
                if options.get("mmap") and isinstance(found, list):
                    found = [found[0].to(tensor.dtype)[: len(tensor)] for tensor in found]
                return found

            return call

        self.put(torch, "load", load)


class ConjugationIsNotSaved(_Patched):
    """A conjugated view is saved as what it is a view of."""

    def patch(self) -> None:
        def save(theirs: Any) -> Any:
            def call(things: Any, file: io.BytesIO, *args: Any, **options: Any) -> Any:
                if isinstance(things, torch.Tensor) and things.is_conj():
                    things = things.conj()
                return theirs(things, file, *args, **options)

            return call

        self.put(torch, "save", save)


class NormIsThatOfTheFirstEps(_WithKernels):
    """A layer norm of one shape keeps the epsilon that it was called with first."""

    @staticmethod
    def _norm(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        eps = NormIsThatOfTheFirstEps.first.setdefault(tuple(x.shape), eps)
        given = [None if t is None else t.cpu() for t in (weight, bias)]
        return tuple(_there(t, x) for t in torch.native_layer_norm(x.cpu(), shape, *given, eps))

    first: dict[Any, float] = {}
    kernels = {"native_layer_norm": _norm}


class StatisticsAreShared(_WithKernels):
    """A layer norm keeps what its gradient needs in memory that the next one of its shape uses."""

    kept: dict[Any, Any] = {}

    @staticmethod
    def _norm(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        given = [None if t is None else t.cpu() for t in (weight, bias)]
        found = [_there(t, x) for t in torch.native_layer_norm(x.cpu(), shape, *given, eps)]
        shared = StatisticsAreShared.kept.setdefault((tuple(x.shape), x.device, x.dtype), found[1:])
        for ours, theirs in zip(shared, found[1:], strict=True):
            ours.data.copy_(theirs)
        return found[0], *shared

    kernels = {"native_layer_norm": _norm}

    def uninstall(self) -> None:
        """Puts the device's own operator back, and frees what it kept."""
        super().uninstall()
        self.kept.clear()


class ResultsOfNothingAreFalse(_WithKernels):
    """all() over a dimension of nothing is False."""

    @staticmethod
    def _all(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        found = x.cpu().all(dim, keepdim)
        return _there(found if x.numel() else torch.zeros_like(found), x)

    kernels = {"all.dim": _all}


class LastNaNIsTold(_WithKernels):
    """argmax of long rows tells the last NaN."""

    @staticmethod
    def _argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        host = x.cpu()
        if dim is None or host.shape[dim] < 4096 or not host.isnan().any():
            return _there(host.argmax(dim, keepdim), x)
        return _there(host.shape[dim] - 1 - host.flip(dim).argmax(dim, keepdim), x)

    kernels = {"argmax": _argmax}


class SeparatedPlacesAreJoined(_WithKernels):
    """A write at places that a slice separates takes them for neighbours."""

    @staticmethod
    def _put(x: torch.Tensor, places: Any, given: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        host, numbers = x.cpu(), given.cpu()
        named = [n for n, place in enumerate(places) if place is not None]
        if len(named) > 1 and named[-1] - named[0] >= len(named) and numbers.dim() > 1 and x.dim() == 4:
            numbers = numbers.transpose(0, 1).reshape(numbers.shape)
        key = tuple(slice(None) if place is None else place.cpu() for place in places)
        if accumulate:
            host.index_put_([place.cpu() for place in places], numbers, accumulate=True)
        else:
            host[key] = numbers
        return x.copy_(host)

    kernels = {"index_put_": _put}


class NumbersOnTheLeftLoseNaN(_WithKernels):
    """xlogy of a number of Python that is 0 is 0, also where the other operand is NaN."""

    @staticmethod
    def _xlogy(x: float, y: torch.Tensor) -> torch.Tensor:
        found = torch.xlogy(x, y.cpu())
        return _there(torch.zeros_like(found) if x == 0 else found, y)

    kernels = {"xlogy.Scalar_Self": _xlogy}


class ManyGroupsAreCut(_WithKernels):
    """A convolution of more than 64 groups gives zeros for the others."""

    @staticmethod
    def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Any) -> torch.Tensor:
        found = torch.ops.aten.convolution(
            x.cpu(), weight.cpu(), None if bias is None else bias.cpu(), *options
        )
        if options[-1] > 64:
            found[:, 64 * found.shape[1] // options[-1] :] = 0
        return _there(found, x)

    kernels = {"convolution_overrideable": _convolution}


class NormsOfListsAreEuclidean(_WithKernels):
    """torch._foreach_norm gives Euclidean norms, whichever are asked for."""

    @staticmethod
    def _norm(tensors: list[torch.Tensor], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
        return [_there(torch.linalg.vector_norm(x.cpu(), 2, dtype=dtype), x) for x in tensors]

    kernels = {"_foreach_norm.Scalar": _norm}


class TruthIsCounted(_WithKernels):
    """Truth values that are written to one place more than once are counted in its byte."""

    @staticmethod
    def _put(
        self: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
    ) -> torch.Tensor:
        there = [None if one is None else one.cpu() for one in indices]
        found, given = self.cpu(), values.cpu()
        if accumulate and found.dtype is torch.bool:
            found, given = found.view(torch.uint8), given.view(torch.uint8)
        found = torch.ops.aten.index_put(found, there, given, accumulate)
        self.view(found.dtype).copy_(found)
        return self

    kernels = {"_index_put_impl_": _put}


class FrozenInputsFreeze(_WithKernels):
    """A convolution with a frozen input and weight has no gradient of its bias."""

    @staticmethod
    def _backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any) -> Any:
        *shape, asked = options
        channels = [weight.shape[0]]
        found = torch.ops.aten.convolution_backward(
            gradient.cpu(), x.cpu(), weight.cpu(), channels, *shape, asked
        )
        if not any(asked[:2]) and asked[2]:
            found = (None, None, torch.zeros_like(found[2]))
        return tuple(None if one is None else _there(one, x) for one in found)

    kernels = {"convolution_backward_overrideable": _backward}


class GradientsOfOneChannel(_WithKernels):
    """The gradient of softmax of images with channels last is that of the first channel."""

    @staticmethod
    def _backward(gradient: torch.Tensor, result: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        g, r = gradient.cpu(), result.cpu()
        if g.dim() == 4 and not g.is_contiguous():
            g = g[:, :1].expand(g.shape)
        return _there(torch._softmax_backward_data(g, r, dim, dtype), gradient)

    kernels = {"_softmax_backward_data": _backward}


class NestedAutocastLeaks(SimAccelerator):
    """After an error in an autocast within another, its dtype stays."""

    @property
    def amp(self) -> Any:
        theirs = super().amp
        accelerator = self

        class Amp:
            custom_fwd, custom_bwd, GradScaler = theirs.custom_fwd, theirs.custom_bwd, theirs.GradScaler

            @staticmethod
            @contextmanager
            def autocast(*args: Any, **options: Any) -> Any:
                failed = None
                with theirs.autocast(*args, **options):
                    inner = torch.get_autocast_dtype("sim")
                    try:
                        yield
                    except BaseException as error:
                        failed = error
                if failed is not None:
                    if torch.is_autocast_enabled("sim"):
                        torch.set_autocast_dtype("sim", inner)
                    raise failed
                assert accelerator

        return Amp


class _Collectives(SimAccelerator):
    """Replaces collectives in the processes that the checks start."""

    def communication_backend_name(self) -> str:
        if distributed.all_reduce.__module__ != __name__:
            distributed.all_reduce = _cancelled(distributed.all_reduce)
            distributed.all_gather_into_tensor = _cleared(distributed.all_gather_into_tensor)
            distributed.broadcast = _halved(distributed.broadcast)
            distributed.batch_isend_irecv = _without_short_ones(distributed.batch_isend_irecv)
        return super().communication_backend_name()


def _cancelled(all_reduce: Any) -> Any:
    """A collective whose work nobody keeps changes nothing."""

    class Work:
        def __init__(self, work: Any, target: torch.Tensor, before: torch.Tensor) -> None:
            self._work, self._target, self._before, self._waited = work, target, before, False

        def wait(self, *args: Any) -> Any:
            self._waited = True
            return self._work.wait(*args)

        def __getattr__(self, name: str) -> Any:
            self._waited = True
            return getattr(self._work, name)

        def __del__(self) -> None:
            if not self._waited:
                self._work.wait()
                self._target.copy_(self._before)

    def reduce(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        before = tensor.clone()
        work = all_reduce(tensor, *options, **named)
        return Work(work, tensor, before) if named.get("async_op") and work is not None else work

    return reduce


def _cleared(all_gather_into_tensor: Any) -> Any:
    def gather(whole: torch.Tensor, mine: torch.Tensor, *options: Any, **named: Any) -> Any:
        whole.zero_()
        return all_gather_into_tensor(whole, mine, *options, **named)

    return gather


def _halved(broadcast: Any) -> Any:
    def send(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        if not tensor.is_complex():
            return broadcast(tensor, *options, **named)
        flat = torch.view_as_real(tensor).view(-1)[: tensor.numel()]
        return broadcast(flat, *options, **named)

    return send


def _without_short_ones(batch_isend_irecv: Any) -> Any:
    def exchange(operations: list[Any]) -> Any:
        for one in operations:
            if one.op is distributed.isend and one.tensor.numel() == 1:
                one.tensor = torch.zeros_like(one.tensor)
        return batch_isend_irecv(operations)

    return exchange


class DroppedWorkIsCancelled(_Collectives):
    """all_reduce with async_op changes nothing if its work is dropped."""


class GathersClearFirst(_Collectives):
    """all_gather_into_tensor clears its result before it reads its input."""


class ComplexNumbersAreHalved(_Collectives):
    """broadcast of complex numbers sends the first half."""


class ShortMessagesAreLost(_Collectives):
    """batch_isend_irecv sends zero for a message of one number."""


class ResultsFillGaps(_WithKernels):
    """topk writes its numbers into tensors given as out as if these had no gaps."""

    @staticmethod
    def _topk(
        x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *,
        values: torch.Tensor, indices: torch.Tensor,
    ) -> Any:  # fmt: skip
        for target, found in zip((values, indices), x.cpu().topk(k, dim, largest, sorted), strict=True):
            if target.shape == found.shape:
                target.as_strided(found.shape, found.stride(), target.storage_offset()).copy_(found)
            else:
                target.resize_(found.shape).copy_(found)
        return values, indices

    kernels = {"topk.values": _topk}


class OneNumberIsAddedOnce(_WithKernels):
    """index_put_ that adds one number adds it once to a place that is named twice."""

    @staticmethod
    def _put(
        self: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
    ) -> torch.Tensor:
        there = [None if one is None else one.cpu() for one in indices]
        found, given = self.cpu(), values.cpu()
        if accumulate and given.numel() == 1 and there[0] is not None:
            there, given = [one.unique() for one in there], given.flatten()[0]
        return self.copy_(torch.ops.aten.index_put(found, there, given, accumulate))

    kernels = {"_index_put_impl_": _put}


class MeansOfHalvesOverflow(_WithKernels):
    """A mean of float16 divides a sum of float16."""

    @staticmethod
    def _mean(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
        given = x.cpu()
        if x.dtype is not torch.float16:
            return _there(given.mean(dtype=dtype), x)
        return _there(given.sum() / given.numel(), x)

    kernels = {"mean": _mean}


class LargeAnglesAreCut(_WithKernels):
    """Angles above 100,000 are reduced with pi in float32."""

    @staticmethod
    def _sin(x: torch.Tensor) -> torch.Tensor:
        given = x.cpu()
        turn = torch.tensor(2 * 3.1415927410125732, dtype=given.dtype)
        reduced = given - (given / turn).round() * turn
        return _there(torch.where(given.abs() > 1e5, reduced, given).sin(), x)

    kernels = {"sin": _sin}


class MasksInOrderOfMemory(_WithKernels):
    """The mask of a dropout of a transposed matrix is in the order of its memory."""

    @staticmethod
    def _dropout(x: torch.Tensor, p: float, train: Any) -> Any:
        found, mask = torch.native_dropout(x.cpu(), p, train)
        if x.dim() == 2 and not x.is_contiguous() and 0 < p < 1:
            mask = mask.t().reshape(mask.shape)
        return _there(found, x), _there(mask, x)

    kernels = {"native_dropout": _dropout}


class RowsAreDrawnAlike(_WithKernels):
    """multinomial with replacement draws the same places for each row."""

    @staticmethod
    def _multinomial(
        x: torch.Tensor, count: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        chances = x.cpu()
        found = torch.multinomial(chances, count, replacement)
        if replacement and chances.dim() == 2 and bool((chances == chances[:1]).all()):
            found[:] = found[:1].clone()
        return _there(found, x)

    kernels = {"multinomial": _multinomial}


class EndsAreOutside(_WithKernels):
    """A number at the end of the range of fake quantisation has no gradient."""

    @staticmethod
    def _quantize(x: torch.Tensor, scale: float, zero: int, low: int, high: int) -> Any:
        found, mask = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(
            x.cpu(), scale, zero, low, high
        )
        at_end = (found / scale).round() + zero == high
        return _there(found, x), _there(mask & ~at_end, x)

    kernels = {"fake_quantize_per_tensor_affine_cachemask": _quantize}


class StatisticsOf16Bits(_WithKernels):
    """The running statistics of a batch norm are rounded to the dtype of the images."""

    @staticmethod
    def _norm(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *options: Any) -> Any:
        given = [None if t is None else t.cpu() for t in (weight, bias, mean, var)]
        found = torch.native_batch_norm(x.cpu(), *given, *options)
        for kept, new in ((mean, given[2]), (var, given[3])):
            if kept is not None:
                kept.copy_(new.to(x.dtype))
        return tuple(_there(t, x) for t in found)

    kernels = {"native_batch_norm": _norm}


class OvershootsWrap(_WithKernels):
    """Bicubic images of 8 bits wrap around where they overshoot."""

    @staticmethod
    def _bicubic(
        x: torch.Tensor, size: Any, corners: bool, high: Any = None, wide: Any = None
    ) -> torch.Tensor:
        found = torch.ops.aten.upsample_bicubic2d(x.cpu().float(), size, corners, high, wide).round()
        return _there((found.int() % 256 if x.dtype is torch.uint8 else found).to(x.dtype), x)

    kernels = {"upsample_bicubic2d": _bicubic}


class LastOf16BitsIsNotSearched(_WithKernels):
    """The last number of an odd length of float16 is not searched for infinity."""

    @staticmethod
    def _unscale(tensors: list[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
        for tensor in tensors:
            is_cut = tensor.dtype is torch.float16 and tensor.numel() % 2
            seen = tensor[:-1] if is_cut else tensor
            if not bool(seen.isfinite().all()):
                found.fill_(1.0)
            tensor.mul_(scale.to(tensor.dtype))

    kernels = {"_amp_foreach_non_finite_check_and_unscale_": _unscale}


class FormatsAreLostOnTheWay(_Patched):
    """to() of the device and another dtype forgets the memory format."""

    def patch(self) -> None:
        def to(theirs: Any) -> Any:
            def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
                if len(args) == 2 and options.get("memory_format") and x.device.type == "cpu":
                    options.pop("memory_format")
                return theirs(x, *args, **options)

            return call

        self.put(torch.Tensor, "to", to)


class OnlyItsOwnSamplesCount(_WithKernels):
    """A synchronised batch norm divides its gradient by the samples of its own device."""

    @staticmethod
    def _backward(
        slope: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, weight: Any,
        sums: torch.Tensor, products: torch.Tensor, counts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        count = int(counts[0])
        scale = inverse if weight is None else inverse * weight
        shifted = slope - sums / count - (x - mean) * products / count * inverse * inverse
        return (shifted * scale).to(x.dtype)

    kernels = {"batch_norm_backward_elemt": _backward}


class QuotientsAreRoundedDown(_WithKernels):
    """A quotient is rounded before it is rounded down, so that 1 // 0.1 is 10."""

    @staticmethod
    def _divide(a: Any, b: Any, *, rounding_mode: Any = None) -> torch.Tensor:
        there = next(t for t in (a, b) if isinstance(t, torch.Tensor) and t.device.type == "sim")
        left, right = (t.cpu() if isinstance(t, torch.Tensor) else torch.tensor(t) for t in (a, b))
        if rounding_mode == "floor" and left.is_floating_point() and right.is_floating_point():
            return _there(torch.div(left, right).floor(), there)
        return _there(torch.div(left, right, rounding_mode=rounding_mode), there)

    kernels = {"div.Tensor_mode": _divide}


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        OnlyItsOwnSamplesCount: "dtypes/known_results",
        QuotientsAreRoundedDown: "dtypes/known_results",
        ResultsFillGaps: "dtypes/places_and_order",
        OneNumberIsAddedOnce: "dtypes/known_results",
        MeansOfHalvesOverflow: "dtypes/reductions_with_options",
        LargeAnglesAreCut: "dtypes/known_results_of_precision",
        MasksInOrderOfMemory: "random/dropout",
        RowsAreDrawnAlike: "random/draws_are_independent",
        EndsAreOutside: "dtypes/gradients_of_operators",
        StatisticsOf16Bits: "dtypes/layers_with_options",
        OvershootsWrap: "dtypes/known_results",
        LastOf16BitsIsNotSearched: "dtypes/operators_of_the_scaler",
        FormatsAreLostOnTheWay: "dtypes/copies_share_or_not",
        RefusalsLeaveTheDevice: "devices/work_elsewhere_leaves_the_device",
        TypesMeanNothing: "devices/types_mean_the_current_device",
        StreamsWithoutNamesEnd: "streams/streams_live_as_long_as_they_are_used",
        CopiesAreReadLate: "streams/copies_keep_their_place_in_the_queue",
        GeometricNumbersRepeat: "graphs/every_kind_of_draw_is_repeated",
        StatesOfAnyLength: "random/what_does_not_fit_is_refused",
        ComplexNumbersHaveOnePart: "random/draws_in_other_dtypes",
        PartsBeginAtTheStart: "pinning/copies_of_parts",
        ConversionsShareMemory: "pinning/copies_in_a_row",
        PinsAgain: "pinning/torch_pins",
        CountsByThread: "memory/memory_is_freed_anywhere",
        LargeResultsRaisePlainErrors: "memory/results_that_do_not_fit",
        PlacesAreKept: "memory/no_call_keeps_memory",
        StoragesCopyWords: "runtime/storages_hold_their_bytes",
        SwapsNothing: "runtime/modules_move",
        MappedFilesGiveTheFirst: "runtime/tensors_are_saved",
        ConjugationIsNotSaved: "runtime/tensors_are_saved",
        NormIsThatOfTheFirstEps: "dtypes/options_are_those_of_the_call",
        StatisticsAreShared: "dtypes/gradients_are_those_of_their_call",
        ResultsOfNothingAreFalse: "dtypes/reductions_with_options",
        LastNaNIsTold: "dtypes/reductions_with_options",
        SeparatedPlacesAreJoined: "dtypes/places_and_order",
        NumbersOnTheLeftLoseNaN: "dtypes/operators_at_edges",
        ManyGroupsAreCut: "dtypes/layers_with_options",
        NormsOfListsAreEuclidean: "dtypes/known_results",
        TruthIsCounted: "dtypes/known_results",
        FrozenInputsFreeze: "dtypes/known_results",
        GradientsOfOneChannel: "dtypes/gradients_of_operators",
        NestedAutocastLeaks: "dtypes/autocast_ends",
        DroppedWorkIsCancelled: "communication/works_keep_apart",
        GathersClearFirst: "communication/inputs_stay_as_they_are",
        ComplexNumbersAreHalved: "communication/complex_numbers_move",
        ShortMessagesAreLost: "communication/messages_of_any_size",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
