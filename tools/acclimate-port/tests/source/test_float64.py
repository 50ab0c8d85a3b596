"""Numbers of 64 bits that come to the device, which Apple's GPUs refuse, hold back the edits that choose it."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.source.float64 import GAMES, float64
from porting import EACH_TARGET, ported_project, site

HEAD = "import numpy as np\nimport torch\n"
CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"

WIDE = {
    "an array without a dtype": "torch.tensor(np.zeros(3), device=device)",
    "an array through a name": "x = np.ones((2, 3))\n    return torch.from_numpy(x).to(device)",
    "an array of numbers": "torch.from_numpy(np.array([0.1, 2])).to(device)",
    "a random array": "torch.as_tensor(np.random.randn(3)).cuda()",
    "a scalar": "torch.tensor(np.log(value)).to(device)",
    "a sum of arrays": "torch.tensor(value + np.linspace(0, 1, 3)).to(device)",
    "an array of a type": "torch.from_numpy(value.astype(np.float64)).to(device)",
    "a tensor of a type": "torch.zeros(3, dtype=torch.float64, device=device)",
    "a tensor that moves": "torch.zeros(3, dtype=torch.double).to(device)",
    "a parameter of a module": "net.weight.double()",
    "another type of a tensor": "value.to(torch.float64)",
    "a sum in a type": "torch.sum(value, dtype=torch.float64)",
    "a buffer": "net.register_buffer('x', torch.linspace(0, 1, 3).double())",
    "a number after the move": "torch.from_numpy(np.zeros(3)).to(device).float()",
    "a device by a keyword": "torch.from_numpy(np.zeros(3)).to(device=value.device)",
    "a table of computed numbers": "torch.from_numpy(np.array([1 / np.power(2, i) for i in range(3)])).to(device)",
    "a quotient of whole numbers": "torch.tensor(1.0 / np.bincount(value)).to(device)",
    "a part of a grid": "torch.from_numpy(np.meshgrid(np.linspace(0, 1, 3), np.ones(2))[0]).to(device)",
    "a grid by its ends": "torch.from_numpy(np.mgrid[0:1:3j]).to(device)",
    "a product by its letters": "torch.from_numpy(np.einsum('i,j->ij', np.zeros(3), np.ones(3))).to(device)",
    "an inverse": "torch.from_numpy(np.linalg.inv(np.eye(3))).to(device)",
    "edges of bins": "torch.from_numpy(np.histogram(value)[1]).to(device)",
    "a choice of two numbers": "torch.from_numpy(np.where(value, 0.0, 1.0)).to(device)",
    "a root of whole numbers": "torch.from_numpy(np.sqrt(-np.arange(3))).to(device)",
    "whole numbers that are scaled": "torch.from_numpy(np.array([1, 2]) * 0.5).to(device)",
    "whole numbers that a function scales": "torch.from_numpy(np.multiply(np.arange(3), 0.5)).to(device)",
    "numbers of texts": "torch.from_numpy(np.array(list(map(float, value)))).to(device)",
    "numbers in another order": "torch.from_numpy(np.random.permutation(np.linspace(0, 1, 3))).to(device)",
    "a range to a quotient": "x = 16 / 4\n    return torch.from_numpy(np.arange(x)).to(device)",
    "a range to a quotient in a tuple": "x = (16 / 4, 2)\n    return torch.from_numpy(np.arange(x[0])).to(device)",
    "a tensor beside another": "torch.ones(2, device=device).new_tensor(np.zeros(3))",
    "a number of an array": "[torch.tensor(r, device=device) for r in np.linspace(0, 1, 3)]",
    "entries of a dictionary": "x = {'a': torch.from_numpy(np.zeros(3))}\n    return {k: v.to(device) for k, v in x.items()}",
    "options": "dict(a={'device': device, 'dtype': torch.double})",
}
NARROW = {
    "an array of fewer bits": "torch.tensor(np.zeros(3, dtype=np.float32), device=device)",
    "a dtype of torch": "torch.tensor(np.zeros(3), dtype=torch.float32, device=device)",
    "a conversion before the move": "torch.from_numpy(np.zeros(3)).float().to(device)",
    "a class of 32 bits": "torch.FloatTensor(np.zeros(3)).to(device)",
    "a conversion of the array": "torch.from_numpy(np.zeros(3).astype('float32')).to(device)",
    "a list of unknown numbers": "torch.tensor(value).to(device)",
    "an unknown array": "torch.from_numpy(value).to(device)",
    "places of numbers": "torch.from_numpy(np.argsort(np.zeros(3))).to(device)",
    "whole numbers in another order": "torch.from_numpy(np.random.permutation(10)).to(device)",
    "a choice of two whole numbers": "torch.from_numpy(np.where(value, 0, 1)).to(device)",
    "an answer": "torch.from_numpy(np.random.rand(3) > 0.5).to(device)",
    "a number of Python": "torch.tensor(float(value)).to(device)",
    "whole numbers": "torch.from_numpy(np.arange(3)).to(device)",
    "a tensor of the host": "value.cpu().double()",
    "a tensor that stays on the host": "torch.zeros(3, dtype=torch.float64)",
    "another answer for Apple": "value.double() if device != 'mps' else value",
    "a move in a type": "torch.from_numpy(np.zeros(3)).to(device, torch.float32)",
}

LIBRARIES = "from PIL import Image\nfrom scipy.io import wavfile\nfrom sklearn.utils.class_weight import compute_class_weight\nimport cv2\nimport trimesh\n"
READ_WIDE = {
    "an image of OpenCV": "x = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB) / 255.0",
    "an image of Pillow": "x = np.array(Image.open(path).convert('RGB'))\n    x = x.transpose(2, 0, 1) / 255",
    "a sound": "_, x = wavfile.read(path)\n    x = x / 32768.0",
    "weights of classes": "x = compute_class_weight('balanced', classes=[0, 1], y=path)",
    "a shape": "x = np.asarray(trimesh.load(path).vertices)",
    "positions of atoms": "x = path.get_positions()",
}
READ_NARROW = {
    "an image of 8 bits": "x = cv2.resize(cv2.imread(path), (3, 3))",
    "an image of fewer bits": "x = cv2.imread(path).astype(np.float32) / 255.0",
    "an image with a type": "x = np.array(Image.open(path), dtype=np.float32) / 255",
    "another library's array": "x = path.read() / 255.0",
}


@pytest.mark.parametrize("kind", [*READ_WIDE, *READ_NARROW])
def test_what_is_read_from_a_file_has_the_bits_that_its_library_gives(kind: str) -> None:
    line = READ_WIDE.get(kind) or READ_NARROW[kind]
    text = f"{HEAD}{LIBRARIES}\n\ndef f(path, device):\n    {line}\n    return torch.from_numpy(x){{}}.to(device)\n"
    assert bool(float64(text.format("")).on_device) == (kind in READ_WIDE)
    assert not float64(text.format(".float()")).on_device


def source(line: str) -> str:
    body = line if line.startswith("x = ") else f"return {line}"
    return f"{HEAD}\n\ndef f(net, value, device):\n    {body}\n"


@pytest.mark.parametrize("kind", WIDE)
def test_a_number_of_64_bits_on_the_device_is_found(kind: str) -> None:
    assert [*float64(source(WIDE[kind])).on_device] == ["f"]


@pytest.mark.parametrize("kind", NARROW)
def test_a_number_of_fewer_or_unknown_bits_is_none_of_64(kind: str) -> None:
    assert not float64(source(NARROW[kind])).on_device


def test_values_of_other_libraries_are_known() -> None:
    solver = (
        "import torch\nfrom torchdiffeq import odeint\n\n\ndef f(g, x, t):\n    return odeint(g, x, t{})\n"
    )
    assert float64(solver.format("")).on_device == {"f": 6}
    assert not float64(solver.format(", method='rk4'")).on_device
    scaled = "import torch\nfrom sklearn.datasets import load_iris\n\nx = torch.tensor(load_iris()).cuda()\n"
    assert float64(scaled).on_device == {"x": 4, "<module>": 4}


def test_a_reward_of_a_game_is_of_64_bits_where_the_program_plays() -> None:
    learn = "import torch\n\n\ndef f(batch, device):\n    return torch.tensor([one.reward for one in batch]).to(device)\n"
    assert not float64(learn).on_device
    assert float64(learn).taken == ((GAMES, "f"),)
    assert float64(f"import gym\n{learn}").on_device == {"f": 6}
    typed = learn.replace("batch])", "batch], dtype=torch.float)")
    assert float64(f"import gym\n{typed}") == float64("import gym\nimport torch\n")


DATA = {
    "an array": ("self.x[i]", True),
    "a tensor": ("torch.from_numpy(self.x[i]), 1", True),
    "a number of Python, of which a loader makes float64": ("{'x': 1, 'y': float(i)}", True),
    "a tensor of 32 bits": ("torch.from_numpy(self.x[i]).float()", False),
    "an unknown item": ("self.y[i]", False),
}


@pytest.mark.parametrize("kind", DATA)
def test_an_item_of_a_data_set_comes_to_the_device_in_a_batch(kind: str) -> None:
    item, is_wide = DATA[kind]
    data = (
        f"{HEAD}\n\nclass Data(torch.utils.data.Dataset):\n    def __init__(self, y):\n"
        f"        self.x, self.y = np.random.randn(3), y\n\n    def __getitem__(self, i):\n        return {item}\n"
    )
    loop = "\n\ndef f(loader, device):\n    for x in loader:\n        x = x{}.to(device)\n"
    assert bool(float64(data + loop.format("")).on_device) == is_wide
    assert not float64(data + loop.format(".float()")).on_device


@pytest.mark.parametrize(
    ("end", "is_set"), [("", False), ("\n    def __len__(self):\n        return 3\n", True)]
)
def test_a_class_with_a_length_and_items_is_a_data_set(end: str, is_set: bool) -> None:
    text = (
        f"{HEAD}\n\nclass Data:\n    def __getitem__(self, i):\n        return np.ones(i)\n{end}"
        "\n\ndef f(loader, device):\n    for x in loader:\n        x = x.to(device)\n"
    )
    assert bool(float64(text).on_device) is is_set


@EACH_TARGET
def test_the_choice_of_a_device_names_the_line_of_such_a_number(target: str) -> None:
    text = f"{HEAD}\ndevice = {CHOICE}\nx = torch.tensor(np.zeros(3)).to(device)\n"
    found = port_text(text, Settings(target))
    assert found.text == text
    assert (
        "Apple's MPS has no float64: line 5 makes a float64 tensor on the device"
        in site(found, CHOICE).reason
    )


@EACH_TARGET
def test_a_program_without_a_way_for_the_host_is_ported_beside_such_a_number(target: str) -> None:
    text = "import torch\n\n\ndef f(net, x):\n    y = torch.ones(1).cuda()\n    return net(x).double()\n"
    assert ".cuda()" not in port_text(text, Settings(target)).text
    moved = "import torch\n\n\ndef f(x):\n    return x.double().cuda()\n"
    assert port_text(moved, Settings(target)).text == moved


@EACH_TARGET
def test_a_module_that_the_program_imports_holds_back_its_device(target: str, tmp_path: Path) -> None:
    files = {
        "train.py": f"import torch\nfrom layers import Layer\n\ndevice = {CHOICE}\nnet = Layer().to(device)\n",
        "other.py": f"import torch\nimport plain\n\ndevice = {CHOICE}\nnet = plain.make().to(device)\n",
        "layers.py": "import torch\n\n\nclass Layer(torch.nn.Module):\n    def forward(self, x):\n        return self.weight.double() @ x\n",
        "plain.py": "import torch\n\n\ndef make():\n    return torch.nn.Linear(1, 1)\n",
    }
    found = ported_project(tmp_path, files, target)
    held = site(found["train.py"], CHOICE)
    assert held.status is Status.UNSAFE
    assert "layers.py:6" in held.reason
    assert site(found["other.py"], CHOICE).status is Status.CONVERTED


@EACH_TARGET
def test_an_argument_of_another_file_holds_back_the_device_that_it_reaches(
    target: str, tmp_path: Path
) -> None:
    files = {
        "run.py": f"import numpy as np\nimport torch\nfrom net import Net\n\ndevice = {CHOICE}\nnet = Net().to(device)\nprint(net.sample(bias=np.zeros(21)))\n",
        "net.py": "import torch\n\n\nclass Net(torch.nn.Module):\n    def sample(self, bias):\n        return torch.tensor(bias, device=self.weight.device)\n",
    }
    assert site(ported_project(tmp_path, files, target)["run.py"], CHOICE).status is Status.UNSAFE
    files["run.py"] = files["run.py"].replace("zeros(21)", "zeros(21, np.float32)")
    assert site(ported_project(tmp_path, files, target)["run.py"], CHOICE).status is Status.CONVERTED


@EACH_TARGET
def test_an_array_of_a_function_holds_back_the_device_that_it_reaches(target: str, tmp_path: Path) -> None:
    files = {
        "train.py": f"import torch\nfrom noise import Noise\n\ndevice = {CHOICE}\nNoise(3).add(torch.ones(1, device=device))\n",
        "noise.py": (
            "import numpy as np\nimport torch\n\n\ndef schedule(n):\n    return np.linspace(0, 1, n)\n\n\n"
            "class Noise:\n    def __init__(self, n):\n        self.scale = np.cumprod(1 - schedule(n))\n\n"
            "    def add(self, x):\n        return part(self.scale, x) * x\n\n\n"
            "def part(values, x):\n    return torch.from_numpy(values).to(device=x.device).float()\n"
        ),
    }
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is Status.UNSAFE
    files["noise.py"] = files["noise.py"].replace("0, 1, n", "0, 1, n, dtype=np.float32")
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is Status.CONVERTED


@EACH_TARGET
def test_a_game_in_another_file_of_the_program_holds_back_the_device(target: str, tmp_path: Path) -> None:
    files = {
        "main.py": "import gym\nfrom agent import learn\n\nlearn(gym.make('Pendulum-v1'))\n",
        "agent.py": f"import torch\n\ndevice = {CHOICE}\n\n\ndef learn(batch):\n    return torch.tensor([one.reward for one in batch]).to(device)\n",
    }
    assert site(ported_project(tmp_path, files, target)["agent.py"], CHOICE).status is Status.UNSAFE
    files["main.py"] = files["main.py"].replace("import gym\n", "import os as gym\n")
    assert site(ported_project(tmp_path, files, target)["agent.py"], CHOICE).status is Status.CONVERTED


@EACH_TARGET
def test_what_a_function_of_another_file_gives_keeps_its_bits(target: str, tmp_path: Path) -> None:
    files = {
        "train.py": f"import torch\nimport tables\nfrom model import Model\n\ndevice = {CHOICE}\n_, betas = tables.schedule(3)\nModel(betas).run(torch.ones(1, device=device))\n",
        "tables.py": "import numpy as np\n\n\ndef schedule(n):\n    return n, np.linspace(0, 1, n)\n",
        "model.py": (
            "import torch\n\n\nclass Model:\n    def __init__(self, betas):\n        self.betas = betas\n\n"
            "    def run(self, x):\n        return part(self.betas, x) * x\n\n\n"
            "def part(values, x):\n    return torch.from_numpy(values).to(device=x.device)[0].float()\n"
        ),
    }
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is Status.UNSAFE
    files["train.py"] = files["train.py"].replace("_, betas", "betas, _")
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is Status.CONVERTED


KEPT = {
    "an array of numpy's default": ("self.noise = np.zeros((n, 3))", True),
    "an array of 32 bits": ("self.noise = np.zeros((n, 3), dtype=np.float32)", False),
    "an array that is converted": ("self.noise = np.zeros((n, 3)).astype('float32')", False),
    "a number that is compared": ("self.noise = np.random.rand(n) < 0.5", False),
    "a number": ("self.noise = np.random.uniform(0, 1)", False),
}


@pytest.mark.parametrize("kind", KEPT)
def test_an_unknown_array_has_the_bits_of_those_that_its_module_makes(kind: str) -> None:
    line, is_wide = KEPT[kind]
    text = f"{HEAD}\n\nclass Agent:\n    def __init__(self, n):\n        {line}\n\n    def act(self, x, device):\n        return {{}}\n"
    assert bool(float64(text.format("torch.from_numpy(x).unsqueeze(0).to(device)")).on_device) == is_wide
    for narrow in (
        "torch.from_numpy(x).float().to(device)",
        "torch.from_numpy(x).to(device, torch.float32)",
        "torch.from_numpy(x.numpy()).to(device)",
        "torch.tensor(x).to(device)",
    ):
        assert not float64(text.format(narrow)).on_device, narrow
    assert not float64(
        text.replace("x, device", "labels, device").format("torch.from_numpy(labels).to(device)")
    ).on_device


def test_a_number_of_numpy_leaves_a_result_its_bits() -> None:
    text = f"{HEAD}\n\ndef bits(x):\n    return x / np.log(2.0)\n\n\ndef wide(n):\n    return np.ones(n) / np.log(2.0)\n"
    assert [*float64(text).given] == ["here:wide(=)"]


def test_a_spherical_transform_holds_numbers_of_64_bits() -> None:
    text = "import torch\nfrom torch_harmonics import RealSHT\n\n\ndef f(x):\n    return RealSHT(4, 8).to(x.device)(x)\n"
    assert float64(text).on_device == {"f": 6}


@EACH_TARGET
@pytest.mark.parametrize("call", ["load", "data.load"])
def test_a_part_of_what_a_function_of_another_file_gives_may_be_of_64_bits(
    call: str, target: str, tmp_path: Path
) -> None:
    files = {
        "data.py": "import pandas as pd\nimport torch\n\n\ndef load(path):\n    table = pd.read_csv(path)\n"
        "    x = torch.tensor(table[['a', 'b']].values)\n    return x, torch.zeros(3)\n",
        "train.py": f"import data\nimport torch\nfrom data import load\n\n\ndef main(path):\n    device = {CHOICE}\n"
        f"    x, y = {call}(path)\n    return x.to(device)\n",
    }
    found = site(ported_project(tmp_path, files, target)["train.py"], CHOICE)
    assert found.status is Status.UNSAFE, found
    files["train.py"] = files["train.py"].replace("return x.to", "return y.to")
    found = site(ported_project(tmp_path, files, target)["train.py"], CHOICE)
    assert found.status is Status.CONVERTED, found


MODEL = (
    "import numpy as np\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\nclass Model:\n"
    "    def __init__(self, device='cpu'):\n        self.device = device\n\n    def fit(self, x, y):\n"
    "        data = TensorDataset(torch.from_numpy({x}), torch.from_numpy(y))\n"
    "        for n, (a, b) in enumerate(DataLoader(data, batch_size=2)):\n            a{cast}.to(self.device).float()\n"
)
FIT = (
    "import numpy as np\nimport torch\nfrom model import Model\n\n\ndef main():\n"
    f"    model = Model(device={CHOICE})\n    model.fit([np.array([0.1, 0.2]), np.array([0, 1])], np.array([1, 0]))\n"
)


@EACH_TARGET
@pytest.mark.parametrize(
    ("x", "cast", "status"),
    [
        ("np.concatenate(x, axis=-1)", "", Status.UNSAFE),
        ("x[0]", "", Status.UNSAFE),
        ("np.concatenate(x, axis=-1)", ".float()", Status.CONVERTED),
    ],
)
def test_arrays_that_a_program_gives_come_to_the_device_by_a_loader_of_tensors(
    x: str, cast: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {"model.py": MODEL.format(x=x, cast=cast), "train.py": FIT}
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is status


SAMPLES = (
    "import torch\n\n\nclass Sample:\n    def __call__(self, item):\n        return {{'label': {value}}}\n"
)
BATCHES_OF = (
    "import torch\nfrom data import Sample\n\n\ndef main(loader):\n"
    f"    device = {CHOICE}\n    for data in loader:\n        data['label']{{moved}}\n"
)


@EACH_TARGET
@pytest.mark.parametrize(
    ("value", "moved", "status"),
    [
        ("item['scores']['total']", ".to(device).to(torch.float32)", Status.UNSAFE),
        ("item['total']", ".to(device).float()", Status.UNSAFE),
        ("item['total']", ".float().to(device)", Status.CONVERTED),
        ("item['total']", ".to(device)", Status.CONVERTED),
        ("item.total.numpy()", ".to(device).float()", Status.CONVERTED),
    ],
)
def test_a_number_of_a_record_is_float64_in_a_batch_that_is_cast_after_its_move(
    value: str, moved: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {"data.py": SAMPLES.format(value=value), "train.py": BATCHES_OF.format(moved=moved)}
    assert site(ported_project(tmp_path, files, target)["train.py"], CHOICE).status is status


MOVES = {
    "a comprehension": "batch = {key: value.to(device) for key, value in batch.items()}",
    "a list": "batch = [value.to(device) for value in batch]",
    "a function without a name": "batch = list(map(lambda value: value.to(device), batch))",
    "a function": "batch = move(batch, device)",
    "its parts": "_, batch = batch\n        batch = batch.to(device)",
}
ITEMS = {
    "an array": "np.random.rand(3)",
    "a number of a list": "self.labels[index]",
}
SET = (
    "import numpy as np\nimport torch\nfrom torch.utils.data import DataLoader, Dataset\n\n\n"
    "class Data(Dataset):\n    labels = None\n\n    def __init__(self):\n        self.labels = [0.5, 0.25]\n\n"
    "    def __getitem__(self, index):\n        return {item}\n\n\ndef move(value, device):\n    return value.to(device)\n\n\n"
    "def run():\n    device = {choice}\n    for batch in DataLoader(Data()):\n        {move}\n        print(batch)\n\n\nrun()\n"
)


@EACH_TARGET
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("item", ITEMS)
def test_batches_of_64_bits_hold_back_a_device_however_they_are_moved(
    item: str, move: str, target: str, tmp_path: Path
) -> None:
    for given, status in ((ITEMS[item], Status.UNSAFE), ("index", Status.CONVERTED)):
        text = SET.format(item=given, move=MOVES[move], choice=CHOICE)
        found = ported_project(tmp_path / status.value, {"main.py": text}, target)["main.py"]
        assert site(found, CHOICE).status is status, found


@pytest.mark.parametrize("loop", ["bar", "enumerate(bar)"])
def test_batches_are_known_behind_a_bar_that_shows_how_many_are_done(loop: str) -> None:
    data = SET.partition("\n\ndef run")[0].format(item="np.ones(3), 1")
    text = (
        f"{data}\n\ndef f(device):\n    given = DataLoader(Data())\n    bar = tqdm(given)\n"
        f"    for pair in {loop}:\n        pair = [one.to(device) for one in pair]\n"
    )
    assert "f" in float64(text).on_device
    assert "f" not in float64(text.replace("tqdm(given)", "rows(given)")).on_device


@EACH_TARGET
@pytest.mark.parametrize(("kind", "status"), [("", Status.UNSAFE), (", dtype='f4'", Status.CONVERTED)])
def test_an_array_of_a_method_is_of_64_bits_where_no_mac_runs_the_program_yet(
    kind: str, status: Status, target: str
) -> None:
    text = (
        f"{HEAD}\n\nclass Filter:\n    def __init__(self):\n        self.x, self.y = self.make(3)\n\n"
        f"    @staticmethod\n    def make(n):\n        x = np.zeros((n, n){kind})\n        return x, x.T\n\n"
        "    def run(self):\n        return torch.from_numpy(self.x).unsqueeze(0).cuda()\n"
    )
    found = [one for one in port_text(text, Settings(target)).sites if one.code == "ACC301"]
    assert [one.status for one in found] == [status]
