"""A decision is one edit: a guard and what it guards, a test and its flag, a device and who looks at it.

Where a program is about CUDA itself, or too early to count devices, its code stays or is unsafe. Programs that can
run do so before and after, on the machines of ``machines.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Ported, Settings, Status, port_text
from acclimate_port.source.survey import Survey, joined, survey
from porting import EACH_TARGET, check, differing, program, reasons


def ported(source: str, target: str, known: Survey | None = None) -> Ported:
    return port_text(source, Settings(target, survey=known or Survey()))


def left(found: Ported) -> list[str]:
    """The texts of the sites that a safe port does not convert and reports as left."""
    return [site.text for site in found.sites if site.status in (Status.LEFT, Status.UNSAFE)]


# -- a guard and what it guards --------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'config = {"use": flag}\nif config["use"] and not torch.cuda.is_available():\n    config["use"] = False\n'
        'return torch.ones(1, device="cuda" if config["use"] else "cpu")',
        'if flag and not torch.cuda.is_available():\n    flag = False\nnew_device = "cuda" if flag else "cpu"\nreturn new_device',
        'has = torch.cuda.is_available()\nif flag and not has:\n    flag = False\nreturn torch.ones(1, device="cuda" if has else "cpu")',
        'if not torch.cuda.is_available():\n    flag = False\nreturn torch.ones(1, device="cuda:0" if flag else "cpu")',
        'if not torch.cuda.is_available() or other:\n    flag = False\nreturn torch.device("cuda" if flag else "cpu")',
    ],
)
def test_a_flag_that_is_cleared_without_a_device_is_ported_with_its_device(body: str, target: str) -> None:
    check(program(body), target, changed=True)
    assert not left(ported(program(body), target))


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        # The string is data or unsafe, so the guard must not turn it on for other devices.
        'where = "cuda" if flag else other\nif not torch.cuda.is_available():\n    where = "cpu"\nreturn run(where)',
        "use = flag\nif use and not torch.cuda.is_available():\n    use = False\nif use:\n    return model.cuda()\nreturn model",
        "if flag and not torch.cuda.is_available():\n    flag = False\nif flag:\n    torch.cuda.nccl.version()",
        "use = torch.cuda.is_available()\nif use:\n    model = model.cuda()\nreturn model",
        "for i in range(torch.cuda.device_count()):\n    torch.cuda.cudart()",
        "return [torch.cuda.cudart() for i in range(torch.cuda.device_count())]",
        "def used(i):\n    return torch.cuda.cudart()\nreturn max(range(torch.cuda.device_count()), key=used)",
        "def move(a, on):\n    if on:\n        return a.cuda()\n    return a\nreturn move(model, torch.cuda.is_available())",
        "def start():\n    on = torch.cuda.is_available()\n    return 1, on\n"
        "number, use = start()\nif use:\n    torch.cuda.cudart()",
        'if device.type == "cuda" and not torch.cuda.is_available():\n    raise RuntimeError("no CUDA")',
        'if device.type == "cuda" and torch.cuda.is_available():\n    torch.cuda.synchronize(device)',
    ],
)
def test_a_guard_stays_with_what_it_guards(body: str, target: str) -> None:
    source = program(body)
    check(source, target)
    asks = ("torch.cuda.is_available()", "torch.cuda.device_count()")
    safe = ported(source, target).text
    assert [safe.count(ask) for ask in asks] == [source.count(ask) for ask in asks], safe


@EACH_TARGET
def test_a_guard_stays_with_the_default_that_it_replaces(target: str) -> None:
    source = (
        'import torch\n\n\ndef f(device="cuda"):\n    if not torch.cuda.is_available():\n        device = "cpu"\n'
        "    return torch.ones(1, device=device)\n"
    )
    assert "not torch.cuda.is_available()" in ported(source, target).text
    option = (
        'import argparse\nimport torch\n\np = argparse.ArgumentParser()\np.add_argument("--device", default="cuda")\n\n\n'
        'def f():\n    args = p.parse_args()\n    if not torch.cuda.is_available():\n        args.device = "cpu"\n'
    )
    assert "not torch.cuda.is_available()" in ported(option, target).text


@EACH_TARGET
@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def __init__(self):\n        self.cuda = torch.cuda.is_available()\n",
        "def has_cuda():\n    return torch.cuda.is_available()\n",
        "def f(build):\n    return build(use_cuda=torch.cuda.is_available())\n",
        "def opset(n, cuda=False):\n    return n - 2 if cuda else n\n\n\ndef f():\n"
        "    return opset(20, cuda=torch.cuda.is_available())\n",
    ],
)
def test_a_flag_called_cuda_that_other_code_reads_is_unsafe(code: str, target: str) -> None:
    found = ported(f"import torch\n\n\n{code}", target)
    assert "torch.cuda.is_available()" in found.text
    assert "which says CUDA" in reasons(found)


# -- what is about CUDA itself ---------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'return [("CUDA Available?", str(torch.cuda.is_available()).lower())]',
        'return {"cuda_available": torch.cuda.is_available(), "cuda_device_count": torch.cuda.device_count()}',
        'print("CUDA available:", torch.cuda.is_available())',
        'print(f"CUDA devices: {torch.cuda.device_count()}")',
        'print("cuda: %s" % torch.cuda.is_available())',
        'print("CUDA? {}".format(torch.cuda.is_available()))',
    ],
)
def test_a_report_about_cuda_keeps_its_question(body: str, target: str) -> None:
    source = program(body)
    check(source, target, changed=False)
    found = ported(source, target)
    assert {site.status for site in found.sites} == {Status.EXEMPT}
    assert "reports whether there is CUDA" in found.sites[0].reason


@EACH_TARGET
@pytest.mark.parametrize(
    "test",
    [
        "HAS_TRT and torch.cuda.is_available()",
        "torch.cuda.is_available() and tensorrt is not None",
        "nvml_ok and x.is_cuda",
    ],
)
def test_a_condition_about_a_library_of_nvidias_stays(test: str, target: str) -> None:
    source = program(f"if {test}:\n    return compiled(x)\nreturn x")
    assert ported(source, target).text == source or "x.is_cuda" in test
    assert "x.is_cuda" not in test or "x.is_cuda" in ported(source, target).text


@EACH_TARGET
def test_a_branch_for_an_older_torch_stays(target: str) -> None:
    body = (
        'if version.parse(torch.__version__) >= version.parse("2.4"):\n    return torch.amp.GradScaler("cuda", enabled=flag)\n'
        "return 1 if flag else None\n"
    )
    assert '"cuda"' not in ported(program(body), target).text
    old = body.replace(
        "return 1 if flag else None", "else:\n    return torch.cuda.amp.GradScaler(enabled=flag)"
    )
    assert "torch.cuda.amp.GradScaler(enabled=flag)" in ported(program(old), target).text
    assert any("older torch" in site.reason for site in ported(program(old), target).sites)


@EACH_TARGET
@pytest.mark.parametrize("imported", ["import warp as wp", "import jax as wp", "import faster_whisper as wp"])
@pytest.mark.parametrize(
    "use",
    [
        "return wp.get_device(self._device)",
        "return self.parse(self._device)",
        'return wp.devices(f"{self._device}:0".split(":")[0])',
        "kind, _, index = self._device.partition(':')\n        return wp.get_device(kind)",
    ],
)
def test_a_device_that_a_method_gives_to_another_library_stays(use: str, imported: str, target: str) -> None:
    source = (
        f'import torch\n\n\nclass A:\n    def __init__(self):\n        self._device = "cuda:0"\n\n'
        f"    def device(self):\n        {imported}\n\n        {use}\n\n"
        f"    @staticmethod\n    def parse(device):\n        {imported}\n\n"
        "        return device if isinstance(device, wp.Device) else wp.get_device(device)\n\n\n"
        'class B:\n    def __init__(self):\n        self._device = "cuda:0"\n\n'
        "    def device(self):\n        return torch.device(self._device)\n"
    )
    safe = ported(source, target)
    assert safe.text.count('"cuda:0"') == 1, safe.text
    assert "has its own names of devices" in reasons(safe)


# -- what a program says or refuses without CUDA ---------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'new_device = "cuda" if device is None else device\nif torch.device(new_device).type == "cuda" and not torch.cuda.is_available():\n'
        '    print("no CUDA")\n    new_device = "cpu"\nreturn new_device',
        'new_device = "cuda"\nnew_device = torch.device(new_device)\nif not torch.cuda.is_available() and new_device.type == "cuda":\n'
        '    print("no CUDA")\n    new_device = torch.device("cpu")\nreturn new_device',
        'new_device = f"cuda:{int(flag)}"\nif new_device.startswith("cuda"):\n    if not torch.cuda.is_available():\n'
        '        print("no CUDA")\n        new_device = "cpu"\nreturn new_device',
        'new_device = "cuda:0" if flag else "cpu"\nif "cuda" in new_device:\n    assert torch.cuda.is_available()\nreturn new_device',
    ],
)
def test_a_host_still_says_that_cuda_was_asked_for_and_is_missing(body: str, target: str) -> None:
    check(program(body), target)
    assert "finds that CUDA was asked for and is missing" in reasons(ported(program(body), target))


@EACH_TARGET
def test_a_fallback_that_says_nothing_does_not_keep_the_device(target: str) -> None:
    body = (
        'where = "cuda"\nif where == "cuda" and not torch.cuda.is_available():\n    where = "cpu"\n'
        "return torch.ones(1, device=where)"
    )
    check(program(body), target, changed=True)


# -- too early to count devices --------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    ("code", "is_early"),
    [
        ("class A:\n    def __init__(self, rank):\n        self.device = f'cuda:{rank}'\n\n\nconfig = A(0)\n", True),
        ("class A:\n    def __init__(self, rank):\n        self.device = f'cuda:{rank}'\n", False),
        ("def where():\n    device = 'cuda'\n    return device\n\n\nDEVICE = where()\n", True),
        ("def where():\n    device = 'cuda'\n    return device\n\n\ndef two():\n    return where()\n\n\nX = two()\n", True),
        ("def main():\n    device = 'cuda'\n    return device\n\n\nmain()\n", False),
        ("def go():\n    device = 'cuda'\n    return device\n\n\nif __name__ == '__main__':\n    go()\n", False),
        ("if __name__ == '__main__':\n    device = 'cuda'\n", False),
        ("class A:\n    class B:\n        def __init__(self):\n            self.device = 'cuda'\n\n    def __init__(self):\n"
         "        self.b = self.B()\n        class C:\n            def __init__(self):\n                self.device = 'cuda:1'\n"
         "        self.c = C()\n\n\nconfig = A()\n", True),
    ],
)  # fmt: skip
def test_an_import_looks_up_no_accelerator_through_a_constructor(
    code: str, is_early: bool, target: str
) -> None:
    found = ported(f"import torch\n\n\n{code}", target)
    assert (found.text.count("cuda") == code.count("cuda")) == is_early, found.text
    assert ("when the module is imported" in reasons(found)) == is_early


def test_torch_stays_imported_only_where_it_is_needed() -> None:
    source = (
        'def f(n):\n    import torch\n\n    return torch.ones(n, device="cuda")\n\n\n'
        'def g(x):\n    x.device = "cuda:0"  # acclimate: ignore\n    return x\n'
    )
    found = ported(source, "torch")
    assert not found.text.startswith("import torch")
    assert "    import torch\n\n    accelerator = torch.accelerator" in found.text
    assert "device=accelerator_type()" in found.text


@EACH_TARGET
@pytest.mark.parametrize(
    ("code", "is_early"),
    [
        ("def main(n):\n    ds = [torch.device(f'cuda:{i}') for i in n]\n    mp.Process(target=w, args=ds).start()\n", True),
        ("def main(n):\n    device = 'cuda'\n    os.environ['CUDA_VISIBLE_DEVICES'] = n\n    run(device)\n", True),
        ("def main():\n    p.add_argument('--device', default='cuda')\n    os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n", True),
        ("def main(n):\n    os.environ['CUDA_VISIBLE_DEVICES'] = n\n    device = 'cuda'\n    run(device)\n", False),
        ("def w(i):\n    device = f'cuda:{i}'\n    run(device)\n\n\ndef main():\n    mp.Process(target=w).start()\n", False),
        ("def main(x):\n    x = x.to('cuda')\n    mp.Process(target=w).start()\n", False),
    ],
)  # fmt: skip
def test_the_name_of_a_device_counts_no_devices_too_early(code: str, is_early: bool, target: str) -> None:
    source = f"import os\nimport torch\nimport torch.multiprocessing as mp\n\n\n{code}"
    found = ported(source, target)
    assert (found.text.count("cuda") == source.count("cuda")) == is_early, found.text
    assert ("it counts the devices" in reasons(found)) == is_early


# -- figures and functions that MPS lacks ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "divides"),
    [
        ("return 1 / torch.cuda.get_device_properties(0).total_memory", True),
        ("p = torch.cuda.get_device_properties(0)\nreturn 1 / (p.total_memory / 1024)", True),
        ("free, total = torch.cuda.mem_get_info()\nreturn free / total", True),
        ("def used(d):\n    return torch.cuda.max_memory_allocated()\nreturn 3 / used(0)", True),
        (
            "total = torch.cuda.get_device_properties(0).total_memory\nreturn 1 / total if total else None",
            False,
        ),
        ("return torch.cuda.get_device_properties(0).total_memory / 2**30", False),
        ("return torch.cuda.max_memory_allocated() / 2**30", False),
    ],
)
def test_a_figure_that_is_a_divisor_is_not_0_on_apples_devices(body: str, divides: bool) -> None:
    assert ("is a divisor" in reasons(ported(program(body), "torch"))) == divides
    assert "is a divisor" not in reasons(ported(program(body), "acclimate"))


@pytest.mark.parametrize("name", ["manual_seed_all", "seed_all", "device"])
def test_a_function_that_torch_lacks_for_apples_devices_has_another_there(name: str) -> None:
    torch = pytest.importorskip("torch")
    text = ported(f"import torch\n\n\ndef f(n):\n    return torch.cuda.{name}(n)\n", "torch").text
    assert not hasattr(torch.mps, name)
    assert f'getattr(torch.get_device_module(accelerator_type()), "{name}", ' in text


@EACH_TARGET
def test_a_state_from_a_checkpoint_is_for_cuda_alone(target: str) -> None:
    loaded = program(
        'state = model["rng"]\nif state is not None and torch.cuda.is_available():\n    torch.cuda.set_rng_state(state)'
    )
    assert ported(loaded, target).text == loaded
    own = program("state = torch.cuda.get_rng_state()\ntorch.cuda.set_rng_state(state)")
    assert "torch.cuda.set_rng_state" not in ported(own, target).text


# -- a caller's own autocast of the CPU ------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.amp.autocast()", "torch.cuda.amp.autocast(enabled=False)", "torch.cuda.amp.autocast(flag)",
        'torch.autocast("cuda")', 'torch.autocast("cuda", enabled=flag or other)', 'torch.amp.autocast("cuda", enabled=True)',
        'torch.autocast("cuda", enabled=flag if other else False)', "torch.cuda.amp.autocast(enabled=torch.cuda.is_available())",
    ],
)  # fmt: skip
def test_an_autocast_of_cuda_keeps_that_of_the_cpu_around_it(call: str, target: str) -> None:
    source = program(f'with torch.autocast("cpu", enabled=flag):\n    with {call}:\n        return x')
    found = check(source, target, changed=True)
    assert call not in ported(source, target).text
    assert not differing(source, found.text)


@EACH_TARGET
@pytest.mark.parametrize(
    "code", ['with torch.autocast("cuda", dtype=torch.float16):\n    return x', '@torch.autocast("cuda")\ndef g(a):\n    return a\nreturn g(x)']
)  # fmt: skip
def test_an_autocast_that_would_change_that_of_a_caller_is_unsafe(code: str, target: str) -> None:
    source = program(code)
    assert '"cuda"' not in ported(source, target).text
    assert '"cuda"' in ported(source, target, Survey(autocasts_on_host=True)).text


@EACH_TARGET
def test_a_question_for_autocast_stays_with_the_branches_for_devices_below_it(target: str) -> None:
    source = program(
        "if torch.is_autocast_enabled():\n"
        '    if x.device.type == "cuda":\n        dtype = torch.get_autocast_gpu_dtype()\n'
        "    else:\n        raise NotImplementedError\n    return x.to(dtype)\nreturn x"
    )
    assert "torch.is_autocast_enabled()" in ported(source, target).text
    plain = program("if torch.is_autocast_enabled():\n    return x.half()\nreturn x")
    assert "torch.is_autocast_enabled()" not in ported(plain, target).text


@pytest.mark.parametrize(
    "code", ["from transformers import Trainer, TrainingArguments", "accelerator = Accelerator()",
             "import lightning as L", "from pytorch_lightning import Trainer"]
)  # fmt: skip
def test_trainers_of_other_libraries_may_turn_on_the_autocast_of_the_cpu(code: str) -> None:
    assert survey(f"{code}\n".encode()).autocasts_on_host
    assert not survey(b"from trainer import Trainer\nclass Accelerator(Base):\n    pass\n").autocasts_on_host


# -- devices under other names ---------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'kind = x.device.type\nif kind == "cuda":\n    return 1',
        'kind, _, index = str(x.device).partition(":")\nif kind == "cuda":\n    return 1',
        'kind = str(x.device).split(":")[0]\nreturn 1 if kind == "cuda" else 2',
        'def of(a):\n    return a.device.type\nreturn of(x) == "cuda"',
        'def of(a):\n    return a.device.type\nkind = of(x)\nreturn kind != "cuda"',
        'return x.device.type in ("cuda", "mps")',
        'return str(x.device) in ["cuda:0", "cuda:1"]',
    ],
)
def test_a_device_under_another_name_is_compared_as_one(body: str, target: str) -> None:
    found = check(program(body), target)
    assert "device-comparison" in {site.rule for site in found.sites if site.status is not Status.EXEMPT}


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'mode = "cuda" if flag else "slow"\nreturn mode == "cuda"',
        'def of(a):\n    return a.name\nreturn of(x) == "cuda"',
        'kind = model.kind\nreturn kind == "cuda"',
        'kind, rest = model.split(":")\nreturn kind == "cuda"',
    ],
)
def test_a_text_that_is_no_device_is_compared_as_text(body: str, target: str) -> None:
    assert ported(program(body), target).text == program(body)


# -- what a file shows of its objects --------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    ("body", "is_shown"),
    [
        ("x = torch.from_numpy(x)\nreturn x.cuda()", True),
        ("x = torch.from_numpy(x)\nif flag:\n    x = x.cuda()\nreturn x", True),
        ("x = torch.autograd.Variable(x)\nreturn x.view(1, 9).cuda()", True),
        ("for i in range(2):\n    x = torch.ones(1)\n    x = x.cuda()\nreturn x", True),
        ("x = torch.ones(1)\nx = model(x)\nreturn x.cuda()", False),
        ("x = torch.ones(1)\nif flag:\n    x = model(x)\nreturn x.cuda()", False),
        ("x = torch.ones(1)\nfor i in range(2):\n    x.cuda()\n    x = model(x)", False),
        ("x = torch.ones(1)\nreturn lambda: x.cuda()", False),
    ],
)
def test_the_last_assignment_shows_what_a_name_holds(body: str, is_shown: bool, target: str) -> None:
    assert ("x.cuda()" not in ported(program(body), target).text.replace("9).cuda", "9)x.cuda")) == is_shown


@EACH_TARGET
@pytest.mark.parametrize(
    ("moved", "is_module"),
    [("Net()", True), ("Own()", False), ("Other()", False), ("self.net", True), ("self.given", False)],
)
def test_a_module_of_another_file_or_attribute_moves_as_one(moved: str, is_module: bool, target: str) -> None:
    nets = survey(b"class Base(nn.Module):\n    pass\n\n\nclass Net(Base):\n    pass\n", Path("nets.py"))
    own = survey(b"class Own(nn.Module):\n    def cuda(self):\n        return self\n", Path("own.py"))
    source = (
        "import torch\nfrom nets import Net\nfrom own import Own\nfrom elsewhere import Net as Other\n\n\n"
        "class A:\n    def __init__(self):\n        self.net = torch.nn.Linear(1, 1)\n        self.given = None\n\n"
        "    def go(self, given):\n        self.given = given\n"
        f"        yield {moved}.cuda()\n"
    )
    assert (f" {moved}.cuda()" not in ported(source, target, joined([nets, own])).text) == is_module


# -- what is reported ------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "code",
    [
        "import quant_cuda\n\n\ndef f(x):\n    return quant_cuda.matmul(x)\n",
        "from lib import ops_cuda as ops\n\n\ndef f(x):\n    return ops.forward(x)\n",
        "from torch.utils.cpp_extension import CUDAExtension\n\next = CUDAExtension('a', ['a.cpp', 'a.cu'])\n",
        "from torch.utils import cpp_extension\n\next = cpp_extension.load(name='a', sources=['a.cu'])\n",
        "from torch.utils.cpp_extension import load_inline\n\next = load_inline('a', '', cuda_sources=text)\n",
        "from torch_geometric.nn import DataParallel\n\n\ndef f(m):\n    return DataParallel(m)\n",
    ],
)
def test_what_needs_cuda_and_has_no_edit_counts_as_left(code: str, target: str) -> None:
    found = ported(f"import torch\n{code}", target)
    assert [site.status for site in found.sites] == [Status.LEFT]


@EACH_TARGET
def test_a_reason_does_not_name_its_own_line(target: str) -> None:
    source = program('if device.type == "cuda" and torch.cuda.is_available():\n    return 1')
    line = source[: source.index("is_available")].count("\n") + 1
    found = ported(source, target)
    assert found.sites
    assert all(f"line {line}" not in site.reason for site in found.sites)


@EACH_TARGET
def test_an_autocast_behind_a_test_of_cuda_is_none_of_the_cpu(target: str) -> None:
    text = 'with torch.autocast(device.type) if device.type == "cuda" else torch.no_grad():\n    pass\n'
    assert not survey(text.encode()).autocasts_on_host
    assert survey(text.replace("cuda", "cpu").encode()).autocasts_on_host
