"""A ported program where the host is all there is: counts of devices, refusals, answers of the device's module."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from acclimate_port.engine import Settings, port_text
from porting import BOTH, check, ported_once_for_all, program

torch = pytest.importorskip("torch", reason="runs ported code")

IMPORTS = "import os\nimport sys\n\nimport torch\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"


def to_torch(lines: str) -> str:
    """What ``--to torch`` makes of the body of a function."""
    return to_torch_program("def main(rank, args):\n" + textwrap.indent(textwrap.dedent(lines), "    "))


def to_torch_program(source: str) -> str:
    return ported_once_for_all(IMPORTS + textwrap.dedent(source), "torch")


STARTS_OR_DIVIDES = [
    "mp.spawn(main, nprocs=torch.cuda.device_count())",
    "mp.spawn(main, (args,), torch.cuda.device_count())",
    "torch.multiprocessing.start_processes(main, args=(args,), nprocs=torch.cuda.device_count())",
    "n = torch.cuda.device_count()\nmp.spawn(main, nprocs=n, args=(n,))",
    "n = args.n or torch.cuda.device_count()\nmp.spawn(main, nprocs=n)",
    "n = args.n if args.n else torch.cuda.device_count()\nmp.spawn(main, nprocs=n)",
    "n: int = min(8, torch.cuda.device_count())\nmp.spawn(main, nprocs=int(n))",
    "args.gpus = torch.cuda.device_count()\nmp.spawn(main, nprocs=args.gpus)",
    "if (n := torch.cuda.device_count()):\n    pass\nmp.spawn(main, nprocs=n)",
    "a, n = 1, torch.cuda.device_count()\nmp.spawn(main, nprocs=n)",
    "n = torch.cuda.device_count()\nif n > 3:\n    n = 3\nmp.spawn(main, nprocs=n)",
    "world_size = torch.cuda.device_count()",
    "args.world_size = torch.cuda.device_count() * args.nodes",
    "config['world_size'] = torch.cuda.device_count()",
    "config = {'num_processes': torch.cuda.device_count()}",
    "per_node = torch.cuda.device_count()\nargs.world_size = per_node * args.world_size",
    "dist.init_process_group('gloo', rank=rank, world_size=torch.cuda.device_count())",
    "os.environ['WORLD_SIZE'] = str(torch.cuda.device_count())",
    "for i in range(torch.cuda.device_count()):\n    mp.Process(target=main, args=(i,)).start()",
    "all_of_them = [mp.Process(target=main, args=(i,)) for i in range(torch.cuda.device_count())]",
    "n = torch.cuda.device_count()\nfor i in range(n):\n    p = mp.Process(target=main, args=(i,))\n    p.start()",
    "pool = mp.Pool(torch.cuda.device_count())",
    "pool = mp.Pool(processes=torch.cuda.device_count())",
    "device = rank % torch.cuda.device_count()",
    "node = rank // torch.cuda.device_count()",
    "batch = int(args.batch / torch.cuda.device_count())",
    "args.batch //= torch.cuda.device_count()",
    "node, device = divmod(rank, torch.cuda.device_count())",
    "n = torch.cuda.device_count()\ndevice = rank % n",
    "n = torch.cuda.device_count()\nassert n > 0\nmp.spawn(main, nprocs=n)",
    "n = torch.cuda.device_count()\nif n == 0:\n    raise RuntimeError('no device')\nmp.spawn(main, nprocs=n)",
    "n = torch.cuda.device_count()\nif n < 2:\n    print('slow')\nmp.spawn(main, nprocs=n)",
]


@BOTH
@pytest.mark.parametrize("lines", STARTS_OR_DIVIDES)
def test_a_number_of_devices_that_starts_processes_or_divides_is_the_same_on_a_host(
    lines: str, target: str
) -> None:
    source = f"{IMPORTS}def main(rank, args):\n{textwrap.indent(lines, '    ')}\n"
    is_counted_on_a_host(source, target)


def is_counted_on_a_host(source: str, target: str) -> None:
    """Checks that a safe port counts no device on a host: all edits are safe, which proofs compare."""
    found = port_text(source, Settings(target))
    assert "torch.cuda" not in found.text
    assert "max(1" not in found.text


@BOTH
@pytest.mark.parametrize(
    "source",
    [
        """
        def count():
            return torch.cuda.device_count()

        mp.spawn(print, nprocs=count())
        """,
        """
        def start(function, n):
            mp.spawn(function, args=(n,), nprocs=n)

        start(print, torch.cuda.device_count())
        """,
        """
        def start(function, n=torch.cuda.device_count()):
            mp.spawn(function, args=(n,), nprocs=n)
        """,
        """
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
        args = parser.parse_args()
        mp.spawn(print, nprocs=args.gpus)
        """,
        """
        class Trainer:
            def __init__(self):
                self.n = torch.cuda.device_count()

            def run(self):
                mp.spawn(print, nprocs=self.n)
        """,
    ],
)
def test_a_number_of_devices_is_the_same_on_a_host_where_another_function_gets_it(
    source: str, target: str
) -> None:
    is_counted_on_a_host(IMPORTS + textwrap.dedent(source), target)


@pytest.mark.parametrize(
    "lines",
    [
        "print(torch.cuda.device_count())",
        "print('%d devices' % torch.cuda.device_count())",
        "print(f'{torch.cuda.device_count()} devices')",
        "if torch.cuda.device_count() > 1:\n    model = torch.nn.DataParallel(model)",
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]",
        "n = torch.cuda.device_count()\nif n > 0:\n    mp.spawn(main, nprocs=n)\nelse:\n    main(0)",
        "n = torch.cuda.device_count()\nif n:\n    mp.spawn(main, nprocs=n)",
        "n = torch.cuda.device_count()\nif n == 0:\n    return main(0)\nmp.spawn(main, nprocs=n)",
        "if torch.cuda.device_count() > 0:\n    mp.spawn(main, nprocs=torch.cuda.device_count())\nelse:\n    main(0)",
        "if torch.cuda.is_available():\n    mp.spawn(main, nprocs=torch.cuda.device_count())",
        "per_device = rank / 2 if torch.cuda.device_count() else 1",
    ],
)
def test_other_numbers_of_devices_stay_as_torch_counts_them(lines: str) -> None:
    text = to_torch(lines)
    assert "torch.accelerator.device_count()" in text
    assert "max(1" not in text


REFUSALS = [
    "assert torch.cuda.is_available(), 'needs a device'",
    "assert torch.cuda.is_available() and flag",
    "if not torch.cuda.is_available():\n    raise RuntimeError('needs a device')",
    "if not torch.cuda.is_available() or flag:\n    raise ValueError(1)",
    "if torch.cuda.is_available():\n    print(0)\nelse:\n    raise RuntimeError('needs a device')",
    "assert torch.cuda.device_count() > 0",
    "if torch.cuda.device_count() < 1:\n    raise RuntimeError('needs a device')",
    "if not torch.cuda.device_count():\n    raise RuntimeError('needs a device')",
    "if 0 == torch.cuda.device_count():\n    raise ValueError('needs a device')",
    "assert torch.cuda.is_available() or flag",
    "assert not torch.cuda.is_available()",
    "assert torch.cuda.device_count() >= 2",
]


@pytest.mark.parametrize("target", ["acclimate", "torch"])
@pytest.mark.parametrize("lines", REFUSALS)
def test_a_refusal_to_run_without_a_device_refuses_a_host_as_before(lines: str, target: str) -> None:
    ported = check(program(f"{lines}\nreturn torch.zeros(1).cuda()"), target, changed=True)
    assert "cuda" not in ported.text
    assert all(site.safe for site in ported.sites)


ANSWERS = """
import torch


def answers():
    name = torch.cuda.get_device_name(0)
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    bytes_of_all = torch.cuda.get_device_properties(0).total_memory
    peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    label = f"{torch.cuda.get_device_properties(0).name} {torch.cuda.get_device_name()}"
    states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
    torch.cuda.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1])
    seed = torch.cuda.initial_seed()
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    with torch.cuda.device(0):
        wait = torch.cuda.synchronize
    wait()
    for each in (torch.cuda.empty_cache, torch.cuda.reset_peak_memory_stats):
        each()
    return name, major, free, bytes_of_all, peak, label, seed, kind
"""


@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_what_a_program_asks_a_device_has_an_answer_on_a_host(target: str) -> None:
    ported = port_text(ANSWERS, Settings(target, unsafe=True)).text
    assert "torch.cuda" not in ported
    space: dict[str, Any] = {}
    exec(ported, space)
    assert space["answers"]()[-1] is torch.bfloat16


def test_a_model_that_is_built_in_the_call_keeps_its_layers_on_a_host() -> None:
    source = "import torch\n\nlayer = torch.nn.SyncBatchNorm.convert_sync_batchnorm(build().model, None)\n"
    for target in ("acclimate", "torch"):
        ported = ported_once_for_all(source, target)
        assert "lambda module, process_group=None: module)(build().model, None)" in ported


def test_a_number_that_is_called_a_device_is_ported_as_a_number() -> None:
    text = to_torch("device = rank % torch.cuda.device_count()\nmodel = torch.nn.Linear(1, 1).cuda(device)")
    assert '.to(f"{accelerator_type()}:{device}")' in text


SPAWNS = """
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size, store):
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    total = torch.ones(1).cuda(rank)
    dist.all_reduce(total)
    if rank == 0:
        print("ranks:", int(total), "of", world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(work, args=(n, sys.argv[1]), nprocs=n)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_a_program_that_starts_a_process_for_each_device_does_on_a_host_what_it_did(
    target: str, tmp_path: Path
) -> None:
    ran = []
    for name, text in (("before", SPAWNS), ("after", port_text(SPAWNS, Settings(target, unsafe=True)).text)):
        program = tmp_path / f"{name}.py"
        program.write_text(text, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, str(program), str(tmp_path / f"store_{name}")],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        ran.append((ended.stdout, ended.returncode))
    assert ran == [("", 0)] * 2


LISTS = [
    'devices = (torch.device("cpu"),) + (torch.device("cuda"),) * torch.cuda.is_available()',
    'devices = ["cpu"] + torch.cuda.is_available() * ["cuda"]',
    'devices = ["cpu"] + ["cuda"] * int(torch.cuda.is_available())',
    'devices = ["cpu", *["cuda"] * bool(torch.cuda.is_available())]',
    'found = torch.cuda.is_available()\ndevices = ["cpu"] + ["cuda"] * found',
    'devices = ["cpu"] + (torch.cuda.is_available() and ["cuda"] or [])',
    'devices = ["cpu"]\nif torch.cuda.is_available():\n    devices = ["cpu", "cuda"]',
    'devices = ["cpu"]\nif torch.cuda.is_available():\n    devices = devices + ["cuda"]',
]


@pytest.mark.parametrize("lines", LISTS)
@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_a_list_of_devices_has_each_once(lines: str, target: str) -> None:
    body = textwrap.indent(lines, "    ")
    source = ported_once_for_all(f"import torch\n\n\ndef f():\n{body}\n    return devices\n", target)
    space: dict[str, Any] = {}
    exec(source, space)
    names = [str(device) for device in space["f"]()]
    assert names[0] == "cpu"
    assert len(set(names)) == len(names)
