"""A test that expects numbers which a seed gives on CUDA runs on CUDA alone."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, BOTH, site_of

TEST = (
    "import pytest\nimport torch\n\n\n@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')\n"
    "def {name}():\n    torch.manual_seed(0)\n    x = {drawn}\n    assert torch.allclose(x.cpu(), torch.tensor({numbers}))\n"
)


@BOTH
@pytest.mark.parametrize(
    ("name", "drawn", "numbers", "status"),
    [
        ("test_f", "torch.rand(2, device='cuda')", "[0.3990, 0.5167]", Status.UNSAFE),
        (
            "test_f",
            "torch.ones(2, device='cuda', generator=torch.Generator(device='cuda'))",
            "[0.399, 1.5167]",
            Status.UNSAFE,
        ),
        ("test_f", "torch.ones(2, device='cuda')", "[0.3990, 0.5167]", Status.CONVERTED),
        ("test_f", "torch.rand(2, device='cuda')", "[0.5, 1.0]", Status.CONVERTED),
        ("show", "torch.rand(2, device='cuda')", "[0.3990, 0.5167]", Status.CONVERTED),
    ],
)
def test_a_test_of_drawn_numbers_is_unsafe(
    name: str, drawn: str, numbers: str, status: Status, target: str
) -> None:
    ported = port_text(TEST.format(name=name, drawn=drawn, numbers=numbers), Settings(target))
    assert site_of(ported, AVAILABLE).status is status
    assert {one.status for one in ported.sites if one.text == "'cuda'"} == {status}
