"""A device's name is ported as a key of a cache, which the program fills and reads by the same value."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, check, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
HEAD = "import torch\n\nheld = {}\n\n\ndef f(x, y: torch.Tensor, model, flag, other, device):\n"
CACHES = {
    "a test": "    if place not in held:\n        held[place] = y.to(place)\n    return held[place]\n",
    "a test of the keys": "    if place not in held.keys():\n        held[place] = y.to(place)\n    return held[place]\n",
    "a method": "    if held.get(place) is None:\n        held[place] = y.to(place)\n    return held.pop(place)\n",
    "a default": "    return held.setdefault(place, y.to(place))\n",
    "a limit": "    if len(held) > 3:\n        held.clear()\n    held[place] = y.to(place)\n    return held[place]\n",
}
CHOSEN = f"    place = {CHOICE}\n"
OF_CLASS = """\
import torch


class Held:
    {0}

    def __init__(self):
        {1}

    def get(self, y: torch.Tensor, device=None):
        device = device or {2}
        if device not in self.held:
            self.held[device] = y.to(device)
        return self.held[device]
"""


@EACH_TARGET
@pytest.mark.parametrize("kind", CACHES)
def test_a_device_by_which_a_cache_is_filled_and_read_is_ported(kind: str, target: str) -> None:
    check(HEAD + CHOSEN + CACHES[kind], target, changed=True)


@EACH_TARGET
@pytest.mark.parametrize(
    ("of_class", "of_object"), [("held = {}", "pass"), ("size = 1", "self.held = dict()")]
)
def test_a_device_is_ported_as_the_key_of_a_cache_of_a_class(
    of_class: str, of_object: str, target: str
) -> None:
    source = OF_CLASS.format(of_class, of_object, CHOICE)
    assert CHOICE not in port_text(source, Settings(target)).text


TABLES = {
    "an entry under a literal": "    held['cuda'] = y.cuda()\n    return held[place]\n",
    "an entry for the CPU": "    held['cpu'] = y\n    return held[place]\n",
    "entries from elsewhere": "    held.update(model)\n    return held[place]\n",
    "another name": "    table = held\n    table['cuda'] = y\n    return held[place]\n",
    "what a function gets": "    other(held)\n    return held[place]\n",
    "its keys": "    held[place] = y\n    return ['cuda' in one for one in held.keys()]\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_with_other_entries_is_no_cache(kind: str, target: str) -> None:
    source = HEAD + CHOSEN + TABLES[kind]
    assert CHOICE in port_text(source, Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize("begins", ["{'cuda': 1}", "dict(cuda=1)", "load()"])
def test_a_table_that_begins_with_entries_is_no_cache(begins: str, target: str) -> None:
    source = HEAD.replace("{}", begins) + CHOSEN + CACHES["a test"]
    assert CHOICE in port_text(source, Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize(("begins", "status"), [("{}", Status.CONVERTED), ("{'cuda': 1}", Status.UNSAFE)])
def test_a_cache_of_another_file_takes_any_device(
    begins: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {
        "held.py": f"import torch\n\nheld = {begins}\n\n\ndef get(y: torch.Tensor, device):\n    if device not in held:\n"
        "        held[device] = y.to(device)\n    return held[device]\n",
        "main.py": f"import torch\nfrom held import get\n\n\ndef main(y: torch.Tensor):\n    return get(y, {CHOICE})\n",
    }
    assert site(ported_project(tmp_path, files, target)["main.py"], CHOICE).status is status
