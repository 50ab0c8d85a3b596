"""A table that decorators fill is one decision with the code that looks it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, check, differing, ported_project, site

KEPT = "\n\ndef move(x):\n    return x.cuda()\n"
"""What stays in the file of a program, since nothing shows that it is a tensor."""
PART = "import torch\nfrom registry import {}\n\n\n{}\n{} make(n):\n    return torch.zeros(n).cuda()\n"
FILLS = "TABLE = {}\n\n\ndef register(name):\n    def enter(part):\n        TABLE[name] = part\n        return part\n\n    return enter\n"
REGISTRIES = {
    "a function that fills a table": {
        "registry.py": FILLS,
        "parts.py": PART.format("register", "@register('zeros')", "def"),
        "main.py": "from registry import TABLE\n\n\ndef build(name):\n    return TABLE[name](2)\n" + KEPT,
    },
    "a function that fills another file's table": {
        "tables.py": "PARTS = []\n",
        "registry.py": "from tables import PARTS\n\n\ndef part(made):\n    PARTS.append(made)\n    return made\n",
        "parts.py": PART.format("part", "@part", "def"),
        "main.py": "from tables import PARTS\n\n\ndef build():\n    return [made(2) for made in PARTS]\n"
        + KEPT,
    },
    "an object's method": {
        "registry.py": "from fvcore.common.registry import Registry\n\nPARTS = Registry('part')\n",
        "parts.py": PART.format("PARTS", "@PARTS.register_module('zeros')", "def"),
        "build.py": "from registry import PARTS\n\n\ndef build(kind):\n    return PARTS.build(kind)\n",
        "main.py": "from build import build\n" + KEPT,
    },
    "a method of a class": {
        "registry.py": "class Parts:\n    held = {}\n\n    @classmethod\n    def register(cls, name):\n        return cls.held.setdefault\n",
        "parts.py": PART.format("Parts", "@Parts.register('zeros')", "def"),
        "main.py": "from registry import Parts\n\n\ndef build(name):\n    return Parts.held[name](2)\n"
        + KEPT,
    },
    "a call": {
        "registry.py": FILLS,
        "parts.py": PART.format("register", "", "def") + "\n\nregister('zeros')(make)\n",
        "main.py": "from registry import TABLE\n\n\ndef build(name):\n    return TABLE.get(name)(2)\n" + KEPT,
    },
}
MADE = "torch.zeros(n).cuda()"


@EACH_TARGET
@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_is_registered_is_not_ported_without_the_program_that_looks_it_up(
    kind: str, target: str, tmp_path: Path
) -> None:
    found = site(ported_project(tmp_path, REGISTRIES[kind], target)["parts.py"], MADE)
    assert found.status is Status.UNSAFE
    assert "main.py:" in found.reason


@EACH_TARGET
@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_is_registered_is_ported_with_the_program_that_looks_it_up(
    kind: str, target: str, tmp_path: Path
) -> None:
    files = dict(REGISTRIES[kind])
    files["main.py"] = "import torch\n" + files["main.py"].replace("(x)", "(x: torch.Tensor)")
    results = ported_project(tmp_path, files, target)
    assert site(results["parts.py"], MADE).status is Status.CONVERTED
    assert site(results["main.py"], "x.cuda()").status is Status.CONVERTED


OTHERS = {
    "a decorator that registers nothing": FILLS
    + "\n\ndef timed(name):\n    def wrap(part):\n        return part\n\n    return wrap\n",
    "a decorator with a table of its own": FILLS
    + "\n\nKNOWN = {}\n\n\ndef timed(name):\n    def wrap(part):\n        KNOWN[name] = part\n"
    "        return part\n\n    return wrap\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OTHERS)
def test_another_decorator_of_the_same_file_holds_nothing_back(
    kind: str, target: str, tmp_path: Path
) -> None:
    files = {
        "registry.py": OTHERS[kind],
        "parts.py": PART.format("timed", "@timed('zeros')", "def"),
        "main.py": REGISTRIES["a function that fills a table"]["main.py"],
    }
    assert site(ported_project(tmp_path, files, target)["parts.py"], MADE).status is Status.CONVERTED


@EACH_TARGET
def test_a_function_without_a_device_in_the_same_table_joins_no_files(target: str, tmp_path: Path) -> None:
    files = {
        "registry.py": FILLS,
        "parts.py": "from registry import register\n\n\n@register('one')\ndef one(n):\n    return n\n",
        "moving.py": "from registry import register\n\n\n@register('two')\ndef two(x):\n    return x.cuda()\n",
        "main.py": f"import torch\nfrom parts import one\n\n\ndef run(n):\n    return one({MADE})\n",
    }
    assert site(ported_project(tmp_path, files, target)["main.py"], MADE).status is Status.CONVERTED


HEAD = "import torch\n\n\n"
BY_DEVICE = {
    "a decorator": FILLS
    + "\n\n@register('cuda')\ndef on_cuda(x):\n    return 'cuda'\n\n\n@register('cpu')\ndef on_cpu(x):\n    return 'cpu'\n",
    "a decorator with a keyword": FILLS.replace("name", "device")
    + "\n\n@register(device='cuda')\ndef on_cuda(x):\n    return 'cuda'\n\n\n@register(device='cpu')\ndef on_cpu(x):\n    return 'cpu'\n",
    "entries": "TABLE = {}\nTABLE['cuda'] = lambda x: 'cuda'\nTABLE['cpu'] = lambda x: 'cpu'\n",
    "a literal": "TABLE = {'cuda': lambda x: 'cuda', 'cpu': lambda x: 'cpu'}\n",
}
LOOKED_UP = [
    "TABLE[x.device.type](x)",
    "TABLE.get(x.device.type)(x)",
    "TABLE[kind](x)",
    "TABLE.get(kind, print)(x)",
]
USE = (
    "\n\ndef f(x: torch.Tensor, y, model, flag, other, device):\n"
    "    kind = 'cuda' if torch.cuda.is_available() else 'cpu'\n    x = x.to(kind)\n    return {}\n"
)


@EACH_TARGET
@pytest.mark.parametrize("looked_up", LOOKED_UP)
@pytest.mark.parametrize("kind", BY_DEVICE)
def test_a_table_by_the_name_of_the_device_stays_with_what_looks_it_up(
    kind: str, looked_up: str, target: str
) -> None:
    check(HEAD + BY_DEVICE[kind] + USE.format(looked_up), target, changed=False)


@EACH_TARGET
@pytest.mark.parametrize("kind", BY_DEVICE)
def test_a_device_would_find_no_entry_with_its_name_beside_one_for_cuda(kind: str, target: str) -> None:
    """The test above can fail: such an edit does something else on another accelerator."""
    source = HEAD + BY_DEVICE[kind] + USE.format("TABLE[kind](x)")
    ported = source.replace(
        "'cuda' if torch.cuda.is_available() else 'cpu'", "torch.accelerator.current_accelerator().type"
    )
    assert any(case.startswith("OTHER") for case in differing(source, ported))


BACKENDS = (
    "import torch.distributed as dist\n\nBACKENDS = {{}}\n\n\ndef register(name):\n    def enter(part):\n"
    "        BACKENDS[name] = part\n        return part\n\n    return enter\n\n\n"
    "@register('nccl')\ndef start(rank):\n    dist.init_process_group('nccl', rank=rank)\n\n\n"
    "def run(rank, name):\n    BACKENDS[name](rank)\n\n\ndef main():\n    run(0, {})\n"
)


@EACH_TARGET
@pytest.mark.parametrize("name", ["'nccl'", "dist.get_default_backend_for_device('cuda')"])
def test_a_table_by_the_name_of_the_backend_stays_with_the_process_group(name: str, target: str) -> None:
    source = BACKENDS.format(name)
    assert port_text(source, Settings(target)).text == source


CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
MAIN = f"import torch\nfrom run import run\n\n\ndef main(x: torch.Tensor):\n    device = {CHOICE}\n    return run(device)(x.to(device))\n"
FILES_BY_DEVICE = {
    "a decorator in a third file": (
        "parts.py:",
        {
            "run.py": f"{FILLS}\n\ndef run(name):\n    return TABLE[name]\n",
            "parts.py": "import torch\nfrom run import register\n\n\n@register('cuda')\ndef part(x):\n    return x\n",
        },
    ),
    "a method of an object in a third file": (
        "run.py:",
        {
            "registry.py": "from mmengine import Registry\n\nPARTS = Registry('part')\n",
            "run.py": "from registry import PARTS\n\n\ndef run(name):\n    return PARTS.get(name)\n",
            "parts.py": "import torch\nfrom registry import PARTS\n\n\n@PARTS.register_module('cuda')\ndef part(x):\n    return x\n",
        },
    ),
    "a table beside the function that looks it up": (
        "run.py:",
        {
            "run.py": "import torch\n\nTABLE = {'cuda': torch.sin, 'cpu': torch.cos}\n\n\ndef run(name):\n    return TABLE.get(name)\n"
        },
    ),
    "a table that an object has": (
        "run.py:",
        {
            "run.py": "import torch\n\n\nclass Run:\n    def __init__(self):\n"
            "        self.held = {'cuda': torch.sin, 'cpu': torch.cos}\n\n    def find(self, name):\n"
            "        return self.held[name]\n\n\ndef run(name):\n    return Run().find(name)\n"
        },
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FILES_BY_DEVICE)
def test_a_device_is_not_ported_without_the_table_of_another_file_that_looks_it_up(
    kind: str, target: str, tmp_path: Path
) -> None:
    place, files = FILES_BY_DEVICE[kind]
    found = site(ported_project(tmp_path, {**files, "main.py": MAIN}, target)["main.py"], CHOICE)
    assert found.status is Status.UNSAFE
    assert place in found.reason


@EACH_TARGET
@pytest.mark.parametrize(
    "run",
    [
        "import torch  # cuda\n\n\ndef run(name):\n    return torch.sin\n",
        "import torch\n\nTABLE = {'cuda': 1}\n\n\ndef run(name):\n    return torch.sin if TABLE else name\n",
    ],
)
def test_a_device_that_another_file_looks_up_in_no_table_is_ported(
    run: str, target: str, tmp_path: Path
) -> None:
    results = ported_project(tmp_path, {"run.py": run, "main.py": MAIN}, target)
    assert site(results["main.py"], CHOICE).status is Status.CONVERTED


OUTSIDE = (
    "import torch\n{head}\n\n\n@{register}\ndef small(x: torch.Tensor):\n"
    "    if torch.cuda.is_available() and torch.cuda.get_device_capability() > (7, 0):\n        return x.cuda()\n    return x\n"
)


@EACH_TARGET
@pytest.mark.parametrize(
    ("head", "register", "use", "status"),
    [
        (
            "from timm.models import register_model",
            "register_model",
            "from timm import create_model as made",
            True,
        ),
        (
            "from ocpmodels.common.registry import registry",
            "registry.register_trainer('small')",
            "from ocpmodels.common.registry import registry\n\nmade = registry.get_trainer_class",
            True,
        ),
        (
            "from timm.models import register_model",
            "register_model",
            "from timm.data import Mixup as made",
            False,
        ),
        (
            "from timm.models import register_model",
            "register_model",
            "from peft import create_model as made",
            False,
        ),
    ],
)
def test_what_another_package_registers_is_of_the_program_that_it_builds_something_for(
    head: str, register: str, use: str, status: bool, target: str, tmp_path: Path
) -> None:
    main = f"import torch\n{use}\n\n\ndef main(x: torch.Tensor):\n    device = {CHOICE}\n    return made('small')(x.to(device))\n"
    files = {"models.py": OUTSIDE.format(head=head, register=register), "main.py": main}
    found = site(ported_project(tmp_path, files, target)["main.py"], CHOICE)
    assert (found.status is Status.UNSAFE) == status, found
