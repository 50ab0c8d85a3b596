"""What a file shows to be a module or a tensor, so that its move is safe."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET

HEAD = """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    pass


"""
KNOWN = [
    "def f(rank: int, model):\n    model = model.cuda(rank)\n    return DDP(model, device_ids=[rank])\n",
    "def f(rank: int, model):\n    return DDP(module=model.cuda(rank), device_ids=[rank])\n",
    "def f(model):\n    model.cuda()\n    return torch.nn.DataParallel(model)\n",
    "def f(model: DDP):\n    return model.cuda()\n",
    "def f(big):\n    make = Net if big else nn.Linear\n    return make().cuda()\n",
    "def f(module: type[nn.Module]):\n    return module().cuda()\n",
    "def f(net: type[Net]):\n    return net().cuda()\n",
    "def f(make, state):\n    model = make()\n    model.load_state_dict(state)\n    model.train()\n    return model.cuda()\n",
    "def f(model: nn.Module):\n    for p in model.parameters():\n        p.data = p.data.cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", KNOWN)
def test_what_a_wrapper_gets_or_a_class_makes_is_a_module(code: str, target: str) -> None:
    found = port_text(HEAD + code, Settings(target))
    assert ".cuda(" not in found.text
    assert all(one.status is Status.CONVERTED for one in found.sites), found.sites


LIBRARIES = """\
import copy
import peft
import timm
import torchmetrics
import diffusers
import pytorch_lightning as pl
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, PreTrainedModel


"""
OF_LIBRARIES = [
    "def f(name):\n    return AutoModelForCausalLM.from_pretrained(name).eval().cuda()\n",
    "def f(config):\n    return AutoModelForCausalLM.from_config(config).cuda()\n",
    "def f():\n    model = BertModel(BertConfig())\n    return model.cuda()\n",
    "def f(name):\n    return diffusers.AutoencoderKL.from_pretrained(name).cuda()\n",
    "def f(name, config):\n    model = peft.get_peft_model(name, config)\n    model.cuda()\n",
    "def f():\n    return timm.create_model('resnet18').cuda(), torchmetrics.Accuracy().cuda()\n",
    "class Net(PreTrainedModel):\n    pass\n\n\ndef f(name):\n    return Net.from_pretrained(name).cuda()\n",
    "class Net(nn.Linear):\n    def start(self):\n        return self.eval().cuda()\n",
    "def f(name, text):\n    tokenizer = AutoTokenizer.from_pretrained(name)\n"
    "    batch = tokenizer(text, return_tensors='pt')\n"
    "    return batch['input_ids'].cuda(), batch.attention_mask[:, 1:].cuda()\n",
    "class A:\n    def __init__(self, n):\n        self.model = nn.Sequential(nn.Linear(n, n))\n"
    "        self.model = self.model.cuda()\n\n    def best(self):\n        found = copy.deepcopy(self.model)\n"
    "        self.model = found\n",
    "class A:\n    def __init__(self, model):\n        self.model = model\n        self.model.cuda()\n\n"
    "    def sum(self):\n        return sum(p.sum() for p in self.model.parameters())\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", OF_LIBRARIES)
def test_what_a_library_of_torch_loads_or_builds_is_a_module(code: str, target: str) -> None:
    found = port_text(LIBRARIES + code, Settings(target))
    assert ".cuda(" not in found.text
    assert all(one.status is Status.CONVERTED for one in found.sites), found.sites


OTHERS_OF_LIBRARIES = [
    "def f(name):\n    return AutoTokenizer.from_pretrained(name).cuda()\n",
    "def f(name):\n    return BertConfig.from_pretrained(name).cuda()\n",
    "def f(name):\n    return diffusers.DiffusionPipeline.from_pretrained(name).cuda()\n",
    "def f(text, tokenizer):\n    return tokenizer(text, return_tensors='np')['input_ids'].cuda()\n",
    "class Net:\n    def start(self):\n        self.cuda()\n",
    "class Net(pl.LightningModule):\n    def start(self):\n        self.cuda()\n",
    "class Net(nn.Linear):\n    class State:\n        def start(self):\n            self.cuda()\n",
    "class A:\n    def __init__(self, n, other):\n        self.model = nn.Linear(n, n)\n        self.model = other\n"
    "        self.model.cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", OTHERS_OF_LIBRARIES)
def test_what_a_library_gives_besides_modules_is_unsafe(code: str, target: str) -> None:
    assert Status.UNSAFE in {one.status for one in port_text(LIBRARIES + code, Settings(target)).sites}


ELEMENTS = [
    "def f():\n    for net in (Net(), nn.Linear(1, 1)):\n        net.cuda()\n",
    "def f():\n    nets = [Net(), Net()]\n    for i, net in enumerate(nets):\n        net.cuda(i)\n",
    "def f():\n    nets = nn.ModuleList([Net()])\n    return [net.cuda() for net in nets]\n",
    "def f(n):\n    xs = []\n    for _ in range(n):\n        xs.append(torch.zeros(2))\n    return [x.cuda() for x in xs]\n",
    "def f(xs: list[torch.Tensor]):\n    nets = [Net(), Net()]\n    for x, net in zip(xs, nets):\n        net.cuda()(x.cuda())\n",
    "def f(n):\n    xs = [torch.zeros(2) for _ in range(n)]\n    return xs[0].cuda()\n",
    "def f(model: nn.Module):\n    for name, p in model.named_parameters():\n        p.grad = p.cuda()\n",
    "def f(model: nn.Module):\n    for part in model.children():\n        part.cuda()\n",
    "def make():\n    return torch.zeros(1), Net()\n\n\ndef f():\n    x, net = make()\n    return x.cuda(), net.cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", ELEMENTS)
def test_what_a_loop_or_a_tuple_gives_is_what_it_holds(code: str, target: str) -> None:
    found = port_text(HEAD + code, Settings(target))
    assert ".cuda(" not in found.text
    assert all(one.status is Status.CONVERTED for one in found.sites), found.sites


OTHER_ELEMENTS = [
    "def f(other):\n    for net in (Net(), other):\n        net.cuda()\n",
    "def f(nets, others):\n    for net, other in zip([Net()], others):\n        other.cuda()\n",
    "def f(other):\n    xs = [torch.zeros(1)]\n    xs.append(other)\n    return xs[0].cuda()\n",
    "def f(model):\n    for part in model.children():\n        part.cuda()\n",
    "def make(x):\n    return torch.zeros(1), x\n\n\ndef f(x):\n    y, x = make(x)\n    return x.cuda()\n",
    "def f():\n    xs = []\n    return xs[0].cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", OTHER_ELEMENTS)
def test_an_element_that_may_be_anything_is_unsafe(code: str, target: str) -> None:
    assert Status.UNSAFE in {one.status for one in port_text(HEAD + code, Settings(target)).sites}


METHODS = [
    "def f(x):\n    return x.gt(0).float().cuda()\n",
    "def f(x):\n    return x.type(torch.FloatTensor).cuda()\n",
    "def f(x, n):\n    return x.view(n, -1)[0].cuda()\n",
    "def f(x):\n    return x.new_zeros((1, 2)).cuda()\n",
    "def f(x):\n    n = x.size(0)\n    return n, x.cuda()\n",
    "def f(x):\n    y = x.unsqueeze(0)\n    return y.cuda()\n",
    "def f(data):\n    return torch.frombuffer(data, dtype=torch.uint8).cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", METHODS)
def test_what_has_methods_of_torch_besides_cuda_is_torchs(code: str, target: str) -> None:
    found = port_text(HEAD + code, Settings(target))
    assert ".cuda(" not in found.text
    assert all(one.status is Status.CONVERTED for one in found.sites), found.sites


@EACH_TARGET
@pytest.mark.parametrize("code", METHODS[:3])
def test_the_methods_show_nothing_beside_a_class_with_its_own_cuda(code: str, target: str) -> None:
    own = "class Batch:\n    def cuda(self):\n        return self\n\n    def float(self):\n        return self\n\n\n"
    assert Status.UNSAFE in {one.status for one in port_text(HEAD + own + code, Settings(target)).sites}


UNKNOWN = [
    "def f(model):\n    model.cuda()\n    return wrap(model)\n",
    "def f(model):\n    model.cuda()\n    return DDP(other, model)\n",
    "def f(make):\n    return make().cuda()\n",
    "def f(big, other):\n    make = Net if big else other\n    return make().cuda()\n",
    "def f(make: type):\n    return make().cuda()\n",
    "def f(packed: nn.utils.rnn.PackedSequence):\n    return [p.cuda() for p in packed]\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", UNKNOWN)
def test_what_nothing_shows_to_be_a_module_is_unsafe(code: str, target: str) -> None:
    assert Status.UNSAFE in {one.status for one in port_text(HEAD + code, Settings(target)).sites}
