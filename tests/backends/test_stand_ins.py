"""Every built-in backend runs as it is over a module with exactly its vendor's recorded names and arguments.

The full suite on each way takes two minutes of processor time, so those runs are marked slow. The Pythons
of the others have torch imported already, and torch loads the stand-in when they import it. A device that
takes the place of one that torch names needs a library of its own, so none of those is in the others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stand_ins import log
from stand_ins.folder import log_file, make_environment
from stand_ins.surface import read_surface
from stand_ins.ways import WAYS

from fresh_process import plain_environment

library = pytest.importorskip("acclimate_sim.library", reason="the emulated accelerator is not installed")
NAMED_SLOTS = library.NAMED_SLOTS

WHOLE_RUN_S = 3600
"""A limit for all checks that only a hang reaches: beside a load of 20 they took 15 minutes."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
PEAK_WITHOUT_STATISTICS = "Metal's allocator keeps no peak in torch 2.10, so it is the largest figure read"
GAUDI_RESERVES_ALL = "Gaudi's allocator holds all memory from the start: memory_reserved() is a constant"
INDUCTOR_FOR_CUDA = "what inductor prepares for CUDA graphs is in builds of torch for CUDA only"
NO_RESIZING = "a build of torch without CUDA resizes no storage of its devices"
NO_PLACE = "a kernel that torch finds by the type of the device, for which this build has no place"
NO_KERNEL_OF_XPU = dict.fromkeys(("dtypes/modules_as_on_the_host", "runtime/transformed_programs"), NO_PLACE)
NO_STATE_OF_MPS = "torch.utils.checkpoint keeps no state of the generator of MPS"
MPS = {
    "memory/walks_over_memory": "UntypedStorage.resize_() of torch does not know MPS",
    "random/recomputed_draws_repeat": NO_STATE_OF_MPS,
    "runtime/checkpoints_draw_again": NO_STATE_OF_MPS,
    "runtime/walks_over_saved_tensors": "torch clones tensors of MPS one by one in copy.deepcopy()",
    "dtypes/autocast_chooses_dtypes": "torch's rules of autocast for MPS leave normalize and transposed "
    "convolutions in the dtype that they get",
    "runtime/transformed_programs": NO_PLACE,
    "dtypes/wrong_arguments_are_refused": "torch's lu_solve for MPS leaves an out of other dtypes as it is",
}
KNOWN_FAILURES = {
    "cuda": {
        "memory/walks_over_memory": NO_RESIZING,
        "runtime/checkpoints_draw_again": INDUCTOR_FOR_CUDA,
        "runtime/compiled_functions_follow_their_surroundings": INDUCTOR_FOR_CUDA,
        "runtime/compiled_functions_have_effects": INDUCTOR_FOR_CUDA,
        "runtime/compiled_functions_keep_apart": INDUCTOR_FOR_CUDA,
        "runtime/compiles": INDUCTOR_FOR_CUDA,
        "runtime/storages_hold_their_bytes": NO_RESIZING,
        "runtime/tensors_in_python": NO_RESIZING,
    },
    **dict.fromkeys(("xpu", "xpu with IPEX", "xpu.external"), NO_KERNEL_OF_XPU),
    "mps": MPS,
    "mps of torch 2.10": {"memory/statistics_agree": PEAK_WITHOUT_STATISTICS, **MPS},
    "hpu": {
        "devices/names": "without an index, which a program may take from its rank; a process has one HPU",
        "memory/cache_is_not_available": GAUDI_RESERVES_ALL,
        "runtime/checkpoints_draw_again": "the stand-in's compiler runs the graph as it is, in which torch "
        "leaves the numbers of a checkpoint to the compiler",
    },
}
"""By way: checks that fail over the stand-in, and why."""

NOT_EXECUTED: dict[str, dict[str, str]] = {}
"""By way: methods that a backend overrides and no check calls, and why."""

pytestmark = pytest.mark.usefixtures("warm_starts")

FEW = {
    "npu": ("runtime/profiler_marks", "launching/visible_devices"),
    "xpu": ("streams/options_of_streams_and_events",),
}
"""By way: what a test of few checks tries.

The stand-in of CUDA has to be there before torch is imported, which the Pythons of these tests have done.
"""


@dataclass(frozen=True)
class Run:
    """What came of the checks over one stand-in."""

    results: list[dict[str, Any]]
    noted: dict[str, set[str]]

    def with_outcome(self, outcome: str) -> dict[str, str]:
        return {r["check"]: r["reason"] for r in self.results if r["outcome"] == outcome}


def python(called: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where a stand-in is installed."""
    way = WAYS[called]
    skip_where_it_cannot_be(way.device_type)
    environment = {**plain_environment(), **make_environment(called, way, folder), **variables}
    environment.pop(way.visible_devices, None)  # with which tests hide this machine's own GPUs
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WHOLE_RUN_S,
        check=False,
    )


def skip_where_it_cannot_be(device_type: str) -> None:
    """A name that torch keeps for its own device is free on Linux, where this torch has no such device."""
    import torch

    if device_type not in NAMED_SLOTS:
        return
    if sys.platform != "linux":
        pytest.skip("torch's own device types are taken over on Linux only")
    if torch.backends.cuda.is_built() or torch.backends.mps.is_built() or torch.xpu._is_compiled():
        pytest.skip(f"this torch is built for hardware, beside which nothing stands in for {device_type}")


def conformance(called: str, folder: Path, *only: str) -> Run:
    report = folder.parent / f"{folder.name}.json"
    options = [argument for name in only for argument in ("--only", name)]
    run = python(called, folder, "-m", "acclimate", "conformance", "--json", str(report), *options)
    assert report.exists(), run.stdout + run.stderr
    told = json.loads(report.read_text())
    assert told["about"]["accelerator"] == WAYS[called].accelerator
    assert told["about"]["implementation"] == WAYS[called].backend
    return Run(told["results"], log.read(log_file(folder)))


def overrides(called: str) -> set[str]:
    from stand_ins.executed import overrides

    return {f"{owner.__name__}.{name}" for owner, name, _ in overrides(WAYS[called].backend)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "stand_in"
    made.mkdir()
    return made


# -- the checks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_RUN_S)
@pytest.mark.parametrize("called", WAYS)
def test_a_backend_keeps_its_promises_over_its_vendors_surface_and_every_override_runs(
    called: str, folder: Path
) -> None:
    run = conformance(called, folder)
    assert len(run.results) > 70
    assert run.with_outcome("failed").keys() == KNOWN_FAILURES.get(called, {}).keys(), run.with_outcome(
        "failed"
    )
    assert run.noted["not-emulated"] == set()
    assert run.noted["wrong-arguments"] == set()
    assert overrides(called) - run.noted["executed"] == NOT_EXECUTED.get(called, {}).keys()


@pytest.mark.parametrize("called", ["npu", pytest.param("xpu", marks=pytest.mark.slow)])
def test_what_backends_override_most_works_over_their_vendors_surface(called: str, folder: Path) -> None:
    run = conformance(called, folder, *FEW[called])
    assert run.with_outcome("failed") == {}
    assert run.noted["not-emulated"] == set()
    assert run.noted["wrong-arguments"] == set()


@pytest.mark.parametrize(
    "called",
    [
        "mlu",
        pytest.param("xpu", marks=pytest.mark.slow),
        pytest.param("sdaa", marks=pytest.mark.slow),
        pytest.param("xpu.external", marks=pytest.mark.slow),
    ],
)
def test_an_accelerator_is_detected_and_computes_on_its_own_device_type(called: str, folder: Path) -> None:
    program = """
import os, torch
del os.environ["ACCLIMATE_ACCELERATOR"]
from acclimate import get_accelerator
acc = get_accelerator()
x = torch.arange(6.0, device=acc.current_device_name()).reshape(2, 3).requires_grad_()
(x @ x.T).sum().backward()
print(acc.name, type(acc).__name__, x.device.type, x.grad.cpu().tolist(), acc.memory_allocated() > 0)
"""
    run = python(called, folder, "-c", program)
    way = WAYS[called]
    of_class = way.backend.partition(":")[2]
    gradient = "[[6.0, 10.0, 14.0], [6.0, 10.0, 14.0]]"
    assert run.stdout.strip() == f"{way.accelerator} {of_class} {way.device_type} {gradient} True", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("called", ["hpu", "xpu", "mps"])
def test_torch_knows_a_device_whose_package_is_tried_for_the_first_time(called: str, folder: Path) -> None:
    program = """
from acclimate import get_accelerator
acc = get_accelerator()
import torch
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count() == acc.device_count() > 0)
"""
    # Attempts are remembered for each value, and this one is new.
    run = python(called, folder, "-c", program, LD_LIBRARY_PATH=str(folder))
    assert run.stdout.strip() == f"{WAYS[called].device_type} True", run.stderr


@pytest.mark.slow
def test_torch_knows_a_device_that_detection_finds_in_a_package_torch_does_not_load(folder: Path) -> None:
    program = """
import os
(folder,) = (path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path.endswith("stand_in"))
os.remove(f"{folder}/stand_in-1.0.dist-info/entry_points.txt")
with open(f"{folder}/habana_frameworks/torch/hpu/__init__.py", "a") as source:
    source.write("from stand_ins.install import install; install()")
del os.environ["ACCLIMATE_ACCELERATOR"]
from acclimate import get_accelerator
acc = get_accelerator()
import torch
print(acc.name, torch.accelerator.current_accelerator())
"""
    run = python("hpu", folder, "-c", program)
    assert run.stdout.strip() == "hpu hpu", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("called", WAYS)
def test_the_training_example_learns_over_every_stand_in(called: str, folder: Path) -> None:
    if not EXAMPLE.exists():
        pytest.skip("the training example is not here")
    small = "--layers 2 --heads 2 --width 64 --context 64 --batch 8 --warmup 2 --steps 12 --log-every 2"
    rare = "--validate-every 6 --checkpoint-every 6 --validation-batches 2"
    out = folder.parent / "training"
    run = python(called, folder, str(EXAMPLE), *small.split(), *rare.split(), "--out", str(out))
    losses = re.findall(r"step +(?:1|12)/12 \| loss ([\d.]+)", run.stdout)
    assert len(losses) == 2, run.stdout + run.stderr
    assert float(losses[1]) < float(losses[0]) - 0.5
    assert f"{WAYS[called].accelerator}: a stand-in for {WAYS[called].device_type}" in run.stdout
    assert log.read(log_file(folder))["not-emulated"] == set()


# -- the stand-ins themselves ------------------------------------------------------------------------


def test_a_stand_in_has_the_recorded_names_and_no_other(folder: Path) -> None:
    program = "import torch; print(*(n for n in dir(torch.npu) if n[0] != '_')); print(torch.npu.no_such)"
    run = python("npu", folder, "-c", program)
    surface = read_surface(WAYS["npu"].surface)
    assert {name for name in run.stdout.split() if name not in surface.names} == set()
    assert "AttributeError: the recorded torch.npu has no no_such" in run.stderr


def test_a_stand_in_refuses_arguments_that_were_not_recorded(folder: Path) -> None:
    calls = {
        "memory_allocated(device_index=0)": "got an unexpected keyword argument 'device_index'",
        "set_device()": "missing a required argument: 'device'",
        "mstx.range_push()": "missing a required argument: 'message'",
        "Event(timing=True)": "got an unexpected keyword argument 'timing'",
        "Stream().wait_stream()": "missing a required argument: 'stream'",
    }
    program = """
import json, sys, torch
for call in json.loads(sys.argv[1]):
    try: eval(f"torch.npu.{call}")
    except TypeError as error: print(error)
"""
    run = python("npu", folder, "-c", program, json.dumps(list(calls)))
    for line, (call, message) in zip(run.stdout.splitlines(), calls.items(), strict=True):
        assert message in line, call
    assert len(log.read(log_file(folder))["wrong-arguments"]) == len(calls)


@pytest.mark.slow
def test_a_backend_that_calls_what_its_vendor_lacks_fails_its_checks(folder: Path) -> None:
    (folder / "faulty.py").write_text("""
from acclimate.backends.npu import NPUAccelerator
class Faulty(NPUAccelerator):
    def empty_cache(self):
        self.torch_module.empty_cache(force=True)
    def ipc_collect(self):
        self.torch_module.ipc_collect_all()
""")
    run = python(
        "npu", folder, "-m", "acclimate", "conformance", "--accelerator", "faulty:Faulty", "--only", "memory"
    )
    assert run.returncode == 1
    assert "TypeError: torch.npu.empty_cache() was called with other arguments" in run.stdout
    assert "AttributeError: the recorded torch.npu has no ipc_collect_all" in run.stdout


def test_what_a_stand_in_cannot_do_is_an_error_of_its_own_and_noted(folder: Path) -> None:
    run = python("npu", folder, "-c", "import torch; torch.npu.utilization()")
    assert (
        "NotEmulatedError: torch.npu.utilization exists, and the stand-in does not emulate it" in run.stderr
    )
    assert log.read(log_file(folder))["not-emulated"] == {"torch.npu.utilization"}


def test_a_stand_in_limits_devices_by_the_vendors_variable(folder: Path) -> None:
    program = "import torch; print(torch.npu.device_count())"
    limited = f"import os; os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '1'; {program}"
    assert python("npu", folder, "-c", limited).stdout.strip() == "1"
