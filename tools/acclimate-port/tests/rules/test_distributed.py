"""Names of communication backends: comparisons with them, and options to choose one."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import ported_once_for_all, ported_project, site

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


PARSER = "import argparse\nimport torch\nimport torch.distributed as dist\nfrom net import build\n\n\n"
OPTION = (
    PARSER + "def main(rank):\n    parser = argparse.ArgumentParser()\n"
    "    parser.add_argument('--dist-backend', default='nccl')\n    args = parser.parse_args()\n    {}\n"
)
REACH = {
    "itself": ("dist.init_process_group(args.dist_backend, rank=rank)", "def build(*_):\n    pass\n"),
    "a name": (
        "backend = args.dist_backend\n    dist.init_process_group(backend=backend)",
        "def build(*_):\n    pass\n",
    ),
    "options in another file": (
        "build(args)",
        "import torch.distributed as dist\n\n\ndef build(args):\n    dist.init_process_group(args.dist_backend)\n",
    ),
    "a parameter of another file": (
        "build(rank, args.dist_backend)",
        "import torch.distributed as dist\n\n\ndef build(rank, backend):\n    dist.init_process_group(backend, rank=rank)\n",
    ),
}
ELSEWHERE = {
    "no use": "print(args)",
    "a library": "build(args.dist_backend)",
}


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("way", REACH)
def test_an_option_that_reaches_the_process_group_is_ported(way: str, target: str, tmp_path: Path) -> None:
    use, net = REACH[way]
    results = ported_project(tmp_path, {"main.py": OPTION.format(use), "net.py": net}, target)
    assert site(results["main.py"], "'nccl'").status is Status.CONVERTED


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("way", ELSEWHERE)
def test_an_option_of_which_nothing_shows_that_it_reaches_it_is_unsafe(
    way: str, target: str, tmp_path: Path
) -> None:
    files = {
        "main.py": OPTION.format(ELSEWHERE[way]),
        "net.py": "import other\n\n\ndef build(x):\n    other.run(x)\n",
    }
    found = site(ported_project(tmp_path, files, target)["main.py"], "'nccl'")
    assert found.status is Status.UNSAFE
    assert "torch.distributed" in found.reason


FIELDS = (
    "dist_backend: str = 'nccl'",
    "dist_backend: str = field(default='nccl', metadata={'help': 'one'})",
    "dist_backend: str = Field('nccl')",
)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("use", ["dist.init_process_group(c.dist_backend)", "other(c)"])
def test_a_field_names_a_backend_and_is_unsafe_at_import(field: str, use: str, target: str) -> None:
    head = "from dataclasses import dataclass, field\nfrom pydantic import Field\nimport torch\nimport torch.distributed as dist\n\n\n"
    source = f"{head}@dataclass\nclass C:\n    {field}\n\n\ndef main(c: C):\n    {use}\n"
    found = port_text(source, Settings(target)).sites
    reason = "when the module is imported" if "dist." in use else "torch.distributed"
    assert [one.status for one in found] == [Status.UNSAFE]
    assert reason in found[0].reason


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize(
    "default", ["typer.Option('nccl', help='x')", "typer.Option(default='nccl')", "typer.Argument('nccl')"]
)
def test_a_parameter_of_a_command_names_a_backend(default: str, target: str) -> None:
    source = f"import torch\nimport torch.distributed as dist\nimport typer\n\n\ndef main(backend: str = {default}):\n    dist.init_process_group(backend)\n"
    found = port_text(source, Settings(target)).sites
    assert [one.status for one in found] == [Status.UNSAFE]
    assert "nccl" not in port_text(source, Settings(target, unsafe=True)).text
