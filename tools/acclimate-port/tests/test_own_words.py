"""What a program says in its own words, where it imports torch, and what only CUDA has."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.files.workers import port_file
from porting import BOTH, program


@BOTH
def test_a_device_beside_another_vendors_word_is_the_programs_own(target: str) -> None:
    source = (
        "import torch\nfrom vendorlib import check\n\n\ndef f(config):\n"
        '    device_type = getattr(config, "device_type", "cuda")\n    return check(device_type)\n\n\n'
        'def g(device_type):\n    return device_type in ["cuda", "ascend", "maca"]\n'
    )
    assert port_text(source, Settings(target, unsafe=True)).text == source
    given = source + '\n\ndef h():\n    return torch.ones(1, device="cuda")\n'
    assert 'device="cuda"' not in port_text(given, Settings(target, unsafe=True)).text


@BOTH
@pytest.mark.parametrize("name", ["import torch", "from torch.cuda import device_count, is_available"])
def test_an_optional_import_of_torch_is_where_the_new_one_is(name: str, target: str) -> None:
    call = "is_available()" if "from" in name else "torch.cuda.is_available()"
    source = (
        f"import os\n\ntry:\n    {name}\n    HAS = True\nexcept ImportError:\n    HAS = False\n\n\n"
        f"def f():\n    return 'yes' if HAS and {call} else 'none'\n"
    )
    after = port_text(source, Settings(target)).text
    assert after != source
    head = after[: after.index("except ImportError")]
    for line in head[: head.index("try:")].splitlines():
        assert "torch" not in line
        assert "acclimate" not in line
    expected = (
        "    from acclimate import get_accelerator\n" if target == "acclimate" else "    import torch\n"
    )
    assert expected in head
    assert port_text(after, Settings(target)).text == after


@BOTH
def test_a_module_without_torch_stays_without_it(target: str) -> None:
    source = (
        "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
        '    parser.add_argument("--device", default="cuda")\n    args = parser.parse_args()\n'
        "    return run(args.device)\n"
    )
    assert port_text(source, Settings(target)).text == source


@BOTH
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return torch.version.cuda", "torch.version.cuda"),
        ("devices = {p.device.type for p in model}\nreturn devices == {'cuda'}", "{'cuda'}"),
        ("if 'CUDA out of memory' in str(flag):\n    return 1", "'CUDA out of memory' in str(flag)"),
        (
            "if any(s in str(flag) for s in ['CUDA out of memory', 'CUDA error']):\n    return 1",
            "any(s in str(flag) for s in ['CUDA out of memory', 'CUDA error'])",
        ),
    ],
)
def test_what_means_cuda_and_has_no_edit_is_reported(body: str, text: str, target: str) -> None:
    found = port_text(program(body), Settings(target))
    assert [site.text for site in found.sites if site.status is Status.LEFT] == [text]


@BOTH
def test_the_handler_of_a_message_of_cuda_stays_with_the_test_of_it(target: str) -> None:
    source = program(
        "try:\n    x.step()\nexcept RuntimeError as e:\n    if 'CUDA out of memory' in str(e):\n"
        "        torch.cuda.empty_cache()\n    else:\n        raise"
    )
    assert port_text(source, Settings(target)).text == source


@BOTH
def test_a_check_that_ends_the_program_is_one(target: str) -> None:
    source = program(
        "if not torch.cuda.is_available():\n    log_and_exit('no CUDA')\n"
        "return torch.cuda.get_device_properties(0).major"
    )
    assert port_text(source, Settings(target)).text == source


def test_a_file_that_python_can_parse_is_not_called_invalid(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import torch\n\n\nclass A:\n    def f(self):\n\t    return torch.cuda.device_count()\n")
    assert "Python can parse it" in port_file(path, Settings()).failure
    path.write_text("import torch\nprint 'cuda'\n")
    assert "not valid Python 3" in port_file(path, Settings()).failure
