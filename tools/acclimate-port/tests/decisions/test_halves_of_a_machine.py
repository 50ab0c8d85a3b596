"""A part of a decision is not ported while its partner stays: streams, ranks, scalers, tests, lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, check, ported_project, site

CPU_TWICE = {
    "a tuple": "devices = (torch.device('cpu'), torch.device('cuda'))",
    "a list": "devices = [torch.device('cpu'), torch.device('cuda', 0)]",
    "a sum": "devices = [torch.device('cpu')] + [torch.device('cuda')]",
    "an addition": "devices = [torch.device('cpu')]\n    devices += [torch.device('cuda')]",
    "an appended one": "devices = [torch.device('cpu')]\n    devices.append(torch.device('cuda'))",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", CPU_TWICE)
def test_a_list_of_the_cpu_and_a_device_does_not_get_the_cpu_twice(kind: str, target: str) -> None:
    source = f"import torch\n\n\ndef f():\n    {CPU_TWICE[kind]}\n    return devices\n"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert "the CPU twice" in "".join(one.reason for one in ported.sites)


@EACH_TARGET
def test_a_device_that_a_test_adds_to_the_cpu_is_ported(target: str) -> None:
    source = (
        "import torch\n\n\ndef f():\n    devices = [torch.device('cpu')]\n"
        "    if torch.cuda.is_available():\n        devices.append(torch.device('cuda'))\n    return devices\n"
    )
    assert "'cuda'" not in port_text(source, Settings(target)).text


TEXT = {
    "a guard": "if 'cuda' in value and not torch.cuda.is_available():\n        raise ValueError\n    return value",
    "an answer": "return value == 'cuda' and torch.cuda.is_available()",
    "the other order": "return torch.cuda.device_count() > 1 and 'cuda' in value",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", TEXT)
def test_a_question_stays_beside_a_comparison_of_a_text_that_stays(kind: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(value):\n    {TEXT[kind]}\n"
    assert port_text(source, Settings(target)).text == source


HALVES = {
    "a result that another function compares": (
        "def get_device():\n    device = None\n    if torch.cuda.is_available():\n        device = 'cuda'\n"
        "    return device\n\n\ndef module():\n    device = get_device()\n    if device == 'cuda':\n"
        "        return torch.cuda\n    raise NotImplementedError\n"
    ),
    "an attribute that another method compares": (
        "class A:\n    def __init__(self):\n        if torch.cuda.is_available():\n            self.device = 'cuda'\n"
        "        else:\n            self.device = 'cpu'\n\n    def f(self):\n        return self.device == 'cuda'\n"
    ),
    "a guard and the default of a list": (
        "class A:\n    def __init__(self, grads, devices=None):\n        assert torch.cuda.is_available(), 'no GPU'\n"
        "        self._devices = devices or ['cuda:0']\n        self.g = grads.to(self._devices[0])\n"
    ),
    "a wrapped model and the device that goes on with it": (
        "def start(rank):\n    torch.distributed.init_process_group(backend='nccl')\n\n\n"
        "def place(model, device):\n    assert device < torch.cuda.device_count()\n"
        "    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])\n"
        "    device = 'cuda:{}'.format(device)\n    return model, device\n\n\n"
        "def check(name):\n    if name != 'cuda' or not torch.cuda.is_available():\n        raise ValueError(name)\n\n\n"
        "def train(rank):\n    torch.cuda.set_device(rank)\n"
    ),
    "a number of ranks and their backend": (
        "def count():\n    return torch.cuda.device_count()\n\n\ndef start(backend='nccl'):\n"
        "    torch.distributed.init_process_group(backend)\n"
    ),
    "a message about devices": (
        "def f(device, n):\n    return f\"{n if 'cuda' in device else 0} of {torch.cuda.device_count()}\"\n"
    ),
    "a scaler and the names of its autocast": (
        "from contextlib import ExitStack\n\ntry:\n    from torch.cuda.amp import GradScaler, autocast\n"
        "except Exception:\n    autocast = None\n    GradScaler = None\n\n\nclass Trainer:\n"
        "    def __init__(self, on):\n        self.on = on\n        self.scaler = GradScaler()\n\n"
        "    def run(self, model, x):\n        context = autocast if self.on else ExitStack\n"
        "        with context():\n            return model(x)\n"
    ),
    "streams and the function that gets them": (
        "class A:\n    def __init__(self, n):\n        self.streams = [torch.cuda.Stream() for i in range(n)]\n\n\n"
        "def run(streams):\n    event: torch.cuda.Event = torch.cuda.Event()  # acclimate: ignore\n"
        "    current = torch.cuda.current_stream()\n    current.wait_stream(streams[0])\n    return event\n"
    ),
    "the method that pins, and who calls it": (
        "class Data:\n    def pin_memory(self, verbose=True):\n"
        "        self.batches = [{k: v.pin_memory() for k, v in b.items()} for b in self.batches]\n\n\n"
        "def load(pin=None):\n    data = Data()\n    if torch.cuda.is_available():\n"
        "        data.pin_memory(verbose=False)\n    return data\n"
    ),
    "a tensor's place that is kept, and its move": (
        "def f(x: torch.Tensor, wanted):\n    back = wanted and not x.is_cuda\n"
        "    if wanted:\n        x = x.cuda()\n    return x, back\n"
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", HALVES)
def test_a_half_stays_with_its_partner(kind: str, target: str) -> None:
    source = f"import torch\n\n\n{HALVES[kind]}"
    assert port_text(source, Settings(target)).text == source


def test_what_a_wait_for_an_unsafe_stream_asks_is_unsafe() -> None:
    source = (
        "import torch\n\n\nclass A:\n    def __init__(self):\n        self.stream = torch.cuda.Stream()\n\n"
        "    def wait(self):\n        torch.cuda.current_stream().wait_stream(self.stream)\n"
    )
    assert port_text(source, Settings("torch")).text == source


@EACH_TARGET
def test_the_tensors_that_a_class_pins_itself_are_reported(target: str) -> None:
    source = f"import torch\n\n\n{HALVES['the method that pins, and who calls it']}"
    sites = {one.text: one for one in port_text(source, Settings(target)).sites}
    assert sites["v.pin_memory()"].status is Status.LEFT
    assert sites["data.pin_memory(verbose=False)"].status is Status.LEFT


@EACH_TARGET
def test_a_scaler_of_a_base_class_stays_with_the_autocast_of_its_flag_in_a_subclass(
    target: str, tmp_path: Path
) -> None:
    files = {
        "base.py": "import torch\n\n\nclass Base:\n    def __init__(self, on):\n        self.mixed = on\n"
        "        self.scaler = torch.amp.GradScaler('cuda', enabled=self.mixed)\n",
        "agent.py": "import torch\nfrom base import Base\n\n\nclass Agent(Base):\n    def f(self, model, x):\n"
        "        with torch.amp.autocast('cuda', dtype=self.dtype, enabled=self.mixed):\n            return model(x)\n",
    }
    results = ported_project(tmp_path, files, target)
    assert not site(results["base.py"], "torch.amp.GradScaler('cuda', enabled=self.mixed)").safe


@EACH_TARGET
def test_a_device_stays_with_a_test_in_the_base_class_that_gets_it_through_a_dictionary(
    target: str, tmp_path: Path
) -> None:
    files = {
        "utils.py": "import torch\n\n\ndef resolve_device(wanted):\n    if wanted == 'auto':\n"
        "        if torch.cuda.is_available():\n            return 'cuda'\n        return 'cpu'\n    return wanted\n",
        "base.py": "import torch\n\n\nclass Runner:\n    def __init__(self, model, device='cpu', gpus=None):\n"
        "        if gpus and device != 'cuda':\n            raise ValueError(device)\n        self.device = device\n",
        "train.py": "from base import Runner\nfrom utils import resolve_device\n\n\nclass TrainingRunner(Runner):\n"
        "    pass\n\n\ndef build(model, device, gpus):\n    kwargs = dict(model=model, device=device, gpus=gpus)\n"
        "    return TrainingRunner(**kwargs)\n\n\ndef train(model, wanted, gpus):\n"
        "    device = resolve_device(wanted)\n    return build(model, device=device, gpus=gpus)\n",
    }
    results = ported_project(tmp_path, files, target)
    assert not site(results["utils.py"], "'cuda'").safe
    assert not site(results["utils.py"], "torch.cuda.is_available()").safe


@EACH_TARGET
def test_devices_that_one_function_numbers_are_ported_together(target: str, tmp_path: Path) -> None:
    files = {
        "numbers.py": "def gpu_of(rank):\n    return [rank]\n",
        "policy.py": "import torch\nfrom numbers import gpu_of\n\n\ndef policy_device(rank):\n"
        "    return torch.device('cuda', index=gpu_of(rank)[0])  # acclimate: ignore\n",
        "rollout.py": "import torch\nfrom numbers import gpu_of\n\n\ndef rollout_device(rank):\n"
        "    used = gpu_of(rank)\n    return torch.device('cuda', index=used[0]) if used else torch.device('cpu')\n",
    }
    results = ported_project(tmp_path, files, target)
    assert not site(results["rollout.py"], "torch.device('cuda', index=used[0])").safe


@EACH_TARGET
def test_a_device_is_ported_with_the_comparison_that_only_tells_a_loader_to_pin(target: str) -> None:
    source = (
        "import torch\nfrom torch.utils.data import DataLoader\n\n\ndef f(args, data):\n"
        "    device = 'cuda' if args.cuda and torch.cuda.is_available() else 'cpu'\n"
        "    return DataLoader(data, pin_memory=(device == 'cuda')), torch.ones(1, device=device)\n"
    )
    assert check(source, target, changed=True).sites
    assert "'cuda'" not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_a_call_right_before_one_that_counts_the_devices_is_ported_with_it(target: str) -> None:
    source = (
        "import multiprocessing\n\nimport torch\n\n\ndef f():\n    torch.cuda.empty_cache()\n"
        "    torch.cuda.synchronize()\n\n\ndef g(work):\n    multiprocessing.Process(target=work).start()\n"
    )
    assert "torch.cuda" not in port_text(source, Settings(target)).text
    apart = source.replace("    torch.cuda.synchronize()\n", "    print(1)\n")
    assert port_text(apart, Settings(target)).text == apart


@EACH_TARGET
def test_a_device_is_ported_where_the_base_class_only_pins_memory_by_it(target: str, tmp_path: Path) -> None:
    files = {
        "base.py": "class Base:\n    def __init__(self, device='cpu'):\n        self.device = device\n\n"
        "    def loader(self, options):\n        options['pin_memory'] = self.device.type == 'cuda'\n",
        "run.py": "import torch\nfrom base import Base\n\n\nclass Own(Base):\n    pass\n\n\ndef main(args):\n"
        "    device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n    return Own(device=device)\n",
    }
    results = ported_project(tmp_path, files, target)
    found = results["run.py"].sites
    assert found
    assert all(one.status is Status.CONVERTED and one.safe for one in found)
