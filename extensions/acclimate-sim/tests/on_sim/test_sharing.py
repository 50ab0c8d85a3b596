from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset


class OnDevice(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)).to("sim:1")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_return_tensors_on_the_device(method: str) -> None:
    loader = DataLoader(OnDevice(), batch_size=2, num_workers=1, multiprocessing_context=method, timeout=300)
    batches = list(loader)
    assert [str(batch.device) for batch in batches] == ["sim:1"] * 2
    assert torch.cat(batches).tolist() == [[float(i)] * 2 for i in range(4)]


def _raise_unless_three_ones(tensor: torch.Tensor) -> None:
    if tensor.device.type != "sim" or tensor.tolist() != [1.0] * 3:
        raise ValueError(tensor)


@pytest.mark.slow
def test_a_spawned_process_gets_tensors_as_its_arguments() -> None:
    child = mp.get_context("spawn").Process(target=_raise_unless_three_ones, args=(torch.ones(3).to("sim"),))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_a_queue_keeps_parameters_and_their_gradients_flag() -> None:
    queue = mp.get_context("fork").SimpleQueue()
    for sent in (
        nn.Parameter(torch.ones(2).to("sim")),
        nn.Parameter(torch.ones(2).to("sim"), requires_grad=False),
        torch.ones(2).to("sim").requires_grad_(),
        torch.ones(2),
    ):
        queue.put(sent)
        received = queue.get()
        assert type(received) is type(sent)
        assert (received.device, received.requires_grad) == (sent.device, sent.requires_grad)
        assert received.tolist() == [1.0, 1.0]
