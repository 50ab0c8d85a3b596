"""Branches: the host keeps the one that a program has for it, and what only CUDA's own code can do stays."""

import textwrap

import pytest

from acclimate.port.engine import Settings, Status, port_text

TYPE = "get_accelerator().device_name()"


def ported(source: str, target: str = "acclimate") -> str:
    return port_text(textwrap.dedent(source), Settings(target, unsafe=True)).text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'if x.device.type == "cuda" and ok:\n    a()\nelif x.device.type == "cpu":\n    b()\n',
            f'x.device.type == {TYPE} != "cpu" and ok',
        ),
        (
            'if "cuda" in device:\n    a()\nelif device == "mps":\n    c()\nelif device in ("cpu", "meta"):\n    b()\n',
            f'{TYPE} in device != "cpu"',
        ),
        (
            'y = 1 if device == "cuda" else 2 if device == "cpu" else 3\n',
            f'1 if device == {TYPE} != "cpu" else 2',
        ),
        (
            'def f(device):\n    if device == "cuda":\n        return 1\n    if device == "cpu":\n        return 2\n',
            f'device == {TYPE} != "cpu"',
        ),
        (
            'match device.type:\n    case "cuda":\n        a()\n    case "cpu":\n        b()\n',
            f'case _ if device.type == {TYPE} != "cpu"',
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
        'if device == "cpu":\n    b()\nelif device == "cuda":\n    a()\n',
        'if device == "cuda":\n    a()\nif device == "cpu":\n    b()\n',
        'if device == "cuda":\n    a()\nelif device != "cpu":\n    b()\n',
    ],
)
def test_a_test_without_a_later_branch_for_the_host_is_true_on_a_host(source: str) -> None:
    text = ported(f"import torch\n\n{source}")
    assert f"device == {TYPE}:" in text


@pytest.mark.parametrize("target", ["acclimate", "torch"])
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
