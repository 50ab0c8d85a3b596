"""Autocasts and scalers, and the device that they belong to, are ported together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, check, ported_project, reasons

CHOICES = {
    "a choice": "def main(net):\n    net.to(torch.device('cuda' if torch.cuda.is_available() else 'cpu'))\n",
    "ranks": "def main(rank):\n    torch.cuda.set_device(rank)\n    torch.distributed.init_process_group('nccl')\n",
    "a test": "def main(x):\n    if torch.cuda.is_available():\n        return torch.zeros(1, device='cuda')\n",
}
STAYING = {
    "a dtype that nothing shows": (
        "def step(self, net, x):\n    with torch.cuda.amp.autocast(dtype=self.dtype):\n        return net(x)\n"
    ),
    "unpacked arguments": "def step(options):\n    return torch.cuda.amp.GradScaler(**options)\n",
    "a class that is passed": "def step(run):\n    return run(torch.cuda.amp.autocast)\n",
}


@EACH_TARGET
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", STAYING)
def test_a_device_stays_with_an_autocast_or_a_scaler_of_its_program(
    kind: str, choice: str, target: str, tmp_path: Path
) -> None:
    source = f"import torch\n\n\n{STAYING[kind]}\n\n{CHOICES[choice]}"
    assert port_text(source, Settings(target)).text == source
    files = {
        "steps.py": f"import torch\n\n\n{STAYING[kind]}",
        "main.py": f"import torch\nfrom steps import step\n\n\n{CHOICES[choice]}",
    }
    results = ported_project(tmp_path, files, target)
    assert Status.CONVERTED not in {one.status for one in results["main.py"].sites}


@EACH_TARGET
def test_an_autocast_that_is_off_stays_with_the_one_around_it(target: str, tmp_path: Path) -> None:
    files = {
        "loss.py": (
            "import torch\n\n\ndef loss(net, x, dtype):\n    with torch.cuda.amp.autocast(dtype=dtype):\n        y = net(x)\n"
            "        with torch.cuda.amp.autocast(enabled=False):\n            return y.float()\n"
        ),
        "inner.py": (
            "import torch\n\n\ndef inner(x):\n    with torch.cuda.amp.autocast(enabled=False):\n        return x.float()\n"
        ),
        "main.py": "from inner import inner\nfrom loss import loss\n\n\ndef main(net, x):\n    return inner(loss(net, x, 0))\n",
    }
    for name, given in (("stays", "dtype"), ("ported", "torch.float16")):
        text = files["loss.py"].replace("dtype=dtype", f"dtype={given}")
        results = ported_project(tmp_path / name, {**files, "loss.py": text}, target)
        statuses = {site.status for one in results.values() for site in one.sites}
        assert statuses == {Status.UNSAFE if name == "stays" else Status.CONVERTED}


@EACH_TARGET
def test_a_region_without_autocast_that_stays_for_one_program_holds_the_others(
    target: str, tmp_path: Path
) -> None:
    step = "import torch\n\n\ndef {}(net, x, device{}):\n    with torch.cuda.amp.autocast():\n        return net(x.to(device))\n"
    files = {
        "mel.py": "import torch\n\n\nclass Mel(torch.nn.Module):\n    def forward(self, x):\n"
        "        with torch.cuda.amp.autocast(enabled=False):\n            return x @ x\n",
        "first.py": step.format("first", "=torch.device('cuda')"),
        "second.py": step.format("second", ""),
        "train_first.py": "from first import first\nfrom mel import Mel\n\n\ndef main(x):\n    first(Mel(), x)\n",
        "train_second.py": "import torch\nfrom mel import Mel\nfrom second import second\n\n\ndef main(x):\n"
        "    second(Mel(), x, torch.device('cuda'))\n",
    }
    results = ported_project(tmp_path / "held", files, target)
    assert {one.status for result in results.values() for one in result.sites} == {Status.UNSAFE}
    files["first.py"] = step.format("first", "")
    results = ported_project(tmp_path / "free", files, target)
    assert {one.status for result in results.values() for one in result.sites} == {Status.CONVERTED}


SCOPES = {
    "a choice": "scope = torch.autocast if flag else nullcontext\nwith scope('cuda'):\n    return x @ x\n",
    "an assignment": "scope = nullcontext\nif flag:\n    scope = torch.amp.autocast\nwith scope(device_type='cuda'):\n    return x @ x\n",
    "a choice at the call": "with (torch.autocast if flag else nullcontext)('cuda'):\n    return x @ x\n",
    "a partial": "scope = partial(torch.autocast, dtype=torch.float16)\nwith scope('cuda'):\n    return x @ x\n",
    "an argument": "def run(scope):\n    with scope('cuda'):\n        return x @ x\n\nreturn run(torch.autocast)\n",
    "a default": "def run(scope=torch.autocast):\n    with scope('cuda'):\n        return x @ x\n\nreturn run()\n",
    "an attribute": "model.scope = torch.autocast if flag else nullcontext\nwith model.scope('cuda'):\n    return x @ x\n",
}
HEAD = "from contextlib import nullcontext\nfrom functools import partial\n\nimport torch\n\n\ndef f(x, model, flag):\n"


@EACH_TARGET
@pytest.mark.parametrize("kind", SCOPES)
def test_a_device_that_a_name_for_autocast_gets_is_one_decision_with_the_others(
    kind: str, target: str
) -> None:
    body = "".join(f"    {line}\n" for line in SCOPES[kind].splitlines())
    choice = "\n\ndef g(net):\n    net.to('cuda' if torch.cuda.is_available() else 'cpu')\n"
    source = f"{HEAD}{body}{choice}"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert {one.status for one in ported.sites} == {Status.UNSAFE}
    guarded = source.replace("with ", "if torch.cuda.is_available():\n     with ").replace(
        "return x", " return x"
    )
    if "def run" not in source:
        compile(guarded, "guarded", "exec")
        assert {one.status for one in port_text(guarded, Settings(target)).sites} == {Status.CONVERTED}


@EACH_TARGET
def test_a_name_that_holds_no_function_of_torch_takes_no_device(target: str) -> None:
    ported = port_text(f"{HEAD}    scope = model.run or print\n    scope('cuda')\n", Settings(target))
    assert [one.status for one in ported.sites] == [Status.EXEMPT]


FLAGS = {
    "a device's type": "cuda = x.device.type != 'cpu'\nreturn torch.cuda.amp.GradScaler(enabled=cuda)",
    "a test": "use = torch.cuda.is_available()\nreturn torch.cuda.amp.GradScaler(enabled=use)",
    "a test and more": "use = torch.cuda.is_available() and flag\nreturn torch.cuda.amp.GradScaler(enabled=use and other)",
    "an autocast": "cuda = x.device.type != 'cpu'\nwith torch.cuda.amp.autocast(enabled=cuda):\n    return cuda",
    "several devices": "cuda = x.device.type != 'cpu'\nif cuda and flag and torch.cuda.device_count() > 1:\n    return 2\nreturn 1",
    "several devices beside a type": "if x.device.type != 'cpu' and torch.cuda.device_count() > 1:\n    return 2\nreturn 1",
    "a number beside a type": "return torch.cuda.device_count() if x.device.type != 'cpu' else 0",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FLAGS)
def test_a_flag_that_is_false_on_a_host_guards_what_it_turns_on(kind: str, target: str) -> None:
    body = "".join(f"    {line}\n" for line in FLAGS[kind].splitlines())
    source = f"import torch\n\n\ndef f(x: torch.Tensor, y, model, flag, other, device):\n{body}"
    ported = check(source, target, changed=True)
    assert {one.status for one in ported.sites} == {Status.CONVERTED}


@EACH_TARGET
def test_a_flag_that_may_be_true_on_a_host_guards_nothing(target: str) -> None:
    source = (
        "import torch\n\n\ndef f(flag):\n    use = torch.cuda.is_available() or flag\n"
        "    if use and torch.cuda.device_count() >= 0:\n        return torch.zeros(1).pin_memory()\n"
    )
    assert "on a host" in reasons(port_text(source, Settings(target))) or target == "torch"
