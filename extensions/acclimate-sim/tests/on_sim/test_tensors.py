from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

DIFFERENT = "Expected all tensors to be on the same device"
x = torch.arange(4.0).view(2, 2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(b > 0, a, a),
        lambda a, b: nn.functional.linear(a, b),
        lambda a, b: nn.functional.embedding(b.long().flatten() % 2, a),
        lambda a, b: a.copy_(a).add_(b),
        lambda a, b: torch._foreach_add([a], [b]),
        lambda a, b: torch.add(a, 1, out=b),
        lambda a, b: nn.functional.layer_norm(a, (2,), b[0]),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_different_devices_do_not_mix(mix: object, other: str) -> None:
    with pytest.raises(RuntimeError, match=DIFFERENT):
        mix(x.to("sim:0"), x.to(other))  # type: ignore[operator]


def test_a_number_on_the_host_mixes_with_any_device() -> None:
    assert (x.to("sim") * torch.tensor(2.0)).cpu().equal(x * 2)


def test_a_host_tensor_is_never_written_by_an_operator_on_sim() -> None:
    with pytest.raises(RuntimeError, match=DIFFERENT):
        torch.tensor(1.0).add_(torch.tensor(1.0, device="sim"))


def test_indices_may_be_on_the_host() -> None:
    assert x.to("sim")[torch.tensor([1])].cpu().equal(x[[1]])
    with pytest.raises(RuntimeError):
        x[torch.tensor([1], device="sim")]


@pytest.mark.parametrize("options", [{}, {"periodic": False}, {"periodic": True, "beta": 8.0}])
def test_kaisers_window_is_the_hosts(options: dict[str, float]) -> None:
    window = torch.kaiser_window(7, **options, device="sim:1")
    assert window.device == torch.device("sim:1")
    assert window.cpu().equal(torch.kaiser_window(7, **options))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32])
def test_a_histogram_counts_integers_as_accelerators_do(dtype: torch.dtype) -> None:
    experts = torch.tensor([[3, 0, 3], [1, 3, 0]], dtype=dtype, device="sim")
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert (counts.dtype, counts.tolist()) == (dtype, [2, 1, 0, 3])


def test_to_copies_and_a_device_without_index_is_the_current_one() -> None:
    a = x.to("sim")
    b = a.to("sim:1")
    b.mul_(2)
    assert (a.device, b.device) == (torch.device("sim:0"), torch.device("sim:1"))
    assert a.cpu().equal(x)
    assert a.to("sim:0") is a


def test_views_share_memory() -> None:
    a = torch.arange(24.0, device="sim").view(2, 3, 4)
    a.transpose(0, 1)[1:, :, ::2].zero_()
    expected = torch.arange(24.0).view(2, 3, 4)
    expected.transpose(0, 1)[1:, :, ::2].zero_()
    assert a.cpu().equal(expected)
    assert a[..., None].squeeze(-1).data_ptr() == a.data_ptr()


def test_out_tensors_are_resized() -> None:
    out = torch.empty(0, device="sim")
    torch.add(x.to("sim"), 1, out=out)
    assert out.cpu().equal(x + 1)


def test_lazy_conjugation_and_negation_are_kept() -> None:
    z = torch.randn(3, 3, dtype=torch.cfloat)
    s = z.to("sim")
    torch.testing.assert_close((s.conj() @ s.mH).cpu(), z.conj() @ z.mH)
    assert s.conj().clone().cpu().equal(z.conj())
    assert s.conj().imag.cpu().equal(z.conj().imag)


def test_numpy_and_unknown_devices_are_refused() -> None:
    with pytest.raises(TypeError, match="to numpy"):
        x.to("sim").numpy()
    with pytest.raises(RuntimeError, match=r"there is no device 9\. The device index is out of range"):
        torch.zeros(1, device="sim:9")


@pytest.mark.parametrize(
    "make",
    [
        lambda: x.to("sim").to_sparse(),
        lambda: x.to_sparse().to("sim"),
        lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device="sim"),
        lambda: x.to("sim").to_sparse_csr(),
        lambda: x.to_sparse_csr().to("sim") @ x.to("sim"),
        lambda: nn.Embedding(3, 2, sparse=True).to("sim")(torch.tensor([1]).to("sim")).sum().backward(),
    ],
)
def test_sparse_tensors_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"sim: this device has no Sparse(Csr)? tensors"):
        make()


def test_deepcopy_printing_and_meta_work() -> None:
    layer = copy.deepcopy(nn.Linear(2, 2).to("sim"))
    assert layer.weight.device.type == "sim"
    assert "device='sim:0'" in repr(x.to("sim"))
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    assert layer.to_empty(device="sim:1").weight.device == torch.device("sim:1")
