"""A test that turns the processes of a loader on is unsafe where these fail on a Mac, which imports the program again."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import AVAILABLE, EACH_TARGET

SCRIPT = """\
import torch
from torchvision import transforms

use_cuda = torch.cuda.is_available()
options = {options} if use_cuda else {{}}
loader = torch.utils.data.DataLoader(data({transform}), batch_size=4, **options)
{loop}
"""
LOOP = "for x in loader:\n    print(x.shape)"
MAIN = "if __name__ == '__main__':\n    for x in loader:\n        print(x.shape)"
LAMBDA = "transforms.Lambda(lambda x: x)"
CASES = {
    "a loop that runs at import": ("{'num_workers': 4}", "", LOOP, "line 7"),
    "a lambda": ("{'num_workers': 4}", LAMBDA, MAIN, "line 6"),
    "options made by a call": ("dict(num_workers=4)", LAMBDA, MAIN, "line 6"),
    "a program that is run by its name": ("{'num_workers': 4}", "", MAIN, ""),
    "no processes": ("{'num_workers': 0}", LAMBDA, LOOP, ""),
    "other options": ("{'pin_memory': True}", LAMBDA, LOOP, ""),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", CASES)
def test_processes_that_fail_on_a_mac_are_not_turned_on(kind: str, target: str) -> None:
    options, transform, loop, reason = CASES[kind]
    text = SCRIPT.format(options=options, transform=transform, loop=loop)
    found = next(one for one in port_text(text, Settings(target)).sites if one.text == AVAILABLE)
    assert found.safe == (not reason), found
    assert reason in found.reason
