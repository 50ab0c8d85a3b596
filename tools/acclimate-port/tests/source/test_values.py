"""The kinds of the values of a file: what its functions and methods give."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET

METHODS = {
    "return torch.nn.NLLLoss()": True,
    "if self.fp16:\n            return torch.nn.CrossEntropyLoss()\n        return torch.nn.NLLLoss()": True,
    "return torch.zeros(2).long()": True,
    "if self.fp16:\n            return None\n        return torch.nn.NLLLoss()": False,
    "return self.other()": False,
    "return self.make()": False,
    "yield torch.zeros(2)": False,
}


@EACH_TARGET
@pytest.mark.parametrize("body", METHODS)
def test_what_a_method_gives_in_any_case_is_moved(body: str, target: str) -> None:
    source = (
        f"import torch\n\n\nclass Agent:\n    def make(self):\n        {body}\n\n"
        "    def __init__(self):\n        self.loss = self.make()\n        self.loss.cuda()\n"
    )
    ported = port_text(source, Settings(target))
    found = next(site for site in ported.sites if site.text == "self.loss.cuda()")
    assert (found.status is Status.CONVERTED) == METHODS[body]


@EACH_TARGET
def test_what_a_function_gives_in_any_case_is_moved(target: str) -> None:
    source = "import torch\n\n\ndef make():\n    return torch.nn.Linear(1, 1)\n\n\ndef f():\n    return make().cuda()\n"
    assert ".cuda()" not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_what_has_a_size_and_is_asked_for_cuda_is_a_tensor(target: str) -> None:
    source = "import torch\n\n\ndef f(x, grid):\n    n = x.size(0)\n    return n, x.cuda() if not x.is_cuda else x\n"
    ported = port_text(source, Settings(target))
    assert (
        next(site for site in ported.sites if site.text == "x.cuda()").reason
        != "it may be neither a tensor nor a module"
    )


SPAWNED = (
    "import torch\n\n\ndef work(gpu, args):\n    torch.nn.Linear(2, 2).cuda(gpu)\n\n\n"
    "def main(args):\n    torch.multiprocessing.spawn(work, (args,), args.n)\n"
)


@EACH_TARGET
def test_a_spawned_function_gets_the_index_of_its_process_first(target: str) -> None:
    assert ".cuda(" not in port_text(SPAWNED, Settings(target)).text


@EACH_TARGET
def test_a_spawned_function_that_is_also_called_may_get_something_else(target: str) -> None:
    source = f"{SPAWNED}    work(args.gpu, args)\n"
    assert port_text(source, Settings(target)).text == source


NEXT = {
    "x = next(iter(loader))": True,
    "it = iter(loader)\n    x, y = next(it)": True,
    "it = iter(loader)\n    y, x = next(it)": True,
    "x = next(other)": False,
    "x, y = next(iter(other))": False,
    "x = next(iter(loader), None)": False,
    "x = next(iter(DataLoader(other, collate_fn=other)))": False,
}


@EACH_TARGET
@pytest.mark.parametrize("line", NEXT)
def test_the_next_batch_of_a_loader_is_a_tensor(line: str, target: str) -> None:
    source = (
        "import torch\nfrom torch.utils.data import DataLoader\n\n\ndef f(data, other):\n"
        f"    loader = DataLoader(data)\n    {line}\n    return x.cuda()\n"
    )
    found = next(site for site in port_text(source, Settings(target)).sites if site.text == "x.cuda()")
    assert (found.status is Status.CONVERTED) == NEXT[line]
