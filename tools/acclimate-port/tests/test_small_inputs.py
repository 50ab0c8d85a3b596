"""Small pieces of programs whose port was half done, lost a refusal, or gave a device to another library."""

from __future__ import annotations

import textwrap

import pytest

from acclimate_port.engine import Ported, Settings, Status, port_text
from machines import run

BOTH = pytest.mark.parametrize("target", ["acclimate", "torch"])


def port(source: str, target: str, *, unsafe: bool = True) -> Ported:
    """What the tool makes of a piece of a program, which a second run must not change."""
    settings = Settings(target, unsafe=unsafe)
    ported = port_text(textwrap.dedent(source), settings)
    assert port_text(ported.text, settings).text == ported.text
    return ported


@BOTH
@pytest.mark.parametrize(
    "lines",
    [
        'if device.type == torch.device("cuda").type and not torch.cuda.is_available(): return host',
        'if not torch.cuda.is_available() and torch.device("cuda") == device: return host',
        'if "cuda" in device: assert torch.cuda.is_available()',
        'if device == "cuda":\n        if not torch.cuda.is_available(): raise ValueError(device)',
        'device = "cpu" if device == "cuda" and not torch.cuda.is_available() else device',
    ],
)
def test_a_search_for_missing_cuda_stays_whole_and_counts_as_left(lines: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(device, host):\n    {lines}\n    return device\n"
    ported = port(source, target)
    assert ported.text == source
    assert {site.status for site in ported.sites} == {Status.LEFT}


@BOTH
@pytest.mark.parametrize("kind", ["parameter", "loop"])
def test_a_guard_and_the_list_that_it_guards_stay_together(kind: str, target: str) -> None:
    test = 'if device == "cuda" and not torch.cuda.is_available():\n        pytest.skip()\n    go(device)\n'
    heads = {
        "parameter": '@pytest.mark.parametrize("device", ["cpu", "cuda"])\ndef test(device):\n    ',
        "loop": 'for device in ["cpu", "cuda"]:\n    ',
    }
    source = f"import pytest\nimport torch\n\n\n{heads[kind]}{test}"
    assert port(source, target).text == source


@BOTH
def test_an_argument_for_cudas_libraries_stays(target: str) -> None:
    source = """
        import torch

        def f(m: torch.Tensor):
            return torch.linalg.svd(m, driver="gesvd" if m.is_cuda else None)
        """
    ported = port(source, target)
    assert ported.text == textwrap.dedent(source)
    assert "driver" in ported.sites[0].reason


@BOTH
@pytest.mark.parametrize(
    "lines",
    [
        'if "cuda" in device:\n    a = 1\nelif "xpu" in device:\n    a = 2\nelse:\n    a = 3\n',
        'match device:\n    case "cuda":\n        a = 1\n    case "xpu":\n        a = 2\n    case _:\n        a = 3\n',
        'a = 1 if device.startswith("cuda") else 2 if device == "xpu" else 3\n',
    ],
)
def test_a_device_with_its_own_branch_keeps_it(
    lines: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("machines").TYPES, "XPU", "xpu")
    monkeypatch.setitem(__import__("machines").BACKENDS, "XPU", "xccl")
    ported = port(f"import torch\n\n{lines}", target).text
    for machine, device, expected in (
        ("CUDA", "cuda", "1"),
        ("XPU", "xpu", "2"),
        ("HOST", "cpu", "3"),
        ("OTHER", "other", "1"),
    ):
        outcome = run(f"device = {device!r}\n{ported}", machine, "a")
        assert (outcome.error, outcome.result) == ("", expected), ported


@BOTH
@pytest.mark.parametrize(
    "line", ["torch.cuda.IntTensor = f", "torch.cuda.synchronize = f", "del torch.cuda.Stream"]
)
def test_a_name_of_torch_cuda_that_is_assigned_stays(line: str, target: str) -> None:
    source = f"import torch\n\n{line}\n"
    ported = port(source, target)
    assert ported.text == source
    assert ported.sites[0].status is Status.LEFT


@BOTH
def test_a_device_with_an_index_has_none_on_a_host_wherever_it_goes(target: str) -> None:
    source = 'import torch\n\n\ndef f(i):\n    return f"cuda:{i}"\n'
    ported = port(source, target).text
    assert run(ported, "HOST", "f(1)").result == "'cpu'"
    assert run(ported, "OTHER", "f(1)").result == "'other:1'"


@BOTH
@pytest.mark.parametrize(
    "location",
    [
        'None if torch.cuda.is_available() else "cpu"',
        'torch.device("cpu") if not torch.cuda.is_available() else None',
    ],
)
def test_a_map_location_names_the_device_where_a_checkpoint_of_cuda_cannot_go_back(
    location: str, target: str
) -> None:
    source = f"import torch\n\n\ndef f(p):\n    return torch.load(p, map_location={location}).device\n"
    ported = port(source, target, unsafe=False).text
    found = {machine: run(ported, machine, "f(1)").result for machine in ("CUDA", "HOST", "OTHER")}
    assert found == {"CUDA": "'cuda:0'", "HOST": "'cpu'", "OTHER": "'other:0'"}


@BOTH
def test_a_branch_that_loads_a_checkpoint_without_a_device_is_unsafe(target: str) -> None:
    source = """
        import torch

        def f(p):
            if torch.cuda.is_available():
                return torch.load(p)
            return torch.load(p, map_location="cpu")
        """
    assert [site.safe for site in port(source, target).sites] == [False]


@BOTH
@pytest.mark.parametrize(
    ("library", "status"),
    [
        ("fast_speech", Status.UNSAFE),
        ("faster_whisper", Status.LEFT),
        ("xgboost", Status.LEFT),
        ("timm", Status.CONVERTED),
    ],
)
@pytest.mark.parametrize("value", ['"cuda" if torch.cuda.is_available() else "cpu"', '"cuda"'])
def test_a_device_given_to_another_library_is_not_safe(
    value: str, library: str, status: Status, target: str
) -> None:
    for lines in (
        f"return Model(n, device={value})",
        f"device = {value}\n    return Model(n, device=device)",
    ):
        source = f"import torch\nfrom {library} import Model\n\n\ndef f(n):\n    {lines}\n"
        assert {site.status for site in port(source, target, unsafe=False).sites} == {status}, lines


@BOTH
def test_bfloat16_is_unsafe_where_a_host_was_not_asked_before(target: str) -> None:
    choice = "torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32"
    assert [
        site.safe for site in port(f"import torch\n\n\ndef f():\n    return {choice}\n", target).sites
    ] == [False]
    guarded = choice.replace("torch.cuda.is_bf", "torch.cuda.is_available() and torch.cuda.is_bf")
    assert all(
        site.safe for site in port(f"import torch\n\n\ndef f():\n    return {guarded}\n", target).sites
    )


@BOTH
@pytest.mark.parametrize(
    "test",
    [
        't.type() == "torch.cuda.HalfTensor"',
        't.type() in ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor"]',
    ],
)
def test_a_class_of_tensors_in_a_string_is_that_of_the_device(test: str, target: str) -> None:
    ported = port(f"import torch\n\n\ndef f(t):\n    return {test}\n", target).text
    tensor = "type('T', (), {'type': lambda self: 'torch%s.HalfTensor'})()"
    found = [
        run(ported, machine, f"f({tensor % kind})").result
        for machine, kind in (("CUDA", ".cuda"), ("OTHER", ".other"), ("HOST", ""))
    ]
    assert found == ["True", "True", "False"]


def test_a_class_of_tensors_in_a_string_that_stays_counts_as_left() -> None:
    ported = port(
        'import torch\n\nnames = ["torch.cuda.HalfTensor"]\npatch("torch.cuda.is_available")\n', "acclimate"
    )
    assert [site.status for site in ported.sites] == [Status.LEFT, Status.LEFT]
    assert "mock" not in ported.sites[0].reason


@BOTH
def test_each_way_to_give_torch_a_device_is_known(target: str) -> None:
    source = """
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from transformers import AutoModel

        def f(g, p):
            DeviceMesh.from_group(g, "cuda")
            torch.jit.load(p, "cuda")
            return AutoModel.from_pretrained(p, device_map={"": "cuda:0"})
        """
    assert '"cuda' not in port(source, target).text


@BOTH
@pytest.mark.parametrize(
    "bound", ['torch = LazyLoader("torch")', "try:\n    import torch\nexcept ImportError:\n    torch = None"]
)
def test_torch_is_torch_however_it_is_bound(bound: str, target: str) -> None:
    source = (
        f'{bound}\n\n\ndef f(device):\n    if "cuda" in device:\n        torch.cuda.synchronize(device)\n'
    )
    ported = port(source, target)
    assert "cuda" not in ported.text
    assert "\nimport torch\n" not in f"\n{ported.text}"


TRAINING = """
    import torch
    from torch import nn
    from torch.cuda.amp import GradScaler, autocast
    from torch.utils.data import DataLoader, TensorDataset

    from net import Net

    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 2)), batch_size=16, pin_memory=True)
    torch.backends.cudnn.benchmark = True
    model = Net()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for step, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.cuda(non_blocking=True)
        weight = (torch.ones(2) * 0.5).cuda()
        with autocast():
            loss = ((model(x) - y) * weight).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    """


@BOTH
def test_a_small_training_script_is_ported_without_unsafe_edits(target: str) -> None:
    ported = port(TRAINING, target, unsafe=False)
    assert "cuda" not in ported.text
    assert {site.status for site in ported.sites} <= {Status.CONVERTED, Status.EXEMPT}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.cudart()",
        'x = torch.device("cuda") if torch.version.cuda else None',
        "with mock.patch('torch.cuda.is_available'): pass",
    ],
)
def test_what_only_cuda_runs_counts_as_left(line: str) -> None:
    sites = port(f"import torch\n\n{line}\n", "acclimate").sites
    assert any(site.status in (Status.LEFT, Status.CONVERTED) for site in sites)


@BOTH
@pytest.mark.parametrize("loop", ["device", "mode"])
def test_a_list_for_cuda_goes_with_the_test_that_adds_to_it(loop: str, target: str) -> None:
    source = f'import torch\n\nfor {loop} in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):\n    go({loop})\n'
    after = port(source, target).text
    assert ("cuda" in after) == ("is_available" in after and "torch.cuda" in after), after
    assert ("torch.cuda" in after) == (loop == "mode")


def test_a_kept_device_without_an_index_is_unsafe_and_one_that_is_used_at_once_is_safe() -> None:
    source = """
        import torch


        def f(n):
            kept = torch.cuda.current_device()
            torch.cuda.set_device(1)
            return torch.zeros(n, device=kept)
        """
    assert "kept = torch.cuda.current_device()" in port(source, "torch", unsafe=False).text
    used = source.replace("kept = torch.cuda.current_device()", "torch.cuda.synchronize()")
    used = used.replace("device=kept", "device=torch.cuda.current_device()")
    assert "device=accelerator_type())" in port(used, "torch", unsafe=False).text
    assert "kept = get_accelerator().current_device_name()" in port(source, "acclimate", unsafe=False).text


@pytest.mark.parametrize(("base", "is_tied"), [("object", False), ("A", True)])
def test_a_flag_of_a_class_is_no_flag_of_an_unrelated_class_with_the_same_name(
    base: str, is_tied: bool
) -> None:
    source = f"""
        import torch

        class A:
            def __init__(self):
                self.use_cuda = torch.cuda.is_available()

        class B({base}):
            def go(self, x, y):
                if self.use_cuda:
                    return torch.cuda.get_device_properties(x).multi_processor_count
        """
    found = port(source, "acclimate", unsafe=False)
    test = next(site for site in found.sites if "is_available" in site.text)
    assert ("line 11" in test.reason) is is_tied, found.sites


def test_the_reads_of_a_name_that_two_branches_bind_are_edited_once() -> None:
    source = """
        import torch

        def f(i, is_first):
            if is_first:
                held = torch.cuda.get_device_properties(i)
                total = held.total_memory
            else:
                held = torch.cuda.get_device_properties(0)
                total = held.total_memory
            return total
        """
    found = port(source, "torch")
    assert [site.status for site in found.sites] == [Status.CONVERTED] * 2, found.sites
