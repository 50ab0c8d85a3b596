"""What a name means where the branches of a file bind it differently."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET

USE = "\n\ndef f(x, use):\n    with autocast(use):\n        return x @ x\n"
FALLBACK = "def autocast(enabled=True):\n        yield\n"
OF_ANY_TORCH = [
    f'if V(torch.__version__) >= V("1.6.0"):\n    from torch.cuda.amp import autocast\nelse:\n    {FALLBACK}',
    f'if V(torch.__version__) < V("1.6.0"):\n    {FALLBACK}else:\n    from torch.cuda.amp import autocast\n',
    "try:\n    from torch.cuda.amp import autocast\n    HAS_AMP = True\nexcept ImportError:\n    autocast = None\n    HAS_AMP = False\n",
]


@EACH_TARGET
@pytest.mark.parametrize("head", OF_ANY_TORCH)
def test_an_autocast_that_each_torch_has_is_ported_where_another_one_is_for_an_older_torch(
    head: str, target: str
) -> None:
    ported = port_text(
        f"import torch\nfrom packaging.version import parse as V\n\n{head}{USE}", Settings(target)
    )
    assert "    with autocast(" not in ported.text
    assert "amp.autocast(" in ported.text


@EACH_TARGET
@pytest.mark.parametrize(
    "head",
    [
        f'if V(torch.__version__) >= V("2.99"):\n    from torch.cuda.amp import autocast\nelse:\n    {FALLBACK}',
        f"if FAST:\n    from torch.cuda.amp import autocast\nelse:\n    {FALLBACK}",
        "try:\n    from torch.cuda.amp import autocast\n    import apex\nexcept ImportError:\n    autocast = None\n",
    ],
)
def test_an_autocast_that_another_condition_chooses_stays(head: str, target: str) -> None:
    source = f"import torch\nfrom packaging.version import parse as V\n\n{head}{USE}"
    assert port_text(source, Settings(target, unsafe=True)).text == source
