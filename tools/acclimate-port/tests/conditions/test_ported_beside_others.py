"""A program's own way for a host, for other devices or for missing CUDA stays what it was."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from acclimate_port.engine import Settings
from acclimate_port.files.workers import port_files
from acclimate_port.source.vendors import VENDORS
from porting import EACH_TARGET, ported_once_for_all


def ported(source: str, target: str = "acclimate") -> str:
    return ported_once_for_all(textwrap.dedent(source).lstrip(), target)


def assert_stays(source: str, target: str = "acclimate") -> None:
    text = textwrap.dedent(source).lstrip()
    assert ported_once_for_all(text, target) == text


@pytest.mark.parametrize(
    "loaded",
    [
        "from .ops import upfirdn2d_ext as ext",
        "from mmcv.utils import ext_loader\n\next = ext_loader.load_ext('_ext', ['forward'])",
    ],
)
def test_a_test_that_leads_to_a_compiled_extension_stays_whatever_loads_it(loaded: str) -> None:
    body = "def f(x):\n    if x.is_cuda:\n        return ext.forward(x)\n    return slow(x)\n"
    assert_stays(f"{loaded}\n\n\n{body}")


@EACH_TARGET
def test_a_host_takes_the_else_of_a_question_for_a_tensors_device(target: str) -> None:
    after = ported(
        """
        import torch


        def f(model, data, device):
            if next(model.parameters()).is_cuda:
                data = scatter(data, [device])[0]
            else:
                data = data.data[0]
            return data
        """,
        target,
    )
    assert 'if (next(model.parameters()).device.type != "cpu"):' in after


def test_a_question_without_another_way_is_true_on_a_host_too() -> None:
    after = ported("import torch\n\n\ndef f(x: torch.Tensor):\n    assert x.is_cuda\n    return x + 1\n")
    assert "assert get_accelerator().on_accelerator(x)" in after


@EACH_TARGET
def test_a_device_of_the_program_that_imports_a_package_for_cuda_stays(target: str) -> None:
    assert_stays(
        """
        import torch

        device = get_device_name()
        if device == "cuda":
            from flash_attn.bert_padding import pad_input
        elif device == "npu":
            from own.npu import pad_input
        """,
        target,
    )


@EACH_TARGET
@pytest.mark.parametrize(
    "flags",
    [
        "is_cuda_available = torch.cuda.is_available()\nis_npu_available = is_torch_npu_available()\n",
        "HAS_CUDA = torch.cuda.device_count() > 0\n",
        "def is_cuda_available():\n    return torch.cuda.is_available()\n\n\n"
        "def is_xpu_available():\n    return torch.xpu.is_available()\n",
    ],
)
def test_a_flag_for_cuda_stays_where_another_device_has_its_own(target: str, flags: str) -> None:
    text = f"import torch\n\n{flags}"
    stays = ported_once_for_all(text, target) == text
    assert stays == ("available" in flags)


@EACH_TARGET
@pytest.mark.parametrize("asks", ['"cuda" in device', 'device == "cuda"', 'device.startswith("cuda")'])
def test_what_finds_that_cuda_is_asked_for_and_missing_stays(asks: str, target: str) -> None:
    assert_stays(
        f"""
        import torch


        def f(device: str):
            if {asks} and not torch.cuda.is_available():
                device = "cpu"
            return device
        """,
        target,
    )


def test_missing_cuda_beside_an_option_for_a_host_is_missing_on_a_host() -> None:
    after = ported(
        "import torch\n\nif not torch.cuda.is_available() and not args.no_gpu:\n    raise SystemExit(1)\n"
    )
    assert 'if get_accelerator().device_name() == "cpu" and not args.no_gpu:' in after


@EACH_TARGET
def test_a_question_in_a_message_stays(target: str) -> None:
    assert_stays(
        """
        import torch


        def f(x):
            raise ValueError(f"wants a tensor of CUDA: {x.is_cuda}")
        """,
        target,
    )


@EACH_TARGET
def test_a_file_of_settings_alone_gets_no_import(target: str) -> None:
    assert_stays("dist_params = dict(backend='nccl')\nlog_level = 'INFO'\n", target)


def test_settings_beside_code_are_ported() -> None:
    after = ported("import torch\n\ndist_params = dict(backend='nccl')\n")
    assert "backend=get_accelerator().communication_backend_name()" in after


@EACH_TARGET
def test_a_tensor_of_another_library_stays(target: str) -> None:
    assert_stays("import paddle\n\n\ndef f(x):\n    return paddle.to_tensor(x).cuda()\n", target)


@EACH_TARGET
def test_a_choice_of_a_package_for_cuda_stays(target: str) -> None:
    assert_stays(
        """
        import torch


        def f(device):
            if device.type == "cpu":
                providers = ["CPUExecutionProvider"]
            elif device.type == "cuda":
                providers = ["CUDAExecutionProvider"]
            return providers
        """,
        target,
    )


@EACH_TARGET
def test_a_helper_is_defined_where_torch_is_imported_in_a_branch_or_not_at_all(target: str) -> None:
    after = ported(
        """
        if has_torch:
            import torch


        def f(model):
            return torch.nn.DataParallel(model)
        """,
        target,
    )
    assert "on_any_device(torch.nn.DataParallel(model))" in after
    names = {"has_torch": False}
    exec(after.replace("from acclimate import get_accelerator\n", ""), names)
    assert callable(names["on_any_device"])


def test_what_a_project_gives_a_devices_name_is_no_number(tmp_path: Path) -> None:
    model, worker = tmp_path / "model.py", tmp_path / "worker.py"
    model.write_text(
        "import torch\n\n\ndef f(x, master_rank, local_rank):\n"
        "    return x.to(master_rank), x.to(local_rank), torch.ones(1)\n"
    )
    worker.write_text(
        'import torch\nfrom model import f\n\nf(torch.ones(1), master_rank="cuda", local_rank=0)\n'
    )
    port_files([model, worker], Settings("acclimate", unsafe=True), True, 1, lambda: None)
    assert "x.to(master_rank), x.to(get_accelerator().device_name(local_rank))" in model.read_text()


@EACH_TARGET
@pytest.mark.parametrize("test", ["torch.cuda.is_available()", "device.type == 'cuda'"])
def test_a_question_in_a_file_with_code_for_each_other_device_stays(test: str, target: str) -> None:
    kinds = {vendor.device_type for vendor in VENDORS}
    source = "import torch\n\nOWN = {}\n\n\ndef f(device, x: torch.Tensor):\n    if {}:\n        x = x.half()\n    return x\n"
    for own, is_ported in ((kinds, False), (kinds - {"npu"}, True)):
        text = source.format(repr(tuple(sorted(own))), test)
        assert (ported(text, target) != text) == is_ported


@pytest.mark.parametrize(
    ("target", "kind"), [("acclimate", "get_accelerator().device_name()"), ("torch", "accelerator_type()")]
)
def test_devices_that_the_file_has_a_way_for_do_not_take_cudas(target: str, kind: str) -> None:
    after = ported(
        """
        import torch


        def choose(device, x: torch.Tensor):
            if device == "mps":
                x = x.float()
            if torch.cuda.is_available():
                enable()
            if device.type == "cuda":
                x = x.half()
            return (x * 2 if x.is_cuda else x)
        """,
        target,
    )
    assert f'if {kind} not in ("cpu", "mps"):' in after
    assert 'not in ("cpu", "mps"):\n        x = x.half()' in after
    assert 'x.device.type not in ("cpu", "mps")' in after


@EACH_TARGET
def test_a_test_whose_answer_leads_to_a_call_that_stays_is_left(target: str) -> None:
    assert_stays(
        """
        import torch


        def f(self, i):
            check = i == 1 and self.device == "cuda"
            if check:
                torch.cuda.set_sync_debug_mode(1)
        """,
        target,
    )


@EACH_TARGET
def test_device_of_stays_as_it_does_nothing_elsewhere(target: str) -> None:
    assert_stays(
        "import torch\n\n\ndef f(x):\n    with torch.cuda.device_of(x):\n        return g(x)\n", target
    )


@EACH_TARGET
@pytest.mark.parametrize(
    "line",
    [
        "if torch.cuda.is_available():\n    cfg.accelerator = 'cuda'",
        "if not torch.cuda.is_available() or version(torch.version.cuda) < (12, 2):\n    skip()",
        "is_nvidia = torch.cuda.is_available()",
        "if device.startswith('cuda:'):\n    device = int(device[5:])",
    ],
)
def test_what_goes_on_with_cuda_by_name_stays_a_question_for_cuda(line: str, target: str) -> None:
    assert_stays(f"import torch\n\n{line}\n", target)


def test_a_list_of_devices_stays_with_the_test_that_skips_one_of_them() -> None:
    after = ported(
        """
        import pytest
        import torch


        @pytest.mark.parametrize("device", ["cuda", "musa"])
        def test(device):
            if not torch.cuda.is_available() and device == "cuda":
                pytest.skip("needs CUDA")
        """
    )
    assert "get_accelerator" not in after


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("acclimate", 'device.startswith({0}) and {0} not in ("cpu", "npu")'),
        ("torch", 'device.startswith({0}) and {0} not in ("cpu", "npu")'),
    ],
)
def test_the_beginning_of_a_devices_name_is_not_that_of_devices_with_a_branch(
    target: str, expected: str
) -> None:
    source = """
        import torch

        if device.startswith("cuda"):
            a = 1
        elif device.startswith("npu"):
            a = 2
        """
    name = "get_accelerator().device_name()" if target == "acclimate" else "accelerator_type()"
    assert expected.format(name) in ported(source, target)


@pytest.mark.parametrize(
    "line", ["return ok and x.is_cuda", "if x.is_cuda:\n        x = kernel(x)", "assert not x.is_cuda"]
)
def test_a_tensor_of_a_host_is_not_taken_for_one_of_an_accelerator(line: str) -> None:
    after = ported(f"import torch\n\n\ndef f(x: torch.Tensor, ok):\n    {line}\n")
    assert 'x.device.type != "cpu"' in after


def test_a_call_whose_bracket_closes_on_another_line_is_ported() -> None:
    after = ported("import torch\n\nx = torch.ones(1).cuda(\n)\n")
    assert "torch.ones(1).to(get_accelerator().device_name())" in after


@EACH_TARGET
def test_an_object_that_is_no_tensor_keeps_its_attribute(target: str) -> None:
    assert_stays(
        "import torch\n\n\ndef f(x):\n    return isinstance(x, (Data, Graph)) and x.is_cuda\n", target
    )


def test_a_host_with_two_memory_nodes_goes_on_as_one_device() -> None:
    after = ported("import torch\n\nif torch.cuda.device_count() > 1:\n    model = wrap(model)\n")
    assert 'if (get_accelerator().device_name() != "cpu" and get_accelerator().device_count() > 1):' in after


def test_a_number_of_devices_that_chooses_a_way_for_a_host_is_none_there() -> None:
    after = ported(
        """
        import torch

        if torch.cuda.device_count() == 0:
            f()
        else:
            assert g().type == "cuda"
        """
    )
    assert 'if get_accelerator().device_name() == "cpu":' in after


def test_a_state_that_a_host_does_not_save_is_not_restored_there() -> None:
    after = ported(
        """
        import torch


        def restore(state):
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state)
            else:
                assert state is None
        """
    )
    assert 'if get_accelerator().device_name() != "cpu":' in after


@pytest.mark.parametrize(
    ("target", "expected"),
    [("acclimate", "get_accelerator().set_device(i)"), ("torch", "torch.accelerator.set_device_index(i)")],
)
def test_a_device_that_is_made_to_be_set_is_its_number(target: str, expected: str) -> None:
    assert expected in ported(
        "import torch\n\n\ndef f(i):\n    torch.cuda.set_device(torch.cuda.device(i))\n", target
    )


def test_an_index_into_tensors_is_no_device() -> None:
    assert_stays("import torch\n\n\ndef f(x, bbsz_idx):\n    return torch.tensor(x).to(bbsz_idx)\n")


def test_a_scaler_that_is_asserted_is_torchs_own_class() -> None:
    after = ported(
        "import torch\n\n\ndef t(self, x):\n    self.assertIsInstance(x, torch.cuda.amp.GradScaler)\n"
    )
    assert "self.assertIsInstance(x, torch.amp.GradScaler)" in after


@EACH_TARGET
def test_settings_of_mmengine_stay(target: str) -> None:
    assert_stays(
        "from mmengine.dataset import D\n\ndist_cfg = dict(backend='nccl')\ndata = dict(type=D)\n", target
    )


@EACH_TARGET
def test_a_skip_stays_where_the_test_compares_with_cuda_by_name(target: str) -> None:
    assert_stays(
        """
        import unittest

        import torch


        @unittest.skipIf(not torch.cuda.is_available(), "needs CUDA")
        def test(self):
            self.assertEqual(f().type, "cuda")
        """,
        target,
    )


def test_a_function_of_another_module_that_moves_to_a_gpu_is_not_called_on_a_host() -> None:
    after = ported("import torch\n\nif device.type == 'cuda':\n    copy_model_to_gpu(model)\n")
    assert "get_accelerator().device_name() != 'cpu'" in after


def test_a_device_that_a_user_must_ask_for_is_not_chosen_before() -> None:
    after = ported(
        """
        import torch

        if torch.cuda.device_count() > 0:
            device = "cuda"
        elif torch.backends.mps.is_available() and OPTED:
            device = "mps"
        else:
            device = "cpu"
        """
    )
    assert 'if get_accelerator().device_name() not in ("cpu", "mps"):' in after


def test_a_list_of_devices_without_one_that_the_file_knows_stays() -> None:
    assert_stays(
        "import torch\n\nif device == 'mps':\n    f()\nfast = device in ('cuda', 'cpu')\n",
    )


def test_at_least_one_device_is_one_on_a_host_of_two_memory_nodes() -> None:
    after = ported("import torch\n\nworkers = max(1, torch.cuda.device_count())\n")
    number = '(get_accelerator().device_count() if get_accelerator().device_name() != "cpu" else 0)'
    assert f"max(1, {number})" in after


@EACH_TARGET
def test_a_state_beside_a_lazy_call_of_cuda_stays(target: str) -> None:
    assert_stays(
        """
        import torch
        from torch.cuda import _lazy_call


        def fork(state):
            saved = torch.cuda.get_rng_state()
            _lazy_call(lambda: restore(state))
            return saved
        """,
        target,
    )


@EACH_TARGET
@pytest.mark.parametrize(
    "check",
    [
        "if device_type == 'cuda':\n        assert torch.cuda.is_available(), f'{device} was specified.'",
        "if device.startswith('cuda'):\n        if not torch.cuda.is_available():\n            device = 'cpu'",
        "if 'cuda' in device and index:\n        if not torch.cuda.is_available():\n            raise ValueError",
    ],
)
def test_a_check_that_does_nothing_but_find_missing_cuda_stays_whole(check: str, target: str) -> None:
    assert_stays(
        f"import torch\n\n\ndef f(device, device_type, index):\n    {check}\n    return device\n", target
    )


@EACH_TARGET
def test_a_check_that_does_more_for_cuda_is_ported(target: str) -> None:
    after = ported(
        """
        import torch


        def f(device):
            if device.type == "cuda":
                assert torch.cuda.is_available()
                torch.cuda.set_device(device)
        """,
        target,
    )
    assert "cuda" not in after


@pytest.mark.parametrize("kind", ["cuda", "xpu", "cpu", "mps"])
def test_a_literal_may_stand_on_the_left_of_a_comparison_beside_other_devices(kind: str) -> None:
    after = ported(
        """
        import torch


        def f(x):
            if "cuda" == x.device.type:
                return "fast"
            elif x.device.type == "mps":
                return "apple"
            return "slow"
        """,
        "torch",
    )
    names: dict[str, Callable[[SimpleNamespace], str]] = {}
    exec(after, names)
    expected = {"cuda": "fast", "xpu": "fast", "cpu": "slow", "mps": "apple"}[kind]
    assert names["f"](SimpleNamespace(device=SimpleNamespace(type=kind))) == expected
