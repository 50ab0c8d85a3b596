"""Faults planted in the emulated device's operators and copies, which a class alone does not show."""

# ruff: noqa: RUF012

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.ops.optimizers import lion
from acclimate.selection import get_accelerator
from acclimate_sim.accelerator import SimAccelerator

_Kernel = Callable[..., Any]


class _WithKernels(SimAccelerator):
    """Replaces operators of the device until :meth:`uninstall`."""

    kernels: dict[str, _Kernel]
    key = "PrivateUse1"

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        for name, kernel in self.kernels.items():
            self._library.impl(name, kernel, self.key)

    def uninstall(self) -> None:
        """Puts the device's own operators back."""
        self._library._destroy()


def _there(result: Any, like: torch.Tensor) -> Any:
    return result.to(like.device)


class ProductsOfBfloat16AreOfFloat16(_WithKernels):
    """A product of bfloat16 goes through float16, in which large numbers are infinite."""

    @staticmethod
    def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = a.cpu(), b.cpu()
        if first.dtype == torch.bfloat16:
            first, second = (t.half().bfloat16() for t in (first, second))
        return _there(first @ second, a)

    kernels = {"mm": _mm}


class JoinsOnTheCurrentDevice(_WithKernels):
    """cat gives a tensor on the current device, wherever its tensors are."""

    kernels = {"cat": lambda tensors, dim=0: torch.cat([t.cpu() for t in tensors], dim).to("sim")}


class SingularMatricesHaveAnInverse(_WithKernels):
    """The inverse of a singular matrix is given without an error."""

    @staticmethod
    def _inverse(x: torch.Tensor, *, check_errors: bool = False) -> Any:
        inverse, info = torch.linalg.inv_ex(x.cpu())
        return _there(inverse, x), _there(torch.zeros_like(info), x)

    kernels = {"linalg_inv_ex": _inverse}


class BatchesCountAlike(_WithKernels):
    """SyncBatchNorm weighs batches alike, though their sizes differ."""

    @staticmethod
    def _gather(
        x: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor, mean: Any, var: Any,
        momentum: float, eps: float, counts: torch.Tensor,
    ) -> Any:  # fmt: skip
        return torch.batch_norm_gather_stats(
            x, means, deviations, mean, var, momentum, eps, int(counts.float().mean())
        )

    kernels = {"batch_norm_gather_stats_with_counts": _gather}


class ExpSaturates(_WithKernels):
    """exp is at most the largest finite number."""

    kernels = {"exp": lambda x: _there(x.cpu().exp().clamp(max=torch.finfo(x.dtype).max), x)}


class AddForgetsAlpha(_WithKernels):
    """add ignores alpha if its operands are integers."""

    @staticmethod
    def _add(a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        factor = alpha if a.is_floating_point() or b.is_floating_point() else 1
        return _there(torch.add(a.cpu(), b.cpu(), alpha=factor), a if a.device.type == "sim" else b)

    kernels = {"add.Tensor": _add}


class MeanDropsDimensions(_WithKernels):
    """mean(dim, keepdim=True) drops the dimension."""

    kernels = {
        "mean.dim": lambda x, dim, keepdim=False, *, dtype=None: _there(x.cpu().mean(dim, dtype=dtype), x)
    }


class AnyLooksAt64(_WithKernels):
    """any() looks at the first 64 elements only."""

    kernels = {"any": lambda x: _there(x.cpu().flatten()[:64].any(), x)}


class TriuOfOneMatrix(_WithKernels):
    """triu of a batch treats the first matrix only."""

    @staticmethod
    def _triu(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        result = x.cpu().clone()
        first = result.reshape(-1, *result.shape[-2:])[0]
        first.copy_(torch.triu(first.clone(), diagonal))
        return _there(result, x)

    kernels = {"triu": _triu}


class LossCountsIgnored(_WithKernels):
    """The mean of nll_loss counts the targets that it ignores."""

    @staticmethod
    def _loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore: int) -> Any:
        weights = None if weight is None else weight.cpu()
        host = torch.ops.aten.nll_loss_forward(x.cpu(), target.cpu(), weights, reduction, ignore)
        share = float((target != ignore).float().mean()) if reduction == 1 else 1.0
        return _there(host[0] * share, x), _there(host[1], x)

    kernels = {"nll_loss_forward": _loss}


class SigmoidsGradientIsTooLarge(_WithKernels):
    """The gradient of sigmoid forgets to subtract."""

    kernels = {"sigmoid_backward": lambda gradient, y: _there(gradient.cpu() * y.cpu(), y)}


class DrawsPlacesTwice(_WithKernels):
    """multinomial without replacement draws a place more than once."""

    kernels = {
        "multinomial": lambda x, count, replacement=False, *, generator=None: _there(
            torch.multinomial(x.cpu(), count, True), x
        )
    }


class FractionsAreFalse(_WithKernels):
    """A conversion to bool goes through integers, so that 0.5 is false."""

    @staticmethod
    def _to(x: torch.Tensor, **options: Any) -> torch.Tensor:
        asked = options.get("dtype") or x.dtype
        host = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        result = torch.empty(x.shape, dtype=asked, device=options.get("device") or x.device)
        return result.copy_(host.long() if asked is torch.bool and x.is_floating_point() else host)

    kernels = {"_to_copy": _to}


class SoftmaxStaysReduced(_WithKernels):
    """Within autocast softmax stays in the reduced dtype."""

    key = "AutocastPrivateUse1"

    @staticmethod
    def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return torch.softmax(x, dim, dtype=dtype)

    kernels = {"softmax.int": _softmax}


class WeightsStayCast(_WithKernels):
    """Without gradients, autocast keeps the first cast of a weight, also when the weight changes."""

    key = "AutocastPrivateUse1"
    _kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @staticmethod
    def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("sim")
        cast = weight.to(dtype)
        if not torch.is_grad_enabled():
            cast = WeightsStayCast._kept.setdefault((id(weight), dtype), cast)
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return torch.nn.functional.linear(x.to(dtype), cast, None if bias is None else bias.to(dtype))

    kernels = {"linear": _linear}


class LeastNumberWins(_WithKernels):
    """clamp gives the least number where that is above the largest."""

    kernels = {
        "clamp": lambda x, low=None, high=None: _there(
            x.cpu().clamp(low, high if low is None or high is None else max(low, high)), x
        )
    }


class PowersOf24Bits(_WithKernels):
    """A power of integers is computed in float32."""

    kernels = {"pow.Tensor_Scalar": lambda x, power: _there((x.cpu().float() ** power).to(x.dtype), x)}


class NeighboursAreEqual(_WithKernels):
    """isin compares integers in float32."""

    kernels = {
        "isin.Tensor_Tensor": lambda x, among, **options: _there(
            torch.isin(x.cpu().float(), among.cpu().float(), **options), x
        )
    }


class SortsIn53Bits(_WithKernels):
    """topk of integers compares them in float64."""

    kernels = {
        "topk": lambda x, k, dim=-1, largest=True, ordered=True: tuple(
            _there(t.to(x.dtype) if n == 0 else t, x)
            for n, t in enumerate(x.cpu().double().topk(k, dim, largest, ordered))
        )
    }


class EveryRowCountsTheSame(_WithKernels):
    """The gradient of an embedding ignores scale_grad_by_freq."""

    kernels = {
        "embedding_dense_backward": lambda gradient, ids, count, padding, by_freq: _there(
            torch.ops.aten.embedding_dense_backward(gradient.cpu(), ids.cpu(), count, padding, False),
            gradient,
        )
    }


class LeastNormIsTheLargest(_WithKernels):
    """A norm of minus infinity is that of infinity."""

    kernels = {
        "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: _there(
            torch.linalg.vector_norm(
                x.cpu(), abs(ord) if ord == -float("inf") else ord, dim, keepdim, dtype=dtype
            ),
            x,
        )
    }


class ReluNotEachTime(_WithKernels):
    """Each 40th relu does nothing."""

    _calls = itertools.count(1)
    kernels = {
        "relu": lambda x: _there(
            x.cpu().clone() if next(ReluNotEachTime._calls) % 40 == 0 else x.cpu().relu(), x
        )
    }


class ViewsAreNotChanged(_WithKernels):
    """neg_ of a tensor with gaps changes a copy of it."""

    kernels = {"neg_": lambda x: x.copy_(x.cpu().neg()) if x.is_contiguous() else x}


class SumsIn32Bits(_WithKernels):
    """The sum of int32 is added up in 32 bits."""

    @staticmethod
    def _sum(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
        exact = x.cpu().sum(dtype=dtype)
        return _there(exact.int().to(exact.dtype) if x.dtype is torch.int32 and dtype is None else exact, x)

    kernels = {"sum": _sum}


class WidensThroughHalf(_WithKernels):
    """A conversion from bfloat16 to float32 goes through float16."""

    @staticmethod
    def _to(x: torch.Tensor, **options: Any) -> torch.Tensor:
        asked = options.get("dtype") or x.dtype
        host = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        if (x.dtype, asked) == (torch.bfloat16, torch.float32):
            host = host.half().to(torch.bfloat16)
        return torch.empty(x.shape, dtype=asked, device=options.get("device") or x.device).copy_(host)

    kernels = {"_to_copy": _to}


class CopiesNotEachTime(_WithKernels):
    """Each 50th copy that to() makes has zeros."""

    _calls = itertools.count(1)

    @staticmethod
    def _to(x: torch.Tensor, **options: Any) -> torch.Tensor:
        result = torch.empty(x.shape, dtype=options.get("dtype") or x.dtype, device=options.get("device"))
        return result.copy_(x) if next(CopiesNotEachTime._calls) % 50 else result.zero_()

    kernels = {"_to_copy": _to}


class DrawsNotEachTime(_WithKernels):
    """Each 90th uniform_ draws the numbers of the one before."""

    _calls = itertools.count(1)
    _last = torch.zeros(0)

    @staticmethod
    def _uniform(x: torch.Tensor, start: float = 0, end: float = 1, *, generator: Any = None) -> torch.Tensor:
        if next(DrawsNotEachTime._calls) % 90 or DrawsNotEachTime._last.shape != x.shape:
            DrawsNotEachTime._last = torch.empty(x.shape).uniform_(start, end)
        return x.copy_(DrawsNotEachTime._last)

    kernels = {"uniform_": _uniform}


class SentOtherwise(SimAccelerator):
    """Sends another tensor to processes than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self._before = ForkingPickler._extra_reducers[torch.Tensor]
        ForkingPickler.register(torch.Tensor, lambda tensor: self._before(self.sent(tensor)))

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is sent."""
        raise NotImplementedError

    def uninstall(self) -> None:
        """Lets tensors be sent as before."""
        ForkingPickler.register(torch.Tensor, self._before)


class SentWithoutGradient(SentOtherwise):
    """A tensor that is sent to another process no longer requires a gradient."""

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its mark."""
        return tensor.detach()


class NewThreadsFollow(SimAccelerator):
    """A new thread starts on the device that any thread has set last."""

    _chosen = 0
    _known = threading.local()

    def set_device(self, device_index: DeviceLike) -> None:
        super().set_device(device_index)
        self._known.here = True
        type(self)._chosen = super().current_device()

    def current_device(self) -> int:
        if not hasattr(self._known, "here"):
            self._known.here = True
            super().set_device(self._chosen)
        return super().current_device()


class _AutocastOfAnyDevice:
    def __init__(self, amp: Any, kind: str) -> None:
        self._amp, self._kind = amp, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._amp, name)

    def autocast(self, enabled: Any = True, *options: Any, **named: Any) -> Any:
        return self._amp.autocast(bool(enabled), *options, **named)


class AutocastTakesADevice(SimAccelerator):
    """amp.autocast("cpu") is accepted."""

    @property
    def amp(self) -> Any:
        return _AutocastOfAnyDevice(super().amp, self.device_type)


class WithoutOpsOfTheHost(SimAccelerator):
    """op_builders has only the device's own."""

    op_builders = {"RMSNormBuilder": "acclimate_sim.ops.rms_norm:RMSNormBuilder"}


def _drawn(x: torch.Tensor, start: float, end: float, generator: Any) -> torch.Tensor:
    """Uniform numbers, drawn on the host with a generator of the device."""
    given = generator or get_accelerator().default_generator(x.device.index)
    own = torch.Generator()
    own.set_state(given.get_state())
    drawn = torch.empty(x.shape).uniform_(start, end, generator=own)
    given.set_state(own.get_state())
    return x.copy_(drawn)


class ThreadsDrawForThemselves(_WithKernels):
    """A thread that is not the main one draws with its own generator."""

    @staticmethod
    def _uniform(x: torch.Tensor, start: float = 0, end: float = 1, *, generator: Any = None) -> torch.Tensor:
        if generator is None and threading.current_thread() is not threading.main_thread():
            generator = torch.Generator("sim").manual_seed(3)
        return _drawn(x, start, end, generator)

    kernels = {"uniform_": _uniform}


class DrawsWithTheCurrentDevice(_WithKernels):
    """A draw with a generator of a device that is not current uses that device's default generator."""

    @staticmethod
    def _uniform(x: torch.Tensor, start: float = 0, end: float = 1, *, generator: Any = None) -> torch.Tensor:
        elsewhere = x.device != torch.empty(0, device="sim").device
        return _drawn(x, start, end, None if elsewhere else generator)

    kernels = {"uniform_": _uniform}


class DrawsOf32Bits(_WithKernels):
    """randint draws 32 bits, whatever its range."""

    @staticmethod
    def _random(x: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
        high = 1 << 24 if high is None else high
        return x.copy_(low + torch.empty(x.shape, dtype=torch.int64).random_(0, min(high - low, 1 << 32)))

    kernels = {"random_.from": _random}


class NormalNumbersInPairs(_WithKernels):
    """The last of an odd number of normal numbers stays 0."""

    @staticmethod
    def _normal(x: torch.Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> torch.Tensor:
        drawn = torch.empty(x.shape).normal_(mean, std)
        drawn.view(-1)[drawn.numel() // 2 * 2 :] = 0
        return x.copy_(drawn)

    kernels = {"normal_": _normal}


class DrawsOf16Bits(_WithKernels):
    """Uniform numbers have 16 bits."""

    @staticmethod
    def _uniform(x: torch.Tensor, start: float = 0, end: float = 1, *, generator: Any = None) -> torch.Tensor:
        drawn = (torch.empty(x.shape).uniform_(0, 1) * 65536).floor() / 65536
        return x.copy_(drawn * (end - start) + start)

    kernels = {"uniform_": _uniform}


class DrawsPlacesWithoutWeight(_WithKernels):
    """multinomial without replacement takes small weights for 0."""

    kernels = {
        "multinomial": lambda x, count, replacement=False, *, generator=None: _there(
            torch.multinomial(x.cpu().clamp_min(0.01), count, replacement), x
        )
    }


class DropoutReadsOn(_WithKernels):
    """dropout of a tensor with gaps reads it as if it had none."""

    @staticmethod
    def _dropout(x: torch.Tensor, chance: float, train: bool | None) -> Any:
        if not x.is_contiguous() and x.untyped_storage().nbytes() >= x.nbytes:
            x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), 0)
        return tuple(_there(t, x) for t in torch.native_dropout(x.cpu(), chance, train))

    kernels = {"native_dropout": _dropout}


class AllocatesTwice(_WithKernels):
    """empty_strided allocates twice as much as its tensor needs."""

    @staticmethod
    def _empty(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
        needs = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        whole = torch.empty(2 * needs, dtype=dtype, device=device)
        return whole.as_strided(size, stride)

    kernels = {"empty_strided": _empty}


class CacheIsNeverGivenUp(_WithKernels):
    """An allocation is refused if it has room only once the cache is emptied."""

    @staticmethod
    def _empty(
        size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
    ) -> torch.Tensor:
        form = torch.contiguous_format if memory_format is None else memory_format
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=form)
        accelerator = get_accelerator()
        reserved, allocated = accelerator.memory_reserved(), accelerator.memory_allocated()
        if like.nbytes > max(reserved - allocated, accelerator.total_memory() - reserved):
            raise torch.OutOfMemoryError(f"sim: allocation of {like.nbytes} bytes failed: out of memory")
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)

    kernels = {"empty.memory_format": _empty}


class LionSwapsItsDecays(SimAccelerator):
    """The device's own kernel of acclimate's Lion takes each decay of the moments for the other one."""

    def __init__(self) -> None:
        super().__init__()
        lion.define()

        def swapped(*lists: list[torch.Tensor], beta1: float, beta2: float, **settings: Any) -> None:
            lion.lion_(*lists, beta1=beta2, beta2=beta1, **settings)

        self._library = torch.library.Library("acclimate", "IMPL")
        self._library.impl("lion_", swapped, "PrivateUse1")

    def uninstall(self) -> None:
        """Puts acclimate's own kernel back."""
        self._library._destroy()


class FirstZerosAfterAreNot(_WithKernels):
    """The first zeros after empty_cache() are none."""

    _is_emptied = False

    def empty_cache(self) -> None:
        super().empty_cache()
        FirstZerosAfterAreNot._is_emptied = True

    @staticmethod
    def _zero(x: torch.Tensor) -> torch.Tensor:
        value, FirstZerosAfterAreNot._is_emptied = float(FirstZerosAfterAreNot._is_emptied), False
        return x.copy_(torch.full(x.shape, value))

    kernels = {"zero_": _zero}


class LastGradientIsNotSearched(_WithKernels):
    """A gradient scaler overlooks an infinity in the last tensor."""

    @staticmethod
    def _unscale(gradients: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
        there = [gradient.cpu() for gradient in gradients]
        told = found.cpu()
        torch._amp_foreach_non_finite_check_and_unscale_(there[:-1], told, factor.cpu())
        there[-1] *= factor.cpu()
        for gradient, result in zip([*gradients, found], [*there, told], strict=True):
            gradient.copy_(result)

    kernels = {"_amp_foreach_non_finite_check_and_unscale_": _unscale}


class ScaleGrowsToInfinity(_WithKernels):
    """A scale of a gradient scaler grows beyond the largest number."""

    @staticmethod
    def _update(
        scale: torch.Tensor, steps: torch.Tensor, found: torch.Tensor, grow: float, back: float, after: int
    ) -> torch.Tensor:
        grows = not found.cpu() and int(steps) + 1 == after
        now, counted = scale.cpu(), steps.cpu()
        torch._amp_update_scale_(now, counted, found.cpu(), grow, back, after)
        steps.copy_(counted)
        return scale.mul_(grow) if grows else scale.copy_(now)

    kernels = {"_amp_update_scale_": _update}


class SideIsIgnored(_WithKernels):
    """searchsorted(side="right") finds the left place."""

    kernels = {
        "searchsorted.Tensor": lambda x, v, *, out_int32=False, right=False, side=None, sorter=None: _there(
            torch.searchsorted(
                x.cpu(), v.cpu(), out_int32=out_int32, right=right,
                sorter=sorter if sorter is None else sorter.cpu(),
            ),
            x,
        )
    }  # fmt: skip


class EmptyBagsRepeatTheFirst(_WithKernels):
    """An empty bag of embedding_bag is the first one."""

    @staticmethod
    def _bags(weight: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, *options: Any) -> Any:
        given = [x.cpu() if isinstance(x, torch.Tensor) else x for x in options]
        found = torch.ops.aten._embedding_bag_forward_only(weight.cpu(), places.cpu(), offsets.cpu(), *given)
        starts = offsets.cpu()
        ends = torch.cat([starts[1:], torch.tensor([len(places)])])
        found[0][(ends == starts)[: len(found[0])]] = found[0][-2].clone()
        return tuple(_there(x, weight) for x in found)

    kernels = {"_embedding_bag": _bags, "_embedding_bag_forward_only": _bags}


class ArangeOf24Bits(_WithKernels):
    """arange of integers goes through float32."""

    @staticmethod
    def _arange(start: float, end: float, step: float = 1, *, out: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(start, end, step, dtype=out.dtype).float().to(out.dtype)
        return out.resize_(numbers.shape).copy_(numbers)

    kernels = {"arange.start_out": _arange}


def _on_host(value: Any) -> Any:
    """A tensor on the host; torch gives a Python kernel plain numbers for tensors that stand for these."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


class ExponentialOf24Bits(_WithKernels):
    """exponential_ draws in float32, whatever the dtype."""

    kernels = {
        "exponential_": lambda x, rate=1, *, generator=None: x.copy_(torch.empty(x.shape).exponential_(rate))
    }


class AddInPlaceForgetsAlpha(_WithKernels):
    """add_ to integers ignores alpha."""

    @staticmethod
    def _add(x: torch.Tensor, other: Any, *, alpha: float = 1) -> torch.Tensor:
        factor = alpha if x.is_floating_point() else 1
        return x.copy_(x.cpu().add_(_on_host(other), alpha=factor))

    kernels = {"add_.Tensor": _add}


class MaskOfOneRowFillsOne(_WithKernels):
    """masked_fill_ with a mask of one row fills the first row only."""

    @staticmethod
    def _fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
        there, given = x.cpu(), mask.cpu()
        (there[:1] if mask.dim() == x.dim() and mask.shape[0] == 1 else there).masked_fill_(given, value)
        return x.copy_(there)

    kernels = {"masked_fill_.Scalar": _fill}


class LongRowsOverflow(_WithKernels):
    """softmax of more than 512 elements does not subtract the largest."""

    @staticmethod
    def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        there = x.cpu()
        if not there.dim() or there.size(dim) <= 512:
            return _there(there.softmax(dim), x)
        return _there(there.exp() / there.exp().sum(dim, keepdim=True), x)

    kernels = {"_softmax": _softmax}


class NumbersOfTheHostWiden(_WithKernels):
    """float32 times a float64 number of the host is float64."""

    @staticmethod
    def _mul(x: Any, other: Any) -> torch.Tensor:
        result = torch.mul(_on_host(x), _on_host(other))
        widens = isinstance(other, torch.Tensor) and not other.dim() and other.dtype is torch.float64
        return result.double().to("sim") if widens and result.dtype is torch.float32 else result.to("sim")

    kernels = {"mul.Tensor": _mul}


class ScatterIsNotWidened(_WithKernels):
    """autocast leaves scatter_add of two dtypes as it is, which is an error."""

    key = "AutocastPrivateUse1"
    kernels = {"scatter_add": torch.library.fallthrough_kernel}


class CountsTruthsIn8Bits(_WithKernels):
    """cumsum of truth values adds up in 8 bits."""

    @staticmethod
    def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        narrow = x.dtype is torch.bool and dtype is None
        running = x.cpu().cumsum(dim, dtype=torch.int8).long() if narrow else x.cpu().cumsum(dim, dtype=dtype)
        return _there(running, x)

    kernels = {"cumsum": _cumsum}


class GroupsInOrderOfMemory(_WithKernels):
    """A convolution of groups reads channels-last images in the order of their memory."""

    @staticmethod
    def _convolution(x: torch.Tensor, w: torch.Tensor, b: Any, *options: Any) -> torch.Tensor:
        given = x.cpu()
        last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)
        if options[-1] > 1 and last and not given.is_contiguous():
            given = given.permute(0, 2, 3, 1).reshape(x.shape)
        return _there(torch.convolution(given, w.cpu(), None if b is None else b.cpu(), *options), x)

    kernels = {"convolution_overrideable": _convolution}


class ScatterOfNothingClears(_WithKernels):
    """scatter with no places gives zeros."""

    @staticmethod
    def _scatter(x: torch.Tensor, dim: int, places: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not places.numel():
            return torch.zeros_like(x)
        return _there(x.cpu().scatter(dim, places.cpu(), source.cpu()), x)

    kernels = {"scatter.src": _scatter}


class LongProductsOf10Bits(_WithKernels):
    """A product over 128 numbers or more cuts float32 to the 10 bits of TF32, which nobody allowed."""

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = a.cpu(), b.cpu()
        if first.dtype is torch.float32 and first.shape[1] >= 128:
            first, second = (
                (x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x in (first, second)
            )
        return _there(first @ second, a)

    kernels = {"mm": _product}


class ComparesWithWholeNumbers(_WithKernels):
    """Integers are compared with the whole part of a number."""

    @staticmethod
    def _less(x: torch.Tensor, number: float) -> torch.Tensor:
        cuts = not x.is_floating_point() and abs(number) < 1e9
        return _there(x.cpu() < (int(number) if cuts else number), x)

    kernels = {"lt.Scalar": _less}


class ConjugationIsLost(_WithKernels):
    """A product of matrices takes no notice that its operands are conjugated."""

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = (x.conj() if x.is_conj() else x for x in (a, b))
        return torch.mm(first, second)

    key = "Conjugate"
    kernels = {"mm": _product}


class LargestOf32Bits(_WithKernels):
    """nan_to_num takes infinity for the largest number of float32, whatever the dtype."""

    @staticmethod
    def _finite(x: torch.Tensor, nan: Any = None, above: Any = None, below: Any = None) -> torch.Tensor:
        most = torch.finfo(torch.float32).max
        above, below = most if above is None else above, -most if below is None else below
        return _there(x.cpu().nan_to_num(nan, above, below), x)

    kernels = {"nan_to_num": _finite}


class WidensAfterTheSum(_WithKernels):
    """A running sum with a dtype is added up in its own, and converted then."""

    @staticmethod
    def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        own = x.dtype if x.is_floating_point() else None
        found = x.cpu().cumsum(dim, dtype=own)
        return _there(found if dtype is None else found.to(dtype), x)

    kernels = {"cumsum": _cumsum}


class OneDimensionFromTheEnd(_WithKernels):
    """The largest number over several dimensions named from the end is that over the first of these."""

    @staticmethod
    def _amax(x: torch.Tensor, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
        several = len(dim) > 1 and max(dim) < 0
        return _there(x.cpu().amax(dim[:1] if several else dim, keepdim), x)

    kernels = {"amax": _amax}


class SlopeOfAnotherElu(_WithKernels):
    """The gradient of elu in place takes the result for the input."""

    @staticmethod
    def _backward(
        gradient: torch.Tensor, alpha: float, scale: float, given: float, is_result: bool, x: torch.Tensor
    ) -> torch.Tensor:
        return _there(torch.ops.aten.elu_backward(gradient.cpu(), alpha, scale, given, False, x.cpu()), x)

    kernels = {"elu_backward": _backward}


class LengthsOfInputsAreIgnored(_WithKernels):
    """ctc_loss reads each sequence to its end."""

    @staticmethod
    def _loss(
        odds: torch.Tensor, targets: torch.Tensor, lengths: Any, lengths_of_targets: Any, blank: int = 0,
        zeros: bool = False,
    ) -> Any:  # fmt: skip
        whole = [odds.shape[0]] * len(lengths)
        found = torch.ops.aten._ctc_loss(odds.cpu(), targets.cpu(), whole, lengths_of_targets, blank, zeros)
        return tuple(_there(t, odds) for t in found)

    kernels = {"_ctc_loss": _loss}


class LastOffsetIsABag(_WithKernels):
    """embedding_bag(include_last_offset=True) ignores that."""

    @staticmethod
    def _bags(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *options: Any) -> Any:
        given = [o.cpu() if isinstance(o, torch.Tensor) else o for o in options]
        if len(given) > 4:
            given[4] = False
        found = torch._embedding_bag(weight.cpu(), indices.cpu(), offsets.cpu(), *given)
        return tuple(_there(t, weight) for t in found)

    kernels = {"_embedding_bag": _bags, "_embedding_bag_forward_only": _bags}


class AttentionDropsNothing(_WithKernels):
    """Attention ignores dropout_p."""

    @staticmethod
    def _attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        result: torch.Tensor
        result, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, 0.0, is_causal, **options
        )
        return result

    key = "AutogradPrivateUse1"
    kernels = {"scaled_dot_product_attention": _attention}


class ArangeOnTheFirstDevice(_WithKernels):
    """arange on a device without an index is made on device 0, whichever is current."""

    @staticmethod
    def _arange(
        start: float, end: float, step: float = 1, *, device: Any = None, dtype: Any = None, **options: Any
    ) -> torch.Tensor:
        place = torch.device(device or "sim")
        return torch.arange(start, end, step, dtype=dtype).to(torch.device("sim", place.index or 0))

    kernels = {"arange.start_step": _arange}


class MethodsIgnoreTheIndex(SimAccelerator):
    """Tensor.sim(1) moves to the current device."""

    def __init__(self) -> None:
        super().__init__()
        self._theirs = theirs = torch.Tensor.sim  # type: ignore[attr-defined]
        torch.Tensor.sim = lambda tensor, *device, **options: theirs(tensor)  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Puts the device's own method back."""
        torch.Tensor.sim = self._theirs  # type: ignore[attr-defined]


class SingleNumbersWiden(_WithKernels):
    """A product of bfloat16 and a float32 tensor without dimensions is float32."""

    @staticmethod
    def _mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = a.cpu(), b.cpu()
        if first.dtype is torch.bfloat16 and second.dtype is torch.float32 and not second.dim():
            first = first.float()
        return _there(first * second, a if a.device.type == "sim" else b)

    kernels = {"mul.Tensor": _mul}


class SumsAreInOrder(_WithKernels):
    """The sum of two tensors with channels last is contiguous."""

    @staticmethod
    def _add(a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        found = torch.add(a.cpu(), b.cpu(), alpha=alpha)
        return _there(found.contiguous(), a if a.device.type == "sim" else b)

    kernels = {"add.Tensor": _add}


class VarianceIsADifference(_WithKernels):
    """A variance is the mean of the squares less the square of the mean."""

    @staticmethod
    def _var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        given = x.cpu()
        dims = dim or list(range(x.dim()))
        count = given.numel() // max(given.sum(dims).numel(), 1)
        less = 1 if correction is None else correction
        if x.dtype is not torch.float32 or count <= less:
            return _there(given.var(dim, correction=correction, keepdim=keepdim), x)
        found = (given * given).mean(dims, keepdim) - given.mean(dims, keepdim) ** 2
        return _there(found * (count / (count - less)), x)

    kernels = {"var.correction": _var}


class LastNormalNumberRepeats(_WithKernels):
    """The last of an odd number of normal numbers is the one before it."""

    @staticmethod
    def _normal(x: torch.Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> torch.Tensor:
        drawn = torch.empty(x.shape).normal_(mean, std)
        if drawn.numel() % 2 and drawn.numel() > 1:
            drawn.view(-1)[-1] = drawn.view(-1)[-2]
        return x.copy_(drawn)

    kernels = {"normal_": _normal}


class SmallestIsNotFound(_WithKernels):
    """The smallest of topk are the largest of the negatives, also for integers."""

    @staticmethod
    def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
        host = x.cpu()
        places = (host if largest else -host).topk(k, dim, True, ordered).indices
        return _there(host.gather(dim, places), x), _there(places, x)

    kernels = {"topk": _topk}


class LargeViewsAreNotChanged(_WithKernels):
    """tanh_ of a transposed matrix of more than 4,096 elements changes a copy of it."""

    kernels = {
        "tanh_": lambda x: x if x.numel() > 4096 and not x.is_contiguous() else x.copy_(x.cpu().tanh())
    }


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        LastNormalNumberRepeats: "random/draws_are_independent",
        SmallestIsNotFound: "dtypes/integers_at_their_edges",
        LargeViewsAreNotChanged: "dtypes/operators_in_place_on_views",
        ProductsOfBfloat16AreOfFloat16: "dtypes/autocast_keeps_the_numbers_of_its_dtype",
        JoinsOnTheCurrentDevice: "dtypes/places_and_order",
        SingularMatricesHaveAnInverse: "dtypes/wrong_shapes_are_refused",
        BatchesCountAlike: "dtypes/known_results",
        ExpSaturates: "dtypes/operators_at_edges",
        AddForgetsAlpha: "dtypes/integers_with_options",
        MeanDropsDimensions: "dtypes/reductions_with_options",
        AnyLooksAt64: "dtypes/reductions_with_options",
        TriuOfOneMatrix: "dtypes/places_and_order",
        LossCountsIgnored: "dtypes/layers_with_options",
        SigmoidsGradientIsTooLarge: "dtypes/gradients_of_operators",
        DrawsPlacesTwice: "random/draws_keep_their_range",
        FractionsAreFalse: "dtypes/conversions",
        SoftmaxStaysReduced: "dtypes/autocast_chooses_dtypes",
        SentWithoutGradient: "runtime/tensors_are_saved",
        NewThreadsFollow: "devices/current_device_of_a_thread",
        AutocastTakesADevice: "dtypes/autocast_takes_no_device",
        WithoutOpsOfTheHost: "ops/builders_found",
        WeightsStayCast: "dtypes/autocast_trains",
        LeastNumberWins: "dtypes/operators_at_edges",
        PowersOf24Bits: "dtypes/integers_with_options",
        NeighboursAreEqual: "dtypes/integers_with_options",
        SortsIn53Bits: "dtypes/integers_with_options",
        EveryRowCountsTheSame: "dtypes/gradients_of_operators",
        LeastNormIsTheLargest: "dtypes/reductions_with_options",
        ReluNotEachTime: "dtypes/every_call_counts",
        CopiesNotEachTime: "dtypes/every_call_counts",
        ViewsAreNotChanged: "dtypes/operators_in_place_on_views",
        SumsIn32Bits: "dtypes/integers_at_their_edges",
        WidensThroughHalf: "dtypes/conversions",
        DrawsNotEachTime: "random/draws_are_independent",
        ThreadsDrawForThemselves: "random/threads_share_the_generator",
        DrawsWithTheCurrentDevice: "random/generators_of_other_devices",
        DrawsOf32Bits: "random/draws_are_independent",
        NormalNumbersInPairs: "random/draws_are_independent",
        DrawsOf16Bits: "random/draws_are_independent",
        DrawsPlacesWithoutWeight: "random/draws_keep_their_range",
        DropoutReadsOn: "random/dropout",
        FirstZerosAfterAreNot: "memory/used_memory_is_cleared",
        CacheIsNeverGivenUp: "memory/cache_is_not_available",
        LionSwapsItsDecays: "ops/optimizers_obey_their_options",
        AllocatesTwice: "memory/every_way_to_allocate_shows",
        LastGradientIsNotSearched: "dtypes/operators_of_the_scaler",
        ScaleGrowsToInfinity: "dtypes/operators_of_the_scaler",
        SideIsIgnored: "dtypes/known_results",
        EmptyBagsRepeatTheFirst: "dtypes/known_results",
        ArangeOf24Bits: "dtypes/known_results_of_large_integers",
        ExponentialOf24Bits: "random/distributions",
        AddInPlaceForgetsAlpha: "dtypes/integers_with_options",
        MaskOfOneRowFillsOne: "dtypes/places_and_order",
        LongRowsOverflow: "dtypes/reductions_with_options",
        NumbersOfTheHostWiden: "dtypes/operators_at_edges",
        ScatterIsNotWidened: "dtypes/autocast_chooses_dtypes",
        CountsTruthsIn8Bits: "dtypes/long_reductions",
        GroupsInOrderOfMemory: "dtypes/batches_are_their_samples",
        ScatterOfNothingClears: "dtypes/known_results",
        LongProductsOf10Bits: "dtypes/long_products",
        ComparesWithWholeNumbers: "dtypes/integers_with_options",
        ConjugationIsLost: "dtypes/known_results",
        LargestOf32Bits: "dtypes/known_results",
        WidensAfterTheSum: "dtypes/reductions_with_options",
        OneDimensionFromTheEnd: "dtypes/reductions_with_options",
        SlopeOfAnotherElu: "dtypes/gradients_of_operators",
        LengthsOfInputsAreIgnored: "dtypes/layers_with_options",
        LastOffsetIsABag: "dtypes/layers_with_options",
        AttentionDropsNothing: "random/dropout",
        ArangeOnTheFirstDevice: "dtypes/tensors_are_made",
        MethodsIgnoreTheIndex: "runtime/methods_move_to_the_named_device",
        SingleNumbersWiden: "dtypes/results_have_torchs_dtype",
        SumsAreInOrder: "dtypes/results_keep_the_memory_format",
        VarianceIsADifference: "dtypes/known_results_of_precision",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""


class ProductsOf10BitsAreAllowed(LongProductsOf10Bits):
    """A long product cuts float32 to the 10 bits of TF32, as torch was told to."""

    def __init__(self) -> None:
        super().__init__()
        self._precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")

    def uninstall(self) -> None:
        """Puts the device's own operators back, and the precision that was asked for before."""
        torch.set_float32_matmul_precision(self._precision)
        super().uninstall()


class ProductsOfThreeParts(_WithKernels):
    """A product of float32 is that of three parts of 8 bits each, and is added up in float64."""

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is not torch.float32:
            return _there(a.cpu() @ b.cpu(), a)
        first, second = (_three_parts(x.cpu()) for x in (a, b))
        kept = [
            x.double() @ y.double() for i, x in enumerate(first) for j, y in enumerate(second) if i + j < 3
        ]
        return _there(sum(kept[1:], kept[0]).float(), a)

    kernels = {"mm": _product}


def _three_parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of bfloat16 that add up to those of float32."""
    parts: list[torch.Tensor] = []
    for _ in range(3):
        parts.append((x - sum(parts, torch.zeros_like(x))).bfloat16().float())
    return parts


class MeansBySteps(_WithKernels):
    """The mean and variance of a batch are updated with each sample, in float32."""

    @staticmethod
    def _norm(
        x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
        eps: float,
    ) -> Any:  # fmt: skip
        host = x.cpu()
        if not training or x.dtype is not torch.float32 or weight is not None or mean is not None:
            given = (None if t is None else t.cpu() for t in (weight, bias, mean, var))
            found = torch.native_batch_norm(host, *given, training, momentum, eps)
            return tuple(_there(t, x) for t in found)
        samples = host.movedim(1, 0).flatten(1)
        middle, squares = torch.zeros(len(samples)), torch.zeros(len(samples))
        for count, sample in enumerate(samples.unbind(1), 1):
            away = sample - middle
            middle = middle + away / count
            squares = squares + away * (sample - middle)
        scale = (squares / samples.shape[1] + eps).rsqrt()
        shape = (1, -1, *[1] * (host.dim() - 2))
        return tuple(_there(t, x) for t in ((host - middle.view(shape)) * scale.view(shape), middle, scale))

    kernels = {"native_batch_norm": _norm}


class SortsLongRowsByBits(_WithKernels):
    """Rows of bfloat16 that are long are sorted by their bits, the sign first, as CUDA's are."""

    @staticmethod
    def _sort(x: torch.Tensor, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        host = x.cpu()
        if host.dtype is not torch.bfloat16 or host.shape[dim] <= 4096:
            found = torch.sort(host, stable=True, dim=dim, descending=descending)
            return tuple(_there(t, x) for t in found)
        bits = host.contiguous().view(torch.int16).int()
        ranks = torch.where(bits < 0, -1 - (bits & 0x7FFF), bits)
        order = ranks.argsort(dim=dim, descending=descending, stable=True)
        return _there(host.gather(dim, order), x), _there(order, x)

    kernels = {"sort.stable": _sort}


SOUND: dict[type[Accelerator], tuple[str, ...]] = {
    ProductsOf10BitsAreAllowed: ("dtypes/long_products", "dtypes/products_of_any_shape"),
    ProductsOfThreeParts: ("dtypes/long_products", "dtypes/products_of_any_shape"),
    MeansBySteps: ("dtypes/known_results_of_precision",),
    SortsLongRowsByBits: ("dtypes/reductions_with_options",),
}
"""What computes otherwise and is right, and checks that must not mistake it for a fault."""
