"""Names of communication backends: comparisons with them, and options to choose one."""

import argparse
from types import SimpleNamespace

import pytest

from porting import ported_once_for_all

BOTH = ("acclimate", "torch")
OWN = {
    "acclimate": "get_accelerator().communication_backend_name()",
    "torch": "torch.distributed.get_default_backend_for_device(accelerator_type())",
}


def answer(expression: str, backend: str, own: str) -> bool:
    """What a ported comparison says of a program's backend where the accelerator's own is another one."""
    names = {
        "backend": backend,
        "get_accelerator": lambda: SimpleNamespace(communication_backend_name=lambda: own),
        "accelerator_type": str,
        "torch": SimpleNamespace(
            distributed=SimpleNamespace(get_default_backend_for_device=lambda device: own)
        ),
    }
    return bool(eval(expression, names))


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("compared", ["backend == 'nccl'", "'nccl' == backend", "backend != 'nccl'"])
def test_a_comparison_with_the_backend_says_of_gloo_what_it_said_before(compared: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(backend):\n    answer = {compared}\n    return answer\n"
    line = next(
        written for written in ported_once_for_all(source, target).splitlines() if "answer = " in written
    )
    ported = line.partition("answer = ")[2]
    is_equality = "==" in compared
    assert answer(ported, "gloo", own="gloo") is not is_equality
    for own in ("nccl", "xccl", "hccl"):
        assert answer(ported, own, own) is is_equality
        assert answer(ported, "gloo", own) is not is_equality


@pytest.mark.parametrize("target", BOTH)
def test_a_comparison_with_the_constant_for_nccl_stays_false_for_gloo_too(target: str) -> None:
    source = (
        "import torch\nimport torch.distributed as dist\n\n\ndef f(backend):\n"
        "    fast = backend == dist.Backend.NCCL\n    return fast\n"
    )
    assert f'backend == {OWN[target]} and {OWN[target]} != "gloo"' in ported_once_for_all(source, target)


@pytest.mark.parametrize("target", BOTH)
def test_a_host_passes_where_the_program_would_end(target: str) -> None:
    source = "import torch\n\n\ndef f(backend):\n    assert backend == 'nccl'\n"
    assert "gloo" not in ported_once_for_all(source, target)


def test_scripts_that_choose_nccl_by_an_option_still_start_where_there_is_another_backend() -> None:
    source = (
        "import argparse\n\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--distributed-backend', default='nccl', choices=['nccl', 'gloo'])\n"
    )
    text = ported_once_for_all(source, "acclimate")
    names: dict[str, argparse.ArgumentParser] = {}
    exec(text, names)
    for given in ("nccl", "gloo"):
        assert names["parser"].parse_args(["--distributed-backend", given]).distributed_backend == given
    assert names["parser"].parse_args([]).distributed_backend == "gloo"  # a host's own


@pytest.mark.parametrize("target", BOTH)
def test_the_accelerators_own_backend_can_be_chosen(target: str) -> None:
    source = (
        "import argparse\n\nimport torch\n\np = argparse.ArgumentParser()\n\n\ndef f():\n"
        "    p.add_argument('--backend', choices=['nccl', 'gloo'])\n"
    )
    assert f"choices=['nccl', {OWN[target]}, 'gloo']" in ported_once_for_all(source, target)
