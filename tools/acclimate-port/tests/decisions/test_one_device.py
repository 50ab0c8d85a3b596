"""What a program does on one device is ported whole, whichever way its parts are joined, or is unsafe."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, ported_project, site

HALVES = {
    "a batch of an evaluation, and a model and a batch of the training": (
        "from torch.utils.data import DataLoader\n\n\ndef train(model, data):\n    for x, y in data:\n        model(x.cuda())\n\n\n"
        "def evaluate(model, data):\n    for x, y in DataLoader(data):\n        model(x.cuda())\n\n\n"
        "def main(make, data):\n    model = make().cuda()\n    train(model, data)\n    evaluate(model, data)\n"
    ),
    "an option, and the process group of a started rank": (
        "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--device', default='cuda')\n\n\n"
        "def start(rank):\n    torch.cuda.set_device(rank)\n    torch.distributed.init_process_group('nccl')\n"
    ),
    "a scaler, and the device of its model": (
        "def place(name):\n    if name != 'cuda' or not torch.cuda.is_available():\n        raise ValueError(name)\n    return name\n\n\n"
        "def train(model, name):\n    model.to(place(name))\n    return torch.cuda.amp.GradScaler()\n"
    ),
    "a number of devices, and the numbered ones": (
        "def number(index):\n    return index % torch.cuda.device_count()\n\n\n"
        "def move(model, index):\n    return model.cuda(number(index))\n"
    ),
    "an argument of a function whose default stays": (
        "def place(device='cuda'):\n    return torch.device(device) if torch.cuda.is_available() else torch.device('cpu')\n\n\n"
        "def call(model, x):\n    return model(x.to(place('cuda')))\n"
    ),
}


OTHERS = {
    "a state that is saved, and one that is restored": (
        "def save():\n    return {'cuda': torch.cuda.get_rng_state_all()}\n\n\n"
        "def restore(state):\n    torch.cuda.set_rng_state_all(state['cuda'])\n"
    ),
    "a figure, and one that is only told for CUDA": (
        "def used(device):\n    return torch.cuda.memory_allocated(device) if device.type == 'cuda' else 0\n\n\n"
        "def check(sizes):\n    return sum(sizes) == torch.cuda.memory_allocated()\n"
    ),
    "a question for bfloat16, and an autocast": (
        "def check(dtype):\n    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():\n"
        "        raise ValueError(dtype)\n\n\ndef run(dtype):\n    return torch.autocast('cuda', dtype=dtype)\n"
    ),
    "a stream, and the copies in it": (
        "def load(batches):\n    stream = torch.cuda.Stream()\n    for batch in batches:\n"
        "        with torch.cuda.stream(stream):\n            yield batch\n\n\n"
        "def move(batch):\n    return batch.cuda()\n"
    ),
    "a model's normalisation over ranks, and its device": (
        "def wrap(model):\n    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n\n\n"
        "def move(model):\n    return model.cuda()\n"
    ),
    "code for a text that stays": (
        "def f(mode, model):\n    if mode == 'cuda':\n        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            model()\n"
    ),
    "the program's own word for a device": (
        "def device():\n    if torch.cuda.is_available():\n        return 'gpu'\n    return 'cpu'\n"
    ),
}
HALVES |= OTHERS


@EACH_TARGET
@pytest.mark.parametrize("kind", HALVES)
def test_a_half_of_a_file_is_not_ported_alone(kind: str, target: str) -> None:
    source = f"import torch\n\n\n{HALVES[kind]}"
    assert port_text(source, Settings(target)).text == source
    assert port_text(source, Settings(target, unsafe=True)).text != source


STAYS = "def keep(model):\n    return model.cuda()\n"
RUNS = "def run(x):\n    return x.to('cuda' if torch.cuda.is_available() else 'cpu')\n"


def test_a_wait_stays_with_the_events_around_it() -> None:
    source = (
        "import torch\n\n\ndef f(model):\n    torch.cuda.synchronize()\n"
        "    start = torch.cuda.Event(interprocess=True)\n    model()\n    return start\n"
    )
    assert port_text(source, Settings("torch")).text == source


PROGRAMS = {
    "a file that imports a function": {
        "keep.py": STAYS,
        "run.py": f"import torch\nfrom keep import keep\n\n\n{RUNS}",
    },
    "a file that imports a module": {
        "pkg/keep.py": STAYS,
        "pkg/run.py": f"import torch\nfrom pkg import keep\n\n\n{RUNS}\n\ndef go(m):\n    return keep.keep(m)\n",
    },
    "a file whose function is imported": {
        "keep.py": f"from run import run\n\n\n{STAYS}",
        "run.py": f"import torch\n\n\n{RUNS}",
    },
    "a file that is imported beside another": {
        "keep.py": STAYS,
        "run.py": f"import torch\n\n\n{RUNS}",
        "main.py": "from keep import keep\nfrom run import run\n\n\ndef main(x, m):\n    return keep(m)(run(x))\n",
    },
    "a file whose function calls another of it": {
        "keep.py": f"{STAYS}\n\ndef keep_all(models):\n    return [keep(one) for one in models]\n",
        "run.py": f"import torch\nfrom keep import keep_all\n\n\n{RUNS}",
    },
    "a file that gives the name on": {
        "pkg/__init__.py": "from .keep import keep\n",
        "pkg/keep.py": STAYS,
        "run.py": f"import torch\nfrom pkg import keep\n\n\n{RUNS}",
    },
    "a file that imports all names through another": {
        "keep.py": STAYS,
        "all.py": "from keep import *\n",
        "run.py": f"import torch\nfrom all import *\n\n\n{RUNS}",
    },
    "a class whose base asks another file for the device": {
        "keep.py": STAYS,
        "base.py": "from keep import keep\n\n\nclass Base:\n    def start(self, model):\n        self.model = keep(model)\n",
        "run.py": f"import torch\nfrom base import Base\n\n\nclass Own(Base):\n    {RUNS.replace('(x)', '(self, x)', 1)}".replace(
            "    return", "        return"
        ),
    },
    "a class and the base of its base": {
        "keep.py": f"class First:\n    {STAYS.replace('(model)', '(self, model)')}".replace(
            "    return", "        return"
        ),
        "base.py": "from keep import First\n\n\nclass Second(First):\n    pass\n",
        "run.py": f"import torch\nfrom base import Second\n\n\n{RUNS}\n\nclass Third(Second):\n    pass\n",
    },
    "the name of a device that another file chooses": {
        "keep.py": f"class Manager:\n    {STAYS.replace('(model)', '(self, model)')}".replace(
            "    return", "        return"
        ),
        "run.py": "import torch\nfrom keep import Manager\n\n\ndef tag():\n    if torch.cuda.is_available():\n"
        "        return torch.cuda.get_device_name(Manager().device)\n    return ''\n",
    },
    "a function that reads a device of its module": {
        "run.py": "import torch\n\nplace = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n\n\n"
        "def run(x):\n    return x.to(place)\n",
        "keep.py": f"from run import run\n\n\n{STAYS}",
    },
    "a file that imports all names": {
        "keep.py": STAYS,
        "run.py": f"import torch\nfrom keep import *\n\n\n{RUNS}",
    },
    "a package that holds code": {
        "pkg/__init__.py": f"import torch\nfrom .keep import keep\n\n\n{RUNS}",
        "pkg/keep.py": STAYS,
    },
    "a flag that frees memory in its file": {
        "flags.py": "import torch\n\n\ndef has_gpu():\n    return torch.cuda.is_available()\n\n\n"
        "def free():\n    if has_gpu():\n        torch.cuda.empty_cache()\n",
        "run.py": f"from flags import has_gpu\n\n\n{STAYS}",
    },
    "a test that knows the helper of another": {
        "helper.py": f"import torch\n\n\n{RUNS}",
        "test_one.py": "from helper import run\n\n\ndef test(x):\n    assert run(x).device.type == 'cuda'\n",
    },
}


@EACH_TARGET
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_half_of_a_program_is_not_ported_alone(kind: str, target: str, tmp_path: Path) -> None:
    results = ported_project(tmp_path, PROGRAMS[kind], target)
    assert not any("get_accelerator().device_name()" in result.after for result in results.values())
    assert not any("accelerator_type()" in result.after for result in results.values())
    assert not any("torch.accelerator.is_available()" in result.after for result in results.values())
    unsafe = [one for result in results.values() for one in result.sites if "the same program" in one.reason]
    assert unsafe


@EACH_TARGET
def test_programs_that_share_no_code_are_ported_each_for_itself(target: str, tmp_path: Path) -> None:
    files = {
        "keep.py": STAYS,
        "run.py": f"import torch\n\n\n{RUNS}",
        "other.py": "def other(x):\n    return x\n",
        "main.py": "from other import other\nfrom run import run\n\n\ndef main(x):\n    return other(run(x))\n",
        "mixed.py": "from keep import keep\n\n\ndef all_of(m):\n    return keep(m)\n\n\ndef name():\n    return 'mixed'\n",
        "named.py": "from mixed import name\nfrom run import run\n\n\ndef go(x):\n    return name(), run(x)\n",
        "__init__.py": "from keep import keep\nfrom run import run\n",
    }
    results = ported_project(tmp_path, files, target)
    assert results["run.py"].changed


@EACH_TARGET
def test_a_scaler_is_not_ported_beside_an_imported_autocast_that_stays(target: str, tmp_path: Path) -> None:
    files = {
        "step.py": "import torch\n\n\ndef step(model, x, context=torch.cuda.amp.autocast):\n    with context():\n"
        "        return model(x)\n",
        "train.py": "import torch\nfrom step import step\n\n\ndef train(model, x):\n"
        "    scaler = torch.cuda.amp.GradScaler()\n    return scaler.scale(step(model, x))\n",
    }
    results = ported_project(tmp_path, files, target)
    assert not results["train.py"].changed


@EACH_TARGET
def test_a_figure_behind_a_question_for_a_name_that_each_torch_has_is_ported(
    target: str, tmp_path: Path
) -> None:
    files = {
        "util.py": "import torch\n\n\ndef used():\n    if hasattr(torch.cuda, 'memory_reserved'):\n"
        "        return torch.cuda.memory_reserved()\n    return 0\n",
        "train.py": "import torch\nfrom util import used\n\n\ndef step():\n"
        "    return used() / 1e9 if torch.cuda.is_available() else 0\n",
    }
    results = ported_project(tmp_path, files, target)
    assert "torch.cuda.memory_reserved" not in results["util.py"].after
    assert "torch.cuda.is_available" not in results["train.py"].after


@EACH_TARGET
@pytest.mark.parametrize("default", ["device=torch.device('cuda')", "device"])
@pytest.mark.parametrize(
    "line",
    ["writer.add_scalar('peak', torch.cuda.max_memory_allocated())", "torch.cuda.reset_peak_memory_stats()"],
)
def test_a_report_of_memory_stays_with_the_device_of_its_program(
    line: str, default: str, target: str, tmp_path: Path
) -> None:
    files = {
        "memory.py": f"import torch\n\n\ndef tell(writer):\n    if torch.cuda.is_available():\n        {line}\n",
        "train.py": "import torch\nfrom memory import tell\n\n\n"
        f"def train(model, x, writer, {default}):\n    model.to(device)(x)\n    tell(writer)\n",
    }
    results = ported_project(tmp_path, files, target)
    assert results["memory.py"].changed == (default == "device")


@EACH_TARGET
def test_an_annotation_stays_with_the_scaler_that_stays(target: str) -> None:
    source = (
        "try:\n    from torch.cuda.amp import GradScaler\nexcept ImportError:\n    GradScaler = None\n\n\n"
        "class Trainer:\n    scaler: GradScaler\n\n    def start(self, make=GradScaler):\n        self.scaler = make()\n"
    )
    assert port_text(source, Settings(target)).text == source


ALONE = {
    "frees memory": "torch.cuda.empty_cache()",
    "waits": "torch.cuda.synchronize()",
    "seeds behind a guard": "if torch.cuda.is_available():\n        torch.cuda.manual_seed(1)",
    "seeds and sets options": "if torch.cuda.is_available():\n        torch.cuda.manual_seed(1)\n"
    "        torch.backends.cudnn.deterministic = True",
    "turns an autocast off": "with torch.cuda.amp.autocast(enabled=False):\n        print(1)",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", ALONE)
def test_what_chooses_no_device_is_ported_beside_what_stays(kind: str, target: str) -> None:
    source = f"import torch\n\n\ndef f():\n    {ALONE[kind]}\n\n\n{STAYS}"
    after = port_text(source, Settings(target)).text
    assert "model.cuda()" in after
    assert after != source


OWN = {
    "a kernel": "try:\n    import flash_attn\nexcept ImportError:\n    pass\n\n\ndef g(x):\n    if x.is_cuda:\n        return flash_attn.flash_attn_func(x)\n    return x\n",
    "another library": "import faster_whisper\n\n\ndef g():\n    return faster_whisper.WhisperModel(device='cuda')\n",
    "a line that the user keeps": "def g(x: torch.Tensor):\n    return x.cuda()  # acclimate: ignore\n",
    "pinning": "def g(device, options):\n    options['pin_memory'] = device.type == 'cuda'\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OWN)
def test_what_stands_alone_holds_nothing_back(kind: str, target: str) -> None:
    source = f"import torch\n{OWN[kind]}\n\n{RUNS}"
    assert "'cpu')" not in port_text(source, Settings(target)).text


@EACH_TARGET
def test_rules_that_are_not_selected_hold_nothing_back(target: str) -> None:
    source = f"import torch\n\n\n{RUNS}\n\n{STAYS}"
    rules = frozenset({"ACC202", "ACC101", "ACC201"})
    assert AVAILABLE not in port_text(source, Settings(target, select=rules)).text


@EACH_TARGET
def test_the_reason_names_what_stays_in_the_other_file(target: str, tmp_path: Path) -> None:
    results = ported_project(tmp_path, PROGRAMS["a file that imports a function"], target)
    found = site(results["run.py"], "'cuda' if torch.cuda.is_available() else 'cpu'")
    assert found.status is Status.UNSAFE
    assert "keep.py:2, which the same program runs on the same device, stays as it is" in found.reason


POLICY = (
    "import torch\n\n\nclass Policy(torch.nn.Module):\n    def forward(self, x):\n        zeros = torch.zeros(x.size())\n"
    "        if x.is_cuda:\n            zeros = zeros.cuda()\n        return zeros\n"
)
BRANCHES = {
    "if": "if flag:\n            from other import Other as Policy\n        else:\n            from policy import Policy\n",
    "if, the other way": "if flag:\n            from policy import Policy\n        else:\n            from other import Other as Policy\n",
    "try": "try:\n            from policy import Policy\n        except ImportError:\n            from other import Other as Policy\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", BRANCHES)
def test_a_choice_stays_beside_what_any_import_of_a_name_gives(
    kind: str, target: str, tmp_path: Path
) -> None:
    files = {
        "policy.py": POLICY,
        "other.py": "class Other:\n    pass\n",
        "runner.py": f"class Runner:\n    def __init__(self, flag):\n        {BRANCHES[kind]}        self.policy = Policy()\n",
        "train.py": "import torch\nfrom runner import Runner\n\n\ndef main():\n"
        "    device = 'cuda' if torch.cuda.is_available() else 'cpu'\n    runner = Runner(True)\n"
        "    return runner.policy(torch.ones(2, device=device))\n",
    }
    assert not ported_project(tmp_path, files, target)["train.py"].changed


CHAIN = {
    "app/place.py": "import torch\n\n\ndef ready(x):\n    {stays}\n\n\ndef other(x):\n    return x\n",
    "app/steps.py": "from app.place import other, ready\n\n\ndef step(x):\n    return ready(x)\n\n\n"
    "def plain(x):\n    return other(x)\n",
    "app/loop.py": "from app.steps import plain, step\n\n\ndef epoch(x):\n    return step(x)\n\n\n"
    "def short(x):\n    return plain(x)\n",
    "app/__init__.py": "",
}
"""A function that is called through two others, which name no device, and one beside it in each file."""
KEPT = 'return x.tolist().cuda("0")'
CHOICE = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'


@pytest.mark.parametrize("called", ["epoch", "short"])
@EACH_TARGET
def test_a_choice_stays_with_the_code_that_it_runs_through_functions_of_other_files(
    called: str, target: str, tmp_path: Path
) -> None:
    main = f"import torch\nfrom app.loop import {called}\n\n{CHOICE}{called}(torch.ones(2, device=device))\n"
    files = {**CHAIN, "main.py": main, "app/place.py": CHAIN["app/place.py"].format(stays=KEPT)}
    results = ported_project(tmp_path, files, target)
    found = [one for one in results["main.py"].sites if one.rule == "available-choice"]
    assert [one.safe for one in found] == [called == "short"], found
    if called == "epoch":
        assert "app/place.py:5" in found[0].reason


@pytest.mark.parametrize("called", ["epoch", "short"])
@EACH_TARGET
def test_code_stays_with_a_program_that_runs_it_through_functions_of_other_files(
    called: str, target: str, tmp_path: Path
) -> None:
    main = f"import torch\nfrom app.loop import {called}\n\n\ndef main(rows):\n    {called}(torch.ones(2))\n    rows.tolist().cuda()\n"
    files = {**CHAIN, "main.py": main}
    files["app/place.py"] = CHAIN["app/place.py"].format(stays='return x + torch.ones(2, device="cuda")')
    results = ported_project(tmp_path, files, target)
    found = [one for one in results["app/place.py"].sites if one.rule == "device-string"]
    assert [one.safe for one in found] == [called == "short"], found


LOOKS_UP = {
    "a class by a path of settings": "import importlib\n\n\ndef made(config):\n"
    "    module, name = config['target'].rsplit('.', 1)\n"
    "    return getattr(importlib.import_module(module), name)()\n",
    "hydra": "from hydra.utils import instantiate\n\n\ndef made(config):\n    return instantiate(config)\n",
    "a pickle": "import pickle\n\n\nclass Reader(pickle.Unpickler):\n    def find_class(self, module, name):\n"
    "        return super().find_class(module, name)\n\n\ndef made(file):\n    return Reader(file).load()\n",
}
LAYER = "import torch\n\n\nclass Layer:\n    def run(self, x):\n        return x + torch.ones(2, device={device})\n"
USES_MADE = (
    "import torch\nfrom app.lookup import made\n\n\ndef main(config, rows):\n    rows.tolist().cuda()\n"
    "    return made(config).run(torch.ones(2, device='cuda'))\n"
)


@pytest.mark.parametrize("kind", LOOKS_UP)
@EACH_TARGET
def test_a_module_that_no_file_imports_stays_with_the_program_that_finds_any_name(
    kind: str, target: str, tmp_path: Path
) -> None:
    files = {
        "app/__init__.py": "",
        "app/lookup.py": LOOKS_UP[kind],
        "app/layers.py": LAYER.format(device="'cuda'"),
        "main.py": USES_MADE,
    }
    results = ported_project(tmp_path, files, target)
    assert not results["app/layers.py"].changed
    assert "main.py:6" in site(results["app/layers.py"], "'cuda'").reason


@pytest.mark.parametrize("is_imported", [False, True])
@EACH_TARGET
def test_a_package_that_only_gives_a_class_on_does_not_use_it(
    is_imported: bool, target: str, tmp_path: Path
) -> None:
    files = {
        "app/__init__.py": "",
        "app/lookup.py": LOOKS_UP["hydra"],
        "app/parts/__init__.py": "from .layers import Layer\n\n__all__ = ['Layer']\n",
        "app/parts/layers.py": LAYER.format(device="'cuda'"),
        "main.py": USES_MADE,
        "other.py": "from app.parts import Layer\n\nprint(Layer)\n" if is_imported else "print(1)\n",
    }
    results = ported_project(tmp_path, files, target)
    assert results["app/parts/layers.py"].changed == is_imported


@pytest.mark.parametrize("kind", ["imported elsewhere", "a script", "a test", "no lookup"])
@EACH_TARGET
def test_a_module_that_a_lookup_needs_not_find_is_ported(kind: str, target: str, tmp_path: Path) -> None:
    name = "app/test_layers.py" if kind == "a test" else "app/layers.py"
    text = LAYER.format(device="'cuda'")
    files = {
        "app/__init__.py": "",
        "app/lookup.py": "def made(config):\n    return config\n"
        if kind == "no lookup"
        else LOOKS_UP["hydra"],
        name: text + ("\n\nif __name__ == '__main__':\n    Layer().run(1)\n" if kind == "a script" else ""),
        "other.py": "from app.layers import Layer\n\nLayer()\n" if kind == "imported elsewhere" else "",
        "main.py": USES_MADE,
    }
    results = ported_project(tmp_path, files, target)
    assert results[name].changed


@EACH_TARGET
def test_code_for_a_device_stays_beside_a_list_of_devices_that_a_check_for_cuda_keeps(target: str) -> None:
    source = (
        "import torch\n\n\ndef speed(model, x):\n    for device in ['cuda:0', 'cpu']:\n"
        "        if 'cuda' in device and not torch.cuda.is_available():\n            print('no cuda')\n            continue\n"
        "        print(torch.cuda.get_device_name(0) if device != 'cpu' else device)\n"
        "        with torch.cuda.amp.autocast(dtype=torch.float16):\n            model(x.to(device))\n"
    )
    assert port_text(source, Settings(target)).text == source


@pytest.mark.parametrize("entry", ["nerf", "plain"])
@EACH_TARGET
def test_a_choice_stays_with_the_modules_of_a_table_that_it_runs(
    entry: str, target: str, tmp_path: Path
) -> None:
    files = {
        "app/__init__.py": "",
        "app/nerf/__init__.py": "from app.nerf import setup\n\n__all__ = ['setup']\n",
        "app/nerf/setup.py": "from app.nerf.decoder import Decoder\n\n\ndef made():\n    return Decoder()\n",
        "app/nerf/decoder.py": "class Decoder:\n    def __init__(self, rows=()):\n        self.rows = rows.tolist().cuda()\n",
        "app/plain.py": "from torch import nn as setup\n",
        "app/choice.py": f"from app import {entry}\n\nMETHODS = {{'it': {entry}}}\n\n\ndef made(name):\n"
        "    return METHODS[name].setup.made()\n",
        "main.py": f"import torch\nfrom app import choice\n\n{CHOICE}model = choice.made('it').to(device)\n",
    }
    results = ported_project(tmp_path, files, target)
    found = [one for one in results["main.py"].sites if one.rule == "available-choice"]
    assert [one.safe for one in found] == [entry == "plain"], found


@EACH_TARGET
def test_a_test_of_an_elif_that_raises_is_decided_like_any_other(target: str) -> None:
    source = (
        "import torch\n\n\ndef f(use):\n    if not use:\n        pass\n"
        f"    elif not {AVAILABLE}:\n        raise ValueError\n    else:\n        torch.randn(2, device='cuda')\n"
    )
    assert [one.status for one in port_text(source, Settings(target)).sites] == [Status.CONVERTED] * 2
