"""Devices that are right in their line, and not where the program takes them: to libraries, processes, other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project

CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'
DEVICE = f"import torch\n\ndevice = torch.device({CHOICE})\nx = torch.zeros(3, device=device)\n"
IN_OTHER = f"import torch\nfrom lib import give\n\ndevice = torch.device({CHOICE})\ngive(torch.zeros(3, device=device))\n"
SPAWN = "torch.multiprocessing.set_start_method('spawn')\n"
DATA = (
    "class Data(torch.utils.data.Dataset):\n    def __getitem__(self, i):\n        item = torch.zeros(3)\n"
    "        return {}, i\n\n\nloader = torch.utils.data.DataLoader(Data(), num_workers=2)\n"
)
COLLATE = (
    "def collate(items):\n    found = torch.stack(items){}\n    return found\n\n\n"
    "loader = torch.utils.data.DataLoader([], num_workers=2, collate_fn=collate)\n"
)
POOL = "def work(i):\n    return torch.zeros(3){} * i\n\n\nwith torch.multiprocessing.get_context('spawn').Pool(2) as pool:\n    pool.map(work, [])\n"
RPC = "import torch.distributed.rpc as rpc\n\nrpc.rpc_sync('one', torch.add, args=({}, 1))\n"
ATTENTION = "from torch.nn.attention import SDPBackend, sdpa_kernel\n\nwith sdpa_kernel({}):\n    torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
MPI = "from mpi4py import MPI\n\nMPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, {})\n"
GROUP = "torch.distributed.init_process_group({})\ntorch.distributed.all_reduce(x)\n"
ERROR = "try:\n    x.sum()\nexcept RuntimeError as error:\n    if {} not in str(error):\n        raise\n"

ELSEWHERE = {
    "a library of C": f"import ctypes\n{DEVICE}ctypes.CDLL('a.so').scale(ctypes.c_void_p(x.data_ptr()))\n",
    "another framework": f"import jax\n{DEVICE}y = jax.dlpack.from_dlpack(x)\n",
    "another framework's function": f"from jax.dlpack import from_dlpack\n{DEVICE}y = from_dlpack(x)\n",
    "kernels of Warp": f"import warp\n{DEVICE}y = warp.from_torch(x)\n",
    "kernels of Numba": f"import numba\n{DEVICE}y = numba.cuda.as_cuda_array(x)\n",
    "a library of operators": f"import natten\n{DEVICE}y = natten.na2d(x, x, x, 3)\n",
    "an operator of torchaudio": f"import torchaudio\n{DEVICE}y = torchaudio.functional.forced_align(x, x)\n",
    "a call on another machine": DEVICE + RPC.format("x.to(device)"),
    "memory that MPI sends": DEVICE + MPI.format("x"),
    "a process group of MPI": DEVICE + GROUP.format('"mpi"'),
    "attention for CUDA": DEVICE + ATTENTION.format("SDPBackend.FLASH_ATTENTION"),
    "attention by its old name": f"{DEVICE}with torch.backends.cuda.sdp_kernel(enable_math=False):\n    x.sum()\n",
    "an item from a new process": DEVICE + DATA.format("item.to(device)") + SPAWN,
    "a batch from a new process": DEVICE + COLLATE.format(".to(device)") + SPAWN,
    "a result from a new process": DEVICE + POOL.format(".to(device)"),
    "a result of a pool of processes": f"from concurrent.futures import ProcessPoolExecutor\n{DEVICE}\n\ndef work(i):\n"
    "    return torch.zeros(3).to(device)\n\n\nwith ProcessPoolExecutor() as pool:\n    pool.submit(work, 1)\n",
    "a method by its name": f"{DEVICE}kind = {CHOICE}\ngetattr(x, 'run_' + kind)()\n",
    "a module by its name": f"import importlib\n{DEVICE}kind = {CHOICE}\nimportlib.import_module(f'kernels_{{kind}}')\n",
    "a name of code alone": f"import kernels\n{DEVICE}kind = {CHOICE}\ngetattr(kernels, kind)()\n",
    "a name of a global": f"{DEVICE}kind = {CHOICE}\nglobals()[f'run_{{kind}}']()\n",
    "an operator of its own": f"{DEVICE}\n\n@torch.library.custom_op('own::f', mutates_args=(), device_types=('cpu', 'cuda'))\n"
    "def f(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n",
    "a command": f"import os\n{DEVICE}kind = {CHOICE}\nos.system(f'pip install mine-{{kind}}')\n",
    "an autocast in another one": f"{DEVICE}with torch.autocast('cuda', dtype=torch.bfloat16):\n"
    "    with torch.cuda.amp.autocast():\n        x.sum()\n",
    "an error of CUDA": DEVICE + ERROR.format('"CUDA out of memory"'),
    "the text of a tensor": f"{DEVICE}assert repr(x) in ('tensor([0.])', \"tensor([0.], device='cuda:0')\")\n",
    "the environment": f"import os\n{DEVICE}os.environ['JAX_PLATFORMS'] = {CHOICE}\n",
    "the environment, if it is not set": f"import os\n{DEVICE}os.environ.setdefault('JAX_PLATFORMS', {CHOICE})\n",
}
ON_ANY = {
    "memory that is compared": f"import ctypes\n{DEVICE}assert x.data_ptr() == x[0].data_ptr()\n",
    "memory of the host": f"import ctypes\n{DEVICE}ctypes.CDLL('a.so').scale(x.cpu().data_ptr())\n",
    "an array of another framework": f"import jax\n{DEVICE}y = torch.from_dlpack(jax.numpy.zeros(3))\n",
    "a function of torchaudio": f"import torchaudio\n{DEVICE}y = torchaudio.functional.gain(x)\n",
    "a call with a number": DEVICE + RPC.format("3"),
    "an object that MPI sends": DEVICE + MPI.format("3"),
    "a group of any backend": "import torch\n" + DEVICE.replace("import torch\n", "") + "print('mpi')\n",
    "attention by any kernel": DEVICE + ATTENTION.format("[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]"),
    "an item of the host": DEVICE + DATA.format("item") + SPAWN,
    "a batch of the host": DEVICE + COLLATE.format("") + SPAWN,
    "a result of the host": DEVICE + POOL.format(""),
    "an error of any device": DEVICE + ERROR.format('"out of memory"'),
    "a module of torch's": f"{DEVICE}kind = {CHOICE}\ngetattr(torch, kind).empty_cache()\n",
    "an operator for any device": f"{DEVICE}\n\n@torch.library.custom_op('own::f', mutates_args=())\n"
    "def f(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n",
    "a message": f"{DEVICE}print('device=', device)\n",
    "another variable": f"import os\n{DEVICE}os.environ['JAX_PLATFORMS'] = 'cpu'\n",
}
LIBRARIES = {
    "a library of C": "import ctypes\n\nlib = ctypes.CDLL('a.so')\n\n\ndef give(x):\n    lib.scale(ctypes.c_void_p(x.data_ptr()))\n",
    "another framework": "import torch\nimport jax\n\n\ndef give(x: torch.Tensor):\n    return jax.dlpack.from_dlpack(x)\n",
    "an operator of its own": "import torch\n\nlib = torch.library.Library('own', 'IMPL')\n\n\n@torch.library.impl(lib, 'f', 'CUDA')\n"
    "def on_gpu(x):\n    return x\n\n\ndef give(x: torch.Tensor):\n    return torch.ops.own.f(x)\n",
    "an error of CUDA": "import torch\n\n\ndef give(x: torch.Tensor):\n    try:\n        return x.sum()\n    except RuntimeError as error:\n"
    "        if 'CUDA out of memory' not in str(error):\n            raise\n",
}


def _statuses(folder: Path, files: dict[str, str], target: str, name: str = "main.py") -> set[Status]:
    return {one.status for one in ported_project(folder, files, target)[name].sites if one.text == CHOICE}


@EACH_TARGET
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_device_is_unsafe_where_something_takes_those_of_cuda_alone(
    kind: str, target: str, tmp_path: Path
) -> None:
    assert _statuses(tmp_path, {"main.py": ELSEWHERE[kind]}, target) == {Status.UNSAFE}


@pytest.mark.parametrize("kind", ON_ANY)
def test_a_device_is_safe_where_nothing_takes_those_of_cuda_alone(kind: str, tmp_path: Path) -> None:
    assert _statuses(tmp_path, {"main.py": ON_ANY[kind]}, "acclimate") == {Status.CONVERTED}


@EACH_TARGET
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_device_is_unsafe_where_another_file_gives_its_tensors_on(
    kind: str, target: str, tmp_path: Path
) -> None:
    files = {"main.py": IN_OTHER, "lib.py": LIBRARIES[kind]}
    assert _statuses(tmp_path, files, target) == {Status.UNSAFE}


WEIGHTS = "import os\n\n\ndef weights(device):\n    return os.path.join('weights', {})\n"
READS = f"import torch\nfrom paths import weights\n\ndevice = {CHOICE}\nprint(open(weights(device)), torch.zeros(3).to(device))\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("f'{device}.pt'", Status.UNSAFE),
        ("device + '.json'", Status.UNSAFE),
        ("'best_' + device + '.json'", Status.UNSAFE),
        ("f'{1 + 1}.pt'", Status.CONVERTED),
    ],
)
def test_a_device_is_unsafe_that_another_file_makes_a_files_name_of(
    name: str, status: Status, target: str, tmp_path: Path
) -> None:
    assert _statuses(tmp_path, {"main.py": READS, "paths.py": WEIGHTS.format(name)}, target) == {status}


BRANCHES = "import torch\nfrom flags import use_cuda\n\nif use_cuda:\n    device = 'cuda'\n{}else:\n    device = 'cpu'\nprint(torch.zeros(3).to(device))\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("branch", "status"),
    [
        (
            "elif torch.backends.mps.is_available():\n    device = 'mps'\n    torch.set_num_threads(1)\n",
            Status.UNSAFE,
        ),
        ("", Status.CONVERTED),
    ],
)
def test_a_flag_is_unsafe_beside_which_another_file_has_branches_for_other_devices(
    branch: str, status: Status, target: str, tmp_path: Path
) -> None:
    question = "torch.cuda.is_available()"
    files = {"flags.py": f"import torch\n\nuse_cuda = {question}\n", "main.py": BRANCHES.format(branch)}
    found = ported_project(tmp_path, files, target)["flags.py"].sites
    assert [one.status for one in found if one.text == question] == [status]


@EACH_TARGET
def test_tests_run_on_the_host_where_the_conftest_around_them_hides_the_devices(
    target: str, tmp_path: Path
) -> None:
    test = f"import torch\n\n\ndef test_sum():\n    device = torch.device({CHOICE})\n    assert torch.zeros(3).to(device).sum() == 0\n"
    hides = "import os\n\nos.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n"
    files = {"tests/conftest.py": hides, "tests/own/test_sum.py": test, "others/test_sum.py": test}
    assert _statuses(tmp_path, files, target, "tests/own/test_sum.py") == {Status.UNSAFE}
    assert _statuses(tmp_path, files, target, "others/test_sum.py") == {Status.CONVERTED}


@EACH_TARGET
@pytest.mark.parametrize(("default", "status"), [(6, Status.UNSAFE), (0, Status.CONVERTED)])
def test_a_device_after_the_first_may_not_be_there_by_the_default_of_an_option(
    default: int, status: Status, target: str, tmp_path: Path
) -> None:
    text = (
        f"import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--gpu', type=int, default={default})\n"
        "args = parser.parse_args()\ndevice = f'cuda:{args.gpu}' if torch.cuda.is_available() else 'cpu'\nprint(torch.zeros(3).to(device))\n"
    )
    found = ported_project(tmp_path, {"main.py": text}, target)["main.py"].sites
    assert {one.status for one in found} == {status}


def test_an_assertion_goes_with_a_library_that_chooses_its_device(tmp_path: Path) -> None:
    question = "torch.cuda.is_available()"
    text = f"import torch\nimport whisper\n\n\ndef main():\n    assert {question}\n    return whisper.load_model('medium').run()\n"
    found = ported_project(tmp_path, {"main.py": text}, "acclimate")["main.py"].sites
    assert [one.status for one in found if one.text == question] == [Status.UNSAFE]


@EACH_TARGET
@pytest.mark.parametrize(
    ("call", "status"),
    [("device='auto'", Status.UNSAFE), ("", Status.UNSAFE), ("device='cpu'", Status.CONVERTED)],
)
def test_a_device_goes_with_a_trainer_of_another_file_that_chooses_its_own(
    call: str, status: Status, target: str, tmp_path: Path
) -> None:
    env = f"import torch\n\n\ndef device_of():\n    return {CHOICE}\n\n\nclass Env:\n    def step(self, action):\n        return torch.as_tensor(action).to(device_of())\n"
    main = f"from stable_baselines3 import PPO\nfrom env import Env, device_of\n\nPPO('MlpPolicy', Env(), {call}).learn(3)\n"
    assert _statuses(tmp_path, {"env.py": env, "main.py": main}, target, "env.py") == {status}


@pytest.mark.parametrize(
    ("given", "status"), [("True", Status.UNSAFE), ("enable_timing=True", Status.CONVERTED)]
)
def test_an_event_by_position_is_unsafe(given: str, status: Status, tmp_path: Path) -> None:
    text = f"import torch\n\n\ndef timed(x: torch.Tensor):\n    start = torch.cuda.Event({given})\n    start.record()\n    return start\n"
    found = ported_project(tmp_path, {"main.py": text}, "acclimate")["main.py"].sites
    assert [one.status for one in found] == [status]


HELPER = f"import torch\n\n\ndef move(x):\n    return x.to({CHOICE})\n"
CHOOSERS = {
    "fastai": "from fastai.vision.all import vision_learner\nfrom lib import move\n\nlearn = vision_learner(move([]), 1)\n",
    "flair": "from flair.embeddings import WordEmbeddings\nfrom lib import move\n\nprint(WordEmbeddings('a').embed(move([])))\n",
    "ignite": "import ignite.distributed as idist\nfrom lib import move\n\nprint(idist.auto_model(net)(move([])))\n",
    "Ray": "from ray import train\nfrom lib import move\n\nprint(train.torch.prepare_model(net)(move([])))\n",
    "CLIP": "import clip\nfrom lib import move\n\nmodel, _ = clip.load('a')\nprint(model.encode_image(move([])))\n",
}
TOLD = {
    "flair": f"import flair\nimport torch\nfrom lib import move\n\nflair.device = torch.device({CHOICE})\nprint(move([]))\n",
    "CLIP": "import clip\nfrom lib import move\n\nmodel, _ = clip.load('a', device='cpu')\nprint(model.encode_image(move([])))\n",
    "ignite": "import ignite.metrics\nfrom lib import move\n\nprint(ignite.metrics.Loss(move([])))\n",
}


@EACH_TARGET
@pytest.mark.parametrize("library", CHOOSERS)
def test_a_device_goes_with_a_library_of_another_file_that_chooses_its_own(
    library: str, target: str, tmp_path: Path
) -> None:
    files = {"lib.py": HELPER, "main.py": CHOOSERS[library]}
    assert _statuses(tmp_path, files, target, "lib.py") == {Status.UNSAFE}


@pytest.mark.parametrize("library", TOLD)
def test_a_device_is_safe_beside_a_library_that_is_told_its_device(library: str, tmp_path: Path) -> None:
    files = {"lib.py": HELPER, "main.py": TOLD[library]}
    assert _statuses(tmp_path, files, "acclimate", "lib.py") == {Status.CONVERTED}


@EACH_TARGET
@pytest.mark.parametrize(
    ("given", "status"),
    [("device", Status.UNSAFE), ("str(device)", Status.UNSAFE), ("'cpu'", Status.CONVERTED)],
)
def test_a_device_that_another_file_sends_in_a_message_is_unsafe(
    given: str, status: Status, target: str, tmp_path: Path
) -> None:
    lib = f"import requests\n\n\ndef ask(device):\n    return requests.post('http://a', json={{'device': {given}}})\n"
    main = f"import torch\nfrom lib import ask\n\ndevice = {CHOICE}\nprint(ask(device), torch.zeros(3).to(device))\n"
    assert _statuses(tmp_path, {"lib.py": lib, "main.py": main}, target) == {status}


WRITTEN = (
    "import csv\nimport {module}\n\nimport torch\n\nDEVICE = {choice}\nparams = {{'epochs': 3, 'device': DEVICE}}\n\n\n"
    "def write_settings(given, name):\n    with open(name, 'w') as file:\n        csv.writer(file).writerows(given.items())\n\n\n"
    "def submit():\n    {call}\n    {start}\n"
)


@EACH_TARGET
@pytest.mark.parametrize(
    ("call", "start", "status"),
    [
        ("write_settings(params, 'in.csv')", "subprocess.run(['sbatch', 'job.sh'])", Status.UNSAFE),
        ("print(params)", "subprocess.run(['sbatch', 'job.sh'])", Status.CONVERTED),
        ("write_settings(params, 'in.csv')", "print(subprocess)", Status.UNSAFE),
    ],
)
def test_a_device_that_another_program_may_read_from_a_file_is_unsafe(
    call: str, start: str, status: Status, target: str, tmp_path: Path
) -> None:
    text = WRITTEN.format(module="subprocess", choice=CHOICE, call=call, start=start)
    assert _statuses(tmp_path, {"main.py": text}, target) == {status}
