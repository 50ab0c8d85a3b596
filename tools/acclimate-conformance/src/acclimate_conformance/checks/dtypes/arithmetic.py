"""Checks of data types: supported ones compute correctly, and no other one gives wrong results."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    TOLERANCE,
    BrokenPromiseError,
    NotOfferedError,
    distance,
    equal,
    exactly,
    is_host,
    require,
    require_close,
    short,
)
from acclimate_conformance.checks.check import check

REDUCED = (torch.bfloat16, torch.float16)


def reduced_dtypes(accelerator: Accelerator) -> list[torch.dtype]:
    """The supported ones of bfloat16 and float16; ends the check if there is none."""
    offered = [dtype for dtype in REDUCED if dtype in accelerator.supported_dtypes()]
    if not offered:
        raise NotOfferedError("it supports neither bfloat16 nor float16")
    return offered


def supported(accelerator: Accelerator) -> list[torch.dtype]:
    """The supported dtypes; fails the check if models do not compute in one."""
    dtypes = accelerator.supported_dtypes()
    for dtype in dtypes:
        if dtype not in TOLERANCE:
            raise BrokenPromiseError(f"supported_dtypes() has {short(dtype)}, in which models do not compute")
    return dtypes


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that every floating-point type represents exactly: quarters between -2 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).double() / 4


@check(
    "supported_dtypes", "is_bf16_supported", "is_fp16_supported", "is_fp64_supported",
    promise="supported_dtypes starts with float32, lists each type once, and agrees with is_…_supported.",
)  # fmt: skip
def list_of_dtypes(accelerator: Accelerator) -> None:
    dtypes = exactly(accelerator.supported_dtypes(), list, "supported_dtypes()")
    require(dtypes[:1] == [torch.float32], f"supported_dtypes() is {dtypes}, and must start with float32")
    require(len(set(dtypes)) == len(dtypes), f"supported_dtypes() lists a type twice: {dtypes}")
    for dtype in dtypes:
        exactly(dtype, torch.dtype, "an entry of supported_dtypes()")
    told = {
        torch.bfloat16: ("is_bf16_supported", accelerator.is_bf16_supported()),
        torch.float16: ("is_fp16_supported", accelerator.is_fp16_supported()),
        torch.float64: ("is_fp64_supported", accelerator.is_fp64_supported()),
    }
    for dtype, (method, answer) in told.items():
        exactly(answer, bool, f"{method}()")
        listed = dtype in dtypes
        require(
            listed == answer,
            f"{method}() is {answer}, but supported_dtypes() {'has' if listed else 'lacks'} it",
        )
    emulated = exactly(
        accelerator.is_bf16_supported(including_emulation=True),
        bool,
        "is_bf16_supported(including_emulation=True)",
    )
    require(
        emulated or not accelerator.is_bf16_supported(),
        "is_bf16_supported(including_emulation=True) is False, though the device has bfloat16 itself",
    )
    require(
        not is_host(accelerator) or accelerator.is_bf16_supported(),
        "is_bf16_supported() is False on a host, where torch computes in bfloat16 on every processor",
    )
    if emulated:
        ones = torch.ones(4, dtype=torch.bfloat16, device=accelerator.current_device_name())
        total = float((ones + ones).sum())
        require(
            total == 8.0,
            f"is_bf16_supported(including_emulation=True) is True, and 8 ones add up to {total}",
        )


@check("supported_dtypes", promise="Every supported dtype multiplies matrices within its precision.")
def products(accelerator: Accelerator) -> None:
    left, right = numbers(48, 64), numbers(64, 32, seed=1)
    for dtype in supported(accelerator):
        device = accelerator.current_device_name()
        product = left.to(dtype).to(device) @ right.to(dtype).to(device)
        require(product.dtype == dtype, f"a product of {short(dtype)} is {short(product.dtype)}")
        require_close(product, left @ right, dtype, "a matrix product")


@check(
    "supported_dtypes",
    promise="Every supported dtype adds, sums and computes softmax within its precision.",
)  # fmt: skip
def sums(accelerator: Accelerator) -> None:
    left, right = numbers(32, 128), numbers(32, 128, seed=1)
    for dtype in supported(accelerator):
        device = accelerator.current_device_name()
        a, b = left.to(dtype).to(device), right.to(dtype).to(device)
        require_close(a + b, left + right, dtype, "a sum of two tensors")
        require_close(a.abs().sum(-1), left.abs().sum(-1), dtype, "a sum over a dimension")
        require_close(a.softmax(-1), left.softmax(-1), dtype, "a softmax")


@check(
    "supported_dtypes",
    promise="Casts between any two supported dtypes, and copies to the host and back, keep the values.",
)  # fmt: skip
def casts(accelerator: Accelerator) -> None:
    exact = numbers(64)
    dtypes = accelerator.supported_dtypes()
    for source in dtypes:
        on_device = exact.to(source).to(accelerator.current_device_name())
        require(
            equal(on_device.cpu().double(), exact),
            f"copying {short(source)} to the device and back changes values",
        )
        for target in (*dtypes, torch.int32):
            expected = exact.trunc() if target == torch.int32 else exact
            cast = on_device.to(target).cpu()
            require(cast.dtype == target, f"a cast to {short(target)} gives {short(cast.dtype)}")
            require(
                equal(cast.double(), expected),
                f"a cast from {short(source)} to {short(target)} changes values",
            )


@check(
    "supported_dtypes",
    promise="Every supported dtype trains: gradients and updated weights are right within its precision.",
    timeout_s=240, once=True,
)  # fmt: skip
def training_step(accelerator: Accelerator) -> None:
    for dtype in supported(accelerator):
        gradient, weights = _trained(accelerator.current_device_name(), dtype)
        wanted_gradient, wanted_weights = _trained("cpu", torch.float64)
        allowed = 2 * TOLERANCE[dtype]
        for what, found, wanted in (
            ("the gradient", gradient, wanted_gradient),
            ("the updated weight", weights, wanted_weights),
        ):
            apart = distance(found, wanted)
            require(apart <= allowed, f"{what} of a training step in {short(dtype)} is off by {apart:.1e}")


def _trained(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient and the weights after one step of a linear layer."""
    layer = torch.nn.Linear(16, 8, bias=False, dtype=dtype, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(numbers(8, 16) / 4)
    layer = layer.to(device)
    inputs, targets = (
        numbers(24, 16, seed=1).to(dtype).to(device),
        numbers(24, 8, seed=2).to(dtype).to(device),
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.125)
    ((layer(inputs) - targets) ** 2).mean().backward()
    optimizer.step()
    if layer.weight.grad is None:
        raise BrokenPromiseError(f"backward() leaves no gradient in {short(dtype)}")
    return layer.weight.grad, layer.weight


@check(
    "supported_dtypes", "is_bf16_supported", "is_fp16_supported", "is_fp64_supported",
    promise="An unsupported dtype is refused, or emulated with correct results; it never gives wrong ones.",
)  # fmt: skip
def left_out_dtypes(accelerator: Accelerator) -> str | None:
    left, right = numbers(48, 64), numbers(64, 32, seed=1)
    left_out = [d for d in (torch.float64, *REDUCED) if d not in accelerator.supported_dtypes()]
    if not left_out:
        raise NotOfferedError("it supports every dtype")
    emulated = []
    for dtype in left_out:
        device = accelerator.current_device_name()
        try:
            product = left.to(dtype).to(device) @ right.to(dtype).to(device)
            host = product.cpu()
        except Exception:  # noqa: BLE001 - refusing is right, and every device raises another type
            continue
        require_close(host, left @ right, dtype, "a matrix product in an unsupported dtype")
        # bfloat16 and float16 are supported if the hardware has them; float64 if it computes at all.
        require(dtype != torch.float64, "it computes right in float64, but does not list it as supported")
        require(
            dtype != torch.bfloat16 or accelerator.is_bf16_supported(including_emulation=True),
            "it computes right in bfloat16, in hardware or emulated, but is_bf16_supported() is False also "
            "with including_emulation=True",
        )
        emulated.append(short(dtype))
    return f"emulates {' and '.join(emulated)} with right results" if emulated else None


@check(
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "IntTensor", "LongTensor",
    promise="FloatTensor and the other classes make tensors of their dtype on the device, from sizes "
    "or data.",
)  # fmt: skip
def tensor_classes(accelerator: Accelerator) -> None:
    classes = {
        "FloatTensor": torch.float32,
        "DoubleTensor": torch.float64,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }
    supported = accelerator.supported_dtypes()
    for name, dtype in classes.items():
        if dtype.is_floating_point and dtype not in supported:
            continue
        maker = getattr(accelerator, name)
        for made, shape in ((maker(2, 3), (2, 3)), (maker([1, 2, 3]), (3,)), (maker(), (0,))):
            require(made.dtype == dtype, f"{name} makes {short(made.dtype)}")
            require(accelerator.on_accelerator(made), f"{name} makes a tensor on {made.device}")
            require(tuple(made.shape) == shape, f"{name} makes shape {tuple(made.shape)} instead of {shape}")
            require(isinstance(made, maker), f"what {name} makes is not an instance of it")
        require(
            maker([1, 2, 3]).tolist() == [1, 2, 3], f"{name}([1, 2, 3]) holds {maker([1, 2, 3]).tolist()}"
        )


@check(
    "amp",
    promise="Within amp.autocast products use the reduced dtype, and gradients of the weights are float32.",
)  # fmt: skip
def autocast(accelerator: Accelerator) -> None:
    for dtype in reduced_dtypes(accelerator):
        layer = torch.nn.Linear(64, 32, bias=False).to(accelerator.current_device_name())
        inputs = numbers(16, 64).float().to(accelerator.current_device_name())
        with accelerator.amp.autocast(True, dtype):
            output = layer(inputs)
        require(
            output.dtype == dtype,
            f"within autocast in {short(dtype)} a linear layer gives {short(output.dtype)}",
        )
        with accelerator.amp.autocast(False):
            full = layer(inputs)
        require(
            full.dtype == torch.float32, f"within autocast(False) a linear layer gives {short(full.dtype)}"
        )
        require_close(output, full, dtype, "a linear layer within autocast")
        output.float().square().mean().backward()
        gradient = layer.weight.grad
        require(
            gradient is not None and gradient.dtype == torch.float32, "the weight has no float32 gradient"
        )


@check(
    "amp",
    promise="amp.GradScaler scales a loss, steps with unscaled gradients, and skips a step that overflows.",
    of="operators",
)
def gradient_scaling(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    scaler = accelerator.amp.GradScaler(init_scale=1024.0)
    weight = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loss = (weight * 2).sum()
    scaled = scaler.scale(loss)
    require(float(scaled) == 1024.0 * 16, f"a loss of 16 is scaled to {float(scaled)} by 1024")
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    after = weight.detach().cpu()
    require(
        equal(after, torch.zeros(8)), f"a step with unscaled gradients 2 and rate 0.5 from 1 gives {after[0]}"
    )
    scale = scaler.get_scale()
    require(scale == 1024.0, f"a step that does not overflow changes the scale from 1024 to {scale}")
    optimizer.zero_grad()
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    require(equal(weight, after), "a step with infinite gradients is not skipped")
    require(scaler.get_scale() < 1024.0, f"an overflow changes the scale from 1024 to {scaler.get_scale()}")
