"""Edits that are half of a decision are not safe: a guard with its code, a call with its argument.

Each program is ported without unsafe edits, and must stay whole or change whole.
"""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, program

GUARDED = [
    "if x.is_cuda:\n    return y.to('cuda')\nreturn y",
    "return torch.device('cuda:%d' % other) if x.is_cuda else 1",
    "if not torch.cuda.is_available():\n    raise ValueError\ntorch.cuda.cudart()\nreturn y.to('cuda')",
    "if torch.cuda.is_available() and torch.cuda.cudart():\n    return torch.cuda.get_rng_state()",
]


@EACH_TARGET
@pytest.mark.parametrize("body", GUARDED)
def test_code_behind_a_guard_that_stays_is_not_edited_alone(body: str, target: str) -> None:
    source = program(body)
    assert port_text(source, Settings(target)).text == source


ONE_HALF = {
    "a device of a caller that a guard replaces": "def f(model: torch.nn.Module, device):\n"
    "    if not torch.cuda.is_available():\n        device = 'cpu'\n    return model.to(device)\n",
    "a device of a caller that a constructor replaces": "class A:\n    def __init__(self, device='cuda'):\n"
    "        if not torch.cuda.is_available():\n            self.device = 'cpu'\n        else:\n            self.device = device\n",
    "a device of a caller in a choice": "def f(device):\n    return torch.ones(1).to(device if torch.cuda.is_available() else 'cpu')\n",
    "a branch that asks a program of NVIDIA's": "import subprocess\n\n\ndef free():\n"
    "    return subprocess.run(['nvidia-smi'])\n\n\ndef f():\n    if torch.cuda.is_available():\n"
    "        torch.cuda.set_device(free())\n        return torch.device('cuda')\n    return torch.device('cpu')\n",
    "a question whose branch reads where CUDA is": "from torch.utils.cpp_extension import CUDA_HOME\n\n\ndef f():\n"
    "    on = torch.cuda.is_available()\n    if on:\n        return CUDA_HOME + '/bin'\n",
    "devices that are compared": "class A:\n    def f(self, k):\n        self.last = 'cuda:' + str(k)\n\n"
    "    def g(self, x, k):\n        if 'cuda:' + str(k) != self.last:\n            x = x.to('cuda:' + str(k + 1))\n        return x\n",
    "a stream and its context": "class A:\n    def f(self, rank):\n        self.stream = torch.cuda.Stream()\n\n"
    "    def g(self, x: torch.Tensor):\n        with torch.cuda.stream(self.stream):\n            return x.cuda(self.a.b)\n",
    "a function that is bound at import": "wait = torch.cuda.synchronize\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", ONE_HALF)
def test_one_half_is_not_ported_without_the_other(kind: str, target: str) -> None:
    source = f"import torch\n\n\n{ONE_HALF[kind]}"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_choice_stays_with_the_guard_of_the_constructor_that_it_chooses(target: str) -> None:
    source = (
        "import torch\n\n\nclass Gpu:\n    def __init__(self):\n        if not torch.cuda.is_available():\n"
        "            raise ValueError('no GPU')\n        torch.cuda.cudart()\n\n\ndef f():\n    return Gpu() if torch.cuda.is_available() else 1\n"
    )
    assert port_text(source, Settings(target)).text == source


HALVES = [
    # An argument that stays, in an edit.
    "try:\n    x.a()\n    x.b()\n    x.c()\n    x = torch.empty(1, device=torch.device('cuda', torch.cuda.current_device()))\n"
    "except RuntimeError:\n    return 2",
    "if hasattr(torch.cuda.Event, 'from_ipc_handle'):\n"
    "    return torch.cuda.Event.from_ipc_handle(device=torch.cuda.current_device(), handle=x)",
    # The number of a device that CUDA's own call gets.
    "i = torch.cuda.current_device()\nreturn torch.version.cuda and torch.cuda.get_device_properties(i).major >= 8",
    # The branches of a choice by type.
    "if isinstance(x, torch.Tensor):\n    return x.cuda()\nreturn tuple([i.cuda() for i in x])\n",
    "if isinstance(x, torch.Tensor):\n    return x.cuda()\nelif hasattr(x, 'to_device'):\n    return x.to_device('cuda')",
    "if x is None:\n    return x\nelif isinstance(x, torch.Tensor):\n    return x.cuda()\n"
    "elif hasattr(x, 'to_device'):\n    return x.to_device('cuda')",
    # A graph and its capture.
    "graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph, capture_error_mode='thread_local'):\n    pass",
    # A model that stays, and its wrapper.
    "m = model.build()\nm = m.cuda(other)\n"
    "m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[other])",
    # A test about CUDA's version, and what it decides.
    "is_cuda = torch.cuda.is_available()\nreturn {'name': torch.cuda.get_device_name() if is_cuda else '',\n"
    "        'cuda_version': torch.version.cuda if is_cuda else ''}",
    "if device.type == 'cuda':\n    with torch.cuda.device():\n        torch.cuda.empty_cache()",
]


@EACH_TARGET
@pytest.mark.parametrize("body", HALVES)
def test_half_of_a_decision_is_not_edited_alone(body: str, target: str) -> None:
    source = program(body)
    assert port_text(source, Settings(target)).text == source


def test_a_statement_is_not_skipped_because_an_argument_reads_a_stream() -> None:
    after = port_text(
        program("model.run(torch.cuda.current_stream(device), x, y)"), Settings("torch", unsafe=True)
    )
    assert "\n    model.run(" in after.text
    waits = port_text(program("model.wait_stream(torch.cuda.current_stream())"), Settings("torch"))
    assert "if accelerator_type() not in" in waits.text


@EACH_TARGET
def test_a_class_whose_set_up_replaces_names_of_cuda_keeps_its_devices(target: str) -> None:
    source = (
        "import unittest\nfrom unittest.mock import patch\n\nimport torch\n\n\nclass T(unittest.TestCase):\n"
        '    def setUp(self):\n        patch("torch.cuda.is_available", return_value=True).start()\n\n'
        '    def test(self):\n        x = torch.ones(1, device="cuda:7")\n        self.assertEqual(x.device, "cuda:0")\n'
    )
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
@pytest.mark.parametrize("made", ["torch.hann_window(n)", "torch.polar(a, b)", "torch.bernoulli(a)"])
def test_a_function_of_torch_makes_a_tensor(made: str, target: str) -> None:
    after = port_text(f"import torch\n\n\ndef f(n, a, b):\n    return {made}.cuda()\n", Settings(target))
    assert ".cuda()" not in after.text


@EACH_TARGET
def test_a_long_chain_of_methods_keeps_a_tensor(target: str) -> None:
    source = program(
        "for i in model:\n    p = torch.tensor(flag).cuda()\n    p = p.reshape(1, 2).permute(1, 0)\n"
        "    if other:\n        q = p.permute(1, 0)[None].cuda()"
    )
    assert ".cuda()" not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_the_number_of_the_device_is_compared_as_before(target: str) -> None:
    after = port_text(program("assert torch.cuda.current_device() == other"), Settings(target))
    assert "cuda" not in after.text
    assert not [site.reason for site in after.sites if site.reason]


SKIPPED = [
    # What follows a skip, or stands below `skipif`, has a part that only CUDA has.
    "def test(name):\n    if not torch.cuda.is_available():\n        pytest.skip('no GPU')\n"
    "    if torch.cuda.get_device_capability() < (10, 0):\n        pytest.skip('old')\n",
    "@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')\ndef test(name):\n"
    "    assert torch.cuda.get_device_capability() > (7, 0)\n",
    "class A:\n    def check(self):\n        if not torch.cuda.is_available():\n            return False\n"
    "        return 'gfx942' in self._arch()\n\n    def _arch(self):\n"
    "        return torch.cuda.get_device_properties(0).gcnArchName\n",
    # A method or function that is chosen and not called.
    "class A(nn.Module):\n    def __init__(self):\n        self.op = self.on_cuda if torch.cuda.is_available() else self.on_host\n\n"
    "    def on_cuda(self, q):\n        return torch.cuda.memory_stats(q.device)\n\n    def on_host(self, q):\n        return 1\n",
    "def on_cuda():\n    return torch.cuda.cudart()\n\n\ndef f(op):\n    if torch.cuda.is_available():\n        op = on_cuda\n    return op\n",
    "class A:\n    def f(self, make):\n        self.model = make()\n        self.other = make()\n        self.other.cuda()\n        self.model = torch.nn.DataParallel(self.model)\n",
    # A device that is the default of a parameter, and is looked up at import.
    "class M(nn.Module):\n    def __init__(self, n, device='cuda'):\n        self.l = nn.Linear(n, n)\n"
    "        if torch.cuda.is_available():\n            self.l = self.l.to(device)\n",
    # A function gives the name of a device, and code of the file tests it or lists the names that it knows.
    "def get_device_type():\n    if torch.cuda.is_available():\n        return 'cuda'\n    return 'cpu'\n\n\n"
    "def f(kind=None):\n    chosen = kind or get_device_type()\n    if chosen == 'cuda':\n"
    "        return torch.bfloat16\n    return torch.float32\n",
    "def get_device_type():\n    if torch.cuda.is_available():\n        device_type = 'cuda'\n    else:\n"
    "        device_type = 'cpu'\n    return device_type\n\n\ndef f():\n    kind = get_device_type()\n"
    "    assert kind in ['cpu', 'cuda', 'mtia'], kind\n    return kind\n",
    # A ladder of vendors, by functions of the file.
    "def _is_cuda():\n    return torch.version.cuda is not None\n\n\ndef f(rank):\n    if _is_cuda():\n"
    "        return torch.device('cuda', rank)\n    elif torch.backends.mps.is_available():\n"
    "        return torch.device('mps')\n    return torch.device('cpu')\n",
]


@EACH_TARGET
@pytest.mark.parametrize("body", SKIPPED)
def test_a_test_stays_with_what_only_cuda_has_behind_it(body: str, target: str) -> None:
    source = f"import pytest\nimport torch\nfrom torch import nn\n\n\n{body}"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_an_index_in_the_name_of_a_device_is_edited_with_the_name(target: str) -> None:
    source = program('where = f"cuda:{torch.cuda.current_device()}" if flag else "cpu"\nreturn where')
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_the_index_of_a_chosen_device_is_compared_in_all_worlds(target: str) -> None:
    source = program(
        'return torch.load(x, map_location=f"cuda:{torch.cuda.current_device()}" if flag else "cpu")'
    )
    found = port_text(source, Settings(target))
    assert "torch.cuda" not in found.text
    assert not [site.reason for site in found.sites if site.reason]


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "info['CUDA available'] = torch.cuda.is_available()\nreturn info",
        "ok = torch.cuda.is_available()\ninfo['CUDA available'] = ok\nif ok:\n    info['GPU'] = 1\nreturn info",
        "ok = torch.cuda.is_available()\nprint('CUDA available:', ok)",
    ],
)
def test_a_report_of_cuda_stays_also_through_a_name(body: str, target: str) -> None:
    source = program(f"info = {{}}\n{body}")
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_name_that_is_reported_and_places_a_model_is_ported(target: str) -> None:
    source = program(
        "ok = torch.cuda.is_available()\nprint('CUDA available:', ok)\nif ok:\n    y = y.to('cuda')\nreturn y"
    )
    assert "is_available" not in port_text(source, Settings(target)).text.replace("accelerator.is_", "")
    assert "cuda'" not in port_text(source, Settings(target)).text
