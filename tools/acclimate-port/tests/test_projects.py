"""A decision that crosses the border of a file is made whole, or its edits are unsafe.

Each project has two or more files, of which one holds what stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from acclimate_port import engine
from acclimate_port.engine import Status
from acclimate_port.files import workers
from acclimate_port.files.workers import FileResult, port_files
from acclimate_port.source_file import SourceFile
from porting import AVAILABLE, EACH_TARGET, ported_project, site


def check(results: dict[str, FileResult], name: str, code: str, reason: str) -> None:
    """Checks that an edit is unsafe for a reason which names the other place."""
    found = site(results[name], code)
    assert found.status is Status.UNSAFE, found
    assert reason in found.reason


KEPT_MOVE = "def make(model):\n    if {flag}:\n        model = model.cuda()\n    return model\n"

FLAGS = {
    "a name of a module": (
        {
            "app/__init__.py": "",
            "app/cuda.py": "ON = False\n",
            "app/task.py": "from . import cuda\n\n\n" + KEPT_MOVE.format(flag="cuda.ON"),
            "app/work.py": "import torch\nfrom . import cuda\n\n\ndef setup(use):\n"
            "    cuda.ON = use and torch.cuda.is_available()\n",
        },
        ("app/work.py", "task.py:6"),
    ),
    "an imported name": (
        {
            "flags.py": "import torch\n\nHAS_CUDA = torch.cuda.is_available()\n",
            "use.py": "from flags import HAS_CUDA\n\n\n" + KEPT_MOVE.format(flag="HAS_CUDA"),
        },
        ("flags.py", "use.py:6"),
    ),
    "the result of a function": (
        {
            "flags.py": "import torch\n\n\ndef has_gpu():\n    return torch.cuda.is_available()\n",
            "use.py": "from flags import has_gpu\n\n\n" + KEPT_MOVE.format(flag="has_gpu()"),
        },
        ("flags.py", "use.py:6"),
    ),
    "an argument": (
        {
            "build.py": "def make(model, use_gpu):\n    if use_gpu:\n        model = model.cuda()\n    return model\n",
            "run.py": "import torch\nfrom build import make\n\n\ndef main(model):\n"
            "    return make(model, use_gpu=torch.cuda.is_available())\n",
        },
        ("run.py", "build.py:3"),
    ),
    "an attribute of the base class": (
        {
            "base.py": "import torch\n\n\nclass Base:\n    def __init__(self):\n"
            "        self.on_gpu = torch.cuda.is_available()\n",
            "own.py": "from base import Base\n\n\nclass Own(Base):\n    def load(self, model):\n"
            "        if self.on_gpu:\n            model.cuda()\n        return model\n",
        },
        ("base.py", "own.py:7"),
    ),
    "an attribute of an object": (
        {
            "config.py": "import torch\n\n\nclass Config:\n    def __init__(self):\n"
            "        self.on_gpu = torch.cuda.is_available()\n",
            "use.py": "import config\n\n\ndef load(model, settings):\n"
            "    if settings.on_gpu:\n        model.cuda()\n    return model\n",
        },
        ("config.py", "use.py:6"),
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FLAGS)
def test_a_flag_is_not_ported_without_what_it_decides_in_another_file(
    kind: str, target: str, tmp_path: Path
) -> None:
    files, (name, place) = FLAGS[kind]
    check(ported_project(tmp_path, files, target), name, AVAILABLE, place)


@EACH_TARGET
def test_two_classes_that_ask_for_the_same_flag_are_ported_together(target: str, tmp_path: Path) -> None:
    flag = 'self.use_cuda = not opt["no_cuda"] and torch.cuda.is_available()'
    files = {
        "agent.py": f"import torch\nfrom modules import Net\n\n\nclass Agent:\n    def __init__(self, opt):\n        {flag}\n"
        "        self.model = self.build(opt)\n        if self.use_cuda:\n            self.model.cuda()\n\n"
        "    def build(self, opt):\n        return opt['kind'](Net(opt))\n",
        "modules.py": f"import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self, opt):\n        {flag}\n\n"
        "    def forward(self, ids):\n        res = torch.FloatTensor(ids)\n        if self.use_cuda:\n"
        "            res = res.cuda()\n        return res\n",
    }
    results = ported_project(tmp_path, files, target)
    check(results, "modules.py", AVAILABLE, "agent.py:")
    check(results, "modules.py", "res.cuda()", "agent.py:")


SUBCLASSES = {
    "a flag": "self.use_cuda = torch.cuda.is_available()\n        subprocess.check_output(['nvidia-smi'])",
    "a device": "self.where = Where('cuda')\n        self.where.cuda()",
}


@EACH_TARGET
@pytest.mark.parametrize("base", SUBCLASSES)
def test_a_subclass_is_not_ported_without_the_base_class_in_another_file(
    base: str, target: str, tmp_path: Path
) -> None:
    files = {
        "agent.py": "import subprocess\n\nimport torch\n\n\nclass Agent:\n    def __init__(self):\n"
        f"        {SUBCLASSES[base]}\n",
        "hred.py": "import torch\nfrom agent import Agent\n\n\nclass Hred(Agent):\n    def __init__(self):\n"
        '        if torch.cuda.is_available():\n            self.device = torch.device("cuda:0")\n'
        '        else:\n            self.device = torch.device("cpu")\n        super().__init__()\n',
    }
    results = ported_project(tmp_path, files, target)
    check(results, "hred.py", AVAILABLE, "agent.py:")


GUARDED = {
    "a class that loads kernels": (
        "from torch.utils.cpp_extension import load\n\n\nclass Op:\n    def __init__(self):\n        try:\n"
        '            self.k = load(name="k", sources=["k.cu"])\n        except Exception:\n            self.k = None\n',
        "from kernels import Op\n\n        return Op()",
    ),
    "a function of kernels": (
        'from torch.utils.cpp_extension import load\n\next = load(name="k", sources=["k.cu"])\n\n\n'
        "def op(*args):\n    return ext.op(*args)\n",
        "from kernels import op\n\n        return op",
    ),
    "a function that asks for what only CUDA has": (
        "import torch\n\n\ndef arch():\n    return torch.cuda.get_device_capability()\n\n\n"
        "def op():\n    return arch()\n",
        "import kernels\n\n        return kernels.op()",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", GUARDED)
def test_a_guard_stays_with_the_code_of_another_file_that_needs_cuda(
    kind: str, target: str, tmp_path: Path
) -> None:
    kernels, body = GUARDED[kind]
    use = f"import torch\n\n\ndef f():\n    if torch.cuda.is_available():\n        {body}\n    return None\n"
    results = ported_project(tmp_path, {"kernels.py": kernels, "use.py": use}, target)
    check(results, "use.py", AVAILABLE, "kernels.py:")


METHODS = {
    "chosen": "def __init__(self):\n        if torch.cuda.is_available():\n            self.op = self.fast\n"
    "        else:\n            self.op = self.slow\n",
    "behind a guard": "def check(self):\n        if not torch.cuda.is_available():\n            return False\n"
    "        return self.fast()\n",
}


ONLY_CUDA = (
    "torch.cuda.get_device_properties(0).gcnArchName",
    "torch.cuda.memory_stats(self.q.device)['active_bytes.all.current']",
)


@EACH_TARGET
@pytest.mark.parametrize("asked", ONLY_CUDA)
@pytest.mark.parametrize("kind", METHODS)
def test_a_guard_stays_with_the_method_that_it_chooses_and_that_calls_another(
    kind: str, asked: str, target: str, tmp_path: Path
) -> None:
    text = (
        f"import torch\n\n\nclass Op:\n    {METHODS[kind]}\n    def fast(self):\n        return self.arch()\n\n"
        f"    def arch(self):\n        return {asked}\n\n"
        "    def slow(self):\n        return 1\n"
    )
    results = ported_project(tmp_path, {"op.py": text, "other.py": ""}, target)
    check(results, "op.py", AVAILABLE, "line 1")


MAIN = "import argparse\n\nimport torch\nfrom other import run\n\n\ndef main():\n"
PARSED = "    parser = argparse.ArgumentParser()\n    parser.add_argument({})\n    run(parser.parse_args())\n"
OPTIONS = {
    "the default of an option": (
        MAIN + PARSED.format("'--device', default='cuda'"),
        "def run(args):\n    return 1 if args.device == 'cuda' and args.name != 'x' else 2\n",
        "'cuda'",
    ),
    "an entry of a dictionary": (
        MAIN
        + "    run({'config': 1})\n\n\nCONFIG = {'device': 'cuda' if torch.cuda.is_available() else 'cpu'}\n",
        "def run(config):\n    return 1 if config['device'] == 'cuda' and config.get('name') else 2\n",
        "'cuda' if torch.cuda.is_available() else 'cpu'",
    ),
    "all options as keywords": (
        MAIN
        + PARSED.format("'--device', default='cuda'").replace("run(", "run(**vars(").replace("())", "()))"),
        "def run(device, name):\n    return 1 if device == 'cuda' and name else 2\n",
        "'cuda'",
    ),
    "a keyword": (
        MAIN + "    run(argparse.Namespace(device='cuda' if torch.cuda.is_available() else 'cpu'))\n",
        "def run(opt):\n    return 1 if opt.device == 'cuda' and opt.name else 2\n",
        "'cuda' if torch.cuda.is_available() else 'cpu'",
    ),
    "an attribute": (
        MAIN
        + "    args = read()\n    args.device = 'cuda' if torch.cuda.is_available() else 'cpu'\n    run(args)\n",
        "def run(args):\n    return 1 if args.device == 'cuda' and args.name else 2\n",
        "'cuda' if torch.cuda.is_available() else 'cpu'",
    ),
    "a flag in a dictionary": (
        MAIN + "    opt = read()\n    opt['use_cuda'] = torch.cuda.is_available()\n    run(opt)\n",
        "def run(opt, model):\n    if opt.get('use_cuda'):\n        model.cuda()\n    return model\n",
        AVAILABLE,
    ),
    "a flag that is the default of an option": (
        MAIN + PARSED.format("'--on-gpu', default=torch.cuda.is_available()"),
        "def run(args, model):\n    if args.on_gpu:\n        model.cuda()\n    return model\n",
        AVAILABLE,
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OPTIONS)
def test_an_option_is_not_ported_without_what_another_file_does_by_it(
    kind: str, target: str, tmp_path: Path
) -> None:
    use, other, code = OPTIONS[kind]
    results = ported_project(tmp_path, {"other.py": f"import torch\n\n\n{other}", "use.py": use}, target)
    check(results, "use.py", code, "other.py:")


@EACH_TARGET
def test_options_of_programs_that_do_not_know_each_other_are_not_one(target: str, tmp_path: Path) -> None:
    parsed = "    args = read()\n    args.device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    files = {
        "one.py": f"import torch\nimport common\n\n\ndef main():\n{parsed}    return torch.ones(1, device=args.device)\n",
        "two.py": f"import torch\nimport common\n\n\ndef main():\n{parsed}    return args.device == 'cuda' and args.name != 'x'\n",
        "common.py": "import torch\n",
    }
    results = ported_project(tmp_path, files, target)
    assert all(one.status is Status.CONVERTED for one in results["one.py"].sites)
    assert any(one.status is not Status.CONVERTED for one in results["two.py"].sites)


BETWEEN = {
    "a function that passes it on": {
        "plan.py": "from pkg.types import Topology\nfrom pkg.kinds import get_device_type\n\n\n"
        "def plan():\n    kind = get_device_type()\n    return Topology(compute_device=kind)\n",
        "types.py": "import torch\n\n\nclass Topology:\n    def __init__(self, compute_device):\n"
        "        assert compute_device in ['cpu', 'cuda', 'mtia']\n",
    },
    "a class between two others": {
        "plan.py": "from pkg.kinds import Base\n\n\nclass Middle(Base):\n    pass\n",
        "types.py": "import torch\nfrom pkg.plan import Middle\n\n\nclass Own(Middle):\n    def f(self):\n"
        "        return 1 if self.device == 'cuda' and self.device != 'x' else 2\n",
    },
    "a class with types": {
        "plan.py": "",
        "types.py": "import torch\nfrom pkg.kinds import Base\n\n\nclass Own(Base[int]):\n    def f(self):\n"
        "        return 1 if self.device == 'cuda' and self.device != 'x' else 2\n",
    },
    "a package that gives it on": {
        "plan.py": "",
        "inner/__init__.py": "from ..kinds import get_device_type as device_type\n",
        "types.py": "import torch\nfrom pkg.inner import device_type\n\n\ndef f():\n"
        "    return 1 if device_type() == 'cuda' and torch.version.cuda else 2\n",
    },
}


@EACH_TARGET
@pytest.mark.parametrize("kind", BETWEEN)
def test_files_without_code_for_a_device_join_those_that_they_are_between(
    kind: str, target: str, tmp_path: Path
) -> None:
    kinds = (
        "import torch\n\n\ndef get_device_type():\n    return 'cuda' if torch.cuda.is_available() else 'cpu'\n\n\n"
        "class Base:\n    def __init__(self, device=None):\n        self.device = device or self.resolve()\n\n"
        "    def resolve(self):\n        return 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    )
    files = {"pkg/__init__.py": "", "pkg/kinds.py": kinds}
    files |= {f"pkg/{name}": text for name, text in BETWEEN[kind].items()}
    results = ported_project(tmp_path, files, target)
    unsafe = [one for one in results["pkg/kinds.py"].sites if one.status is Status.UNSAFE]
    assert len(unsafe) == len([one for one in unsafe if "types.py:" in one.reason]) > 0


@EACH_TARGET
def test_a_flag_of_the_same_name_is_one_in_files_two_imports_away(target: str, tmp_path: Path) -> None:
    flag = "        self.cuda_ready = torch.cuda.is_available()\n"
    files = {
        "base.py": f"import torch\n\n\nclass Base:\n    def __init__(self, model):\n{flag}"
        "        if self.cuda_ready:\n            model.cuda()\n",
        "middle.py": "from base import Base\n\n\nclass Middle(Base):\n    pass\n",
        "super.py": f"import torch\nfrom middle import Middle\n\n\nclass Manager:\n    def __init__(self):\n{flag}"
        "        self.held = Middle(torch.nn.Linear(1, 1) if self.cuda_ready else None)\n",
    }
    check(ported_project(tmp_path, files, target), "super.py", AVAILABLE, "base.py:")


@EACH_TARGET
def test_a_profilers_figures_are_those_of_the_activities_that_another_file_records(
    target: str, tmp_path: Path
) -> None:
    files = {
        "read.py": "import torch\n\n\ndef times(p):\n    on = torch.cuda.is_available()\n"
        "    return [e.device_time_total if on else e.cpu_time_total for e in p.events()]\n",
        "record.py": "import torch\nfrom torch.profiler import ProfilerActivity, profile\nfrom read import times\n\n\n"
        "def run(f):\n    with profile(activities=[ProfilerActivity.CUDA]) as p:\n        f()\n    return times(p)\n",
    }
    check(ported_project(tmp_path, files, target), "read.py", AVAILABLE, "record.py:")


@EACH_TARGET
def test_an_object_is_not_moved_without_the_class_of_another_file_that_moves_it_too(
    target: str, tmp_path: Path
) -> None:
    files = {
        "main.py": "import torch\nfrom policy import Policy\n\n\ndef main():\n"
        "    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "    model = torch.nn.Linear(2, 2).to(device)\n    return Policy(model)\n",
        "policy.py": "import torch\n\n\nclass Policy:\n    def __init__(self, model):\n"
        "        if torch.cuda.is_available():\n            model.cuda()\n        self.model = model\n",
    }
    results = ported_project(tmp_path, files, target)
    check(results, "main.py", "'cuda' if torch.cuda.is_available() else 'cpu'", "policy.py:7")


COMPARED = {
    "an argument of a constructor": (
        "class Model:\n    def __init__(self, device=None):\n        self.device = device\n"
        '        self.options = {"device_map": "auto"} if self.device == "cuda" else {}\n',
        'from other import Model\n\n\ndef f():\n    return Model(device="cuda")\n',
        '"cuda"',
    ),
    "the result of a function": (
        'from use import get_device_type\n\n\ndef f():\n    kind = get_device_type()\n    assert kind in ["cpu", "cuda", "mtia"]\n',
        "import torch\n\n\ndef get_device_type():\n    if torch.cuda.is_available():\n"
        '        device = "cuda"\n    else:\n        device = "cpu"\n    return device\n',
        '"cuda"',
    ),
    "an attribute of an object": (
        "from use import Classifier\n\n\ndef test_device():\n"
        '    assert Classifier().device in ["cpu", "cuda", "mps"]\n',
        "import torch\n\n\nclass Classifier:\n    def __init__(self, device=None):\n"
        '        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")\n',
        '"cuda" if torch.cuda.is_available() else "cpu"',
    ),
    "an argument that another function passes on": (
        'def check(kind):\n    return 1 if kind == "cuda" and kind != "x" else 2\n\n\n'
        "def outer(device):\n    return check(device)\n",
        'from other import outer\n\n\ndef f():\n    return outer(device="cuda")\n',
        '"cuda"',
    ),
    "the device of a tensor": (
        "import torch\n\n\ndef is_cuda(device):\n"
        '    return torch.version.cuda and device.type == "cuda"\n\n\n'
        "def check(q):\n    return is_cuda(q.device)\n",
        "import torch\nfrom other import check\n\n\ndef f():\n"
        '    device = "cuda" if torch.cuda.is_available() else "cpu"\n'
        "    q = torch.empty(2, device=device)\n    return check(q)\n",
        '"cuda" if torch.cuda.is_available() else "cpu"',
    ),
    "a backend": (
        'def start(backend):\n    return 1 if backend == "nccl" else 2\n',
        'from other import start\n\n\ndef f():\n    return start(backend="nccl")\n',
        '"nccl"',
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", COMPARED)
def test_a_device_is_not_ported_without_the_comparison_of_another_file(
    kind: str, target: str, tmp_path: Path
) -> None:
    other, use, code = COMPARED[kind]
    results = ported_project(tmp_path, {"other.py": other, "use.py": use}, target)
    check(results, "use.py", code, "other.py:")


@EACH_TARGET
def test_a_function_of_the_project_that_takes_a_device_gets_the_accelerators(
    target: str, tmp_path: Path
) -> None:
    files = {
        "tools/device_funcs.py": "def to_device(data, device=None):\n    return data.to(device)\n",
        "train.py": "import torch\nfrom tools.device_funcs import to_device\n\n\ndef train(model, batch, ngpu):\n"
        '    stop = torch.tensor(0).to("cuda" if ngpu > 0 else "cpu")\n'
        '    return to_device(batch, "cuda" if ngpu > 0 else "cpu"), to_device(stop, "cuda")\n',
    }
    result = ported_project(tmp_path, files, target)["train.py"]
    assert "cuda" not in result.after
    assert all(one.safe for one in result.sites)


@EACH_TARGET
def test_what_is_ported_at_both_ends_is_safe(target: str, tmp_path: Path) -> None:
    files = {
        "flags.py": "import torch\n\nHAS_CUDA = torch.cuda.is_available()\n",
        "use.py": "import torch\nfrom flags import HAS_CUDA\n\n\ndef f():\n    x = torch.ones(2)\n    if HAS_CUDA:\n"
        "        x = x.cuda()\n    return x\n",
        "own.py": "import torch\nfrom base import Base\n\n\nclass Own(Base):\n    def __init__(self):\n"
        '        self.device = "cuda" if torch.cuda.is_available() else "cpu"\n',
        "base.py": "import torch\n\n\nclass Base:\n    def __init__(self):\n"
        '        self.where = "cuda" if torch.cuda.is_available() else "cpu"\n',
    }
    results = ported_project(tmp_path, files, target)
    assert all(
        one.status is Status.CONVERTED and one.safe for result in results.values() for one in result.sites
    )


@EACH_TARGET
def test_a_device_may_meet_a_test_that_only_adds_its_number(target: str, tmp_path: Path) -> None:
    files = {
        "load.py": "import torch\n\n\ndef load(path, device):\n    if device != 'mps':\n        print(device)\n"
        "    if device == 'cuda':\n        device = f'cuda:{torch.cuda.current_device()}'\n"
        "    return torch.load(path, map_location=device)\n",
        "use.py": "from load import load\n\n\ndef f(path, n):\n    device = 'cuda' if n else 'cpu'\n    return load(path, device)\n",
    }
    assert site(ported_project(tmp_path, files, target)["use.py"], "'cuda'").status is Status.CONVERTED


@EACH_TARGET
def test_the_same_name_in_files_that_do_not_know_each_other_is_not_one_decision(
    target: str, tmp_path: Path
) -> None:
    flag = "        self.use_cuda = torch.cuda.is_available()\n"
    start = "import torch\n\n\nclass {}:\n    def __init__(self, model):\n"
    files = {
        "one.py": start.format("One") + flag + "        if self.use_cuda:\n            model.cuda()\n",
        "two.py": start.format("Two")
        + flag
        + "        self.x = torch.ones(2)\n        if self.use_cuda:\n            self.x = self.x.cuda()\n",
    }
    results = ported_project(tmp_path, files, target)
    assert site(results["one.py"], AVAILABLE).status is Status.UNSAFE
    assert site(results["two.py"], AVAILABLE).status is Status.CONVERTED


@EACH_TARGET
def test_a_doubt_goes_on_to_the_files_that_rely_on_what_it_keeps(target: str, tmp_path: Path) -> None:
    """``one.py`` relies on ``two.py``, whose flag stays because of ``three.py``, the end of the chain."""
    files = {
        "one.py": "import torch\nfrom two import Two\n\n\nclass One(Two):\n    def __init__(self):\n"
        '        self.device = "cuda" if torch.cuda.is_available() else "cpu"\n',
        "two.py": "import torch\n\n\nclass Two:\n    def __init__(self):\n"
        "        self.on_gpu = torch.cuda.is_available()\n",
        "three.py": "from two import Two\n\n\ndef f(model):\n    if Two().on_gpu:\n        model.cuda()\n",
    }
    results = ported_project(tmp_path, files, target, apply=True)
    check(results, "two.py", AVAILABLE, "three.py:6")
    check(results, "one.py", '"cuda" if torch.cuda.is_available() else "cpu"', "three.py:6")
    assert not any(result.written for result in results.values())


def test_a_file_that_is_ported_again_is_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "two.py": "import torch\n\n\nclass Two:\n    def __init__(self):\n"
        "        self.on_gpu = torch.cuda.is_available()\n",
        "three.py": "from two import Two\n\n\ndef f(model):\n    if Two().on_gpu:\n        model.cuda()\n",
    }
    parsed: list[str] = []

    def parse(text: str, *given: Any) -> SourceFile:
        parsed.append(text)
        return SourceFile(text, *given)

    monkeypatch.setattr(engine, "SourceFile", parse)
    kept = ported_project(tmp_path, files, "acclimate")
    assert sorted(parsed) == sorted(files.values())
    parsed.clear()
    monkeypatch.setattr(workers, "_MOST_KEPT", 0)
    anew = ported_project(tmp_path, files, "acclimate")
    assert len(parsed) > len(files)
    for name, result in kept.items():
        assert result.sites == anew[name].sites
        assert result.after == anew[name].after
    check(kept, "two.py", AVAILABLE, "three.py:6")


def test_a_file_alone_is_unsafe_where_it_imports_what_is_not_given(tmp_path: Path) -> None:
    text = "import torch\nfrom app import cuda\n\n\ndef setup(x: torch.Tensor):\n    if cuda.ON:\n        return x.cuda()\n"
    entry = site(ported_project(tmp_path, {"use.py": text}, "acclimate")["use.py"], "x.cuda()")
    assert (entry.status, "line 6" in entry.reason) == (Status.UNSAFE, True)


KEPT = "def move(x):\n    return x.cuda()\n"
MOVING_CLASS = (
    "import torch\n\n\nclass Mean(torch.nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
    "        self.size = torch.tensor(size).cuda()\n"
)
TABLES = {
    "a table beside the class": {
        "parts.py": MOVING_CLASS + "\n\nTABLE = {'mean': Mean}\n",
        "main.py": "import parts\n\n\ndef build(name, size):\n    return parts.TABLE[name](size)\n\n\n"
        + KEPT,
    },
    "a table in a file between": {
        "parts.py": MOVING_CLASS,
        "table.py": "from parts import Mean\n\nTABLE = {'mean': Mean}\n",
        "build.py": "from table import TABLE\n\n\ndef build(name, size):\n    return TABLE[name](size)\n",
        "main.py": "from build import build\n\n\n" + KEPT,
    },
    "a table that is imported with all names": {
        "parts.py": "import torch\n\n\ndef make(n):\n    return torch.zeros(n).cuda()\n",
        "table.py": "from parts import make\n\nTABLE = {'zeros': make}\n",
        "main.py": "from table import *\n\n\ndef run(name):\n    return TABLE[name](2)\n\n\n" + KEPT,
    },
    "a table with entries that are set later": {
        "parts.py": MOVING_CLASS + "\n\nTABLE = {}\nTABLE['mean'] = Mean\n",
        "main.py": "from parts import TABLE\n\n\ndef build(name):\n    return TABLE[name](2)\n\n\n" + KEPT,
    },
}


@EACH_TARGET
@pytest.mark.parametrize("kind", TABLES)
def test_what_a_table_holds_is_not_ported_without_the_program_that_looks_it_up(
    kind: str, target: str, tmp_path: Path
) -> None:
    results = ported_project(tmp_path, TABLES[kind], target)
    moved = "torch.zeros(n).cuda()" if "zeros(n)" in TABLES[kind]["parts.py"] else "torch.tensor(size).cuda()"
    check(results, "parts.py", moved, "main.py:")


@EACH_TARGET
def test_a_table_that_no_other_file_looks_up_holds_nothing_back(target: str, tmp_path: Path) -> None:
    files = {"parts.py": MOVING_CLASS + "\n\nTABLE = {'mean': Mean}\n", "main.py": KEPT}
    results = ported_project(tmp_path, files, target)
    assert site(results["parts.py"], "torch.tensor(size).cuda()").status is Status.CONVERTED


START = (
    "import torch.distributed as dist\n\n\ndef start(kind):\n    backend = 'nccl'\n"
    "    print('on NVIDIA' if backend == 'nccl' else kind)\n    dist.init_process_group(backend)\n"
)
SHARE = (
    "import torch\nimport torch.distributed as dist\n\n\ndef share(n):\n    size = torch.tensor([n]).cuda()\n"
    "    {}\n    return size\n"
)
RUN = "from share import share\n\n\ndef run():\n    return share(2)\n"
BOTH_FILES = "from run import run\nfrom start import start\n\nstart(1)\nprint(run())\n"


@EACH_TARGET
def test_tensors_that_ranks_exchange_are_not_ported_without_the_backend_of_the_program(
    target: str, tmp_path: Path
) -> None:
    share = SHARE.format("dist.all_reduce(size)")
    files = {"start.py": START, "share.py": share, "run.py": RUN, "main.py": BOTH_FILES}
    results = ported_project(tmp_path, files, target)
    check(results, "share.py", "torch.tensor([n]).cuda()", "start.py:")


@EACH_TARGET
def test_tensors_are_ported_without_a_backend_of_another_program_that_stays(
    target: str, tmp_path: Path
) -> None:
    files = {
        "start.py": START,
        "share.py": SHARE.format("dist.all_reduce(size)"),
        "run.py": RUN,
        "main.py": "from run import run\n\nprint(run())\n",
    }
    results = ported_project(tmp_path, files, target)
    assert site(results["share.py"], "torch.tensor([n]).cuda()").status is Status.CONVERTED


@EACH_TARGET
def test_a_module_of_the_same_name_in_another_program_is_not_meant(target: str, tmp_path: Path) -> None:
    moving = "import torch\n\n\ndef zeros(n):\n    return torch.zeros(n).cuda()\n"
    files = {
        "one/utils.py": "import torch\n\n\ndef zeros(x):\n    return x.cuda()\n",
        "one/main.py": "from utils import *\n\n\ndef run(x):\n    return zeros(x)\n",
        "two/utils.py": moving,
        "two/main.py": "import torch\nfrom utils import *\n\n\ndef run():\n    return zeros(2)\n",
    }
    results = ported_project(tmp_path, files, target)
    assert site(results["two/utils.py"], "torch.zeros(n).cuda()").status is Status.CONVERTED


def test_a_module_of_a_package_has_not_the_name_of_one_of_pythons(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/random.py": "import torch\n\n\ndef seed(x):\n    return x.cuda()\n",
        "main.py": "import random\n\nimport torch\n\n\ndef run():\n    random.seed(1)\n    return torch.zeros(1).cuda()\n",
    }
    results = ported_project(tmp_path, files, "acclimate")
    assert site(results["main.py"], "torch.zeros(1).cuda()").status is Status.CONVERTED


@EACH_TARGET
def test_a_program_that_hides_cuda_keeps_the_tests_of_its_modules(target: str, tmp_path: Path) -> None:
    files = {
        "main.py": 'import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "-1"\n\nfrom model import make\n\nmake()\n',
        "model.py": "import torch\n\n\ndef make():\n"
        "    return torch.ones(1, device='cuda' if torch.cuda.is_available() else 'cpu')\n",
    }
    results = ported_project(tmp_path, files, target)
    check(results, "model.py", "'cuda' if torch.cuda.is_available() else 'cpu'", "main.py:3")
    files["main.py"] = files["main.py"].replace("-1", "1")
    assert "is_available() else 'cpu'" not in ported_project(tmp_path, files, target)["model.py"].after


OWN = "torch.cuda.clock_rate()"
FLAGS_OF_OTHERS = {
    "a function": (
        "def found():\n    return torch.cuda.is_available()",
        "from dev import found, own\n\nif found():\n    own()\n",
    ),
    "a name": ("FOUND = torch.cuda.is_available()", "import dev\n\nif dev.FOUND:\n    dev.own()\n"),
    "a part of a result": (
        "def found():\n    on = torch.cuda.is_available()\n    return 1, on",
        "from dev import found, own\n\nnumber, use = found()\nif use:\n    own()\n",
    ),
    "a field": (
        "class Config:\n    use_cuda: bool = torch.cuda.is_available()",
        "from dev import Config, own\n\n\ndef main(config: Config):\n    if config.use_cuda:\n        own()\n",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FLAGS_OF_OTHERS)
def test_a_flag_stays_with_code_of_its_own_file_that_another_runs_by_it(
    kind: str, target: str, tmp_path: Path
) -> None:
    flag, use = FLAGS_OF_OTHERS[kind]
    files = {
        "dev.py": f"import torch\n\n\n{flag}\n\n\ndef own():\n    return {OWN}\n",
        "main.py": use,
    }
    found = site(ported_project(tmp_path, files, target)["dev.py"], "torch.cuda.is_available()")
    assert not found.safe, found
    # What raises without CUDA holds back the devices of its file, and the flag with them.
    assert "stays as it is" in found.reason or "imported" in found.reason
    (tmp_path / "dev.py").unlink()
    files["dev.py"] = files["dev.py"].replace(OWN, "torch.ones(1)")
    assert (
        site(ported_project(tmp_path, files, target)["dev.py"], "torch.cuda.is_available()").reason
        != found.reason
    )


def test_a_folder_that_is_a_package_itself_is_ported_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "helper").mkdir()
    text = (
        "import augmentations\nimport torch\n\n\ndef take(module, args):\n    return vars(module), args\n\n\n"
        "def main(args):\n    take(augmentations, args)\n    args.cuda = args.cuda and torch.cuda.is_available()\n"
    )
    (tmp_path / "helper/main.py").write_text(text)
    paths = [Path("__init__.py"), Path("helper/main.py")]
    results = port_files(paths, engine.Settings("acclimate"), False, 1, lambda: None)
    assert results
    assert not any(one.failure for one in results)
