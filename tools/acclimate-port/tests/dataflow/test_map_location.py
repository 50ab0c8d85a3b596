"""A ported program loads files on a host, where torch.load and safetensors take "cpu" and no "cpu:0"."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from porting import EACH_TARGET, ported_once_for_all

torch = pytest.importorskip("torch", reason="runs ported code")

LOADS = [
    "return torch.load(path, map_location='cuda:0')",
    "return torch.load(path, 'cuda:1')",
    "return torch.load(path, map_location=f'cuda:{rank}')",
    "return torch.load(path, map_location='cuda:%d' % rank)",
    "return torch.load(path, map_location='cuda:' + str(rank))",
    "return torch.load(path, map_location='cuda:{}'.format(rank))",
    "return torch.load(path, map_location=torch.device('cuda', rank))",
    "return torch.load(path, map_location=torch.device(f'cuda:{rank}'))",
    "return torch.load(path, map_location=torch.device(rank))",
    "return torch.load(path, map_location={'cpu': f'cuda:{rank}'})",
    "where = {'cpu': 'cuda:%d' % rank}\nreturn torch.load(path, map_location=where)",
    "device = torch.device('cuda', rank)\nreturn torch.load(path, map_location=device)",
    "device = torch.device('cuda:0' if path else 'cpu')\nreturn torch.load(path, map_location=str(device))",
    "device = f'cuda:{rank}'\nx = torch.ones(1).to(device)\nreturn torch.load(path, map_location=device)",
    "args.device = torch.device(f'cuda:{rank}')\nreturn torch.load(path, map_location=args.device)",
    "return torch.load(path, map_location=lambda storage, _: storage.cuda(rank))",
    "return read(path, f'cuda:{rank}')",
    "return load_file(str(path) + '.safetensors', device=f'cuda:{rank}')",
    "with safe_open(str(path) + '.safetensors', framework='pt', device='cuda:0') as held:\n"
    "    return {'x': held.get_tensor('x')}",
]  # fmt: skip
HEAD = """
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def read(path, where):
    return torch.load(path, map_location=where)


"""


@pytest.mark.parametrize("lines", LOADS)
@EACH_TARGET
def test_a_file_is_loaded_where_the_host_is_all_there_is(lines: str, target: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "saved"
    torch.save({"x": torch.ones(2)}, path)
    safetensors.save_file({"x": torch.ones(2)}, f"{path}.safetensors")
    body = textwrap.indent(lines, "    ")
    text = ported_once_for_all(f"{HEAD}def load(path, rank: int, args):\n{body}\n", target)
    space: dict[str, Any] = {}
    exec(text, space)

    class Options:
        """What a program's options are."""

    assert space["load"](path, 1, Options())["x"].device.type == "cpu"


NOT_LOADED = [
    "return x.to(f'cuda:{rank}')",
    "return torch.load(x, map_location='cuda')",
]


@pytest.mark.parametrize("lines", NOT_LOADED)
def test_other_devices_keep_the_short_form(lines: str) -> None:
    body = textwrap.indent(lines, "    ")
    text = ported_once_for_all(f"import torch\n\n\ndef f(x, rank):\n{body}\n", "torch")
    assert text.count("torch.accelerator.is_available()") == lines.count("torch.cuda.is_available()")
