"""Code that only looks hardware-specific, and edits that are made together or not at all."""

import textwrap

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET

TARGETS = ("acclimate", "torch")


def ported(source: str, target: str = "acclimate", unsafe: bool = True) -> str:
    return port_text(textwrap.dedent(source), Settings(target, unsafe=unsafe)).text


def stays(source: str) -> None:
    text = textwrap.dedent(source)
    for target in TARGETS:
        assert port_text(text, Settings(target, unsafe=True)).text == text


@pytest.mark.parametrize(
    "line",
    [
        'state = checkpoint["rng_state"]["cuda"]',
        'states = {"cuda": [], "cpu": None}',
        'model = build(impl="cuda")',
        'kernel = load_kernel("ops", "cuda")',
        "if args.cuda: pass",
        "use_cuda = True",
        'print("cuda")',
        'logger.info("running on cuda:%d", 3)',
        'patch("torch.cuda.is_available", return_value=True)',
        'fn = getattr(torch.cuda, "mem_" + name)',
        'ok = "cuda" in rng_state',
        'mode == "cuda"',
        "cuda = 1",
        "x = self.is_cuda",
        "args.is_cuda = False",
        'on_cuda = get_accelerator().device_name() == "cuda"',
    ],
)
def test_data_and_local_names_stay(line: str) -> None:
    stays(f"import torch\n\n{line}\n")


def test_docstrings_comments_and_messages_stay() -> None:
    stays('"""Needs torch.cuda."""\nimport torch\n# x.cuda() on "cuda"\nraise ValueError("cuda is needed")\n')


def test_a_name_of_torch_that_is_something_else_stays() -> None:
    stays("import mytorch as torch\n\ntorch.cuda.synchronize()\n")
    stays("from mine import autocast\n\nwith autocast():\n    run(device_ids=None)\n")


def test_a_name_bound_in_two_ways_is_left_and_reported() -> None:
    source = (
        "import os\n\nif os.name:\n    from torch.cuda.amp import autocast\nelse:\n    from mine import autocast\n\n"
        "with autocast():\n    pass\n"
    )
    for target in TARGETS:
        result = port_text(source, Settings(target, unsafe=True))
        assert result.text == source
        assert any("in one branch" in site.reason for site in result.sites)


def test_a_class_with_a_cuda_method_of_its_own_keeps_it_and_its_calls() -> None:
    stays(
        """
        import torch


        class Loader:
            def cuda(self):
                return self

            def use(self):
                return self.cuda()


        class Special(Loader):
            def use(self):
                return super().cuda()


        loader = Special()
        loader.cuda()
        """
    )


def test_kernels_and_builds_of_extensions_stay() -> None:
    stays(
        """
        import torch
        import triton
        from torch.utils.cpp_extension import load

        ops = load(name="ops", sources=["a.cu"], device="cuda")


        @triton.jit
        def kernel(x, device="cuda"):
            pass
        """
    )
    text = 'from setuptools import setup\nimport torch\n\nsetup(name="x", gpu=torch.cuda.is_available())\n'
    assert port_text(text, Settings(unsafe=True), is_build_script=True).text == text


def test_current_device_is_a_number_where_it_is_used_as_one() -> None:
    source = """
        import torch


        def f(x, model):
            i = torch.cuda.current_device()
            name = f"gpu {i}"
            device = torch.device("cuda", torch.cuda.current_device())
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            return x.to(device), name, total
        """
    text = ported(source)
    assert "i = acc.current_device()" in text
    assert "torch.device(acc.device_name(acc.current_device()))" in text
    assert "get_device_properties(acc.current_device())" in text


def test_current_device_is_a_device_where_each_use_is_one() -> None:
    source = """
        import torch


        class Model:
            def __init__(self):
                self.where = torch.cuda.current_device()

            def forward(self, x):
                return x.to(self.where), torch.zeros(1, device=self.where)
        """
    assert "self.where = get_accelerator().current_device_name()" in ported(source)
    assert "self.where = accelerator_type()" in ported(source, "torch")


def test_a_branch_and_what_is_in_it_change_together_or_not_at_all() -> None:
    source = """
        import torch


        def f(x, device):
            if device.type == "cuda":
                x = x.pin_memory(){comment}
            return x
        """
    kept = source.format(comment="  # acclimate: ignore[pin-memory]")
    assert ported(kept) == textwrap.dedent(kept)
    kept = source.replace('"cuda":', '"cuda":  # acclimate: ignore').format(comment="")
    assert ported(kept) == textwrap.dedent(kept)
    assert "get_accelerator().pin_memory(x)" in ported(source.format(comment=""))


def test_a_branch_stays_when_something_in_it_cannot_be_ported() -> None:
    source = "import torch\n\nif torch.cuda.is_available():\n    torch.cuda.cudart()\n"
    result = port_text(source, Settings(unsafe=True))
    assert result.text == source
    assert "line 4" in next(site.reason for site in result.sites if site.line == 3)


def test_a_branch_is_as_unsafe_as_what_is_in_it() -> None:
    source = (
        "import torch\n\n\ndef f(x):\n    if torch.cuda.is_available():\n        x = x.cuda()\n    return x\n"
    )
    assert ported(source, unsafe=False) == source
    result = port_text(source, Settings())
    assert {site.status for site in result.sites} == {Status.UNSAFE}
    assert 'get_accelerator().device_name() != "cpu"' in ported(source)


def test_a_line_with_ignore_stays_whatever_the_form() -> None:
    for comment in (
        "# acclimate: ignore",
        "# acclimate: ignore[ACC101]",
        "# acclimate: ignore[runtime-call, x]",
    ):
        stays(f"import torch\n\ntorch.cuda.synchronize()  {comment}\n")
    assert "get_accelerator" in ported(
        "import torch\n\ntorch.cuda.synchronize()  # acclimate: ignore[ACC201]\n"
    )


def test_selected_rules_alone_are_applied() -> None:
    source = 'import torch\n\n\ndef f(x):\n    torch.cuda.synchronize()\n    return x.to("cuda")\n'
    only = port_text(source, Settings(select=frozenset({"ACC1"}))).text
    assert 'x.to("cuda")' in only
    assert "get_accelerator().synchronize()" in only
    without = port_text(source, Settings(ignore=frozenset({"runtime-call"}))).text
    assert "torch.cuda.synchronize()" in without
    assert "device_name()" in without


def test_get_accelerator_of_deepspeed_is_kept() -> None:
    source = (
        "import torch\nfrom deepspeed.accelerator import get_accelerator\n\ntorch.cuda.synchronize()\n"
        "torch.cuda.get_device_name()\n"
    )
    result = port_text(source, Settings(unsafe=True))
    assert "acclimate" not in result.text
    assert "get_accelerator().synchronize()" in result.text
    assert "torch.cuda.get_device_name()" in result.text
    assert any("DeepSpeed's accelerator has no get_device_name" in site.reason for site in result.sites)


def test_another_get_accelerator_is_not_taken_for_ours() -> None:
    text = ported("import torch\nfrom mine import get_accelerator\n\ntorch.cuda.synchronize()\n")
    assert "from acclimate import get_accelerator as current_accelerator" in text
    assert "current_accelerator().synchronize()" in text


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("import os\n\nimport torch\n", "import os\n\nimport torch\nfrom acclimate import get_accelerator\n"),
        (
            "import torch\nfrom torch import nn\n",
            "import torch\nfrom acclimate import get_accelerator\nfrom torch import nn\n",
        ),
        (
            '"""Doc."""\nfrom __future__ import annotations\nimport torch\n',
            '"""Doc."""\nfrom __future__ import annotations\nimport torch\nfrom acclimate import get_accelerator\n',
        ),
        (
            "import torch\n\nfrom . import mine\n",
            "import torch\nfrom acclimate import get_accelerator\n\nfrom . import mine\n",
        ),
    ],
)
def test_the_import_goes_where_the_file_has_its_like(head: str, expected: str) -> None:
    assert ported(f"{head}\n\ntorch.cuda.synchronize()\n").startswith(expected)


def test_a_helper_is_defined_before_what_runs_at_import() -> None:
    source = 'import torch\n\nx = torch.zeros(1, device="cuda")\n\nimport os\n\n\nclass A:\n    d = torch.device("cuda")\n'
    text = ported(source, "torch")
    assert text.index("def accelerator_type") < text.index("x = torch.zeros")


def test_strings_within_fstrings_keep_the_file_valid_on_every_python() -> None:
    source = (
        'import torch\n\n\ndef f(x, d):\n    return f\'{x.to("cuda:0")} {d.type == "cuda"} {x.is_cuda}\'\n'
    )
    for target in TARGETS:
        inner = ported(source, target).split("f'", 1)[1].rsplit("'", 1)[0]
        assert "'" not in inner


@EACH_TARGET
def test_line_ends_tabs_and_trailing_space_stay(target: str) -> None:
    source = "import torch\r\n\r\n\r\ndef f(x):  \r\n\ttorch.cuda.synchronize()\t# wait\r\n\treturn x\r\n"
    text = port_text(source, Settings(target)).text
    assert text.count("\n") == text.count("\r\n")
    assert "\t# wait\r\n\treturn x\r\n" in text
    assert "def f(x):  \r\n" in text


def test_device_ids_are_none_on_a_host() -> None:
    source = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n"
        "m = DDP(net, device_ids=[rank], output_device=rank)\n"
    )
    assert ported(source).count('if get_accelerator().device_name() != "cpu" else None') == 2
    assert ported(source, "torch").count("if torch.accelerator.is_available() else None") == 2


def test_the_torch_target_says_what_torch_lacks_and_acclimate_has() -> None:
    source = "import torch\n\ng = torch.cuda.CUDAGraph()\n"
    reasons = [site.reason for site in port_text(source, Settings("torch", unsafe=True)).sites]
    assert reasons == ["torch has no graph for every device; acclimate has one (--to acclimate)"]


def test_what_stands_behind_a_test_of_the_device_in_an_and_goes_together_with_it() -> None:
    # On another accelerator the first half would be true, and the second would raise.
    stays(
        "import torch\n\n\ndef f():\n    return torch.cuda.is_available() and torch.cuda.nccl.version() >= (2, 10)\n"
    )
    both = "import torch\n\n\ndef f():\n    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()\n"
    assert "torch.cuda" not in ported(both)


def test_a_default_and_what_it_is_compared_with_are_the_same_backend() -> None:
    source = "import torch\n\n\ndef f(args):\n    return getattr(args, 'sync_backend', 'nccl') == 'nccl'\n"
    assert ported(source).count("communication_backend_name()") == 3
    stays("import torch\n\n\ndef f(args):\n    return getattr(args.nccl, 'nccl')\n")


@EACH_TARGET
def test_pinning_is_asked_for_once_and_a_data_loader_keeps_its_own(target: str) -> None:
    source = """
        import torch


        def f(data, x):
            a = torch.empty(3, dtype=torch.int8,).pin_memory()
            if torch.accelerator.is_available():
                b = torch.zeros(3, pin_memory=True)
            return torch.utils.data.DataLoader(data, pin_memory=True), torch.ones(1, pin_memory=False), x.get().pin_memory()
        """
    text = ported(source, target)
    assert "DataLoader(data, pin_memory=True), torch.ones(1, pin_memory=False)" in text
    assert "b = torch.zeros(3, pin_memory=True)" in text
    if target == "torch":
        assert "torch.empty(3, dtype=torch.int8, pin_memory=torch.accelerator.is_available(),)" in text
        assert "x.get().pin_memory()" in text


def test_a_variable_that_is_set_or_compared_stays() -> None:
    stays(
        "import os\n\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', '1')\n"
    )
    stays(
        "import os\n\nos.environ.pop('CUDA_VISIBLE_DEVICES', None)\ndel os.environ['CUDA_VISIBLE_DEVICES']\n"
    )
    text = ported("import os\n\nimport torch\n\n\ndef f():\n    return os.environ['CUDA_VISIBLE_DEVICES']\n")
    assert "os.environ[get_accelerator().visible_devices_variable or 'CUDA_VISIBLE_DEVICES']" in text


def test_a_case_keeps_its_guard_and_an_alternative_stays() -> None:
    source = (
        "import torch\n\n\ndef f(device, fast):\n    match device.type:\n        case 'cuda' if fast or slow:\n"
        "            return 1\n        case 'cuda' | 'xpu':\n            return 2\n"
    )
    text = ported(source)
    name = "get_accelerator().device_name()"
    assert f"case _ if device.type == {name} and {name} not in ('cpu', 'xpu') and (fast or slow):" in text
    assert "case 'cuda' | 'xpu':" in text
    stays("def f(mode):\n    match mode:\n        case 'cuda':\n            return 1\n")


def test_a_branch_that_calls_a_function_of_cudas_own_stays_with_its_test() -> None:
    # On a host the branch was not taken, and the reference implementation ran; it must not build CUDA's now.
    stays(
        """
        import torch


        def bias(x, impl="cuda"):
            if impl == "cuda" and x.device.type == "cuda" and init():
                return _bias_cuda(x)
            return bias_reference(x)


        def scan(x: torch.Tensor):
            return scan_cuda_forward(x) if x.is_cuda else reference(x)
        """
    )


def test_the_device_that_an_operator_is_written_for_stays() -> None:
    stays(
        'import torch\n\n\n@torch.library.custom_op("a::b", mutates_args=(), device_types="cuda")\ndef b(x): ...\n'
    )


def test_a_branch_whose_function_here_calls_cudas_own_stays_too() -> None:
    stays(
        """
        import torch
        import fused_cuda


        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return fused_cuda.linear(x)


        def dense(x: torch.Tensor):
            if x.is_cuda:
                return Fused.apply(x)
            return torch.nn.functional.linear(x, x)
        """
    )


def test_a_function_that_only_moves_is_not_taken_for_cudas_own() -> None:
    source = """
        import torch


        def move_to_cuda(x: torch.Tensor):
            return x.cuda()


        def f(x):
            if torch.cuda.is_available():
                x = move_to_cuda(x)
            return x
        """
    assert 'get_accelerator().device_name() != "cpu"' in ported(source)
    assert "cuda()" not in ported(source)


@pytest.mark.parametrize(
    "line",
    [
        'torch.load(p, map_location=None if torch.cuda.is_available() else "cpu")',
        'torch.load(p, map_location=torch.device("cpu") if not torch.cuda.is_available() else None)',
    ],
)
def test_a_checkpoint_still_goes_to_the_host_where_there_is_only_a_host(line: str) -> None:
    # `get_accelerator().is_available()` is true on a host, and `None` is where the checkpoint's tensors were.
    text = ported(f"import torch\n\n\ndef f(p):\n    return {line}\n")
    assert 'None if get_accelerator().device_name() == "cuda" else ' in text
    assert "is_available" not in text


def test_a_device_that_partial_keeps_for_torch_is_ported() -> None:
    source = 'from functools import partial\nimport torch\n\n\ndef f(on):\n    return partial(torch.autocast, "cuda")\n'
    assert "partial(torch.autocast, get_accelerator().device_name())" in ported(source)
    stays('from functools import partial\nimport torch\n\nf = partial(build, "cuda")\n')


@EACH_TARGET
def test_batch_norm_is_synchronised_only_where_it_can_be(target: str) -> None:
    source = "from torch.nn import SyncBatchNorm\n\n\ndef f(self, group):\n    self.m = SyncBatchNorm.convert_sync_batchnorm({}, group)\n"
    once = ported(source.format("self.m"), target)
    assert " else self.m)" in once
    assert ported(once, target) == once
    stays("import mine\n\nm = mine.convert_sync_batchnorm(m)\n")


def test_a_tensor_in_parentheses_that_is_pinned_stays_python() -> None:
    source = "import torch\n\n\ndef f():\n    return (torch.ones(3)).pin_memory()\n"
    assert port_text(source, Settings("torch")).text == source
