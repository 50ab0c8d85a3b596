"""A guard, the values that it guards, and who receives them are ported together or left together."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, check, ported_project, program, site


def statuses(source: str, target: str) -> dict[str, Status]:
    return {one.text: one.status for one in port_text(source, Settings(target)).sites}


def unsafe_or_left(source: str, target: str) -> None:
    """Checks that a safe port leaves a program as it is, and reports its code for CUDA."""
    ported_text = port_text(source, Settings(target))
    assert ported_text.text == source
    assert ported_text.sites


THROUGH_NAMES = [
    "target = 'cuda'  # acclimate: ignore\nif torch.cuda.is_available():\n    where = torch.device(target)\n",
    "def f(x: torch.Tensor, where):\n    if torch.cuda.is_available():\n        x = x.to(where)\n    return x\n\n\n"
    "f(1, 'cuda')  # acclimate: ignore\n",
    "class A:\n    def __init__(self):\n        self.device = 'cuda'  # acclimate: ignore\n\n"
    "    def f(self, x: torch.Tensor):\n        if not torch.cuda.is_available():\n            return x\n"
    "        return x.to(self.device)\n",
    "options = argparse.ArgumentParser()\noptions.add_argument('--device', default='cuda')  # acclimate: ignore\n"
    "args = options.parse_args()\nif torch.cuda.is_available():\n    net = torch.nn.Linear(1, 1).to(args.device)\n",
]


@EACH_TARGET
@pytest.mark.parametrize("body", THROUGH_NAMES)
def test_a_guard_is_not_ported_without_the_device_that_a_name_brings_to_it(body: str, target: str) -> None:
    unsafe_or_left(f"import argparse\n\nimport torch\n\n\n{body}", target)


VALUES = [
    "kind = 'cuda'\nif torch.cuda.is_available():\n    x = torch.ones(1, device=f'{kind}:1')",
    "where = {'d': 'cuda'}\nif torch.cuda.is_available():\n    x = torch.ones(1, device=where['d'])",
    "names = ['cuda']\nif torch.cuda.is_available():\n    x = torch.ones(1, device=names[0])",
    "kind, index = 'cuda', 1\nif torch.cuda.is_available():\n    x = torch.ones(1, device=torch.device(kind, index))",
    "def g(kind='cuda'):  # acclimate: ignore\n    return torch.ones(1, device=kind)\n"
    "if torch.cuda.is_available():\n    x = g()",
    "def g():\n    return 'cuda'  # acclimate: ignore\nif torch.cuda.is_available():\n    x = torch.ones(1, device=g())",
]


@EACH_TARGET
@pytest.mark.parametrize("body", VALUES)
def test_a_guard_stays_where_a_value_that_nothing_shows_to_be_a_device_reaches_what_it_guards(
    body: str, target: str
) -> None:
    check(program(f"{body}\nreturn x"), target, changed=False)


@EACH_TARGET
def test_a_guard_is_ported_with_the_device_that_a_name_brings_to_it(target: str) -> None:
    source = (
        "import torch\n\n\ndef f():\n    target = 'cuda:1'\n    if torch.cuda.is_available():\n"
        "        return torch.device(target)\n    return torch.device('cpu')\n"
    )
    assert set(statuses(source, target).values()) == {Status.CONVERTED}


KNOWN, UNKNOWN = "x = torch.ones(1).cuda()", "model = model.cuda()"
GUARDED = "    if torch.cuda.is_available():\n        {}\n"
MEETING = {
    "a function and its caller": "def load(model):\n" + GUARDED.format(UNKNOWN) + "    return model\n\n\n"
    "def run(path):\n    net = load(path)\n    x = 1\n" + GUARDED.format(KNOWN) + "    return net(x)\n",
    "a parameter with the name of the object": "def load(path):\n    model = make(path)\n"
    + GUARDED.format(UNKNOWN)
    + "    return model\n\n\ndef run(model):\n    x = 1\n"
    + GUARDED.format(KNOWN)
    + "    return model(x)\n",
    "methods of one class": "class A:\n    def load(self, other):\n        self.model = other\n"
    "        if torch.cuda.is_available():\n            self.model.cuda()\n\n    def run(self, x: torch.Tensor):\n"
    "        if torch.cuda.is_available():\n            x = x.cuda()\n        return self.model(x)\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", MEETING)
def test_guards_of_a_model_and_its_input_in_two_functions_are_one_decision(kind: str, target: str) -> None:
    unsafe_or_left(f"import torch\n\n\n{MEETING[kind]}", target)


MASK = "make(torch.device('cuda')).is_cuda"
SKIPS = [
    "class T(TestCase):\n    @skipUnless(torch.cuda.is_available(), 'no')\n    def test(self):\n        assert {}\n",
    "@skipUnless(torch.cuda.is_available(), 'no')\nclass T(TestCase):\n    def test(self):\n        assert {}\n",
    "class T(TestCase):\n    @classmethod\n    def setUpClass(cls):\n        if not torch.cuda.is_available():\n"
    "            raise unittest.SkipTest('no')\n\n    def test(self):\n        assert {}\n",
    "pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no')\n\n\ndef test():\n    assert {}\n",
    "needs = pytest.mark.skipif(not torch.cuda.is_available(), reason='no')\n\n\n@needs\ndef test():\n    assert {}\n",
    "HAS = torch.cuda.is_available()\n\n\n@skipUnless(HAS, 'no')\ndef test():\n    assert {}\n",
    "def needs(test):\n    return skipUnless(torch.cuda.is_available(), 'no')(test)\n\n\n@needs\ndef test():\n    assert {}\n",
    "@pytest.fixture\ndef gpu():\n    if not torch.cuda.is_available():\n        pytest.skip('no')\n\n\n"
    "def test(gpu):\n    assert {}\n",
    "@pytest.fixture(autouse=True)\ndef gpu():\n    if not torch.cuda.is_available():\n        pytest.skip('no')\n\n\n"
    "def test():\n    assert {}\n",
]
ONLY_ON_CUDA = [MASK, "layer.forward_cuda(torch.ones(1))", "flash_attn.attend(torch.ones(1))"]


@EACH_TARGET
@pytest.mark.parametrize("code", ONLY_ON_CUDA)
@pytest.mark.parametrize("skip", SKIPS)
def test_a_skip_stays_where_what_it_skips_is_for_cuda_alone(skip: str, code: str, target: str) -> None:
    unsafe_or_left(f"import torch\nimport flash_attn\n\n\n{skip.format(code)}", target)


@EACH_TARGET
@pytest.mark.parametrize("skip", SKIPS)
def test_a_skip_is_ported_with_what_it_skips(skip: str, target: str) -> None:
    source = f"import torch\n\n\n{skip.format('torch.ones(1).cuda() is not None')}"
    assert port_text(source, Settings(target)).text.count("cuda") == 0


PACKAGES = {
    "another file imports the package": (
        "def ready():\n    return torch.cuda.is_available()\n",
        "from utils import ready\n\nif ready():\n    import typing\n    from flashinfer import silu\n",
    ),
    "the flag of a module": (
        "READY = torch.cuda.is_available()\n",
        "import utils\n\n\ndef f():\n    if utils.READY:\n        import flash_attn\n",
    ),
    "the import comes later in the block": (
        "READY = torch.cuda.is_available()\n",
        "from utils import READY\n\nif READY:\n    print(1)\n\n    import flash_attn\n",
    ),
    "the name says the package": (
        "def is_flashinfer_available():\n    return torch.cuda.is_available()\n",
        "",
    ),
    "the condition names its flag": (
        "@skipUnless(torch.cuda.is_available() and _CUEQ_AVAILABLE, 'no')\ndef test():\n    pass\n",
        "",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", PACKAGES)
def test_a_flag_for_a_package_of_nvidia_stays(kind: str, target: str, tmp_path: Path) -> None:
    body, other = PACKAGES[kind]
    results = ported_project(tmp_path, {"utils.py": f"import torch\n\n\n{body}", "other.py": other}, target)
    assert site(results["utils.py"], AVAILABLE).status is Status.LEFT


@EACH_TARGET
def test_a_flag_whose_readers_import_no_such_package_is_ported(target: str, tmp_path: Path) -> None:
    files = {
        "utils.py": "import torch\n\n\ndef ready():\n    return torch.cuda.is_available()\n",
        "other.py": "from utils import ready\n\nif ready():\n    import numpy\n",
    }
    assert site(ported_project(tmp_path, files, target)["utils.py"], AVAILABLE).status is Status.CONVERTED


REPORTS = [
    'printt("cuda_is_available: %s", torch.cuda.is_available())',
    'log_line("CUDA available?", torch.cuda.is_available())',
    'self.report("number of CUDA devices = {}", torch.cuda.device_count())',
]


@EACH_TARGET
@pytest.mark.parametrize("report", REPORTS)
def test_a_report_that_the_program_prints_by_a_function_of_its_own_stays(report: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(self):\n    {report}\n"
    assert [one.status for one in port_text(source, Settings(target)).sites] == [Status.EXEMPT]


OPTIONS = [
    "def add(p):\n    p.add_argument('--device', default='cuda', choices=['cuda', 'cuda:1'])\n",
    "@click.option('--device', default='cuda', type=click.Choice(['cuda', 'cuda:1']))\ndef main(device):\n    pass\n",
    "@dataclass\nclass Args:\n    device: str = 'cuda'\n\n    def add(self, p):\n"
    "        p.add_argument('--device', default='cuda')\n",
]


@EACH_TARGET
@pytest.mark.parametrize("option", OPTIONS)
def test_the_parts_of_an_option_are_ported_together(option: str, target: str) -> None:
    unsafe_or_left(f"import torch\n\n\n{option}", target)


SCALERS = [
    "class A:\n    def __init__(self, amp):\n        self.count = torch.cuda.device_count()\n"
    "        self.device = 'cpu' if self.count == 0 else 'cuda'  # acclimate: ignore\n"
    "        self.scaler = torch.cuda.amp.GradScaler() if amp else None\n",
    "class A:\n    def __init__(self):\n        self.count = torch.cuda.device_count()\n"
    "        self.device = 'cpu' if self.count == 0 else 'cuda'  # acclimate: ignore\n\n    def start(self):\n"
    "        self.scaler = torch.amp.GradScaler('cuda')\n",
]


@EACH_TARGET
@pytest.mark.parametrize("source", SCALERS)
def test_a_scaler_is_not_ported_without_the_device_of_its_gradients(source: str, target: str) -> None:
    unsafe_or_left(f"import torch\n\n\n{source}", target)


CONDITIONS = [
    "if hasattr(torch.cuda, 'default_generators') and len(torch.cuda.default_generators) > 0:\n"
    "        i = torch.cuda.current_device()\n        return torch.ones(1).cuda(i)\n",
    "if torch.cuda.get_device_capability()[0] >= 8:\n        return torch.ones(1).cuda()\n",
    "return torch.ones(1).cuda() if torch.cuda.cudart() is not None else None\n",
]


@EACH_TARGET
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_that_stays_keeps_the_code_that_it_decides_about(condition: str, target: str) -> None:
    unsafe_or_left(f"import torch\n\n\ndef f():\n    {condition}", target)


CONSTANTS = [
    "class Device:\n    CPU = 'cpu'\n    CUDA = 'cuda'\n\n\ndef f():\n    device = 'cuda'\n"
    "    if device == Device.CUDA:\n        print(device)\n    return torch.ones(1, device=device)\n",
    "class Device(Enum):\n    CUDA = 'cuda'\n\n\ndef f():\n    device = 'cuda'\n"
    "    if device == Device.CUDA.value:\n        print(device)\n    return torch.ones(1, device=device)\n",
    "from .names import Device\n\n\ndef f():\n    device = 'cuda'\n    if device != Device.CPU:\n"
    "        print(device)\n    return torch.ones(1, device=device)\n",
    "CUDA = 'cuda'  # acclimate: ignore\n\n\ndef f():\n    device = 'cuda'\n    if device == CUDA:\n"
    "        print(device)\n    return torch.ones(1, device=device)\n",
]


@EACH_TARGET
@pytest.mark.parametrize("source", CONSTANTS)
def test_a_device_that_is_compared_with_a_constant_of_the_program_stays(source: str, target: str) -> None:
    unsafe_or_left(f"import torch\n\n\n{source}", target)


@EACH_TARGET
@pytest.mark.parametrize(
    "made",
    ["torch.cat([a, b])", "model(a, mask=b)", "torch.stack((a, y.to('cuda')))", "a + b", "a.matmul(b)"],
)
def test_moves_that_meet_in_one_call_are_ported_together(made: str, target: str) -> None:
    source = "import torch\n\n\ndef f(model, x, y: torch.Tensor):\n    a = x.cuda()\n    b = y.to('cuda')\n"
    assert statuses(f"{source}    return {made}\n", target)["x.cuda()"] is Status.UNSAFE
    unsafe_or_left(f"{source}    return {made}, torch.cat([a, b])\n", target)


@EACH_TARGET
def test_a_choice_is_not_ported_without_the_test_in_the_function_that_gets_it(target: str) -> None:
    source = (
        "import torch\n\n\ndef make(model, device_type):\n    fused = device_type == 'cuda'\n"
        "    return torch.optim.AdamW(model.parameters(), fused=fused)\n\n\ndef f(model):\n"
        "    return make(model, device_type='cuda' if torch.cuda.is_available() else 'cpu')\n"
    )
    unsafe_or_left(source, target)


@EACH_TARGET
def test_a_refusal_is_not_ported_before_what_stays(target: str) -> None:
    unsafe_or_left(
        "import torch\n\n\ndef f():\n    assert torch.cuda.is_available()\n    return torch.cuda.cudart()\n",
        target,
    )


EARLIER = (
    "import torch\n\n\ndef load(rows, device=None):\n{indent}if device == 'cpu':\n{indent}    print('on the host')\n"
    "{indent}if not device:\n{indent}    device = 'cuda'\n{indent}rows = torch.ones(2, device=device)\n    return rows\n"
)


@EACH_TARGET
def test_a_test_above_the_assignment_of_a_device_does_not_get_it(target: str) -> None:
    source = EARLIER.format(indent="    ")
    assert "device = 'cuda'" not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_a_test_above_the_assignment_of_a_device_gets_it_in_a_loop(target: str) -> None:
    source = EARLIER.format(indent="        ").replace(
        "device=None):\n", "device=None):\n    for row in rows:\n"
    )
    assert "device = 'cuda'" in port_text(source, Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize(
    ("device", "status"),
    [("cuda: 0", Status.LEFT), ("cuda:", Status.LEFT), ("cuda:0", Status.CONVERTED)],
)
def test_a_question_stays_with_a_device_that_only_old_versions_of_torch_can_read(
    device: str, status: Status, target: str
) -> None:
    source = (
        f"import torch\n\nargs = {{}}\nif {AVAILABLE}:\n    args['device'] = torch.device('{device}')\nelse:\n"
        "    args['device'] = torch.device('cpu')\nx = torch.ones(1).to(args['device'])\n"
    )
    assert statuses(source, target)[AVAILABLE] is status
