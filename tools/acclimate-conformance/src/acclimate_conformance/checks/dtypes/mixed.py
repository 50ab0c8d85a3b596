"""Checks of mixed precision: the extent of autocast, the gradient scaler, custom functions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.errors import AutocastArgumentError
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    device_names,
    in_thread,
    is_host,
    let_through,
    refused,
    require,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import REDUCED, reduced_dtypes
from acclimate_conformance.checks.errors import DeliberateError


def _product_dtype(device: str) -> torch.dtype:
    ones = torch.ones(8, 8, device=device)
    return (ones @ ones).dtype


@check(
    "amp",
    promise="autocast applies only within its block: not after it, even after an error, and not to the host.",
)  # fmt: skip
def autocast_ends(accelerator: Accelerator) -> None:
    device, kind = accelerator.current_device_name(), accelerator.device_type
    for dtype in reduced_dtypes(accelerator):
        _require_off(device, kind, "before autocast")
        with let_through("autocast"), accelerator.amp.autocast(True, dtype):
            raise DeliberateError
        _require_off(device, kind, "after an error within autocast")
        with accelerator.amp.autocast(dtype=dtype):
            now = _product_dtype(device)
            require(now == dtype, f"within autocast(dtype={short(dtype)}) a product is {short(now)}")
            if not is_host(accelerator):
                host = _product_dtype("cpu")
                require(host == torch.float32, f"within autocast a product on the host is {short(host)}")
            with suppress(DeliberateError), accelerator.amp.autocast(enabled=False):
                now = _product_dtype(device)
                require(now == torch.float32, f"within autocast(enabled=False) a product is {short(now)}")
                raise DeliberateError
            now = _product_dtype(device)
            require(now == dtype, f"after autocast(False) within autocast a product is {short(now)}")
            with accelerator.amp.autocast(True, dtype, False):
                pass
            require(torch.is_autocast_cache_enabled(), "autocast(cache_enabled=False) outlasts its block")
        _require_off(device, kind, "after autocast")

        @accelerator.amp.autocast(dtype=dtype)
        def decorated() -> torch.dtype:
            return _product_dtype(device)

        require(decorated() == dtype, f"a function decorated with autocast gives {short(decorated())}")
        _require_off(device, kind, "after a function decorated with autocast")
        if not is_host(accelerator):
            with torch.autocast("cpu", dtype):
                now = _product_dtype(device)
            require(
                now == torch.float32, f'within torch.autocast("cpu") a product on {device} is {short(now)}'
            )
        _require_nested(accelerator, device, dtype)


def _require_nested(accelerator: Accelerator, device: str, outer: torch.dtype) -> None:
    """Fails the check unless an autocast within another restores its dtype, also after an error."""
    for inner in reduced_dtypes(accelerator):
        for fails in (False, True):
            with accelerator.amp.autocast(dtype=outer):
                with suppress(DeliberateError), accelerator.amp.autocast(dtype=inner):
                    now = _product_dtype(device)
                    require(
                        now == inner, f"within autocast({short(inner)}) in another a product is {short(now)}"
                    )
                    if fails:
                        raise DeliberateError
                now, told = _product_dtype(device), torch.get_autocast_dtype(accelerator.device_type)
                require(
                    now == outer and told == outer,
                    f"after autocast({short(inner)}){' that failed' if fails else ''} within "
                    f"autocast({short(outer)}) a product is {short(now)}, and torch says {short(told)}",
                )


@check(
    "amp",
    promise="autocast applies to one thread: it changes nothing in another, whether new or already running.",
)  # fmt: skip
def autocast_of_a_thread(accelerator: Accelerator) -> None:
    device, kind = accelerator.current_device_name(), accelerator.device_type
    dtype = reduced_dtypes(accelerator)[0]
    with ThreadPoolExecutor(1) as other, ExitStack() as theirs:
        other.submit(_require_off, device, kind, "in a thread before autocast").result()
        with accelerator.amp.autocast(dtype=dtype):
            other.submit(_require_off, device, kind, "within autocast of another thread").result()
            in_thread(lambda: _require_off(device, kind, "in a new thread, within autocast of another,"))
        try:
            other.submit(theirs.enter_context, accelerator.amp.autocast(dtype=dtype)).result()
            _require_off(device, kind, "where another thread is within autocast")
            now = other.submit(_product_dtype, device).result()
            require(
                now == dtype, f"within autocast(dtype={short(dtype)}) in a thread a product is {short(now)}"
            )
        finally:
            other.submit(theirs.close).result()


def _require_off(device: str, kind: str, when: str) -> None:
    now = _product_dtype(device)
    require(now == torch.float32, f"{when} a product of float32 is {short(now)}")
    require(not torch.is_autocast_enabled(kind), f"{when} torch says that autocast is on")


@check(
    "amp",
    promise="autocast without arguments is on, and computes products in a supported reduced dtype.",
)  # fmt: skip
def autocast_by_default(accelerator: Accelerator) -> None:
    offered = reduced_dtypes(accelerator)
    device = accelerator.current_device_name()
    with accelerator.amp.autocast():
        now = _product_dtype(device)
        left = torch.ones(8, 8, device=device) * 3
        require(left.dtype == torch.float32, f"within autocast a sum is {short(left.dtype)}")
    require(
        now in offered or (now in REDUCED and is_host(accelerator)),
        f"within autocast() a product is {short(now)}, and supported are {', '.join(map(short, offered))}",
    )


@check(
    "amp",
    promise="autocast and GradScaler without arguments do what torch's do, even after its defaults "
    "were changed.",
)  # fmt: skip
def autocast_defaults_are_torchs(accelerator: Accelerator) -> None:
    kind = accelerator.device_type
    _require_same_autocast(accelerator, "autocast()")
    before, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    try:
        for dtype in reduced_dtypes(accelerator):
            torch.set_autocast_dtype(kind, dtype)
            _require_same_autocast(accelerator, f"after torch.set_autocast_dtype({short(dtype)}), autocast()")
        torch.set_autocast_dtype(kind, before)
        torch.set_autocast_cache_enabled(False)
        _require_same_autocast(accelerator, "after torch.set_autocast_cache_enabled(False), autocast()")
    finally:
        torch.set_autocast_dtype(kind, before)
        torch.set_autocast_cache_enabled(cached)
    found, wanted = accelerator.amp.GradScaler(), torch.amp.GradScaler("cpu")
    require(found.is_enabled(), "GradScaler() is not enabled")
    require(
        found.state_dict() == wanted.state_dict(),
        f"GradScaler() has the state {found.state_dict()}, and torch's {wanted.state_dict()}",
    )


_F = torch.nn.functional
_IN_FLOAT32: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x**3,
    "pow of two tensors": lambda x: torch.pow(x.abs() + 0.5, x.abs()),
    "a number to the power of x": lambda x: 2**x,
    "mse_loss": lambda x: _F.mse_loss(x, x * 2),
    "cross_entropy": lambda x: _F.cross_entropy(x, x.argmax(-1)),
    "log": lambda x: (x + 1).log(),
    "log1p": lambda x: x.log1p(),
    "log2": lambda x: (x + 1).log2(),
    "log10": lambda x: (x + 1).log10(),
    "expm1": lambda x: x.expm1(),
    "rsqrt": lambda x: (x + 1).rsqrt(),
    "reciprocal": lambda x: (x + 1).reciprocal(),
    "sinh": lambda x: x.sinh(),
    "cosh": lambda x: x.cosh(),
    "tan": lambda x: x.tan(),
    "acos": lambda x: x.acos(),
    "asin": lambda x: x.asin(),
    "softplus": _F.softplus,
    "layer_norm": lambda x: _F.layer_norm(x, (8,), x[0], x[0]),
    "group_norm": lambda x: _F.group_norm(x, 2),
    "sum": lambda x: x.sum(),
    "a sum of rows": lambda x: x.sum(0),
    "prod": lambda x: x.prod(),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "norm": lambda x: x.norm(),
    "cosine_similarity": lambda x: _F.cosine_similarity(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "dist": lambda x: torch.dist(x, x * 2),
    "l1_loss": lambda x: _F.l1_loss(x, x * 2),
    "smooth_l1_loss": lambda x: _F.smooth_l1_loss(x, x * 2),
    "kl_div": lambda x: _F.kl_div(x, x, reduction="sum"),
    "nll_loss": lambda x: _F.nll_loss(x, x.argmax(-1)),
    "binary_cross_entropy_with_logits": lambda x: _F.binary_cross_entropy_with_logits(x, x),
    "softmin": lambda x: _F.softmin(x, -1),
    "normalize": lambda x: _F.normalize(x + 1),
    "erfinv": lambda x: (x / 2).erfinv(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "pdist": _F.pdist,
    "huber_loss": lambda x: _F.huber_loss(x, x * 2),
    "poisson_nll_loss": lambda x: _F.poisson_nll_loss(x, x),
    "hinge_embedding_loss": lambda x: _F.hinge_embedding_loss(x, x),
    "cosine_embedding_loss": lambda x: _F.cosine_embedding_loss(x, x, x[0] + 1),
    "margin_ranking_loss": lambda x: _F.margin_ranking_loss(x, x, x),
    "soft_margin_loss": lambda x: _F.soft_margin_loss(x, x),
    "triplet_margin_loss": lambda x: _F.triplet_margin_loss(x, x * 2, x * 3),
    "multi_margin_loss": lambda x: _F.multi_margin_loss(x, x.argmax(-1)),
    "multilabel_margin_loss": lambda x: _F.multilabel_margin_loss(x, x.long()),
    "nll_loss of images": lambda x: _F.nll_loss(x[None, :, :, None], x.argmax(-1)[None, :, None]),
}
"""Operators that torch's autocast for accelerators computes in float32."""
_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "mv": lambda x: torch.mv(x, x[0]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: _F.linear(x, x, x[0]),
    "conv1d": lambda x: _F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: _F.conv2d(x[None, None], x[None, None, :3, :3]),
    "conv_transpose1d": lambda x: _F.conv_transpose1d(x[None], x[:, :, None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv3d": lambda x: _F.conv3d(x[None, None, None], x[None, None, None, :3, :3]),
    "conv_transpose2d": lambda x: _F.conv_transpose2d(x[None, None], x[None, None, :3, :3]),
    "conv_tbc": lambda x: torch.conv_tbc(x[:, None], x[None], x[0]),
    "conv_transpose3d": lambda x: _F.conv_transpose3d(x[None, None, None], x[None, None, None, :3, :3]),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x, x, x]),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, x, x, x),
    "rnn_relu_cell": lambda x: torch.rnn_relu_cell(x, x, x, x),
    "gru_cell": lambda x: torch.gru_cell(x, x, x.repeat(3, 1), x.repeat(3, 1)),
    "lstm_cell": lambda x: torch.lstm_cell(x, [x, x], x.repeat(4, 1), x.repeat(4, 1))[0],
    "addmv": lambda x: torch.addmv(x[0], x, x[0]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None]),
    "addr": lambda x: torch.addr(x, x[0], x[0]),
    "prelu": lambda x: _F.prelu(x, x[0, :1]),
    "scaled_dot_product_attention": lambda x: _F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
"""Operators that it computes in the reduced dtype."""
_REDUCED_ON_HOSTS = ("matmul", "bmm", "addmm", "linear", "conv1d", "einsum", "baddbmm")
_AS_GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "add": lambda x: x + x,
    "mul": lambda x: x * 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "transpose": lambda x: x.t().contiguous(),
    "max": lambda x: x.max(),
    "clamp": lambda x: x.clamp(0, 1),
    "mean": lambda x: x.mean(),
    "gelu": _F.gelu,
    "silu": _F.silu,
    "embedding": lambda x: _F.embedding(x.argmax(-1), x),
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "where": lambda x: torch.where(x > 0, x, -x),
    "index_select": lambda x: x[x.argmax(-1)],
    "dropout": lambda x: _F.dropout(x, 0.5),
}
"""Operators that it leaves in the dtype that they are given."""
_WIDEST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y + 1),
    "atan2": torch.atan2,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([y, x]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), y),
    "index_put": lambda x, y: x.index_put((y.argmax(-1),), y),
    "index_put with accumulate": lambda x, y: x.index_put((y.argmax(-1),), y, accumulate=True),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=-1),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "grid_sample": lambda x, y: _F.grid_sample(x[None, None], y[None, :, None, :2], align_corners=False),
    "bilinear": lambda x, y: _F.bilinear(x, y, x[None, :, :]),
}
"""Operators of several tensors that it computes in float32 if any of these is float32."""
_REDUCED_OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": torch.matmul,
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "addmm": lambda x, y: torch.addmm(x, y, y),
    "addmv": lambda x, y: torch.addmv(x[0], y, x[0]),
    "addr": lambda x, y: torch.addr(x, y[0], y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], y[None], x[None]),
    "addbmm": lambda x, y: torch.addbmm(x, y[None], x[None]),
    "linear": _F.linear,
    "linear with a bias": lambda x, y: _F.linear(x, x, y[0]),
    "conv1d with a bias": lambda x, y: _F.conv1d(x[None], x[:, :, None], y[0]),
    "conv2d": lambda x, y: _F.conv2d(x[None, None], y[None, None, :3, :3]),
    "conv_transpose1d": lambda x, y: _F.conv_transpose1d(x[None], y[:, :, None]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "prelu": lambda x, y: _F.prelu(x, y[0, :1]),
    "gru_cell": lambda x, y: torch.gru_cell(x, y, x.repeat(3, 1), y.repeat(3, 1)),
    "attention": lambda x, y: _F.scaled_dot_product_attention(x[None], y[None], x[None]),
    "attention with a mask that is added": lambda x, y: _F.scaled_dot_product_attention(
        x[None], x[None], x[None], y[None]
    ),
    "attention with a mask of truth values": lambda x, y: _F.scaled_dot_product_attention(
        x[None], y[None], y[None], y[None] < 2
    ),
}
"""Operators of several tensors that it computes in the reduced dtype, whichever of these are float32."""
_IN_A_DTYPE: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "softmax": lambda x, dtype: x.softmax(-1, dtype=dtype),
    "functional.softmax": lambda x, dtype: _F.softmax(x, -1, dtype=dtype),
    "log_softmax": lambda x, dtype: x.log_softmax(-1, dtype=dtype),
    "softmin": lambda x, dtype: _F.softmin(x, -1, dtype=dtype),
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "a sum of rows": lambda x, dtype: x.sum(0, dtype=dtype),
    "prod": lambda x, dtype: x.prod(dtype=dtype),
    "a product of rows": lambda x, dtype: x.prod(0, dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(0, dtype=dtype),
    "cumprod": lambda x, dtype: x.cumprod(0, dtype=dtype),
    "mean": lambda x, dtype: x.mean(dtype=dtype),
}
"""Operators of which the caller may say the dtype."""


@contextmanager
def _told(what: str) -> Iterator[None]:
    """A block whose errors are told with the operator that raises them."""
    try:
        yield
    except NotImplementedError:  # another check is about operators that a device lacks
        raise
    except RuntimeError as error:
        raise BrokenPromiseError(
            f"within amp.autocast, {what} raises {describe(error, whole=True)}"
        ) from error


@check(
    "amp",
    promise="Within autocast products are in the reduced dtype, softmax and losses in float32, as on CUDA.",
    of="operators",
)
def autocast_chooses_dtypes(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for dtype in reduced_dtypes(accelerator):
        for given in (torch.float32, dtype):
            ones = torch.eye(8, dtype=given, device=device)
            tables = [(_REDUCED, dtype), (_IN_FLOAT32, torch.float32), (_AS_GIVEN, given)]
            if is_host(accelerator):  # of which torch's own lists differ
                tables = [({name: _REDUCED[name] for name in _REDUCED_ON_HOSTS}, dtype)]
            for table, wanted in tables:
                for name, compute in table.items():
                    with _told(f"{name} of {short(given)}"), accelerator.amp.autocast(dtype=dtype):
                        found = compute(ones).dtype
                    require(
                        found == wanted,
                        f"within amp.autocast in {short(dtype)}, {name} of {short(given)} is {short(found)}, "
                        f"not {short(wanted)}",
                    )
                    if table is _REDUCED and given == torch.float32:
                        with accelerator.amp.autocast(dtype=dtype), accelerator.amp.autocast(enabled=False):
                            found = compute(ones).dtype
                        require(
                            found == given,
                            f"within amp.autocast(enabled=False) in another block, {name} of "
                            f"{short(given)} is "
                            f"{short(found)}",
                        )
            if torch.float64 in accelerator.supported_dtypes():
                wide = torch.eye(8, dtype=torch.float64, device=device)
                with accelerator.amp.autocast(dtype=dtype):
                    kind = torch.mm(wide, wide).dtype
                require(kind == torch.float64, f"within amp.autocast, a product of float64 is {short(kind)}")
            with accelerator.amp.autocast(dtype=dtype):
                joined = torch.cat([ones.float(), ones.to(dtype)]).dtype
            require(joined == torch.float32, f"within amp.autocast, float32 joined with {dtype} is {joined}")
        if is_host(accelerator):
            continue
        left, right = torch.eye(8, device=device), torch.eye(8, dtype=dtype, device=device)
        mixed, alike = ((left, right), (right, left)), ((left, left), (right, right))
        for combined, wanted, pairs in (
            (_WIDEST, torch.float32, mixed),
            (_REDUCED_OF_TWO, dtype, (*mixed, *alike)),
        ):
            for name, combine in combined.items():
                for first, second in pairs:
                    what = f"{name} of {short(first.dtype)} and {short(second.dtype)}"
                    with _told(what), accelerator.amp.autocast(dtype=dtype):
                        found = combine(first, second).dtype
                    require(found == wanted, f"within amp.autocast, {what} is {short(found)}")
        for asked in accelerator.supported_dtypes():
            for name, cast in _IN_A_DTYPE.items():
                for matrix in (left, right):
                    what = f"{name} of {short(matrix.dtype)} with dtype={short(asked)}"
                    with _told(what), accelerator.amp.autocast(dtype=dtype):
                        found = cast(matrix, asked).dtype
                    require(found == asked, f"within amp.autocast, {what} is {short(found)}")
        with (
            accelerator.amp.autocast(dtype=dtype),
            refused("binary_cross_entropy within amp.autocast", RuntimeError),
        ):
            torch.nn.functional.binary_cross_entropy(right, right)
        with accelerator.amp.autocast(dtype=dtype):
            wide = left.double() if torch.float64 in accelerator.supported_dtypes() else left.int()
            found = (wide @ wide).dtype if wide.dtype == torch.float64 else (wide + wide).dtype
            require(found == wide.dtype, f"within amp.autocast, {short(wide.dtype)} becomes {short(found)}")


@check(
    "amp",
    promise="A model that trains within autocast casts its weights once a block, anew after a step, and its "
    "gradients and results are near those of float32.",
)  # fmt: skip
def autocast_trains(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for dtype in reduced_dtypes(accelerator):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Linear(24, 4)]
        model = torch.nn.Sequential(*layers)
        given, targets = torch.randn(8, 16), torch.randn(8, 4)
        reference = copy.deepcopy(model)
        model, given_there, targets_there = model.to(device), given.to(device), targets.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        its_own = torch.optim.SGD(reference.parameters(), lr=0.5)
        for turn in range(3):
            optimizer.zero_grad()
            with accelerator.amp.autocast(dtype=dtype):
                output = model(given_there)
                again = model(given_there)
                loss = torch.nn.functional.mse_loss(output.float(), targets_there)
            require(torch.equal(output, again), f"two calls within one autocast in {short(dtype)} differ")
            loss.backward()
            its_own.zero_grad()
            expected = torch.nn.functional.mse_loss(reference(given), targets)
            expected.backward()
            require(
                abs(loss.item() - expected.item()) < 0.1 * expected.item() + 0.01,
                f"in step {turn + 1} within autocast in {short(dtype)} the loss is {loss.item():.4f}, and "
                f"in float32 {expected.item():.4f}",
            )
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                if ours.grad is None or theirs.grad is None:
                    raise BrokenPromiseError(f"training within autocast leaves no gradient of {name}")
                require(
                    ours.grad.dtype == torch.float32, f"the gradient of {name} is {short(ours.grad.dtype)}"
                )
                apart = float((ours.grad.cpu() - theirs.grad).abs().max() / theirs.grad.abs().max())
                require(
                    apart < 0.12,
                    f"within autocast in {short(dtype)} the gradient of {name} is off by {apart:.2f}",
                )
            optimizer.step()
            its_own.step()
            with torch.no_grad():  # from the same weights, so that differences do not grow
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    theirs.copy_(ours.cpu())
            for how, no_gradients in (
                ("no_grad()", torch.no_grad),
                ("inference_mode()", torch.inference_mode),
            ):
                with no_gradients(), accelerator.amp.autocast(dtype=dtype):
                    found = model(given_there)
                with no_gradients():
                    wanted = reference(given)
                apart = float((found.cpu().float() - wanted).abs().max() / wanted.abs().max())
                require(
                    apart < 0.12,
                    f"within autocast in {short(dtype)} and {how}, after step {turn + 1}, results are off "
                    f"by {apart:.2f}",
                )


@check(
    "amp",
    promise="autocast takes no device, unlike torch.autocast, and says so.",
)  # fmt: skip
def autocast_takes_no_device(accelerator: Accelerator) -> None:
    for device in ("cpu", accelerator.device_type):
        with (
            refused(f'amp.autocast("{device}")', AutocastArgumentError),
            accelerator.amp.autocast(device),  # type: ignore[arg-type]
        ):
            pass


def _require_same_autocast(accelerator: Accelerator, what: str) -> None:
    with warnings.catch_warnings():  # torch warns and turns itself off if it has not the dtype
        warnings.simplefilter("ignore")
        with torch.autocast(accelerator.device_type):
            wanted = _autocast_state(accelerator)
        with accelerator.amp.autocast():
            found = _autocast_state(accelerator)
    for name, value in wanted.items():
        require(
            found[name] == value,
            f"within {what} {name} is {found[name]}, and within torch.autocast"
            f'("{accelerator.device_type}") {value}',
        )


def _autocast_state(accelerator: Accelerator) -> dict[str, object]:
    kind = accelerator.device_type
    return {
        "torch.is_autocast_enabled()": torch.is_autocast_enabled(kind),
        "torch.get_autocast_dtype()": torch.get_autocast_dtype(kind),
        "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled(),
        "the dtype of a product": _product_dtype(accelerator.current_device_name()),
    }


@check(
    "amp",
    promise="autocast computes in the requested dtype or in float32, never in another reduced dtype.",
)  # fmt: skip
def autocast_to_the_dtype_asked_for(accelerator: Accelerator) -> None:
    device, kind = accelerator.current_device_name(), accelerator.device_type
    reduced_dtypes(accelerator)
    for dtype in REDUCED:
        # For a dtype that the device lacks it may raise, or turn itself off with a warning as torch's does.
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with accelerator.amp.autocast(dtype=dtype):
                told = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
                now = _product_dtype(device)
            require(told == dtype, f"within autocast(dtype={short(dtype)}) torch says {short(told)}")
            require(
                now in (dtype, torch.float32),
                f"within autocast(dtype={short(dtype)}) a product is {short(now)}",
            )


_RANGES: dict[torch.dtype, tuple[float, float]] = {
    torch.bfloat16: (3e5, 3e-9),
    torch.float16: (1 + 2.0**-9, 1 - 2.0**-9),
}
"""Numbers of a dtype that the other dtype of 16 bits has not: beyond its range, or between two of its own."""
_APART = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-9 * 0.75}
"""How far products of them may be off, relative to the largest."""
_OF_ONE_PRODUCT = ("matmul", "bmm", "mv", "linear without a bias", "conv1d", "conv2d", "einsum", "vecdot")
"""Operators that multiply each number once: those of sums and of several products round more often."""


@check(
    "amp",
    promise="autocast to bfloat16 keeps numbers that float16 has not, large and tiny, and autocast to "
    "float16 those that bfloat16 has not.",
    of="operators",
)  # fmt: skip
def autocast_keeps_the_numbers_of_its_dtype(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    offered: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **_REDUCED,
        "linear without a bias": lambda x: _F.linear(x, x),
    }
    chosen = [
        name for name in _OF_ONE_PRODUCT if not is_host(accelerator) or name in (*_REDUCED_ON_HOSTS, "vecdot")
    ]
    for dtype in reduced_dtypes(accelerator):
        for number in _RANGES[dtype]:
            given = torch.eye(8) * number
            for name in chosen:
                wanted = offered[name](given)
                with _told(name), accelerator.amp.autocast(dtype=dtype):
                    found = offered[name](given.to(device)).float().cpu()
                largest = float(wanted.abs().max())
                off = float((found - wanted).abs().max())
                require(
                    off <= _APART[dtype] * largest,
                    f"within amp.autocast in {short(dtype)}, {name} of {number:.7g} is off by {off:.3g} of "
                    f"{largest:.3g}",
                )


@check(
    "amp",
    promise="GradScaler skips a step with an infinite or NaN gradient, and lowers the scale.",
    of="operators",
)
def scaler_skips_infinite_gradients(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    for bad in (float("inf"), float("-inf"), float("nan")):
        for unscaled in (False, True):  # by step(), or by the program, which clips gradients
            weights = [torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]
            optimizer = torch.optim.SGD(weights, lr=0.5)
            scaler = accelerator.amp.GradScaler(init_scale=8.0, backoff_factor=0.5, growth_interval=100)
            factors = torch.ones(4, device=device)
            for turn, (last, wanted, scale) in enumerate(((1.0, 0.5, 8.0), (bad, 0.5, 4.0), (1.0, 0.0, 4.0))):
                factors[-1] = last
                optimizer.zero_grad()
                loss = weights[0].sum() + (weights[1] * factors).sum()
                scaler.scale(loss).backward()
                if unscaled:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                for weight in weights:
                    found = weight.detach().tolist()
                    require(
                        found == [wanted] * 4,
                        f"after step {turn + 1} (the second has a gradient of {bad}) a weight is "
                        f"{found} and not {wanted}",
                    )
                now = scaler.get_scale()
                require(now == scale, f"after step {turn + 1} with a gradient of {bad} the scale is {now}")


@check(
    "amp",
    promise="amp.GradScaler subclasses torch's: it can be disabled, grows, unscales, and is saved and "
    "restored.",
    of="operators",
)
def scaler_by_its_arguments(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    kind = accelerator.amp.GradScaler
    require(isinstance(kind, type) and issubclass(kind, torch.amp.GradScaler), f"amp.GradScaler is {kind!r}")
    loss = torch.ones(1, device=device) * 3
    off = kind(enabled=False)
    require(float(off.scale(loss)) == 3.0, f"a disabled scaler scales 3 to {float(off.scale(loss))}")
    require(not off.is_enabled(), "a scaler made with enabled=False is enabled")
    scaler = kind(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for factor in (1.0, 1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        if factor == 1.0:
            found = weight.grad.tolist() if weight.grad is not None else None
            require(found == [1.0] * 4, f"unscale_ turns four gradients of 1 into {found}")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    require(
        scales == [8.0, 32.0, 8.0],
        f"amp.GradScaler multiplies a scale of 8 by 4 after two good steps and by 1/4 after an overflow: "
        f"{scales}",
    )
    restored = kind()
    restored.load_state_dict(scaler.state_dict())
    require(restored.get_scale() == 8.0, f"restoring a saved scale of 8 gives {restored.get_scale()}")


@check(
    "amp",
    promise="amp.custom_fwd and custom_bwd give a custom function the same casts and autocast as torch's.",
)  # fmt: skip
def custom_functions(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    amp = accelerator.amp
    dtype = reduced_dtypes(accelerator)[0]
    seen: dict[str, Any] = {}

    class Cast(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["cast"] = x.dtype
            seen["product"] = (x @ x).dtype
            return x * 2

        @staticmethod
        @amp.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen["backward"] = _product_dtype(device)
            return gradient * 2

    class AsItIs(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["forward as it is"] = _product_dtype(device)
            return x * 2

        @staticmethod
        @amp.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen["backward as it is"] = _product_dtype(device)
            return gradient * 2

    inputs = torch.ones(4, 4, device=device, requires_grad=True)
    with amp.autocast(dtype=dtype):
        product = inputs @ inputs
        cast, as_it_is = Cast.apply(product), AsItIs.apply(inputs)  # type: ignore[no-untyped-call]
        result = cast.float().sum() + as_it_is.float().sum()
    result.backward()
    expected = {
        "cast": torch.float32, "product": torch.float32, "backward": torch.float32,
        "forward as it is": dtype, "backward as it is": dtype,
    }  # fmt: skip
    for what, wanted in expected.items():
        require(seen.get(what) == wanted, f"in a custom function, {what} is {seen.get(what)}, not {wanted}")


def _kinds_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "a tensor": tensor, "a parameter": torch.nn.Parameter(tensor, False), "a view": tensor[1:].t(),
        "an empty tensor": tensor[:0], "a single number": tensor[0, 0],
        "an expanded tensor": tensor[:1].expand(4, 3),
    }  # fmt: skip


@check(
    "FloatTensor", "HalfTensor", "LongTensor", "IntTensor",
    promise="FloatTensor and the other classes distinguish dtypes and devices, and use the current device.",
)  # fmt: skip
def tensor_classes_are_exact(accelerator: Accelerator) -> None:
    dtypes = accelerator.supported_dtypes()
    dtypes.append(torch.int8)
    require(
        torch.int8 not in accelerator.supported_dtypes(),
        "changing the list that supported_dtypes() returned changes the next one",
    )
    classes = {"FloatTensor": torch.float32, "IntTensor": torch.int32, "LongTensor": torch.int64,
               "ByteTensor": torch.uint8}  # fmt: skip
    device = accelerator.current_device_name()
    for name, dtype in classes.items():
        maker = getattr(accelerator, name)
        for other in classes.values():
            told = isinstance(torch.ones(2, dtype=other, device=device), maker)
            require(told == (other == dtype), f"a tensor of {short(other)} is an instance of {name}: {told}")
        if not is_host(accelerator):
            require(not isinstance(torch.ones(2, dtype=dtype), maker), f"a tensor on the host is a {name}")
        nested = maker([[1, 2], [3, 4]])
        require(nested.tolist() == [[1, 2], [3, 4]], f"{name}([[1, 2], [3, 4]]) holds {nested.tolist()}")
        for given, sized, wanted in (
            ("torch.Size([2, 5])", maker(torch.Size([2, 5])), (2, 5)), ("0", maker(0), (0,)),
            ("2, 0", maker(2, 0), (2, 0)), ("1, 1, 1", maker(1, 1, 1), (1, 1, 1)),
            ("[]", maker([]), (0,)), ("", maker(), (0,)),
        ):  # fmt: skip
            shape = tuple(sized.shape)
            require(shape == wanted, f"{name}({given}) has the shape {shape}, not {wanted}")
        for what, data in {
            "a tuple": (1, 2), "a range": range(1, 3), "an array": torch.tensor([1, 2]).numpy(),
            "an array of another dtype": torch.tensor([1.0, 2.0], dtype=torch.float64).numpy(),
        }.items():  # fmt: skip
            found = maker(data).tolist()
            require(found == [1, 2], f"{name}() of {what} with 1 and 2 holds {found}")
        for index in range(accelerator.device_count()):
            with accelerator.device(index):
                here = torch.ones(1, device=accelerator.device_type).device
                for made in (maker(3), maker([1])):
                    require(made.device == here, f"{name} makes a tensor on {made.device}, {here} is current")
                for place in device_names(accelerator):
                    kinds = _kinds_of(torch.ones(2, 3, device=place).to(dtype))
                    for kind, tensor in kinds.items():
                        is_one = isinstance(tensor, maker)
                        where = f"{kind} of {short(dtype)} on {place}, while {here} is current"
                        require(is_one, f"{where}, is no instance of {name}")
