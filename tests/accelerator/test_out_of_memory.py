"""`is_out_of_memory` distinguishes a full device, or host, from any other error."""

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.backends.cuda import CUDAAccelerator


@pytest.mark.parametrize("backend", [CPUAccelerator, CUDAAccelerator])
def test_the_hosts_plain_runtime_error_is_told_by_its_message(backend: type[Accelerator]) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    assert type(raised.value) is RuntimeError
    assert backend().is_out_of_memory(raised.value)


@pytest.mark.parametrize("backend", [CPUAccelerator, CUDAAccelerator])
def test_torchs_own_type_counts_and_other_errors_do_not(backend: type[Accelerator]) -> None:
    accelerator = backend()
    assert accelerator.is_out_of_memory(torch.OutOfMemoryError("full"))
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert not accelerator.is_out_of_memory(raised.value)
    assert not accelerator.is_out_of_memory(MemoryError())
