"""What only CUDA runs, and is not torch's, counts as left."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.files.workers import port_files
from porting import BOTH, ported_project, program, site

LEFT = {
    "from cpp import pointnet2_cuda\n\npointnet2_cuda.query(x)\n": "`pointnet2_cuda` is a module for CUDA",
    "from .ops import roi_cuda_ops as ops\n\nops.pool(x)\n": "`roi_cuda_ops` is a module for CUDA",
    "def get():\n    return _module\n\n\ndef f(x):\n    emd_cuda = get()\n    return emd_cuda.forward(x)\n": "`emd_cuda`",
    "from autocuda import auto_cuda\n\ndevice = auto_cuda()\n": "`autocuda` is a module for CUDA",
    "def f(runtime, data):\n    return runtime.deserialize_cuda_engine(data)\n": "TensorRT",
    'session = make(providers=["CUDAExecutionProvider"])\n': "ONNX Runtime has another provider",
    'import subprocess\n\nsubprocess.run(["nvidia-smi", "--query-gpu=memory.total"])\n': "NVIDIA's GPUs alone",
    'import os\n\nos.system("nvidia-smi --list-gpus")\n': "NVIDIA's GPUs alone",
    'import os\n\nos.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"\n': "only CUDA reads this variable",
    'import subprocess\n\nsubprocess.run(f"nvidia-smi --query-gpu={field}", shell=True)\n': "NVIDIA's GPUs alone",
    'import os\n\nos.system("/usr/bin/nvidia-smi " f"-i {index}")\n': "NVIDIA's GPUs alone",
    "from lightning.fabric.accelerators.cuda import num_cuda_devices\n\nn = num_cuda_devices()\n": "`lightning` asks",
    "from transformers.utils import is_torch_cuda_available as ok\n\nok()\n": "`transformers` asks",
    "import torch\nimport transformer_engine\n\nwith transformer_engine.pytorch.fp8_autocast(enabled=True):\n    run()\n": (
        "only NVIDIA GPUs run the package `transformer_engine`"
    ),
    "from flash_attn import flash_attn_func\nimport torch\n\ny = flash_attn_func(q, k, v)\n": "only NVIDIA GPUs run",
    "from torch import _C\n\n_C._cuda_setRNGState(state)\n": "a private function of torch for CUDA",
    'import subprocess\n\nsubprocess.run(["python", "-c", "import torch; print(torch.cuda.is_available())"])\n': "in a text",
}
EXEMPT = {
    'import os\n\nos.environ["NCCL_SHARP_DISABLE"] = "1"\n': "only NCCL reads this variable",
    'import torch\n\nprint(profiler.key_averages().table(sort_by="self_cuda_time_total"))\n': "for each kind of device",
}


@BOTH
@pytest.mark.parametrize("source", EXEMPT)
def test_what_needs_no_edit_on_other_devices_is_reported_and_counts_as_no_code_for_cuda(
    source: str, target: str
) -> None:
    ported = port_text(source, Settings(target))
    assert [one.status for one in ported.sites] == [Status.EXEMPT]
    assert EXEMPT[source] in ported.sites[0].reason


def test_a_package_for_nvidia_alone_holds_no_other_edit_back() -> None:
    source = "import torch\n\ntry:\n    from flash_attn import flash_attn_func\nexcept ImportError:\n    pass\n\n\ndef f(q, k, v):\n    return flash_attn_func(q, k, v)\n\n\ndef make(n):\n    return torch.ones(n, device='cuda')\n"
    found = {site.text: site.status for site in port_text(source, Settings()).sites}
    assert found == {"flash_attn_func(q, k, v)": Status.LEFT, "'cuda'": Status.CONVERTED}


def test_a_function_of_the_project_that_asks_for_cuda_is_not_another_packages(tmp_path: Path) -> None:
    found = ported_project(
        tmp_path,
        {
            "pkg/ask.py": "import torch\n\n\ndef is_cuda_available():\n    return torch.cuda.is_available()\n",
            "pkg/use.py": "from pkg.ask import is_cuda_available\n\nprint(is_cuda_available())\n",
        },
        "acclimate",
    )
    assert found["pkg/use.py"].sites == ()


@BOTH
@pytest.mark.parametrize("source", LEFT)
def test_code_for_cuda_that_is_not_torchs_is_reported_with_a_reason(source: str, target: str) -> None:
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert [one.status for one in ported.sites] == [Status.LEFT]
    assert LEFT[source] in ported.sites[0].reason


@pytest.mark.parametrize(
    "source",
    [
        "from config import settings\n\nsettings.use_cuda.get()\n",
        "import torch\n\nfor use_cuda in (True, False):\n    f(use_cuda)\n",
        "def f(cuda):\n    return cuda.forward()\n",
        'def f():\n    """nvidia-smi shows the GPUs."""\n    print("nvidia-smi failed")\n',
    ],
)
def test_a_flag_is_no_module_for_cuda(source: str) -> None:
    assert not port_text(source, Settings("acclimate")).sites


MOVES = "import torch\n\n\ndef f():\n    return torch.ones(1).cuda()\n"


@pytest.mark.parametrize(
    ("files", "is_build"),
    [
        ({"pkg/loss/build.py": MOVES}, False),
        ({"build.py": MOVES, "setup.py": ""}, True),
        ({"build.py": MOVES, "pyproject.toml": ""}, True),
        ({"pkg/build.py": f"import setuptools\n{MOVES}"}, True),
        ({"pkg/build.py": f"from torch.utils.cpp_extension import load\n{MOVES}"}, True),
        ({"pkg/build.py": f"from torch.utils.ffi import create_extension\n{MOVES}"}, True),
        ({"setup.py": MOVES}, True),
    ],
)
def test_a_module_called_build_is_a_build_script_only_where_a_project_is_built(
    files: dict[str, str], is_build: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    results = port_files(sorted(tmp_path.rglob("*.py")), Settings("acclimate"), False, 1, lambda: None)
    found = [site.status for result in results for site in result.sites]
    assert found == [Status.LEFT if is_build else Status.CONVERTED]


EXTENSION = {
    "ops/setup.py": "from torch.utils.cpp_extension import CUDAExtension\n\nE = CUDAExtension('gather_rows', ['a.cu'])\n",
    "use.py": "import torch\nimport gather_rows\n\n\ndef f(n):\n    x = torch.ones(n).cuda()\n"
    "    return gather_rows.forward(x)\n",
}


def test_what_moves_tensors_for_the_projects_own_extension_for_cuda_is_unsafe(tmp_path: Path) -> None:
    result = ported_project(tmp_path, EXTENSION, "acclimate")["use.py"]
    move = site(result, "torch.ones(n).cuda()")
    assert move.status is Status.UNSAFE
    assert "gather_rows.forward" in move.reason


def test_a_module_without_kernels_of_a_package_for_nvidia_gpus_needs_none(tmp_path: Path) -> None:
    call = "from flash_attn.{} import run\nimport torch\n\ntorch.cuda.synchronize()\nrun(print)\n"
    files = {
        "flash_attn/plain.py": "import torch\n\n\ndef run(f):\n    f()\n    torch.cuda.synchronize()\n",
        "flash_attn/kernels.py": "import flash_attn_2_cuda\n\n\ndef run(f):\n    flash_attn_2_cuda.fwd(f)\n",
        "one.py": call.format("plain"),
        "two.py": call.format("kernels"),
    }
    results = ported_project(tmp_path, files, "acclimate")
    assert [one.text for one in results["one.py"].sites] == ["torch.cuda.synchronize()"]
    assert site(results["two.py"], "run(print)").status is Status.LEFT


def test_the_reason_for_a_triton_kernel_names_no_vendor() -> None:
    kernel = "import torch\nimport {0}\nfrom flash_attn import gelu\n\n\n@{1}\ndef kernel(x):\n    return gelu(x)\n"
    reasons = [
        port_text(kernel.format(*names), Settings("torch")).sites[0].reason
        for names in (("triton", "triton.jit"), ("numba.cuda", "numba.cuda.jit"))
    ]
    assert "code of a Triton kernel" in reasons[0]
    assert "one vendor's hardware" in reasons[1]


@BOTH
@pytest.mark.parametrize(
    "text", ["custom ops in cuda", "Compares the CUDA kernels.", "a CUDA-extension of torch"]
)
def test_a_function_that_says_that_it_is_about_kernels_of_cuda_is_unsafe(text: str, target: str) -> None:
    body = "if not torch.cuda.is_available():\n    return None\nreturn model(torch.ones(1).cuda())"
    source = program(f'"""{text}"""\n{body}')
    assert port_text(source, Settings(target)).text == source
    other = program(f'"""Moves the inputs to CUDA."""\n{body}')
    assert ".cuda()" not in port_text(other, Settings(target)).text


NUMBERS = "import torch\n\n\ndef main(args):\n    if args.off:\n        args.{name} = {value}\n    {use}\n"
USES = ("torch.cuda.set_device(args.{name})", "with torch.cuda.device(args.{name}):\n        print(1)")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("name", "value", "condition", "is_safe"),
    [
        ("gpu", "-1", "", False),
        ("gpu", "-1", "if args.there:\n        ", False),
        ("gpu", "-1", "if args.gpu >= 0:\n        ", True),
        ("gpu", "1", "", True),
        ("local_rank", "-1", "", True),
    ],
)
def test_a_number_that_may_be_negative_names_no_device_of_acclimate(
    name: str, value: str, condition: str, is_safe: bool, use: str
) -> None:
    use = use.replace("\n", "\n    ") if condition else use
    source = NUMBERS.format(name=name, value=value, use=condition + use.format(name=name))
    assert ("torch.cuda." not in port_text(source, Settings("acclimate")).text) is is_safe
    assert port_text(source, Settings("torch")).text != source


CAPABILITIES = [
    'fast = torch.cuda.get_device_capability("cuda")[0] >= 8',
    'fast = torch.cuda.get_device_capability("cuda") == (9, 0)',
    'fast = wanted or torch.cuda.get_device_capability("cuda")[0] < 9',
]


@BOTH
@pytest.mark.parametrize("line", CAPABILITIES)
def test_the_device_whose_capability_is_asked_for_is_no_test_beside_it(line: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(wanted):\n    {line}\n    return fast\n"
    ported = port_text(source, Settings(target, unsafe=True))
    assert "cuda.get" not in ported.text
    assert '("cuda")' not in ported.text
    assert {one.safe for one in ported.sites} == {False}


@BOTH
def test_a_capability_beside_a_test_of_the_device_stays(target: str) -> None:
    source = 'import torch\n\n\ndef f(x):\n    return x == "cuda" and torch.cuda.get_device_capability("cuda")[0] > 7\n'
    assert port_text(source, Settings(target, unsafe=True)).text == source


@BOTH
def test_a_condition_on_rocm_is_false_on_other_accelerators_as_on_nvidias(target: str) -> None:
    source = (
        "import torch\n\n\ndef f(q):\n    if torch.cuda.is_available() and torch.version.hip:\n"
        "        return torch.empty(1, device=q.device)\n    return torch.empty(2, device=q.device)\n"
    )
    assert "torch.cuda" not in port_text(source, Settings(target)).text


@BOTH
@pytest.mark.parametrize(
    "asks", ["getattr(torch.cuda.amp, 'autocast') is not None", "hasattr(torch.cuda.amp, 'GradScaler')"]
)
def test_a_question_whether_there_are_autocasts_asks_torch(asks: str, target: str) -> None:
    source = f"import torch\n\n\ndef f():\n    return {asks}\n"
    assert port_text(source, Settings(target)).text == source.replace("torch.cuda.amp", "torch.amp")


def test_a_function_of_the_autocasts_that_is_looked_up_stays() -> None:
    source = "import torch\n\n\ndef f():\n    return getattr(torch.cuda.amp, 'autocast')()\n"
    assert port_text(source, Settings(unsafe=True)).text == source
