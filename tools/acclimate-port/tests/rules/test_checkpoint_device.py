"""A checkpoint that only modules get is loaded to the host on every machine; another load holds its program back."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_project, site

EDITED = {
    "at once": "model.load_state_dict(torch.load(path))",
    "an entry": "model.load_state_dict(torch.load(path)['state_dict'], strict=False)",
    "several entries": (
        "saved = torch.load(path)\n    model.load_state_dict(saved['model'])\n    optimizer.load_state_dict(saved['optimizer'])\n"
        "    return saved['epoch']"
    ),
    "renamed parts": (
        "state = torch.load(path)\n    if 'state_dict' in state:\n        state = state['state_dict']\n"
        "    state = {key[7:]: value for key, value in state.items()}\n    model.load_state_dict(state)"
    ),
    "parts in a loop": (
        "renamed = {}\n    for key, value in torch.load(path).items():\n        renamed[key[7:]] = value\n    model.load_state_dict(renamed)"
    ),
    "parts of the right size": (
        "own = model.state_dict()\n    saved = torch.load(path)\n"
        "    saved = {key: value for key, value in saved.items() if value.shape == own[key].shape}\n"
        "    own.update(saved)\n    model.load_state_dict(own)"
    ),
}
EDITED["parts that are copied"] = (
    "own = model.state_dict()\n    for key, value in torch.load(path).items():\n        own[key].copy_(value)"
)
EDITED["a part with a name of its own"] = (
    "saved = torch.load(path)\n    state = saved['model']\n    other = {key[7:]: value for key, value in state.items()}\n"
    "    model.load_state_dict(other)"
)
EDITED["one of two paths"] = (
    "saved = torch.load(path) if place else torch.load(path)\n    model.load_state_dict(saved)"
)
EDITED["a generator"] = "gan.gen.load_state_dict(torch.load(path))"
LEFT = {
    "a result": "return torch.load(path)",
    "names alone": "print(torch.load(path).keys())",
    "a device": "model.load_state_dict(torch.load(path, map_location=place))",
    "a device by its position": "model.load_state_dict(torch.load(path, place))",
    "an object of the program's own": "ema.load_state_dict(torch.load(path))",
    "tensors that the module keeps": "model.load_state_dict(torch.load(path), assign=True)",
    "a value besides": "saved = torch.load(path)\n    model.load_state_dict(saved['model'])\n    return saved['best']",
    "a tensor in a loop": "for key, value in torch.load(path).items():\n        model.weights[key] = value",
    "a computation": "saved = torch.load(path)\n    model.load_state_dict(saved)\n    return saved['weight'] * 2",
    "a choice": (
        "if place:\n        saved = torch.load(path)\n    else:\n        saved = torch.load(path, map_location='cpu')\n"
        "    model.load_state_dict(saved)"
    ),
    "a name of the module": "global saved\n    saved = torch.load(path)\n    model.load_state_dict(saved)",
}


def source(body: str) -> str:
    return f"import torch\n\n\ndef f(model, optimizer, ema, path, place):\n    {body}\n"


@EACH_TARGET
@pytest.mark.parametrize("kind", EDITED)
def test_a_checkpoint_that_modules_copy_is_loaded_to_the_host(kind: str, target: str) -> None:
    text = source(EDITED[kind])
    edited = text.replace("torch.load(path)", "torch.load(path, map_location='cpu')")
    assert port_text(text, Settings(target)).text.replace('"cpu"', "'cpu'") == edited


@EACH_TARGET
@pytest.mark.parametrize("kind", LEFT)
def test_a_checkpoint_whose_tensors_go_elsewhere_is_left(kind: str, target: str) -> None:
    text = source(LEFT[kind])
    assert port_text(text, Settings(target, unsafe=True)).text == text


@EACH_TARGET
def test_a_program_that_goes_on_without_a_checkpoint_needs_review(target: str) -> None:
    text = source(
        "try:\n        model.load_state_dict(torch.load(path))\n    except Exception:\n        pass"
    )
    assert port_text(text, Settings(target)).text == text


@EACH_TARGET
def test_a_load_to_the_device_of_the_checkpoint_holds_back_a_program_if_none_that_is_ported_saves_it(
    target: str, tmp_path: Path
) -> None:
    files = {"test.py": "import torch\n\nmodel = torch.load('model.pt')\nx = torch.ones(1).cuda()\n"}

    def moved() -> Status:
        return site(ported_project(tmp_path, files, target)["test.py"], "torch.ones(1).cuda()").status

    assert moved() is Status.UNSAFE
    files["train.py"] = "import torch\n\nx = torch.ones(1).cuda()\ntorch.save(x, 'model.pt')\n"
    assert moved() is Status.CONVERTED
    files["train.py"] = f"import xformers.ops\n{files['train.py']}"
    assert moved() is Status.UNSAFE


@EACH_TARGET
def test_a_class_with_its_own_way_to_load_may_keep_the_tensors(target: str, tmp_path: Path) -> None:
    files = {
        "main.py": source("policy = path\n    policy.load_state_dict(torch.load(path))"),
        "net.py": source("net = torch.nn.Linear(1, 1)\n    net.load_state_dict(torch.load(path))"),
        "agent.py": "class Agent:\n    def load_state_dict(self, state):\n        self.alpha = state['alpha']\n",
    }
    found = ported_project(tmp_path, files, target)
    assert site(found["main.py"], "torch.load(path)").status is Status.UNSAFE
    assert site(found["net.py"], "torch.load(path)").status is Status.CONVERTED
    files["agent.py"] = "import torch\n\n\n" + files["agent.py"].replace("Agent", "Agent(torch.nn.Module)")
    files["agent.py"] = files["agent.py"].replace(
        "self.alpha = state['alpha']", "self.alpha.copy_(state['alpha'])"
    )
    assert (
        site(ported_project(tmp_path, files, target)["main.py"], "torch.load(path)").status
        is Status.CONVERTED
    )


BESIDE = "import torch\n\n\ndef f(model, path):\n    model.load_state_dict(torch.load(path))\n    {}\n"


@EACH_TARGET
def test_a_load_beside_one_that_stays_is_half_of_one(target: str) -> None:
    for line, is_safe in (
        ("model.memory = torch.load(path + 'model')", False),
        ("numbers = torch.load('numbers')", False),
        ("model.memory = torch.load(path + 'model', map_location='cpu')", True),
    ):
        found = [
            one for one in port_text(BESIDE.format(line), Settings(target)).sites if one.code == "ACC307"
        ]
        assert [one.safe for one in found] == [is_safe], found


UNKNOWN_FILE = "import sys\n\nimport torch\n\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = torch.ones(2).to(device) + torch.load(sys.argv[1]{})['a']\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("given", "status"), [("", Status.UNSAFE), (", map_location=device", Status.CONVERTED)]
)
def test_a_file_of_any_name_may_hold_tensors_of_the_device_that_saved_it(
    given: str, status: Status, target: str, tmp_path: Path
) -> None:
    found = ported_project(tmp_path, {"main.py": UNKNOWN_FILE.format(given)}, target)["main.py"]
    assert site(found, "'cuda' if torch.cuda.is_available() else 'cpu'").status is status


@EACH_TARGET
@pytest.mark.parametrize("given", ["True, True", "**options"])
def test_a_load_that_may_assign_tensors_is_left(given: str, target: str) -> None:
    text = f"import torch\n\n\ndef f(model, path, options):\n    model.load_state_dict(torch.load(path), {given})\n"
    assert port_text(text, Settings(target)).text == text


SEVERAL = """\
import torch


def f(model, target_net, source_net, path, other, flag):
    if flag:
        model.load_state_dict(torch.load(path))
    else:
        target_net.load_state_dict(torch.load(path{place}))
        source_net.load_state_dict(torch.load(other))
"""


@EACH_TARGET
@pytest.mark.parametrize(("place", "edits"), [("", 3), (", map_location=flag", 0)])
def test_loads_of_two_branches_are_edited_all_or_none(place: str, edits: int, target: str) -> None:
    ported = port_text(SEVERAL.format(place=place), Settings(target)).text
    assert ported.count('map_location="cpu"') == edits


LONG_TRY = """\
import torch


def f(model, optimizer, path):
    try:
        start = int(path.split("/")[-1])
        model.load_state_dict(torch.load(path))
        optimizer.load_state_dict(torch.load(path + "2"))
        print("restored")
    except {caught}:
        print("not restored")
    return model
"""


@EACH_TARGET
@pytest.mark.parametrize(("caught", "is_safe"), [("Exception", False), ("ValueError", True)])
def test_a_load_among_other_work_that_may_fail_needs_review_if_its_error_is_caught(
    caught: str, is_safe: bool, target: str
) -> None:
    sites = port_text(LONG_TRY.format(caught=caught), Settings(target)).sites
    assert [one.safe for one in sites] == [is_safe] * 2


KEEPING = {
    "its own loading": "    def load_state_dict(self, saved):\n        self.bank = saved['bank']\n",
    "the loading of its own part": (
        "    def _load_from_state_dict(self, saved, prefix, *rest):\n        self.bank = saved[prefix + 'bank']\n"
    ),
    "a buffer": (
        "    def _load_from_state_dict(\n        self, saved, prefix, *rest\n    ):\n"
        "        self.register_buffer('bank', saved[prefix + 'bank'])\n"
    ),
    "each part of it": (
        "    def load_state_dict(self, saved):\n        for name, value in saved.items():\n"
        "            setattr(self, name, value)\n"
    ),
    "all of it": "    def load_state_dict(self, saved):\n        self.__dict__.update(saved)\n",
    "more state": "    def set_extra_state(self, saved):\n        self.bank = saved['bank']\n",
    "a hook": (
        "    def __init__(self):\n        self._register_load_state_dict_pre_hook(self.take)\n\n"
        "    def take(self, saved, *rest):\n        self.bank = saved.pop('bank')\n"
    ),
}
COPYING = {
    "a copy": "    def load_state_dict(self, saved):\n        self.bank.copy_(saved['bank'])\n",
    "a move": "    def load_state_dict(self, saved):\n        self.bank = saved['bank'].to(self.weight.device)\n",
    "a number": "    def set_extra_state(self, saved):\n        self.count = int(saved['count'])\n",
    "a size": (
        "    def _load_from_state_dict(self, saved, prefix, *rest):\n"
        "        self.bank = torch.zeros(saved[prefix + 'bank'].shape)\n"
    ),
    "another method": "    def take(self, saved):\n        self.bank = saved['bank']\n\n    # no state_dict\n",
    "the rest of the class": (
        "    def load_state_dict(self, saved):\n        super().load_state_dict(saved)\n\n"
        "    def use(self, saved):\n        self.bank = saved\n"
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", [*KEEPING, *COPYING])
def test_a_load_is_unsafe_where_a_module_of_the_project_keeps_what_it_gets(
    kind: str, target: str, tmp_path: Path
) -> None:
    load = "torch.load(path)"
    files = {
        "net.py": f"import torch\n\n\nclass Net(torch.nn.Module):\n{(KEEPING | COPYING)[kind]}",
        "run.py": f"import torch\nfrom net import Net\n\n\ndef f(path):\n    model = Net()\n    model.load_state_dict({load})\n",
    }
    found = site(ported_project(tmp_path, files, target)["run.py"], load)
    assert found.status is (Status.UNSAFE if kind in KEEPING else Status.CONVERTED), found
