"""Files belong to one program, and agree about its device, where one looks for names in modules or gets modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

NET = "import torch\nfrom torch import nn\n\n\nclass Pose(nn.Module):\n    def forward(self, x):\n        return x + torch.rand(x.size()).cuda()\n\n\ndef pose():\n    return Pose()\n"
MOVE = "torch.rand(x.size()).cuda()"
STAYS = "import torch\n{}\n\nprint(net(torch.ones(2).cuda(), unknown(2).cuda()))\n"
"""A program that stays on CUDA, as nothing shows what `unknown` gives."""
USERS = {
    "the dictionary of a package": STAYS.format("import networks\n\nnet = networks.__dict__['pose']()"),
    "an attribute of a package": STAYS.format("import networks\n\nnet = getattr(networks, name)()"),
    "a name in a branch": STAYS.format("import networks\n\nif True:\n    main(getattr(networks, name)())"),
    "a module that it gives away": STAYS.format(
        "from base import run\nfrom networks import nets\n\nrun(nets)"
    ),
    "a module by a keyword": STAYS.format(
        "from base import run\nimport networks.nets as nets\n\nrun(module=nets)"
    ),
}
GIVES_ON = ("from .nets import *\n", "from .nets import pose\n", "from . import nets\n")


@EACH_TARGET
@pytest.mark.parametrize("name", USERS)
def test_modules_that_a_program_searches_or_gives_away_agree_with_it(
    name: str, target: str, tmp_path: Path
) -> None:
    files = {"train.py": USERS[name], "networks/__init__.py": GIVES_ON[0], "networks/nets.py": NET}
    entry = site(ported_project(tmp_path, files, target)["networks/nets.py"], MOVE)
    assert (entry.status, "the same program" in entry.reason) == (Status.UNSAFE, True)


@EACH_TARGET
@pytest.mark.parametrize("gives_on", GIVES_ON)
def test_a_package_that_is_searched_gives_on_what_it_imports(
    gives_on: str, target: str, tmp_path: Path
) -> None:
    files = {
        "train.py": USERS["an attribute of a package"],
        "networks/__init__.py": gives_on,
        "networks/nets.py": NET,
    }
    assert site(ported_project(tmp_path, files, target)["networks/nets.py"], MOVE).status is Status.UNSAFE


@EACH_TARGET
def test_a_module_that_no_one_searches_or_gets_is_ported(target: str, tmp_path: Path) -> None:
    files = {
        "train.py": STAYS.format("import networks\n\nnet = networks.other()"),
        "networks/__init__.py": "from .others import other\n",
        "networks/others.py": "def other():\n    return abs\n",
        "networks/nets.py": NET,
    }
    assert site(ported_project(tmp_path, files, target)["networks/nets.py"], MOVE).status is Status.CONVERTED


@EACH_TARGET
def test_modules_given_to_a_base_class_of_another_package_agree_with_it(target: str, tmp_path: Path) -> None:
    files = {
        "pixel/__init__.py": "from .proxy import Proxy\n",
        "pixel/proxy.py": "class Proxy:\n    def __init__(self, func):\n        self.func = func\n\n    def run(self, batch):\n"
        "        return self.func.pose()(unknown(batch).cuda())\n",
        "task/func.py": NET,
        "task/main.py": "import func\nimport pixel\n\n\nclass Own(pixel.Proxy):\n    def __init__(self):\n"
        "        super().__init__(func)\n",
    }
    assert site(ported_project(tmp_path, files, target)["task/func.py"], MOVE).status is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize(
    ("table", "decorator"),
    [
        ("class Tables:\n    nets = Table('nets')\n", "@Tables.nets.register('pose')"),
        ("Tables = Table()\n", "@Tables.registe_with_name(name='pose')"),
    ],
)
def test_a_table_in_a_class_joins_what_a_decorator_enters_with_who_looks_it_up(
    table: str, decorator: str, target: str, tmp_path: Path
) -> None:
    files = {
        "libs.py": f"{table}\n\ndef find(name):\n    return getattr(Tables, name)\n",
        "nets.py": NET.replace(
            "from torch import nn", "from torch import nn\nfrom libs import Tables"
        ).replace("class Pose", f"{decorator}\nclass Pose"),
        "train.py": STAYS.format("from libs import find\n\nnet = find('pose')()"),
    }
    assert site(ported_project(tmp_path, files, target)["nets.py"], MOVE).status is Status.UNSAFE


@EACH_TARGET
def test_a_name_that_a_tuple_binds_joins_the_files_that_read_it(target: str, tmp_path: Path) -> None:
    files = {
        "options.py": "import os\nimport torch\n\nargs, rest = parser.parse_known_args()\n"
        "if args.gpu:\n    os.environ['CUDA_VISIBLE_DEVICES'] = args.gpu\n"
        "args.device = 'cuda' if torch.cuda.is_available() else 'cpu'\nargs.gpus = torch.cuda.device_count()\n",
        "nets.py": NET,
        "train.py": "from options import args\nfrom nets import Pose\n\nprint(Pose().to(args.device))\n",
    }
    assert site(ported_project(tmp_path, files, target)["nets.py"], MOVE).status is Status.UNSAFE
