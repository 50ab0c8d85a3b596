"""What is about one vendor's hardware on purpose stays, and what says "there is a GPU" stays false on a host."""

import textwrap
from typing import Any

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_once_for_all

torch = pytest.importorskip("torch", reason="runs ported code")

TARGETS = ("acclimate", "torch")
IMPORTS = """\
import unittest
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
"""


def ported(source: str, target: str = "acclimate") -> str:
    return ported_once_for_all(IMPORTS + textwrap.dedent(source), target)


def stays(source: str) -> None:
    for target in TARGETS:
        text = IMPORTS + textwrap.dedent(source)
        result = port_text(text, Settings(target, unsafe=True))
        assert result.text == text
        assert all(site.reason for site in result.sites)


REPLACES = [
    '@patch("torch.cuda.is_available", return_value=True)\ndef test(a):\n    setup(backend="nccl", device="cuda:0")\n',
    '@mock.patch("torch.cuda.set_device")\ndef test(a):\n    model.to("cuda")\n    dist.init_process_group("nccl")\n',
    '@mock.patch.object(torch.cuda, "device_count")\ndef test(a):\n    x = torch.ones(1, device="cuda")\n',
    'def test():\n    fake.device = "cuda:0"\n    with patch("torch.cuda.get_device_capability"):\n        pass\n',
    'def test(monkeypatch):\n    monkeypatch.setattr(torch.cuda, "is_available", yes)\n    device = "cuda"\n',
    'def test(monkeypatch):\n    monkeypatch.setattr("torch.cuda.is_available", yes)\n    torch.cuda.empty_cache()\n',
    '@patch("torch.cuda.is_available")\nclass Test:\n    def test(self, a):\n        x = torch.ones(1).cuda()\n',
]


@pytest.mark.parametrize("source", REPLACES)
def test_a_test_that_replaces_names_of_torch_cuda_stays_whole(source: str) -> None:
    stays(source)


def test_a_test_that_replaces_something_else_is_ported() -> None:
    text = ported('@patch("mine.load")\ndef test(a):\n    x = torch.ones(1, device="cuda")\n')
    assert "device=get_accelerator().device_name()" in text


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils.cpp_extension import CUDA_HOME\n\n\ndef flags():\n"
        "    if torch.cuda.is_available() and CUDA_HOME is not None:\n        return ['-DWITH_CUDA']\n",
        "from torch.utils.cpp_extension import load as load_ext\n\n\ndef build(sources):\n"
        "    if torch.cuda.is_available():\n        sources.append('a.cu')\n    return load_ext('x', sources)\n",
        "from torch.utils import cpp_extension\n\n\ndef build():\n    gpu = torch.cuda.is_available()\n"
        "    return cpp_extension.load(name='x', sources=['a.cu'] if gpu else [])\n",
        "import torch.utils.cpp_extension\n\n\ndef build(force):\n"
        "    kind = torch.utils.cpp_extension.CUDAExtension if torch.cuda.is_available() or force else None\n"
        "    return torch.utils.cpp_extension.load('x', [])\n",
    ],
)
def test_a_test_of_the_device_that_decides_about_a_build_stays(source: str) -> None:
    stays(source)


@pytest.mark.parametrize(
    "source",
    [
        "import tensorrt as trt\n\n\ndef place(device):\n    if device.type == torch.device('cuda').type:\n"
        "        return trt.TensorLocation.DEVICE\n",
        "import pycuda.driver as driver\n\n\ndef f(x):\n    driver.memcpy(x.to('cuda'))\n",
        "import cupy\n\n\ndef f(x):\n    return cupy.asarray(x.cuda())\n",
    ],
)
def test_a_function_that_uses_a_runtime_of_nvidia_stays(source: str) -> None:
    stays(source)


def test_the_other_functions_of_such_a_file_are_ported() -> None:
    text = ported(
        "import tensorrt as trt\n\n\ndef f(x: torch.Tensor):\n    return x.cuda()\n\n\ntrt.init()\n"
    )
    assert "x.to(get_accelerator().device_name())" in text


SKIPS = [
    '@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")\ndef test():\n    pass\n',
    '@unittest.skipIf(not torch.cuda.is_available(), "needs CUDA")\ndef test():\n    pass\n',
    '@unittest.skipUnless(torch.cuda.is_available(), "needs CUDA")\ndef test():\n    pass\n',
    'needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="")\n',
    'HAS = torch.cuda.is_available()\n\n\n@unittest.skipUnless(HAS, "needs CUDA")\ndef test():\n    pass\n',
    'def test():\n    if not torch.cuda.is_available():\n        pytest.skip("needs CUDA")\n',
    'def test(self):\n    if not torch.cuda.is_available():\n        self.skipTest("needs CUDA")\n',
    'def test():\n    if not torch.cuda.is_available():\n        raise unittest.SkipTest("needs CUDA")\n',
    'if not torch.cuda.is_available():\n    pytest.skip("needs CUDA", allow_module_level=True)\n',
]


@pytest.mark.parametrize("source", SKIPS)
def test_a_test_that_is_skipped_without_a_device_is_skipped_on_a_host(source: str) -> None:
    text = ported(source)
    assert "is_available" not in text
    assert 'get_accelerator().device_name() == "cpu"' in text or 'device_name() != "cpu"' in text
    assert "torch.accelerator.is_available()" in ported(source, "torch")


def test_an_answer_that_is_returned_is_no_on_a_host() -> None:
    source = (
        'HAS = torch.cuda.is_available()\n\n\n@unittest.skipUnless(HAS, "")\ndef test():\n    return HAS\n'
    )
    assert 'HAS = get_accelerator().device_name() != "cpu"' in ported(source)


@pytest.mark.parametrize(
    "line",
    [
        'print("GPU" if torch.cuda.is_available() else "CPU")',
        'print("GPU" if not torch.cuda.is_available() else f"the CPU of {name}")',
        'text = "" if not x.is_cuda else " (GPU {})".format(x.get_device())',
        'text = " (GPU)" if x.is_cuda else ""',
        "if x.is_cuda:\n    show(x.get_device())",
        "if x.is_cuda:\n    show(x.device.index)",
    ],
)
def test_what_people_are_told_of_a_gpu_and_its_index_stays_false_on_a_host(line: str) -> None:
    text = ported(f"def f(x: torch.Tensor, name):\n{textwrap.indent(line, '    ')}\n")
    assert "on_accelerator" not in text
    assert "is_available" not in text
    assert '= "cpu"' in text


@pytest.mark.parametrize("name", ["dist.Backend.NCCL", "torch.distributed.Backend.NCCL"])
def test_the_constant_of_a_backend_is_its_name(name: str) -> None:
    source = (
        f"def f(backend):\n    if backend == {name}:\n        return torch.device('cuda')\n"
        f"    dist.init_process_group(backend={name})\n    return {{torch.device('cuda'): {name}}}\n"
    )
    assert "NCCL" not in ported(source)
    assert ported(source).count("acc.communication_backend_name()") == 4
    assert ported(source, "torch").count("get_default_backend_for_device(device_type)") == 4


def test_an_edit_of_is_bf16_supported_is_unsafe() -> None:
    source = "import torch\n\nok = torch.cuda.is_bf16_supported()\n"
    assert port_text(source, Settings()).text == source
    site = port_text(source, Settings()).sites[0]
    assert site.status is Status.UNSAFE
    assert "on a host without accelerator it is True" in site.reason
    assert "torch.cuda" not in port_text(source, Settings(unsafe=True)).text


CLASSES = """
def images(pictures, fast):
    Tensor = torch.cuda.FloatTensor if fast else torch.FloatTensor
    Long = torch.cuda.LongTensor
    return pictures.type(Tensor), pictures.type(Long), Tensor([1.0]), pictures.type(torch.cuda.HalfTensor)


class Trainer:
    def __init__(self):
        self.Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.Tensor

    def step(self, x):
        return x.type(self.Tensor)
"""


@EACH_TARGET
def test_tensors_change_to_the_type_that_a_name_holds(target: str) -> None:
    text = ported(CLASSES, target)
    assert ".type(" not in text
    space: dict[str, Any] = {}
    exec(text, space)
    found = space["images"](torch.arange(3), True)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.int64, torch.float32, torch.float16]
    assert found[0].tolist() == [0.0, 1.0, 2.0]
    assert space["Trainer"]().step(torch.arange(3)).dtype is torch.float32


def test_a_class_that_must_be_one_stays() -> None:
    stays("Tensor = torch.cuda.FloatTensor\nok = isinstance(x, Tensor)\n")


@pytest.mark.parametrize(
    "source",
    [
        """
        def test_cache():
            a, b = torch.device("cuda:0"), torch.device("cuda:1")
            assert cache(a) is not cache(b)
        """,
        """
        class Test(unittest.TestCase):
            def test_cache(self):
                self.assertNotEqual(key("cuda:0"), key("cuda:1"))
        """,
        """
        def memory():
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
            return subprocess.check_output(["nvidia-smi", "-i", str(index)])
        """,
        """
        def clusters():
            import cuda.bindings.driver as driver

            return driver.cuDeviceGet(torch.cuda.current_device())
        """,
        """
        def selector():
            return str(torch.cuda.current_device())

        def memory():
            return subprocess.check_output(["nvidia-smi", "-i", selector()])
        """,
    ],
)
def test_numbers_of_devices_that_a_host_has_not_stay(source: str) -> None:
    stays(source)


def test_two_devices_that_hold_tensors_are_ported() -> None:
    source = """
        def test_sum():
            a, b = torch.device("cuda:0"), torch.device("cuda:1")
            assert torch.ones(1, device=a) + torch.ones(1).to(b).to("cuda:0") == 2
        """
    for target in TARGETS:
        assert "cuda:" not in ported(source, target)


def test_a_program_that_prints_what_nvidia_smi_says_is_ported() -> None:
    source = """
        def main(model):
            print(subprocess.run(["nvidia-smi"]))
            return torch.ones(1, device="cuda"), torch.cuda.current_device()
        """
    assert "torch.cuda" not in ported(source)


CHECKED = [
    """
    def check(*tensors):
        for each in tensors:
            if not each.is_cuda:
                raise TypeError("needs CUDA")


    def attend(q, k):
        from flash_attn import flash_attn_func

        check(q, k)
        return flash_attn_func(q, k)
    """,
    """
    class Attend:
        def check(self, x):
            assert x.is_cuda

        def forward(self, q):
            import flash_attn

            self.check(q)
            return flash_attn.flash_attn_func(q, q)
    """,
]


@pytest.mark.parametrize("source", CHECKED)
def test_a_check_that_a_function_makes_before_a_kernel_stays(source: str) -> None:
    stays(source)


def test_a_check_that_a_function_makes_before_other_code_is_ported() -> None:
    source = CHECKED[0].replace("from flash_attn import flash_attn_func", "flash_attn_func = torch.add")
    assert "if not get_accelerator().on_accelerator(each):" in ported(source)
