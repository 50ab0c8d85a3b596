"""What only CUDA runs, and is not torch's, counts as left."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.files.workers import port_files
from porting import BOTH

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
}


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
