"""A synchronisation that gets a device goes with it, and one after a line that raises without CUDA goes with that line."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, site_of

SOURCE = """\
import torch


class Trainer:
    def __init__(self):
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def step(self, net, x):
        y = net(x.to(self.device))
        torch.cuda.synchronize({given})
        return y
"""


@EACH_TARGET
@pytest.mark.parametrize(
    ("given", "stays", "status"),
    [
        ("self.device", True, Status.UNSAFE),
        ("self.device", False, Status.CONVERTED),
        ("", True, Status.CONVERTED),
        ("0", True, Status.CONVERTED),
    ],
)
def test_a_synchronisation_stays_with_the_device_that_it_gets(
    given: str, stays: bool, status: Status, target: str
) -> None:
    source = SOURCE.format(given=given)
    source = ("import cupy\n" if stays else "") + source
    ported = port_text(source, Settings(target))
    assert site_of(ported, f"torch.cuda.synchronize({given})").status is status


@EACH_TARGET
def test_a_synchronisation_after_a_reset_that_stays_is_unsafe(target: str) -> None:
    source = (
        "import cupy\nimport torch\n\n\ndef start(index):\n    torch.cuda.reset_peak_memory_stats(index)\n"
        "    torch.cuda.synchronize(0)\n\n\ndef end(net, x):\n    torch.cuda.synchronize()\n    return net(x.cuda())\n"
    )
    ported = port_text(source, Settings(target))
    assert site_of(ported, "torch.cuda.synchronize(0)").status is Status.UNSAFE
    assert site_of(ported, "torch.cuda.synchronize()").status is Status.CONVERTED
