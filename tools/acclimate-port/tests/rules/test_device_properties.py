"""What a device tells of itself, of which some is only told by CUDA's."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, site_of


@BOTH
@pytest.mark.parametrize(
    ("use", "status"),
    [
        ("return properties", Status.UNSAFE),
        ("return getattr(properties, 'warp_size')", Status.UNSAFE),
        ("check(properties)", Status.UNSAFE),
        ("return getattr(properties, 'warp_size', 32)", Status.CONVERTED),
        ("print(properties)", Status.CONVERTED),
        ("return properties.total_memory", Status.CONVERTED),
    ],
)
def test_the_properties_of_a_device_are_unsafe_where_other_code_gets_them(
    use: str, status: Status, target: str
) -> None:
    text = (
        f"import torch\n\n\ndef f(check):\n    properties = torch.cuda.get_device_properties(0)\n    {use}\n"
    )
    assert site_of(port_text(text, Settings(target)), "torch.cuda.get_device_properties(0)").status is status
