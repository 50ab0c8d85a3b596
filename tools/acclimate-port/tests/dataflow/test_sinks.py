"""Where ``torch.cuda.current_device()`` goes decides whether it becomes a device's name or stays a number."""

import textwrap

import pytest

from porting import EACH_TARGET, ported_once_for_all

NAMES = {"acclimate": "get_accelerator().current_device_name()", "torch": "accelerator_type()"}
NUMBERS = {
    "acclimate": "get_accelerator().current_device()",
    "torch": "torch.accelerator.current_device_index()",
}
CURRENT = "torch.cuda.current_device()"


def ported(lines: str, target: str) -> str:
    body = textwrap.indent(textwrap.dedent(lines), "    ")
    return ported_once_for_all(f"import torch\n\n\ndef f(x, args, device=None, gpu=None):\n{body}\n", target)


DEVICES = [
    f"device = device or {CURRENT}\nreturn x.to(device)",
    f"device = {CURRENT} if device is None else device\nreturn x.to(device)",
    f"where = args.where or {CURRENT}\nreturn x.to(where)",
    f"x.to(where := {CURRENT})\nreturn x.to(where)",
    f"where = {CURRENT}\nreturn x.to(where), x.cuda(where, non_blocking=True)",
    f"options = {{'device': {CURRENT}, 'dtype': torch.half}}\nreturn torch.zeros(1, **options)",
    f"return torch.zeros(1, **{{'device': {CURRENT}}})",
    f"options = dict(device={CURRENT})\nreturn torch.zeros(1, **options)",
    f"options = {{'dtype': torch.half}}\noptions['device'] = {CURRENT}\nreturn torch.zeros(1, **options)",
    f"options = {{'device': {CURRENT}}}\nmore = {{**options, 'n': 1}}\nreturn x.to(**more)",
    f"options = {{'device': {CURRENT}}}\nreturn x.to(options['device'])",
    f"x.device = {CURRENT}\nif x.device is not None:\n    return torch.ones(1).to(x.device)",
    f"x.where = {CURRENT} if args.on else torch.device('cpu')\nreturn torch.ones(1).to(x.where)",
]


@EACH_TARGET
@pytest.mark.parametrize("lines", DEVICES)
def test_what_gets_to_devices_alone_becomes_a_devices_name(lines: str, target: str) -> None:
    text = ported(lines, target)
    assert text.count(NAMES[target]) >= 1
    assert NUMBERS[target] not in text
    assert "device_name(where)" not in text
    assert "{where}" not in text


STAY = [
    f"device = device or {CURRENT}\nreturn torch.device('cuda', device)",
    f"index = {CURRENT} if x.is_cuda else 0\nreturn names[index]",
    f"gpu = gpu or {CURRENT}\nreturn x.to(gpu), x.cuda(gpu)",
    f"gpu = {CURRENT} if gpu is None else gpu\nreturn x.to(gpu)",
    f"where = {CURRENT} if args.first else int(args.rank)\nreturn x.to(where)",
    f"log({{'device': {CURRENT}}})",
    f"counts = {{'device': {CURRENT}}}\nprint(counts)",
    f"options = {{'device': {CURRENT}, 'rank': {CURRENT}}}\nprint(options['rank'])",
]


@EACH_TARGET
@pytest.mark.parametrize("lines", STAY)
def test_what_gets_to_a_number_stays_a_number(lines: str, target: str) -> None:
    text = ported(lines, target)
    assert NUMBERS[target] in text
    assert "current_device_name()" not in text


@EACH_TARGET
def test_an_index_that_only_a_message_reads_stays_a_number(target: str) -> None:
    source = """
        import torch


        class Monitor:
            def __init__(self):
                self.device_index = torch.cuda.current_device()
                self.capacity = torch.cuda.get_device_properties(self.device).total_memory

            def __str__(self):
                return f"{self.device_name} ({self.device_index})"
        """
    text = ported_once_for_all(textwrap.dedent(source).lstrip(), target)
    assert f"self.device_index = {NUMBERS[target]}" in text.replace("= (", "= ")


@EACH_TARGET
def test_a_number_that_is_called_gpu_is_made_a_device_where_it_is_used(target: str) -> None:
    text = ported(f"gpu = gpu or {CURRENT}\nreturn x.to(gpu)", target)
    used = {
        "acclimate": "x.to(get_accelerator().device_name(gpu))",
        "torch": 'x.to(f"{accelerator_type()}:{gpu}")',
    }
    assert used[target] in text
