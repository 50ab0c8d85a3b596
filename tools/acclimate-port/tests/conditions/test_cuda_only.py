"""What a program asks of the device keeps its meaning on CUDA, and stays false on a host where a GPU is meant."""

import textwrap
from typing import Any

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, ported_once_for_all

TARGETS = ("acclimate", "torch")
IMPORTS = "import warnings\n\nimport torch\nimport torch.distributed as dist\n"


def ported(source: str, target: str = "acclimate") -> str:
    return ported_once_for_all(IMPORTS + textwrap.dedent(source), target)


def body(lines: str, target: str = "acclimate") -> str:
    return ported("def f(x: torch.Tensor, device, args):\n" + textwrap.indent(lines, "    ") + "\n", target)


def stays(lines: str) -> None:
    for target in TARGETS:
        assert textwrap.indent(lines, "    ") in body(lines, target)


@pytest.mark.parametrize(
    "lines",
    [
        'print("CUDA: " , str(not torch.cuda.is_available()))',
        "if torch.cuda.is_available():\n    args.max_memory.update({i: '1GIB' for i in args.devices})",
        'if not torch.cuda.is_available():\n    args.about += "<p>This demo does not work on CPU.</p>"',
    ],
)
def test_what_people_are_told_of_cuda_is_not_said_of_a_host(lines: str) -> None:
    text = body(lines)
    assert "is_available" not in text
    assert "device_name() != " in text or "device_name() == " in text


@pytest.mark.parametrize(
    "test",
    ["{} < 1", "{} == 0", "not {}", "{} < 1 or args.slow", "not ({} > 0)", "not ({} >= 1)", "not ({} != 0)"],
)
def test_a_test_that_needs_a_device_is_skipped_on_a_host(test: str) -> None:
    source = (
        f"import pytest\n\n\n@pytest.mark.skipif({test.format('torch.cuda.device_count()')}, reason='x')\n"
    )
    text = ported(source + "def test_fp16():\n    pass\n")
    assert "device_count" not in text
    assert ("==" in text) is ("not (" not in test)


def test_a_figure_of_memory_is_asked_where_it_was_before() -> None:
    text = body("if torch.cuda.is_available():\n    args.peak = torch.cuda.max_memory_allocated()")
    assert 'if get_accelerator().device_name() != "cpu":' in text


@pytest.mark.parametrize(
    "lines",
    [
        "args.n_gpu = torch.cuda.device_count()\nargs.is_gpu = args.n_gpu > 0",
        "n = torch.cuda.device_count()\nx = x if n else args",
        "n = torch.cuda.device_count()\nif n == 0:\n    return args",
    ],
)
def test_a_number_of_devices_that_a_program_compares_with_none_is_none_on_a_host(lines: str) -> None:
    number = '(get_accelerator().device_count() if get_accelerator().device_name() != "cpu" else 0)'
    assert f"n = {number}" in body(lines) or f"n_gpu = {number}" in body(lines)


def test_a_number_of_devices_that_is_asked_for_none_at_once_becomes_the_question_itself() -> None:
    text = body("if torch.cuda.device_count() > 0:\n    args.a()")
    assert 'if get_accelerator().device_name() != "cpu":' in text


def test_a_test_that_needs_two_devices_counts_them() -> None:
    text = body("if torch.cuda.device_count() < 2:\n    pytest.skip('needs two')")
    name = "get_accelerator().device_name()"
    assert f'if ({name} == "cpu" or get_accelerator().device_count() < 2):' in text


@EACH_TARGET
@pytest.mark.parametrize(
    ("device", "lines"),
    [
        ("cuda:1", "if device != 'cuda':\n    return 1\nreturn 2"),
        ("cuda", "if device != 'cuda':\n    return 1\nreturn 2"),
        ("cpu", "if device != 'cuda':\n    return 1\nreturn 2"),
        ("cuda:1", "return 1 if device == 'cuda' else 2"),
        ("cuda", "return 1 if device == 'cuda' else 2"),
        ("cuda:1", "ok = (device != 'cuda') == True\nreturn ok"),
        ("cuda:1", "if args and device != 'cuda':\n    return 1\nreturn 2"),
    ],
)
def test_a_text_with_an_index_is_compared_as_before_on_cuda(
    device: str, lines: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    source = "def f(device, args):\n" + textwrap.indent(lines, "    ") + "\n"
    text = ported(source, target).replace("from acclimate import get_accelerator\n", "")
    exec(source, before)
    exec(text, after)

    class Cuda:
        def device_name(self) -> str:
            return "cuda"

    after["get_accelerator"] = Cuda
    after["accelerator_type"] = lambda: "cuda"
    assert after["f"](device, True) == before["f"](device, True)


@pytest.mark.parametrize(
    ("before", "acclimate"),
    [
        ("{'cuda:0': 'cpu'}", "{'cuda:0': 'cpu'}"),
        ("{'cuda:0': 'cuda:1'}", "{'cuda:0': get_accelerator().device_name(1)}"),
        ("{'cuda:0': f'cuda:{args}'}", "{'cuda:0': get_accelerator().device_name(args)}"),
        ("{'cuda:%d' % 0: 'cuda:%d' % args}", "{'cuda:%d' % 0: get_accelerator().device_name(args)}"),
    ],
)
def test_where_a_checkpoint_was_saved_stays_and_where_it_goes_is_ported(before: str, acclimate: str) -> None:
    text = body(f"return torch.load(x, map_location={before})")
    key = before.partition(": ")[0]
    assert f"map_location={key}: " in text
    assert "'cuda:1'" not in text.replace(key, "")
    if acclimate != before:
        assert "get_accelerator()" in text.partition(key)[2]


@pytest.mark.parametrize(
    "lines",
    [
        "if device == 'cuda':\n    x.record_stream(args)",
        "if x.device.type == 'cuda':\n    x.record_stream(args)",
        "dtype = torch.float16 if args and x.device.type == 'cuda' else torch.float32",
        "dtype = torch.bfloat16 if x.is_cuda else torch.float32",
        "x = x.half() if x.device.type == 'cuda' else x",
        "if 'cpu' in device.type:\n    args.a()\nif 'cuda' in device.type:\n    args.b()",
        "args.half = torch.cuda.is_available() and args.half",
        "train(fp16=torch.cuda.is_available())",
        "if not args and torch.cuda.is_available():\n    print('a GPU is available')",
        "if torch.cuda.is_available():\n    args.a()\nelse:\n    args.c()",
    ],
)
def test_what_means_other_hardware_is_false_on_a_host(lines: str) -> None:
    text = body(lines)
    assert "torch.cuda" not in text
    assert "is_available" not in text
    assert "on_accelerator" not in text
    assert 'get_accelerator().device_name() != "cpu"' in text.replace("'", '"') or '!= "cpu"' in text.replace(
        "'", '"'
    )


@pytest.mark.parametrize(
    "lines",
    [
        "name = 'onnxruntime-gpu' if torch.cuda.is_available() else 'onnxruntime'",
        "name = f\"tensorflow{'' if torch.cuda.is_available() else '-cpu'}\"",
        "cuda = torch.cuda.is_available()\nname = 'onnxruntime-gpu' if cuda else 'onnxruntime'",
        "p = ['CUDAExecutionProvider'] if torch.cuda.is_available() else []",
        "assert torch.cuda.is_available(), 'CUDA required for APEX optimizers'",
        "assert args and torch.cuda.is_available(), 'bitsandbytes needs CUDA'",
        "if not torch.cuda.is_available():\n    raise RuntimeError('flash-attn needs CUDA')",
        "if torch.cuda.is_available():\n    model.parallelize()",
        "context = tvm.gpu(0) if torch.cuda.is_available() else tvm.cpu()",
    ],
)
def test_a_question_about_a_package_of_nvidia_stays(lines: str) -> None:
    stays(lines)


def test_a_refusal_without_a_package_lets_other_devices_pass() -> None:
    text = body("if not torch.cuda.is_available():\n    raise RuntimeError('needs a GPU')")
    assert 'if get_accelerator().device_name() == "cpu":' in text


@EACH_TARGET
def test_a_backend_is_known_in_capitals_as_a_default_and_by_its_question(target: str) -> None:
    source = (
        "import argparse\n\np = argparse.ArgumentParser()\n\n\ndef f():\n"
        "    p.add_argument('--dist-backend', default='nccl')\n"
        "    dist.init_process_group(backend='NCCL')\n"
        "    return 'nccl' if dist.is_nccl_available() else 'gloo'\n"
    )
    text = ported(source.replace("return", "backend ="), target)
    assert "nccl" not in text.lower()
    assert "torch.distributed.is_backend_available(" in text


def test_the_variable_whose_devices_nvidia_smi_counts_stays() -> None:
    lines = "gpu = os.environ.get('CUDA_VISIBLE_DEVICES')\nrun(['nvidia-smi', '-i', gpu])"
    assert lines.splitlines()[0] in ported(f"import os\n\n\ndef f():\n{textwrap.indent(lines, '    ')}\n")


def test_an_assertion_in_what_torchscript_compiles_stays_with_what_it_guards() -> None:
    source = (
        "@torch.jit.script\ndef f(device: str):\n    if device == 'cpu':\n        return torch.get_autocast_cpu_dtype()\n"
        "    assert device == 'cuda'\n    return torch.get_autocast_gpu_dtype()\n"
    )
    for target in TARGETS:
        assert "assert device == 'cuda'" in ported(source, target)


@pytest.mark.parametrize(
    "lines",
    [
        "if torch.cuda.is_available() and not args.gpu:\n    print('CUDA is available but --gpu is not given')",
        "if torch.cuda.is_available():\n    warnings.warn('3 CUDA devices are available')\n    print('CUDA is present')",
    ],
)
def test_a_message_that_cuda_is_there_is_told_of_cuda_alone(lines: str) -> None:
    stays(lines)


@pytest.mark.parametrize(
    "lines",
    [
        "if not (torch.cuda.is_available() and torch.cuda.device_count() > 0):\n    args.version = args.version + '+cpu'",
        'url = f\'https://data.pyg.org/whl/torch-{args.version}+{"cu121" if torch.cuda.is_available() else "cpu"}.html\'',
        "args.build = 'torch==2.3+cu121' if torch.cuda.is_available() else 'torch==2.3'",
        "has_gpu = torch.cuda.is_available()\nif has_gpu:\n    args.run(['pip', 'install', 'faiss'])",
        "if torch.cuda.is_available():\n    args.run('python -m pip install --index-url ' + args.url)",
    ],
)
def test_a_choice_of_a_packages_build_is_about_cuda(lines: str) -> None:
    stays(lines)


def test_what_does_more_than_tell_of_cuda_is_ported() -> None:
    text = body("if torch.cuda.is_available():\n    print('CUDA is available')\n    args.device = 'cuda'")
    assert "is_available" not in text


def test_a_model_of_the_name_of_a_device_is_no_code_for_this_device() -> None:
    choice = "place = 'cpu'\nif torch.cuda.is_available():\n    place = torch.device('cuda')\n"
    source = (
        choice + "\n\ndef load(model_name='mps'):\n    return torch.load(model_name, map_location=place)\n"
    )
    assert '("cpu", "mps")' not in ported(source)
    assert '"mps"' in ported(source.replace("model_name", "kind"))


SETS = (
    "import torch\n\n\ndef f(args, model):\n    args.distributed = False\n    if torch.cuda.is_available():\n"
    "        args.distributed = args.world_size > 1\n{between}"
    "    if args.distributed:\n        from apex.parallel import DistributedDataParallel\n\n"
    "        model = DistributedDataParallel(model)\n    return model\n"
)


def test_a_reason_says_whether_the_branch_itself_imports_a_package() -> None:
    reasons = [
        port_text(source, Settings()).sites[0].reason
        for source in (SETS.format(between=""), SETS.format(between="        import apex\n"))
    ]
    assert reasons == [
        "what it sets decides about an import of a package for NVIDIA GPUs",
        "its branch imports a package for NVIDIA GPUs",
    ]
