"""Every accelerator reports its dtypes correctly, and makes tensors of each type."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch

from acclimate.accelerator import Accelerator, TensorType
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import AutocastArgumentError

TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


@pytest.mark.parametrize("name", ["is_bf16_supported", "is_fp16_supported", "is_fp64_supported"])
def test_support_is_a_bool(acc: Accelerator, name: str) -> None:
    assert type(getattr(acc, name)()) is bool


def test_supported_dtypes_are_floating_and_start_with_float32(acc: Accelerator) -> None:
    dtypes = acc.supported_dtypes()
    assert type(dtypes) is list
    assert dtypes[0] is torch.float32
    assert all(dtype.is_floating_point for dtype in dtypes)
    assert len(set(dtypes)) == len(dtypes)


def test_supported_dtypes_agree_with_the_questions(acc: Accelerator) -> None:
    dtypes = acc.supported_dtypes()
    assert (torch.bfloat16 in dtypes) == acc.is_bf16_supported()
    assert (torch.float16 in dtypes) == acc.is_fp16_supported()
    assert (torch.float64 in dtypes) == acc.is_fp64_supported()


def test_a_supported_dtype_computes(acc: Accelerator) -> None:
    for dtype in acc.supported_dtypes():
        ones = torch.ones(2, 2, dtype=dtype, device=acc.device_name())
        assert (ones @ ones).float().sum().item() == 8.0, dtype


def test_what_autocast_is_told_counts(whole: Accelerator) -> None:
    assert whole.is_fp16_supported()
    assert not whole.is_bf16_supported()


def test_what_the_module_says_of_bfloat16_counts_most(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole.torch_module, "is_bf16_supported", lambda: True, raising=False)
    assert whole.is_bf16_supported()


def test_a_module_that_tells_emulation_apart_is_told_whether_it_counts(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emulates(including_emulation: bool = True) -> bool:
        return including_emulation

    monkeypatch.setattr(whole.torch_module, "is_bf16_supported", emulates, raising=False)
    assert not whole.is_bf16_supported()
    assert whole.is_bf16_supported(including_emulation=True)
    assert torch.bfloat16 not in whole.supported_dtypes()


# `int` stands for a function written in C, whose parameters Python may not know.
@pytest.mark.parametrize(("function", "answer"), [(lambda: True, True), (int, False)])
def test_a_module_that_does_not_tell_emulation_apart_is_asked_without_it(
    whole: Accelerator, monkeypatch: pytest.MonkeyPatch, function: Callable[[], object], answer: bool
) -> None:
    monkeypatch.setattr(whole.torch_module, "is_bf16_supported", function, raising=False)
    for including_emulation in (False, True):
        assert whole.is_bf16_supported(including_emulation) is answer


def test_emulation_makes_no_difference_where_nothing_tells_of_it(acc: Accelerator) -> None:
    assert acc.is_bf16_supported(including_emulation=True) == acc.is_bf16_supported()


def test_a_silent_device_is_tried(bare: Accelerator) -> None:
    # float8 has no matrix product and no sum on the host, which computes for this device.
    assert bare._computes_in(torch.bfloat16)
    assert not bare._computes_in(torch.float8_e4m3fn)


# -- tensors of a type -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), TENSORS.items())
def test_a_tensor_type_makes_a_tensor_of_sizes(acc: Accelerator, name: str, dtype: torch.dtype) -> None:
    tensor = getattr(acc, name)(2, 3)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), dtype, acc.device_type)


@pytest.mark.parametrize(("name", "dtype"), TENSORS.items())
def test_a_tensor_type_makes_a_tensor_of_data(acc: Accelerator, name: str, dtype: torch.dtype) -> None:
    tensor = getattr(acc, name)([[1, 2], [3, 4]])
    assert (tensor.dtype, tensor.device.type) == (dtype, acc.device_type)
    assert tensor.cpu().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("name", "dtype"), TENSORS.items())
def test_a_tensor_type_makes_an_empty_tensor(acc: Accelerator, name: str, dtype: torch.dtype) -> None:
    assert getattr(acc, name)().shape == (0,)
    assert getattr(acc, name)(torch.Size([2, 0])).shape == (2, 0)


def test_a_tensor_type_knows_its_tensors(acc: Accelerator) -> None:
    tensor = torch.zeros(1, device=acc.device_name())
    assert isinstance(tensor, acc.FloatTensor)
    assert not isinstance(tensor, acc.LongTensor)
    assert not isinstance(1.0, acc.FloatTensor)
    assert not isinstance(torch.zeros(1, device="meta"), acc.FloatTensor)


def test_a_made_tensor_type_copies_its_data(indexed: Accelerator) -> None:
    source = torch.zeros(2)
    made = TensorType(torch.float32, "cpu")(source)
    made += 1
    assert source.tolist() == [0, 0]
    assert repr(indexed.IntTensor) == f"TensorType(torch.int32, '{indexed.device_type}')"


def test_a_made_tensor_type_refuses_several_values() -> None:
    with pytest.raises(TypeError, match="not 2 values"):
        TensorType(torch.float32, "cpu")(1.0, 2.0)


def test_the_hosts_tensor_types_are_torchs(cpu: CPUAccelerator) -> None:
    for name in TENSORS:
        assert getattr(cpu, name) is getattr(torch, name)


# -- mixed precision ---------------------------------------------------------------------------------


def test_autocast_computes_in_the_dtype_asked_for(cpu: CPUAccelerator) -> None:
    ones = torch.ones(2, 2)
    with cpu.amp.autocast(dtype=torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
    with cpu.amp.autocast(enabled=False):
        assert (ones @ ones).dtype == torch.float32
    assert (ones @ ones).dtype == torch.float32


@pytest.mark.parametrize("arguments", [("cuda", torch.bfloat16), ("cpu",), (torch.bfloat16,)], ids=str)
def test_autocast_refuses_the_arguments_of_torch_autocast_before_it_is_entered(
    acc: Accelerator, arguments: tuple[object, ...]
) -> None:
    with pytest.raises(AutocastArgumentError, match=f"enabled must be a bool. Value .*{arguments[0]}"):
        acc.amp.autocast(*arguments)


def test_autocast_decorates(cpu: CPUAccelerator) -> None:
    @cpu.amp.autocast(dtype=torch.bfloat16)
    def product(ones: torch.Tensor) -> torch.Tensor:
        return ones @ ones

    assert product(torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_is_of_the_device(whole: Accelerator) -> None:
    context = whole.amp.autocast(True, torch.float16)
    assert (context.device, context.fast_dtype) == ("whole", torch.float16)


def test_autocast_takes_what_cudas_takes(acc: Accelerator) -> None:
    # The class itself tells no more than (*args, **kwargs) since torch 2.15.
    _, *theirs = inspect.signature(torch.cuda.amp.autocast.__init__).parameters
    assert list(inspect.signature(acc.amp.autocast).parameters) == theirs


def test_grad_scaler_takes_what_cudas_takes(acc: Accelerator) -> None:
    ours = inspect.signature(acc.amp.GradScaler).parameters
    theirs = inspect.signature(torch.cuda.amp.GradScaler).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_grad_scaler_is_one_class_of_torchs(acc: Accelerator) -> None:
    assert acc.amp.GradScaler is acc.amp.GradScaler
    scaler = acc.amp.GradScaler(init_scale=4.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler._device == acc.device_type


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_scaler_is_pickled_and_copied_as_torchs_is(acc: Accelerator, enabled: bool) -> None:
    scaler = acc.amp.GradScaler(init_scale=4.0, enabled=enabled)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert type(twin) is acc.amp.GradScaler
        assert twin is not scaler
        assert twin.state_dict() == scaler.state_dict()
        assert twin._device == acc.device_type


def test_grad_scaler_scales_and_steps(cpu: CPUAccelerator) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = cpu.amp.GradScaler(init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0, 8.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("given", [True, False])
def test_custom_functions_are_decorated_for_the_device(cpu: CPUAccelerator, given: bool) -> None:
    decorate = cpu.amp.custom_fwd(cast_inputs=torch.float32) if given else cpu.amp.custom_fwd

    class Double(torch.autograd.Function):
        @staticmethod
        @decorate
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @cpu.amp.custom_bwd
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(1, dtype=torch.bfloat16 if given else torch.float32, requires_grad=True)
    with cpu.amp.autocast(dtype=torch.bfloat16):
        y = Double.apply(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.item() == 2
