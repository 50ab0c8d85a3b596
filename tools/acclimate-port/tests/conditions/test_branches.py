"""Branches: the host keeps the one that a program has for it, and what only CUDA's own code can do stays."""

import json
import textwrap
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.files.workers import port_file
from porting import EACH_TARGET

TYPE = "get_accelerator().device_name()"


def ported(source: str, target: str = "acclimate") -> str:
    return port_text(textwrap.dedent(source), Settings(target, unsafe=True)).text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'if x.device.type == "cuda" and ok:\n    a()\nelif x.device.type == "cpu":\n    b()\n',
            f'x.device.type == {TYPE} and {TYPE} != "cpu" and ok',
        ),
        (
            'if "cuda" in device:\n    a()\nelif device == "mps":\n    c()\nelif device in ("cpu", "meta"):\n    b()\n',
            f'{TYPE} in device and {TYPE} not in ("cpu", "mps")',
        ),
        (
            'y = 1 if device == "cuda" else 2 if device == "cpu" else 3\n',
            f'1 if (device == {TYPE} and {TYPE} != "cpu") else 2',
        ),
        (
            'def f(device):\n    if device == "cuda":\n        return 1\n    if device == "cpu":\n        return 2\n',
            f'device == {TYPE} and {TYPE} != "cpu"',
        ),
        (
            'match device.type:\n    case "cuda":\n        a()\n    case "cpu":\n        b()\n',
            f'case _ if device.type == {TYPE} and {TYPE} != "cpu"',
        ),
        ("if x.is_cuda:\n    a()\nelif x.is_cpu:\n    b()\n", '(x.device.type != "cpu")'),
    ],
)
def test_a_branch_for_the_host_is_still_the_one_that_a_host_takes(source: str, expected: str) -> None:
    assert expected in ported(f"import torch\n\n{source}")


@pytest.mark.parametrize(
    "source",
    [
        'if device == "cuda":\n    a()\nelse:\n    b()\n',
        'if device == "cuda":\n    model.half()\n',
        'if device == "cuda":\n    a()\nif device == "cpu":\n    b()\n',
        'if device == "cuda":\n    a()\nelif device != "cpu":\n    b()\n',
        'fused = device == "cuda"\n',
    ],
)
def test_a_test_is_false_on_a_host_though_no_branch_names_it(source: str) -> None:
    assert f'device == {TYPE} and {TYPE} != "cpu"' in ported(f"import torch\n\n{source}")


@pytest.mark.parametrize(
    "source",
    [
        'assert device == "cuda"\n',
        'if device == "cuda":\n    model.half()\nelse:\n    raise ValueError(device)\n',
    ],
)
def test_a_test_may_be_true_on_a_host_where_the_program_would_refuse_it(source: str) -> None:
    text = ported(f"import torch\n\n{source}")
    assert f"device == {TYPE}" in text
    assert '"cpu"' not in text


@pytest.mark.parametrize(
    ("otherwise", "asks"),
    [("float16", f'{TYPE} != "cpu" and'), ("float32", f'{TYPE} != "cpu" and')],
)
def test_bfloat16_is_not_asked_of_a_host_that_was_not_asked_before(otherwise: str, asks: str) -> None:
    question = "torch.cuda.is_available() and torch.cuda.is_bf16_supported()"
    text = ported(f"import torch\n\ndtype = 'bfloat16' if {question} else '{otherwise}'\n")
    supported = "get_accelerator().is_bf16_supported(including_emulation=True)"
    assert f"'bfloat16' if {asks} {supported} else" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'if device.type == "cuda":\n    half()\nelif device.type == "mps":\n    warn()\n',
            f'device.type == {TYPE} and {TYPE} not in ("cpu", "mps")',
        ),
        (
            "if torch.cuda.is_available():\n    half()\nelif torch.backends.mps.is_available():\n    warn()\n",
            f'if {TYPE} not in ("cpu", "mps"):',
        ),
        (
            'half = device.type in ("cuda", "xpu")\n',
            f'half = device.type in ({TYPE}, "xpu") and {TYPE} != "cpu"',
        ),
        (
            'half = device.type not in ("cuda", "xpu")\n',
            f'half = not (device.type in ({TYPE}, "xpu") and {TYPE} != "cpu")',
        ),
        ('half = device.startswith("cuda")\n', f'half = device.startswith({TYPE}) and {TYPE} != "cpu"'),
        ('if device != "cuda":\n    skip()\n', f'if not (device == {TYPE} and {TYPE} != "cpu"):'),
    ],
)
def test_a_test_stays_false_on_devices_that_have_a_way_of_their_own(source: str, expected: str) -> None:
    assert expected in ported(f"import torch\n\n{source}")


@EACH_TARGET
def test_a_branch_that_calls_a_native_module_stays_with_its_test(target: str) -> None:
    source = """\
        import torch
        from boxes import _C


        def encode(x: torch.Tensor):
            if x.is_cuda:
                return _C.encode(x)
            return slow(x)
        """
    assert ported(source, target) == textwrap.dedent(source)


def test_a_name_that_is_no_backend_is_not_compared_with_one() -> None:
    source = "if alg == 'nccl':\n    import torch\n    reduce()\n"
    result = port_text(source, Settings(unsafe=True))
    assert result.text == source
    assert [site.status for site in result.sites] == [Status.LEFT]
    for compared in ("args.dist_backend", "torch.distributed.get_backend()", 'options["backend"]'):
        assert "'nccl'" not in ported(f"import torch\n\nif {compared} == 'nccl':\n    run()\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import helion\n\nok = x.is_cuda\n", 'ok = (x.device.type != "cpu")'),
        ("import triton\n\nok = x.is_cuda and y.is_cuda\n", 'ok = (x.device.type != "cpu") and (y.device'),
        (
            'from flash_attn import f\n\nok = x.device.type == "cuda"\n',
            f'x.device.type == {TYPE} and {TYPE} != "cpu"',
        ),
        ('from .ops import scan_kernel\n\nok = device == "cuda"\n', f'device == {TYPE} and {TYPE} != "cpu"'),
        (
            'pin = device == "cuda"\nbuffer = torch.empty(1, pin_memory=pin)\n',
            f'device == {TYPE} and {TYPE} != "cpu"',
        ),
        ('use_cuda = "cuda" in device\nmodel.convert(use_cuda)\n', f'{TYPE} in device and {TYPE} != "cpu"'),
        ('loader = load(pin_memory=device.type == "cuda")\n', f'device.type == {TYPE} and {TYPE} != "cpu"'),
        ("chosen = self.gpu_config if q.is_cuda else self.cpu_config\n", '(q.device.type != "cpu") else'),
        (
            'if device == "cuda":\n    a()\nelse:\n    filter_cpu(x)\n',
            f'if device == {TYPE} and {TYPE} != "cpu":',
        ),
    ],
)
def test_a_test_for_kernels_or_pinned_memory_is_false_on_a_host(source: str, expected: str) -> None:
    assert expected in ported(f"import torch\n\n{source}")


def test_what_is_compared_with_a_text_that_stays_stays() -> None:
    source = """\
        def test_arguments():
            args = parse(["run", "--model_args", "pretrained=gpt2,device=cuda"])
            assert args.model_args == {"pretrained": "gpt2", "device": "cuda"}
            assert args.device == "cuda"


        def test_file(path):
            path.write_text("device: cuda:1")
            assert read(path).device == "cuda:1"
        """
    assert ported(source) == textwrap.dedent(source)
    assert "cuda" not in ported('def f(x):\n    return x.device == "cuda"\n')


@EACH_TARGET
def test_a_process_group_is_bound_to_no_device_where_ranks_talk_through_gloo(target: str) -> None:
    text = ported(
        "import torch.distributed as dist\n\n\ndef f(d):\n    dist.init_process_group(device_id=d)\n", target
    )
    kind = TYPE if target == "acclimate" else "accelerator_type()"
    assert f'device_id=d if {kind} not in ("cpu", "mps") else None' in text
    assert port_text(text, Settings(target, unsafe=True)).text == text


def test_a_shell_command_of_several_lines_in_a_notebook_stays(tmp_path: Path) -> None:
    source = "if True:\n  !run \\\n    --device cuda:0 \\\n  --more\nx.to('cuda')\n"
    cells = [{"cell_type": "code", "source": source}]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    result = port_file(path, Settings())
    assert not result.failure
    after = json.loads(result.after)["cells"][0]["source"]
    assert source.partition("x.to")[0] in after
    assert "x.to('cuda')" not in after


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if not x.is_cuda:\n    return_slow(x)\n", 'if not (x.device.type != "cpu"):'),
        ("if w.device.type != 'cuda':\n    force_fp32 = True\n", "if w.device.type == 'cpu':"),
        (
            'if "cuda" not in device:\n    steps = 1\nelse:\n    steps = 2\n',
            f'if not ({TYPE} in device and {TYPE} != "cpu"):',
        ),
        ('if device != "cuda":\n    raise ValueError(device)\n', f"if device != {TYPE}:"),
        ("if not x.is_cuda:\n    raise ValueError(x)\n", "if not get_accelerator().on_accelerator(x):"),
    ],
)
def test_code_for_a_host_behind_a_negated_test_still_runs_there(source: str, expected: str) -> None:
    assert expected in ported(f"import torch\n\n{source}")


@EACH_TARGET
def test_every_part_of_a_test_for_cudas_own_function_stays(target: str) -> None:
    source = "import torch\n\nif x.is_cuda and (bias is None or bias.is_cuda):\n    dense_cuda(x, bias)\n"
    assert ported(source, target) == source


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n\ngpus = os.environ.get('CUDA_VISIBLE_DEVICES')\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n",
        "import torch\n\nn = os.getenv('CUDA_VISIBLE_DEVICES')\nrun(env={'CUDA_VISIBLE_DEVICES': '1'})\n",
        "import cudf\n\ngpus = os.environ['CUDA_VISIBLE_DEVICES']\n",
    ],
)
def test_a_variable_that_the_file_sets_too_is_still_the_one_that_it_reads(source: str) -> None:
    source = f"import os\n{source}"
    assert ported(source) == source


@EACH_TARGET
@pytest.mark.parametrize("given", ["0", "rank", "torch.cuda.current_device()", "torch.device('cpu')", ""])
def test_a_storage_is_moved_by_keyword(target: str, given: str) -> None:
    source = (
        f"import torch\n\n\ndef f(p, rank):\n    torch.load(p, map_location=lambda s, _: s.cuda({given}))\n"
    )
    text = ported(source, target)
    assert "lambda s, _: s.to(device=" in text
    assert port_text(text, Settings(target, unsafe=True)).text == text
