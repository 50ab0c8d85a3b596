"""Code that is compiled, or that launches CUDA's own kernels: what cannot work elsewhere stays as it is."""

import textwrap
import types
import warnings

import libcst as cst
import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.source.torchscript import TorchScript
from acclimate_port.source.tree import Tree
from porting import EACH_TARGET

TYPE = "get_accelerator().device_name()"


def ported(source: str, target: str = "acclimate") -> str:
    return port_text(textwrap.dedent(source), Settings(target, unsafe=True)).text


SCRIPTED = [
    "@torch.jit.script\ndef f(x):\n    return x.cuda()\n",
    "from torch.jit import script as s\n\n\n@s\ndef f(x):\n    return x.cuda()\n",
    "from torch import jit\n\n\n@jit.script_if_tracing\ndef f(x):\n    return x.cuda()\n",
    "compiled = torch.jit.script if fast else None\n\n\n@torch.jit.script\ndef f(x):\n    return x.cuda()\n",
    "def maybe(f):\n    return torch.jit.script(f) if on else f\n\n\n@maybe\ndef f(x):\n    return x.cuda()\n",
    "try:\n    fuse = torch.jit.script\nexcept Exception:\n    fuse = same\n\n\n@fuse\ndef f(x):\n    return x.cuda()\n",
    "from megatron.core.jit import jit_fuser\n\n\n@jit_fuser\ndef f(x):\n    return x.cuda()\n",
    "def f(x):\n    return x.cuda()\n\n\ng = torch.jit.script(f)\n",
    "def f(x):\n    return x.cuda()\n\n\n@torch.jit.script\ndef g(x):\n    return f(x)\n",
    "class N(torch.nn.Module):\n    def forward(self, x):\n        torch.cuda.synchronize()\n        return x\n\n\nn = torch.jit.script(N(3))\n",
    "class N(torch.nn.Module):\n    def forward(self, x):\n        return self.step(x)\n\n"
    "    def step(self, x):\n        return x.cuda()\n\n\nn = N(3)\nn = torch.jit.script(n)\n",
    "class A(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n\n\nclass N(A):\n    pass\n\n\n"
    "def build():\n    return N()\n\n\nn = torch.jit.script(build())\n",
    "class A(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n\n\nclass N(torch.nn.Module):\n"
    "    def __init__(self):\n        self.a = A()\n\n\nn = torch.jit.script(torch.nn.Sequential(N()))\n",
    "class T:\n    def __init__(self):\n        self.model = Net()\n        self.model = torch.jit.script(self.model)\n\n\n"
    "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n",
    "class N(torch.jit.ScriptModule):\n    @torch.jit.script_method\n    def forward(self, x):\n        return x.cuda()\n",
    "class N(torch.nn.Module):\n    @torch.jit.export\n    def step(self, x):\n        return x.cuda()\n",
    "@torch.jit.script\nclass Box:\n    def __init__(self, x):\n        self.x = x.cuda()\n",
    "def f(x):\n    if torch.jit.is_scripting():\n        x = x.cuda()\n    return x\n",
]


@EACH_TARGET
@pytest.mark.parametrize("source", SCRIPTED)
def test_what_torchscript_compiles_gets_no_call_that_it_does_not_know(source: str, target: str) -> None:
    source = f"import torch\n\n{source}"
    result = port_text(source, Settings(target, unsafe=True))
    assert result.text == source
    assert "TorchScript" in [site.reason.split()[0] for site in result.sites if site.status is Status.LEFT]


@pytest.mark.parametrize(
    "source",
    [
        "class N(torch.nn.Module):\n    def __init__(self):\n        self.x = torch.ones(1).cuda()\n\n\n"
        "n = torch.jit.script(N())\n",
        "class N(torch.nn.Module):\n    @torch.jit.ignore\n    def load(self, x):\n        return x.cuda()\n",
        "@torch.jit.script\ndef f(x, device: str = 'cuda'):\n    return x.to(device)\n",
        "def f(x):\n    if not torch.jit.is_scripting():\n        x = x.cuda()\n    return x\n",
        "def f(x):\n    return x.cuda()\n\n\ng = torch.jit.trace(f, x)\n",
    ],
)
def test_what_python_runs_beside_compiled_code_is_ported(source: str) -> None:
    assert "cuda" not in ported(f"import torch\n\n{source}")


def test_a_test_of_the_device_in_compiled_code_still_compiles() -> None:
    torch = pytest.importorskip("torch")
    source = """\
        from typing import Optional
        import torch


        def fast(x: torch.Tensor, device: torch.device) -> bool:
            return x.is_cuda and device.type == "cuda"


        def beside(x: torch.Tensor):
            assert x.is_cuda


        compiled = torch.jit.script(fast)
        """
    text = ported(source)
    assert "cuda" not in text
    assert "on_accelerator(x)" in text.partition("def beside")[2]
    module = types.ModuleType("ported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The compiler reads the source of a function from its file.
        import linecache

        linecache.cache["<ported>"] = (len(text), None, text.splitlines(keepends=True), "<ported>")
        exec(compile(text, "<ported>", "exec"), module.__dict__)
    assert module.compiled(torch.ones(1), torch.device("cpu")) is False


KERNELS = [
    "from boxes import _C as C\n\n\ndef f(x, y):\n    fast = x.is_cuda and y.is_cuda\n    if fast:\n        C.boxes(x)\n",
    "from . import _C\n\n\nclass A:\n    def f(self, x):\n        self.fast = x.is_cuda\n\n"
    "    def g(self, x):\n        return _C.boxes(x) if self.fast else x\n",
    "import boxes_cuda as ext\n\n\ndef f(x):\n    if not x.is_cuda:\n        return slow(x)\n    return ext.forward(x)\n",
    "from apex.norm import Norm\n\n\ndef f(x):\n    if not x.is_cuda:\n        return slow(x)\n    return Norm.apply(x)\n",
    "try:\n    from flash_attn import attend\nexcept ImportError:\n    attend = None\n\n\n"
    "def f(q, k):\n    assert all(t.is_cuda for t in (q, k))\n    return attend(q, k)\n",
    "import importlib\n\n\nclass A:\n    def __init__(self):\n        global norm\n"
    "        norm = importlib.import_module('norm_cuda')\n\n"
    "    def f(self, x):\n        if x.device.type != 'cuda':\n            return slow(x)\n        return norm.apply(x)\n",
    "from apex.norm import Norm\n\n\nclass A:\n    def __init__(self):\n        self.norm = Norm\n\n"
    "    def f(self, x):\n        if not x.is_cuda:\n            return slow(x)\n        return self.norm.apply(x)\n",
    "from boxes import _C\n\n\nclass F:\n    def forward(x):\n        return _C.f(x)\n\n\ndef inner(x):\n"
    "    return F.apply(x)\n\n\ndef f(x):\n    if not x.is_cuda:\n        return x\n    else:\n        return inner(x)\n",
    "from boxes import _C\n\n\ndef can(x):\n    return x.is_cuda\n\n\ndef f(x):\n    if can(x):\n        _C.f(x)\n",
    "from boxes import _C\n\n\nclass A:\n    def can(self, x):\n        return x.is_cuda\n\n"
    "    def f(self, x):\n        if not self.can(x):\n            return x\n        return _C.f(x)\n",
    "from boxes import _C\n\n\ndef f(x):\n    if (fast := x.is_cuda) and ok:\n        pass\n    if fast:\n        _C.f(x)\n",
    "from boxes import _C\n\n\ndef f(x):\n    n, fast = x.shape, x.is_cuda\n    return _C.f(x) if fast else x\n",
    "import fused_dense_lib\n\n\nclass F:\n    def forward(x):\n        return fused_dense_lib.f(x)\n\n\ng = F.apply\n\n\n"
    "def f(x):\n    assert x.is_cuda\n    return g(x)\n",
    "def fits(x):\n    if not on:\n        return False\n    if x.device.type != 'cuda':\n        return False\n    return True\n\n\n"
    "def f(x):\n    if fits(x):\n        return torch._C._jit_get_operation('aten::cudnn_convolution')(x)\n    return slow(x)\n",
    "def fits(x):\n    if x.is_cuda:\n        return True\n    return False\n\n\n"
    "def f(x):\n    return torch.ops.mine.scan_cuda(x) if fits(x) else x\n",
    "import cutlass\n\n\ndef check(x):\n    assert x.is_cuda, 'CUDA only'\n",
    "import cutlass.cute as cute\n\n\ndef check(x):\n    if x.device.type != 'cuda':\n        raise ValueError(x)\n",
]


@EACH_TARGET
@pytest.mark.parametrize("source", KERNELS)
def test_a_test_that_leads_to_cudas_own_kernels_stays(source: str, target: str) -> None:
    source = f"import torch\n\n{source}"
    assert ported(source, target) == source


@pytest.mark.parametrize(
    "source",
    [
        "from config import _C\n\n\ndef f(x):\n    if x.is_cuda:\n        _C.merge(x)\n",
        "from boxes import _C\n\n\ndef f(x):\n    if x.is_cuda:\n        a(x)\n    _C.f(x)\n",
        "from boxes import _C\n\n\ndef f(x):\n    if not x.is_cuda:\n        _C.f(x)\n",
    ],
)
def test_a_test_that_decides_about_no_kernel_is_ported(source: str) -> None:
    assert "is_cuda" not in ported(f"import torch\n\n{source}")


def test_a_hosts_settings_are_chosen_on_a_host_where_a_name_holds_the_answer() -> None:
    source = """\
        import torch


        def f(self, q):
            n, is_cuda, device = *q.shape, q.is_cuda, q.device
            return self.cuda_config if is_cuda else self.cpu_config
        """
    assert '(q.device.type != "cpu"), q.device' in ported(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('if d == torch.device("cuda"):\n    a()\n', f'd == torch.device({TYPE}) and {TYPE} != "cpu"'),
        ("ok = torch.device('cuda', i) == d\n", f"device_name(i)) == d and {TYPE} != 'cpu'"),
        ('ok = d == torch.device(f"cuda:{i}")\n', f'device_name(i)) and {TYPE} != "cpu"'),
        ('ok = d.type == torch.device("cuda").type\n', f'torch.device({TYPE}).type and {TYPE} != "cpu"'),
        ('if d != torch.device("cuda"):\n    a()\n', f"d != torch.device({TYPE}):"),
        (
            'b = {torch.device("cuda"): 1, torch.device("cpu"): 2}[d]\n',
            f'{{torch.device({TYPE}): 1, torch.device("cpu"): 2}}',
        ),
    ],
)
def test_a_comparison_with_a_device_is_false_on_a_host_and_unsafe(source: str, expected: str) -> None:
    source = f"import torch\n\n\ndef f(d, i):\n{textwrap.indent(source, '    ')}"
    assert expected in ported(source)
    assert port_text(source, Settings()).text == source
    twice = ported(ported(source))
    assert twice == ported(source)


@EACH_TARGET
def test_a_key_for_the_accelerator_does_not_replace_that_of_the_host(target: str) -> None:
    source = 'import torch\n\nb = {torch.device("cpu"): 1, torch.device("cuda"): 2}[d]\n'
    assert ported(source, target) == source


@pytest.mark.parametrize(
    "source",
    [
        "launch(torch.cuda.current_stream().cuda_stream)\n",
        "s = torch.cuda.current_stream()\nlaunch(s.cuda_stream)\n",
        "s = torch.cuda.Stream()\nlaunch(s.cuda_stream)\n",
    ],
)
def test_a_stream_whose_handle_is_asked_for_stays_cudas(source: str) -> None:
    source = f"import torch\n\n\ndef f():\n{textwrap.indent(source, '    ')}"
    assert ported(source) == source


def test_compilers_are_looked_for_once_in_each_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    may_be = Tree.may_be

    def counted(tree: Tree, node: cst.CSTNode) -> set[str]:
        nonlocal looks
        looks += 1
        return may_be(tree, node)

    monkeypatch.setattr(Tree, "may_be", counted)
    chain = "".join(f"x = layer{i}(x, y)\ny = norm{i}(y, x)\n" for i in range(30))
    tree = Tree(f"import torch\n\nscript = torch.jit.script\n{chain}x(y)\n")
    assert not TorchScript(tree).holds(tree.of_type(cst.Call)[-1])
    assert looks < 10 * len(tree.nodes)


@pytest.mark.parametrize("marks", [True, False])
def test_a_script_module_compiles_the_methods_alone_that_it_marks(marks: bool) -> None:
    mark = "    @torch.jit.script_method\n" if marks else ""
    source = (
        f"import torch\n\n\nclass Net(torch.jit.ScriptModule):\n{mark}    def step(self, x):\n        return x\n\n"
        "    def forward(self, x):\n        return self.step(x) + torch.ones(1, device='cuda')\n"
    )
    assert (port_text(source, Settings()).text != source) == marks
