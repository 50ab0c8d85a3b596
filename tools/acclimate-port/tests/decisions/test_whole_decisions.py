"""What a decision consists of, where its parts are far from each other: it is ported whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, ported_project, site

HEAD = "import torch\n\n\n"


def stays(source: str, target: str, *texts: str) -> None:
    """Checks that a safe port reports some pieces of code, and leaves them."""
    found = {one.text: one.status for one in port_text(source, Settings(target)).sites}
    for text in texts:
        assert found[text] in (Status.UNSAFE, Status.LEFT), found


def converted(source: str, target: str) -> None:
    sites = port_text(source, Settings(target)).sites
    assert sites
    assert all(one.status is Status.CONVERTED for one in sites), sites


ENDS = [
    "if not torch.cuda.is_available():\n        sys.exit(1)",
    "assert torch.cuda.is_available()",
    "if torch.cuda.device_count() == 0:\n        raise RuntimeError",
]
CALLED = {
    "a function": "    train(queue)\n\n\ndef train(queue):\n    for x in queue:\n        x = {}\n",
    "a function of that": "    run(queue)\n\n\ndef run(queue):\n    train(queue)\n\n\ndef train(queue):\n"
    "    for x in queue:\n        x = {}\n",
    "a class": "    Trainer(queue)\n\n\nclass Trainer:\n    def __init__(self, x):\n        self.move(x)\n\n"
    "    def move(self, x):\n        x = {}\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", CALLED)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_goes_on_without_cuda_only_if_the_functions_that_it_calls_can(
    end: str, kind: str, target: str
) -> None:
    source = f"import sys\n\nimport torch\n\n\ndef main(queue):\n    {end}\n    y = torch.ones(1).cuda()\n{CALLED[kind]}"
    stays(
        source.format("x.cuda()"),
        target,
        end.partition("torch")[1] + end.partition("torch")[2].partition(")")[0] + ")",
    )
    converted(source.format("torch.ones(1).cuda()"), target)


FLAGS = [
    "def check(cuda):\n    if cuda and not torch.cuda.is_available():\n        raise RuntimeError('no CUDA')\n\n\n"
    "def move(x, cuda):\n    return x.cuda() if cuda and torch.cuda.is_available() else x.cpu()\n",
    "def check(args):\n    assert not args.use_gpu or torch.cuda.is_available()\n\n\n"
    "def move(x, use_gpu):\n    if torch.cuda.is_available() and use_gpu:\n        x.cuda()\n",
]


@EACH_TARGET
@pytest.mark.parametrize("code", FLAGS)
def test_tests_beside_the_same_flag_are_one_decision(code: str, target: str) -> None:
    text = port_text(HEAD + code, Settings(target)).text
    assert text == HEAD + code
    converted(HEAD + code.replace("(x", "(x: torch.Tensor"), target)


ASKED = [
    "if x.device.type == 'cpu':\n        x.data = x.data.cuda()\n    y = [x]\n    assert x.device.type == 'cuda'",
    "x = x.cuda()\n    assert x.is_cuda",
    "x = x.to('cuda')\n    if x.device.type == 'cuda':\n        print(x)",
]


@EACH_TARGET
@pytest.mark.parametrize("code", ASKED)
def test_a_move_is_not_ported_without_a_later_test_of_the_devices_type(code: str, target: str) -> None:
    source = f"{HEAD}def f(x: torch.Tensor):\n    {code}\n    return x\n"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_move_behind_a_test_of_the_device_is_ported(target: str) -> None:
    source = f"{HEAD}def f(x: torch.Tensor):\n    if not x.is_cuda:\n        x = x.cuda()\n    return x\n"
    assert "x.cuda()" not in port_text(source, Settings(target)).text


FIELDS = [
    "class Config:\n    where: torch.device\n    other: bool = True\n\n    def __post_init__(self):\n"
    "        assert self.where.type == 'cuda'\n",
    "class Base:\n    where: torch.device\n\n\nclass Config(Base):\n    where: torch.device\n\n    def check(self):\n"
    "        if self.where.type == 'cuda' and self.where.index:\n            print(1)\n",
]
MADE = ["Config(where=torch.device('cuda', 1))", "Config(torch.device('cuda', 1))"]


@EACH_TARGET
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("code", FIELDS)
def test_a_field_of_a_class_gets_a_device_only_with_the_tests_of_it(
    code: str, made: str, target: str, tmp_path: Path
) -> None:
    use = f"def f():\n    return {made}\n"
    alone = f"{HEAD}@dataclass\n{code}\n\n{use}"
    stays(alone, target, "torch.device('cuda', 1)")
    files = {
        "config.py": f"{HEAD}@dataclass\n{code}",
        "use.py": f"import torch\nfrom config import Config\n\n\n{use}",
    }
    result = site(ported_project(tmp_path, files, target)["use.py"], "torch.device('cuda', 1)")
    assert "config.py:" in result.reason


NCCL = [
    "c10d._check_for_nccl_backend(group)",
    "isinstance(group, torch.distributed.ProcessGroupNCCL)",
]


@EACH_TARGET
@pytest.mark.parametrize("asks", NCCL)
def test_a_device_is_not_ported_behind_a_question_for_nccl(asks: str, target: str) -> None:
    source = (
        "import torch\nfrom torch.distributed import distributed_c10d as c10d\n\n\ndef f(x, group):\n"
        f"    is_nccl = {asks}\n    device = torch.device('cpu')\n    if is_nccl:\n"
        "        device = torch.device('cuda', torch.cuda.current_device())\n    return x.to(device)\n"
    )
    found = port_text(source, Settings(target))
    assert found.text == source
    assert any("NCCL" in one.reason for one in found.sites if one.status is Status.LEFT)


LIBRARIES = [
    "on = True\n    if torch.cuda.device_count() == 0:\n        on = False\n    if on:\n"
    "        device = torch.device('cuda')\n        context = tvm.gpu(0)\n    else:\n        device = torch.device('cpu')",
    "if torch.cuda.is_available():\n        device = 'cuda'\n    else:\n        device = 'cpu'\n"
    "    model = torch.load(model, map_location=torch.device(device))\n    if device == 'cpu':\n"
    "        model.deparallelize()\n    else:\n        model.parallelize()",
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n    if device != 'cpu':\n        model.parallelize()",
    "if not torch.cuda.is_available():\n        device = ''\n    else:\n        device = f'--gpus \"device={model}\"'",
    "device = torch.cuda.device_count()\n    if device > 1:\n        os.environ['EGL_DEVICE_ID'] = str(device - 1)",
    "device = ['docker', 'run']\n    if torch.cuda.is_available():\n        device += ['--runtime=nvidia']",
]


@EACH_TARGET
@pytest.mark.parametrize("code", LIBRARIES)
def test_a_choice_of_the_device_stays_with_the_library_of_nvidias_that_it_decides_about(
    code: str, target: str
) -> None:
    source = f"import torch\nimport tvm\n\n\ndef f(model):\n    {code}\n    return model, device\n"
    assert port_text(source, Settings(target)).text == source


def test_an_option_of_the_programs_own_is_none_of_dockers() -> None:
    source = f"{HEAD}def f(parser):\n    if torch.cuda.is_available():\n        parser.add_argument('--gpus', type=int)\n"
    assert AVAILABLE not in port_text(source, Settings("acclimate")).text


@EACH_TARGET
def test_the_number_that_a_function_gives_by_a_test_is_a_part_of_the_test(target: str) -> None:
    source = (
        f"{HEAD}def make(size: int, device: int):\n    if device > -1:\n"
        "        return torch.cuda.LongTensor(size, device=device).fill_(1)\n    return torch.arange(0, size)\n\n\n"
        "def device_of(x: torch.Tensor):\n    if not x.is_cuda:\n        return -1\n    else:\n        return x.get_device()\n\n\n"
        "def f(x: torch.Tensor):\n    return make(x.size(0), device_of(x)) + x\n"
    )
    assert port_text(source, Settings(target)).text == source


GIVEN = {
    "an attribute that a branch sets": (
        "class Run:\n    def __init__(self, gpu):\n        if gpu and torch.cuda.is_available():\n"
        "            self._on = True\n        else:\n            self._on = False\n        self.held = {}\n",
        "self._on",
    ),
    "a name": ("def run():\n    fast = torch.cuda.is_available()\n    return {}\n", "fast"),
}
ARGUMENTS = ["Trainer(use_cuda={})", "Trainer(1, {})", "make({})"]


@EACH_TARGET
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("kind", GIVEN)
def test_a_flag_is_ported_with_what_another_file_does_by_a_parameter_of_another_name(
    kind: str, argument: str, target: str, tmp_path: Path
) -> None:
    code, flag = GIVEN[kind]
    files = {
        "lemma.py": "from net import Net\n\n\nclass Trainer:\n    def __init__(self, n=1, use_cuda=False):\n"
        "        self.model = Net()\n        if use_cuda:\n            self.model.cuda()\n\n\n"
        "def make(on):\n    return Trainer(1, on)\n",
        "net.py": "import torch\n\n\nclass Net(torch.nn.Module):\n    def cuda(self):\n        self.use_cuda = True\n",
        "run.py": f"import torch\nfrom lemma import Trainer, make\n\n\n{code.format(argument.format(flag))}",
    }
    result = site(ported_project(tmp_path, files, target)["run.py"], AVAILABLE)
    assert result.status is Status.UNSAFE
    assert "lemma.py:8" in result.reason


@EACH_TARGET
@pytest.mark.parametrize("guard", ["assert torch.cuda.is_available()", "if torch.cuda.is_available():\n    "])
def test_a_guard_is_not_ported_before_a_device_that_a_function_of_another_file_keeps(
    guard: str, target: str, tmp_path: Path
) -> None:
    files = {
        "dev.py": "import torch\n\n\ndef get_device():\n    if torch.cuda.is_available():\n"
        "        return torch.device(f'cuda:{torch.cuda.current_device()}')\n    return torch.device('cpu')\n",
        "memory.py": "import torch\nfrom dev import get_device\n\n\ndef used():\n    device = get_device()\n"
        "    if device.type == 'cuda':\n        return torch.cuda.memory_allocated(device)\n    return 0\n",
        "moe.py": f"import torch\nfrom dev import get_device\n\n\ndef f():\n    {guard}\n"
        "    x = torch.empty(3, device=get_device())\n".replace("    \n    x", "        x"),
    }
    result = site(ported_project(tmp_path, files, target)["moe.py"], AVAILABLE)
    assert result.status is Status.UNSAFE
    assert "dev.py:" in result.reason or "memory.py:" in result.reason


@EACH_TARGET
def test_a_device_stays_beside_a_model_whose_library_has_its_own_words_for_devices(target: str) -> None:
    source = (
        "import torch\nfrom rwkv.model import RWKV\n\n\nclass Model:\n    def __init__(self, path):\n"
        "        self.model = RWKV(model=path, strategy='cuda fp16')\n\n    def chat(self, ids):\n"
        "        return self.model.forward(torch.as_tensor([ids], device='cuda'), None)\n"
    )
    stays(source, target, "'cuda fp16'", "'cuda'")


@EACH_TARGET
def test_a_method_called_cuda_is_not_ported_without_review(target: str) -> None:
    source = f"{HEAD}class Signal:\n    def to(self, device):\n        return self\n\n    def cuda(self):\n        return self.to('cuda')\n"
    stays(source, target, "'cuda'")


@EACH_TARGET
@pytest.mark.parametrize("use", ["move(model)", "model.cuda()"])
def test_a_check_is_not_ported_without_the_code_of_another_file_that_follows_its_calls(
    use: str, target: str, tmp_path: Path
) -> None:
    files = {
        "checks.py": f"{HEAD}def check(cuda):\n    if cuda and not torch.cuda.is_available():\n        raise RuntimeError\n",
        "run.py": f"import torch\nfrom checks import check\n\n\ndef run(model, cuda):\n    check(cuda)\n    if cuda:\n        {use}\n",
    }
    result = site(ported_project(tmp_path, files, target)["checks.py"], AVAILABLE)
    expected = Status.CONVERTED if use == "move(model)" else Status.UNSAFE
    assert result.status is expected, result
    if expected is Status.UNSAFE:
        assert "run.py:8" in result.reason


STARTS = {
    "its class": (
        "class Run:\n    def __init__(self, model{kind}, rank: int):\n        if rank != -1:\n"
        "            torch.cuda.set_device(rank)\n        if torch.cuda.is_available():\n"
        "            self.model = model.cuda()\n\n    @classmethod\n    def make(cls):\n"
        "        dist.init_process_group('nccl', init_method='env://')\n",
        ["'nccl'", "torch.cuda.set_device(rank)", AVAILABLE],
    ),
    "a function that calls it": (
        "def setup(rank):\n    dist.init_process_group('nccl', rank=rank)\n\n\n"
        "def train(rank: int, model{kind}):\n    setup(rank)\n    return model.cuda(rank)\n",
        ["'nccl'"],
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", STARTS)
def test_a_process_group_is_not_ported_without_the_moves_that_come_with_it(kind: str, target: str) -> None:
    code, texts = STARTS[kind]
    head = "import torch\nimport torch.distributed as dist\n\n\n"
    stays(head + code.format(kind=""), target, *texts)
    converted(head + code.format(kind=": torch.nn.Module"), target)


@EACH_TARGET
def test_a_loop_over_what_a_test_has_collected_is_a_part_of_the_test(target: str) -> None:
    source = (
        f"{HEAD}def f(data):\n    devices = set()\n    streams = []\n\n    def check(x):\n        if x.is_cuda:\n"
        "            devices.add(x.device)\n\n    data.apply(check)\n    for device in devices:\n"
        "        streams.append(torch.cuda.Stream(device, priority=-1))\n    return streams\n"
    )
    stays(source, target, "torch.cuda.Stream(device, priority=-1)")


WORDS = [
    "accelerator = 'gpu' if torch.cuda.is_available() else 'cpu'\n    return pl.Trainer(accelerator=accelerator)",
    "kind = 'cpu'\n    if torch.cuda.is_available():\n        kind = \"gpu\"\n    return pl.Trainer(accelerator=kind)",
    "options = {}\n    kind = 'gpu' if torch.cuda.is_available() else 'cpu'\n    options['accelerator'] = kind\n"
    "    return options",
    "return {'accelerator': 'gpu' if torch.cuda.is_available() else 'cpu'}",
    "return pl.Trainer(gpus=1 if torch.cuda.is_available() else 0)",
    "n = torch.cuda.device_count()\n    return pl.Trainer(gpus=n)",
    "return pl.Trainer(num_gpus=torch.cuda.device_count())",
]


@EACH_TARGET
@pytest.mark.parametrize("code", WORDS)
def test_another_library_is_not_told_to_use_a_gpu_that_it_may_not_know(code: str, target: str) -> None:
    source = f"import pytorch_lightning as pl\nimport torch\n\n\ndef f():\n    {code}\n"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_the_number_of_gpus_of_the_programs_own_is_ported(target: str) -> None:
    source = f"{HEAD}def f(n_gpus):\n    return n_gpus\n\n\ndef g():\n    return f(n_gpus=torch.cuda.device_count())\n"
    converted(source, target)


@EACH_TARGET
@pytest.mark.parametrize("package", ["GPUtil", "pynvml"])
def test_a_guard_of_code_of_another_file_that_asks_nvidias_driver_is_unsafe(
    package: str, target: str, tmp_path: Path
) -> None:
    files = {
        "usage.py": f"import {package}\n\n\nclass MaxGPU:\n    def __init__(self, i):\n        self.n = {package}.count()\n",
        "test.py": "import torch\nfrom usage import MaxGPU\n\n\ndef test():\n    if torch.cuda.is_available():\n        MaxGPU(0)\n",
    }
    result = site(ported_project(tmp_path, files, target)["test.py"], AVAILABLE)
    assert result.status is Status.UNSAFE
    assert "usage.py:" in result.reason


@EACH_TARGET
def test_a_state_of_a_checkpoint_is_unsafe_in_a_loop_too(target: str) -> None:
    source = (
        f"{HEAD}def f(path):\n    saved = torch.load(path)\n    if 'rng' in saved and torch.cuda.is_available():\n"
        "        states = saved['rng']\n        states = states[:2]\n        for i, state in enumerate(states):\n"
        "            torch.cuda.set_rng_state(state.cpu(), device=i)\n"
    )
    stays(source, target, AVAILABLE, "torch.cuda.set_rng_state(state.cpu(), device=i)")


PLATFORM = (
    "class {}Accelerator:\n    def is_available(self):\n        return torch.cuda.is_available()\n\n"
    "    def synchronize(self):\n        torch.cuda.synchronize()\n"
)


@EACH_TARGET
@pytest.mark.parametrize(
    "beside", ["class XPUAccelerator:\n    pass\n", "class RocmAccelerator:\n    pass\n", ""]
)
def test_a_class_for_cuda_beside_those_for_other_devices_stays(
    beside: str, target: str, tmp_path: Path
) -> None:
    source = HEAD + PLATFORM.format("CUDA") + "\n\n" + beside
    files = {"cuda.py": source} if beside else {"cuda.py": source, "npuaccelerator.py": ""}
    result = ported_project(tmp_path, files, target)["cuda.py"]
    assert not result.changed
    assert {one.status for one in result.sites} == {Status.LEFT}


@EACH_TARGET
@pytest.mark.parametrize("name", ["CUDA", "Own"])
def test_a_class_beside_that_for_the_cpu_is_ported(name: str, target: str) -> None:
    converted(HEAD + PLATFORM.format(name) + "\n\nclass CPUAccelerator:\n    pass\n", target)


OWN_NUMBER = (
    "import torch\nfrom {}\n\n\ndef f(x: torch.Tensor):  # on cuda\n    device = {}().current_device()\n"
    "    return x.to(device)\n"
)


@EACH_TARGET
def test_what_the_programs_own_accelerator_calls_its_current_device_may_be_no_number(target: str) -> None:
    own = OWN_NUMBER.format("own import accelerator", "accelerator")
    assert port_text(own, Settings(target)).text == own
    deepspeeds = OWN_NUMBER.format("deepspeed.accelerator import get_accelerator", "get_accelerator")
    assert port_text(deepspeeds, Settings(target)).text != deepspeeds


SET = [
    "if torch.cuda.is_available():\n        args.distributed = args.world_size > 1",
    "if not torch.cuda.is_available():\n        print('host')\n    else:\n"
    "        if 'WORLD_SIZE' in args:\n            args.distributed = args.world_size > 1",
]


@EACH_TARGET
@pytest.mark.parametrize("code", SET)
def test_a_flag_that_only_a_device_sets_to_a_comparison_decides_as_its_test(code: str, target: str) -> None:
    source = (
        f"{HEAD}def f(args, model):\n    args.distributed = False\n    {code}\n    if args.distributed:\n"
        "        from apex.parallel import DistributedDataParallel\n\n        model = DistributedDataParallel(model)\n"
    )
    assert port_text(source, Settings(target)).text == source
