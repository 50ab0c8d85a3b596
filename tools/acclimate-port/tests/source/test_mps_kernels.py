"""A function of torch without a kernel for Apple's GPUs holds back the edits that choose the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.mps_kernels import without_mps
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
HEAD = "import numpy as np\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
WITHOUT = {
    "a loss": "nn.CTCLoss()(x, y, m, n)",
    "a function of a loss": "F.ctc_loss(x, y, m, n)",
    "a layer": "nn.AdaptiveAvgPool3d((4, 4, 4))",
    "the size of a pool by its keyword": "F.adaptive_avg_pool3d(x, output_size=4)",
    "a decomposition": "torch.linalg.eigh(x)",
    "an exponential of a matrix": "torch.matrix_exp(x)",
    "channels that are shuffled": "nn.ChannelShuffle(2)",
    "an embedding that keeps norms": "nn.Embedding(3, 4, max_norm=1.0)",
    "numbers in steps of their logarithms": "torch.logspace(0, 1, 5, device=m)",
    "a method of tensors": "x.matrix_exp()",
    "a distribution": "torch.distributions.Poisson(x).sample()",
    "a function of torch.special": "torch.special.ndtri(x)",
    "a compressed sparse tensor": "x.to_sparse_csr()",
}
WITH = {
    "a pool that gives one number": "nn.AdaptiveAvgPool3d(1)",
    "a pool that gives one number by its sides": "F.adaptive_avg_pool3d(x, (1, 1, 1))",
    "a function of numpy": "np.linalg.eigh(x.numpy())",
    "a tensor of the host": "torch.linalg.eigh(x.cpu())",
    "numbers in such steps on the host": "torch.logspace(0, 1, 5).to(m)",
    "an embedding": "nn.Embedding(3, 4, max_norm=None)",
    "the norm of gradients": "nn.utils.clip_grad_norm_(x, max_norm=1.0)",
    "another loss": "nn.CrossEntropyLoss()(x, y)",
    "a singular value decomposition": "torch.linalg.svd(x)",
    "a method of an object": "sampler.mode(x)",
    "a sparse tensor of coordinates": "torch.sparse_coo_tensor(x, y)",
}


def code(call: str) -> str:
    return f"{HEAD}\n\ndef f(x, y, m, n, sampler):\n    return {call}\n"


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_call_without_a_kernel_is_found(kind: str) -> None:
    assert without_mps(code(WITHOUT[kind])) == {"f": 8}


@pytest.mark.parametrize("kind", WITH)
def test_a_call_with_a_kernel_is_not_found(kind: str) -> None:
    assert without_mps(code(WITH[kind])) == {}


def test_an_import_of_a_part_of_torch_binds_torch() -> None:
    source = "import torch.nn.functional\n\n\ndef f(x):\n    return torch.linalg.eigh(x)\n"
    assert without_mps(source) == {"f": 5}


@EACH_TARGET
@pytest.mark.parametrize("is_choice", [True, False])
def test_a_loss_of_another_file_holds_back_a_program_that_takes_the_host_of_a_mac(
    is_choice: bool, target: str, tmp_path: Path
) -> None:
    device = CHOICE if is_choice else "'cuda'"
    files = {
        "losses.py": code(WITHOUT["a function of a loss"]),
        "train.py": "import torch\nfrom losses import f\n\n\ndef main():\n"
        f"    x = torch.ones(3, device={device})\n    f(x, x, 1, 2, None)\n",
    }
    found = site(ported_project(tmp_path, files, target)["train.py"], device)
    if is_choice:
        assert found.status is Status.UNSAFE
        assert "no kernel" in found.reason
        assert "losses.py:8" in found.reason
    else:
        assert found.status is Status.CONVERTED
