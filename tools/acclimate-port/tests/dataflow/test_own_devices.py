"""A device is not ported safely beside code of another library that does not follow it."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
MEMORY = {
    "TensorRT": (
        "import tensorrt as trt",
        "context = trt.Runtime(None).load('m').create_execution_context()\ncontext.execute_v2([x.data_ptr()])",
    ),
    "TensorRT, by its address": (
        "import tensorrt as trt",
        "context = trt.load('m')\ncontext.set_tensor_address('x', address(x))",
    ),
    "ONNX Runtime": (
        "import onnxruntime",
        "binding = onnxruntime.InferenceSession('m').io_binding()\nbinding.bind_input('x', x.device.type, 0, 'float', [1], 0)",
    ),
    "ONNX Runtime, by a text": (
        "import onnxruntime as ort",
        "value = ort.OrtValue.ortvalue_from_shape_and_type([1], 'float', str(x.device))",
    ),
    "ONNX Runtime, by its memory": (
        "import onnxruntime",
        "bind(onnxruntime.InferenceSession('m'), x.data_ptr())",
    ),
    "PyCUDA": ("import pycuda.driver as drv", "drv.memcpy_dtod(1, x.data_ptr(), 4)"),
    "cpm_kernels": ("from cpm_kernels.kernels.base import KernelFunction", "start(1, [x.data_ptr()])"),
    "a kernel with a stream": (
        "import ctypes",
        "stream = torch.cuda.current_stream()\nfunction(1, 0, stream, [ctypes.c_void_p(x.data_ptr())])",
    ),
    "a kernel with a stream's handle": (
        "from kernels import scale",
        "scale((1,), (2,), (x.data_ptr(),), torch.cuda.current_stream().cuda_stream)",
    ),
    "an array": ("import cupy", "y = cupy.ndarray(x.__cuda_array_interface__)"),
}
SHAPES = {
    "the module": "device = {choice}\nx = torch.ones(1, device=device)\n{use}\n",
    "two functions": "def main():\n    device = {choice}\n    infer(torch.ones(1, device=device))\n\n\n"
    "def infer(x):\n    {use}\n",
    "a class": "class Run:\n    def __init__(self):\n        self.device = {choice}\n\n    def run(self, x):\n"
    "        x = x.to(self.device)\n        {use}\n",
}


def placed(shape: str, use: str) -> str:
    margin = {"the module": "\n", "two functions": "\n    ", "a class": "\n        "}[shape]
    return SHAPES[shape].format(choice=CHOICE, use=use.replace("\n", margin))


@EACH_TARGET
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", MEMORY)
def test_a_device_whose_memory_a_runtime_gets_is_not_ported(kind: str, shape: str, target: str) -> None:
    library, use = MEMORY[kind]
    source = f"{library}\nimport torch\n\n\n{placed(shape, use)}"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("library", "use"),
    [
        ("import onnxruntime", "y = onnxruntime.InferenceSession('m').run(None, {'x': x.cpu().numpy()})"),
        ("import onnxruntime", "same = x.data_ptr() == id(x)"),
        ("import pynvml", "name = x.data_ptr()"),
        ("import numpy", "name = x.data_ptr()"),
    ],
)
def test_a_device_whose_memory_no_runtime_gets_is_ported(
    library: str, use: str, shape: str, target: str
) -> None:
    source = f"{library}\nimport torch\n\n\n{placed(shape, use)}"
    assert CHOICE not in port_text(source, Settings(target)).text


CHOOSING = {
    "a summary": ("from torchsummary import summary", "summary({model}, (3, 8, 8))"),
    "a summary by its module": ("import torchsummary", "torchsummary.summary({model}, (3, 8, 8), -1)"),
    "Lightning's Fabric": ("import lightning as L", "L.Fabric(devices=1).setup({model})"),
    "Lightning's choice": (
        "from pytorch_lightning import Trainer",
        "Trainer(accelerator='auto').fit({model})",
    ),
    "CLIP": ("import clip", "encoder, _ = clip.load('ViT-B/32')\n    encoder.encode_image({model}.weight)"),
}
MAIN = "{head}\nimport torch\n\n\ndef main():\n    device = {choice}\n    model = torch.nn.Linear(1, 1).to(device)\n    {use}\n"


@EACH_TARGET
@pytest.mark.parametrize("kind", CHOOSING)
def test_a_device_beside_a_function_that_chooses_its_own_is_unsafe(kind: str, target: str) -> None:
    head, use = CHOOSING[kind]
    source = MAIN.format(head=head, choice=CHOICE, use=use.format(model="model"))
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert any("by itself" in one.reason for one in ported.sites)


@EACH_TARGET
@pytest.mark.parametrize(
    ("head", "use"),
    [
        ("from torchinfo import summary", "summary(model, (3, 8, 8))"),
        ("from torchsummary import summary", "summary(torch.nn.Linear(1, 1), (1,), device='cpu')"),
        ("import clip", "encoder, _ = clip.load('ViT-B/32')\n    encoder = encoder.to(device)"),
        ("import clip", "encoder, _ = clip.load('ViT-B/32', device)"),
        ("import lightning as L", "L.Trainer(accelerator='cpu').fit(torch.nn.Linear(1, 1))"),
        ("import wan", "wan.make(device_id=None)"),
        ("import clip", "encoder, _ = clip.load('ViT-B/32', device=device)"),
    ],
)
def test_a_function_that_follows_the_program_or_its_model_holds_nothing_back(
    head: str, use: str, target: str
) -> None:
    source = MAIN.format(head=head, choice=CHOICE, use=use)
    assert CHOICE not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_a_summary_in_another_function_holds_nothing_back(target: str) -> None:
    source = MAIN.format(head="from torchsummary import summary", choice=CHOICE, use="return model")
    source += "\n\ndef show(model):\n    summary(model, (3, 8, 8))\n"
    statuses = {one.status for one in port_text(source, Settings(target)).sites}
    assert statuses == {Status.CONVERTED}


@EACH_TARGET
def test_a_device_beside_a_library_that_gets_its_number_is_unsafe(target: str) -> None:
    source = (
        "import torch\nimport wan\n\n\ndef main(rank: int):\n    torch.cuda.set_device(rank)\n"
        "    model = wan.WanT2V(device_id=rank)\n    return model\n"
    )
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert "line 7 gives the number of a device" in ported.sites[0].reason


@EACH_TARGET
def test_bfloat16_is_asked_for_only_on_the_device_that_the_program_uses(target: str) -> None:
    source = (
        "import lightning as L\nimport torch\n\n\ndef main():\n"
        "    precision = 'bf16-true' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else '32'\n"
        "    return L.Fabric(devices=1, precision=precision)\n"
    )
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
@pytest.mark.parametrize(
    "use",
    [f"pl.Trainer(accelerator={CHOICE})", f"kind = {CHOICE}\n    pl.Trainer(accelerator=kind)"],
)
def test_a_name_that_lightning_takes_for_an_accelerator_stays(use: str, target: str) -> None:
    source = f"import pytorch_lightning as pl\nimport torch\n\n\ndef main():\n    {use}\n"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert any("Lightning knows no accelerators" in one.reason for one in ported.sites)


TRAINER = """\
import torch
from {package} import Trainer


class Mine(Trainer):
    def build(self):
        self.model = torch.nn.Linear(4, 4){own}
        self.scaler = torch.cuda.amp.GradScaler()
        if torch.cuda.device_count() > 1:
            self.model = torch.nn.DataParallel(self.model)

    def step(self, batch):
        with torch.cuda.amp.autocast():
            return self.model(batch{read})
"""


@EACH_TARGET
@pytest.mark.parametrize(
    ("package", "own", "read", "is_safe"),
    [
        ("dassl.engine", "", ".to(self.device)", False),
        ("dassl.engine", "", "", True),
        ("dassl.engine", "\n        self.device = pick()", ".to(self.device)", True),
        ("transformers", "", ".to(self.device)", True),
    ],
)
def test_code_of_a_class_whose_device_a_base_of_another_library_chooses_is_unsafe(
    package: str, own: str, read: str, is_safe: bool, target: str
) -> None:
    source = TRAINER.format(package=package, own=own, read=read)
    sites = port_text(source, Settings(target)).sites
    assert len(sites) == 4
    assert {one.safe for one in sites} == {is_safe}, sites


@EACH_TARGET
@pytest.mark.parametrize("package", ["torch2trt", "neural_renderer"])
def test_a_device_of_a_file_that_imports_a_package_built_for_cuda_alone_is_unsafe(
    package: str, target: str
) -> None:
    source = f"import torch\nimport {package}\n\nx = torch.ones(1).cuda()\n"
    assert port_text(source, Settings(target)).text == source
