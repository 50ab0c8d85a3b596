"""The training example: it learns, it continues where it was stopped, and ranks agree with each other."""

from __future__ import annotations

import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from training import (
    EXAMPLES,
    SCRIPT,
    STEPS,
    TINY,
    Row,
    curve,
    environment,
    forget_checkpoints_after,
    largest_difference,
    log_of,
    on_sim,
    start,
    train,
    wait,
    wait_for_step,
)

from fresh_process import FreshProcesses
from warm_python import WarmPython

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    """An uninterrupted run on the CPU, with dropout, so that random numbers matter."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with warm_python.in_place():
        train(out, "--dropout=0.1")
    return out


@pytest.fixture
def another(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of the whole run, to continue from."""
    return shutil.copytree(whole_run, tmp_path / "run")


def run_without_matplotlib(out: Path, *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """One run to its end."""
    code = f"""
{before}
import runpy, sys
sys.modules["matplotlib"] = None
sys.path[0] = {str(EXAMPLES)!r}
sys.argv = {[str(SCRIPT), f"--out={out}", *TINY, *options]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command, env = [sys.executable, "-c", code], environment(DS_ACCELERATOR="cpu")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


# -- a whole run -------------------------------------------------------------------------------------


def test_the_loss_falls_from_chance_to_well_below_it(whole_run: Path) -> None:
    found = curve(whole_run)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert found[0]["loss"] == pytest.approx(5.5, abs=0.3)  # ln(256) = 5.55: every byte as likely
    assert found[-1]["loss"] < 3.4
    assert [row["step"] for row in found if "validation_loss" in row] == [10, 20, 30]
    assert found[-1]["validation_loss"] < 3.4


def test_a_run_shows_its_figures_as_lines_where_there_is_no_terminal(whole_run: Path) -> None:
    said = log_of(whole_run).read_text()
    assert "0.1 M parameters" in said
    assert f"step 10/{STEPS} | loss " in said
    assert "tokens/s" in said
    assert "\x1b[" not in said


def test_a_run_draws_its_curve(whole_run: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = (whole_run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 400


def test_the_newest_checkpoints_are_kept(whole_run: Path) -> None:
    found = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert found == ["step_00000020.pt", "step_00000030.pt"]


def test_without_matplotlib_a_run_says_so_and_keeps_its_metrics(tmp_path: Path) -> None:
    ended = run_without_matplotlib(tmp_path / "run", "--steps=2")
    assert ended.returncode == 0, ended.stderr
    assert "pip install matplotlib" in ended.stdout
    assert len(curve(tmp_path / "run")) == 2


# -- stopped and resumed -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_curve_to_the_bit(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, f"--steps={STEPS}", "--dropout=0.1")
    wait_for_step(out, 13, process)
    process.kill()
    assert wait(process) == -signal.SIGKILL
    ended = run_without_matplotlib(out, f"--steps={STEPS}", "--dropout=0.1", "--resume")
    assert curve(out) == curve(whole_run), ended.stderr
    assert f"resuming from {out}/checkpoints/step_000000" in ended.stdout


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda n: n.name
)
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on_to_the_bit(
    number: signal.Signals, whole_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(out, f"--steps={STEPS}", "--dropout=0.1")
    wait_for_step(out, 2, process)
    process.send_signal(number)
    assert wait(process) == 128 + number
    done = len(curve(out))
    assert curve(out) == curve(whole_run)[:done]
    assert done < STEPS
    assert (out / f"checkpoints/step_{done:08d}.pt").exists()
    assert f"{number.name}: checkpoint of step {done} written" in log_of(out).read_text()
    ended = run_without_matplotlib(out, f"--steps={STEPS}", "--dropout=0.1", "--resume")
    assert curve(out) == curve(whole_run), ended.stderr


def test_a_run_that_is_complete_resumes_to_nothing(whole_run: Path) -> None:
    before = curve(whole_run)
    ended = run_without_matplotlib(whole_run, f"--steps={STEPS}", "--dropout=0.1", "--resume")
    assert ended.returncode == 0, ended.stderr
    assert curve(whole_run) == before


def test_settings_that_differ_from_the_checkpoints_are_told(another: Path) -> None:
    ended = run_without_matplotlib(another, "--steps=31", "--lr=0.001", "--dropout=0.1", "--resume")
    assert ended.returncode == 0, ended.stderr
    assert "curve may differ: steps 30 -> 31; lr 0.003 -> 0.001" in ended.stdout
    assert len(curve(another)) == 31


# -- what a user can get wrong -----------------------------------------------------------------------

REFUSED = {
    "another run": (["--steps=5"], "whole holds a run. Continue it with --resume, or give another --out."),
    "another shape": (
        ["--layers=3", "--width=32", "--resume"],
        "step_00000030.pt is of a model with layers 2 (here 3), width 64 (here 32). Give this run the same",
    ),
    "too little text": (
        ["--out=new", "--data=short.txt"],
        "The text has 19 bytes, and a context of 64 needs 130: a window to train on and one to",
    ),
    "no text": (["--out=new", "--data=no/such/folder"], "There is no no/such/folder. Name a text file, or a"),
    "heads": (["--heads=5"], "--width 64 must be a multiple of twice --heads 5"),
    "batch": (["--batch=8", "--accumulate=3"], "--batch 8 cannot be divided among 1 ranks in 3 parts"),
    "rate": (["--lr=-1"], "'-1' is not a number of at least 0"),
    "dropout": (["--dropout=1"], "--dropout 1 must be below 1"),
    "no steps": (["--steps=0"], "'0' is not a whole number of at least 1"),
    "dtype": (["--out=new", "--dtype=float16"], "does not compute in float16. --dtype can be bfloat16,"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(fresh: FreshProcesses, whole_run: Path) -> dict[str, Any]:
    """What the script answers to each, all in one process."""
    code = f"""
import contextlib, io, os, sys
sys.modules["matplotlib"] = None
open("short.txt", "w").write("To be, or not to be")
import train_gpt
for name, (options, message) in {REFUSED!r}.items():
    sys.argv = [{str(SCRIPT)!r}, {f"--out={whole_run}"!r}, *{TINY!r}, *options]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status = train_gpt.main()
        except SystemExit as end:
            status = end.code
    tell(**{{name: [status, said.getvalue(), os.path.exists("new")]}})
"""
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return fresh.check(code, path=[EXAMPLES], env=env).told


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_told_and_nothing_is_begun(
    name: str, fresh: FreshProcesses, refusals: dict[str, Any], whole_run: Path
) -> None:
    if name == "dtype" and fresh_float16(fresh):
        pytest.skip("this host computes in float16")
    status, said, has_begun = refusals[name]
    assert status in (1, 2)
    assert REFUSED[name][1] in said
    assert not has_begun
    assert len(curve(whole_run)) == STEPS


def fresh_float16(fresh: FreshProcesses) -> bool:
    code = "from acclimate import get_accelerator; tell(it=get_accelerator().is_fp16_supported())"
    return bool(fresh.check(code, env={"DS_ACCELERATOR": "cpu"}).told["it"])


def test_a_run_that_diverges_stops_before_its_checkpoints_are_spoilt(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = run_without_matplotlib(out, "--steps=9", "--lr=1e30", "--checkpoint-every=1")
    assert ended.returncode == 1
    assert "the run has diverged. Try a smaller --lr than 1e+30" in ended.stderr
    good = len(curve(out))
    assert f"--resume continues from step_{good:08d}.pt." in ended.stderr


def test_a_full_disk_loses_neither_the_run_nor_the_checkpoint_before(another: Path) -> None:
    before = (another / "checkpoints/step_00000030.pt").read_bytes()
    # A limit on the size of files, which the system reports as it does a full disk.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))"
    ended = run_without_matplotlib(another, "--steps=34", "--checkpoint-every=2", "--resume", before=limit)
    assert ended.returncode == 1
    assert (
        f"The checkpoint of step 32 could not be written to {another}/checkpoints: File too large. "
        "step_00000030.pt is still there. The run continues, and tries again later." in ended.stdout
    )
    assert "train_gpt.py: The checkpoint of step 34 could not be written" in ended.stderr
    assert len(curve(another)) == 34
    left = sorted(path.name for path in (another / "checkpoints").iterdir())
    assert left == ["step_00000020.pt", "step_00000030.pt"]
    assert (another / "checkpoints/step_00000030.pt").read_bytes() == before


# -- ranks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The curve of a run in float32, without dropout: what any number of ranks should get."""
    out = tmp_path_factory.mktemp("runs") / "one"
    with warm_python.in_place():
        ended = run_without_matplotlib(out, "--dtype=float32", "--steps=12")
    assert ended.returncode == 0, ended.stderr
    return curve(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ("tp", 2),
        ("ddp", 2),
        ("fsdp2", 2),
        ("tp+ddp", 4),
        ("tp+fsdp2", 4),
    ],
)
def test_ranks_train_as_one_does_on_the_same_global_batch(
    parallel: str, ranks: int, one_rank: list[Row], tmp_path: Path
) -> None:
    found = train(
        tmp_path / "run", f"--parallel={parallel}", "--dtype=float32", "--accumulate=2", steps=12, ranks=ranks
    )
    assert largest_difference(found, one_rank) < 1e-4
    assert largest_difference(found, one_rank, "norm") < 1e-4
    assert found[-1]["validation_loss"] == pytest.approx(one_rank[-1]["validation_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "optimizer"), [("ddp", "adamw"), ("fsdp2", "adamw"), ("fsdp2", "fused_adam")]
)
def test_two_ranks_resume_to_the_bit(parallel: str, optimizer: str, tmp_path: Path) -> None:
    options = (f"--parallel={parallel}", f"--optimizer={optimizer}", "--dropout=0.1", "--checkpoint-every=5")
    whole = train(tmp_path / "run", *options, steps=12, ranks=2)
    forget_checkpoints_after(tmp_path / "run", 10)
    assert train(tmp_path / "run", *options, "--resume", steps=12, ranks=2) == whole
    assert "resuming from" in log_of(tmp_path / "run").read_text()


@pytest.mark.slow
def test_shards_of_two_ranks_go_on_in_one_process_and_back(tmp_path: Path) -> None:
    out, alone, options = tmp_path / "run", tmp_path / "alone", ("--dtype=float32", "--resume")
    train(out, "--parallel=fsdp2", *options, steps=4, ranks=2)
    train(out, *options, steps=8)
    assert "ranks 2 -> 1, so random numbers differ" in log_of(out).read_text()
    found = train(out, "--parallel=ddp", *options, steps=12, ranks=2)
    for steps in (4, 8, 12):  # the schedule knows where a run ends, so one rank goes the same way
        run_without_matplotlib(alone, *options, f"--steps={steps}")
    assert largest_difference(found, curve(alone)) < 1e-4


@pytest.mark.slow
def test_a_run_goes_on_with_its_tensors_split_otherwise(tmp_path: Path) -> None:
    out, alone, options = tmp_path / "run", tmp_path / "alone", ("--dtype=float32", "--resume")
    train(out, "--parallel=tp+ddp", *options, steps=4, ranks=4)
    train(out, "--parallel=tp", *options, steps=8, ranks=2)
    train(out, "--parallel=tp+fsdp2", *options, steps=12, ranks=4)
    found = train(out, *options, steps=16)
    for steps in (4, 8, 12, 16):
        run_without_matplotlib(alone, *options, f"--steps={steps}")
    assert largest_difference(found, curve(alone)) < 1e-4


@pytest.mark.slow
def test_a_launcher_restarts_killed_ranks_and_the_curve_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    options = ("--dropout=0.1", "--checkpoint-every=5")
    whole = train(tmp_path / "whole", *options, steps=40, ranks=2)
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "acclimate", "run", "--num_accelerators=2", "--max_restarts=1"]
    command = [*launcher, str(SCRIPT), f"--out={out}", *TINY, *options, "--steps=40", "--resume"]
    with log_of(out).open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, text=True)
    wait_for_step(out, 12, process)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
    assert len(ranks) == 2
    ranks[1].kill()
    assert wait(process) == 0, log_of(out).read_text()
    assert f"resuming from {out}/checkpoints/step_000000" in log_of(out).read_text()
    assert curve(out) == whole


def is_rank(process: psutil.Process) -> bool:
    return process.cmdline()[1:2] == [str(SCRIPT)]


# -- dtypes, optimizers and accelerators -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--dtype=float32"], ["--optimizer=fused_adam"], ["--optimizer=cpu_adam"]], ids=" ".join
)
def test_each_way_to_train_on_the_host_learns_and_resumes_to_the_bit(
    options: list[str], tmp_path: Path
) -> None:
    check_learns_and_resumes(tmp_path / "run", *options)


@pytest.mark.slow
def test_an_accelerator_without_bfloat16_learns_in_float16(tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim")
    check_learns(train(tmp_path / "run", steps=12, env=on_sim("v100-like")))
    assert "| float16 |" in log_of(tmp_path / "run").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["v100-like", "mps-like", "hpu-like", "sync=check"])
def test_the_same_script_learns_on_an_emulated_accelerator_and_resumes_to_the_bit(
    profile: str, tmp_path: Path
) -> None:
    pytest.importorskip("acclimate_sim")
    check_learns_and_resumes(tmp_path / "run", env=on_sim(profile))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "tp"])
@pytest.mark.parametrize("profile", ["v100-like", "hpu-like", "sync=check"])
def test_two_ranks_learn_on_two_emulated_devices(profile: str, parallel: str, tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim")
    check_learns_and_resumes(tmp_path / "run", f"--parallel={parallel}", ranks=2, env=on_sim(profile))


def check_learns(found: list[Row]) -> None:
    assert found[0]["loss"] > 5.2
    assert found[-1]["loss"] < 4.2


def check_learns_and_resumes(out: Path, *options: str, **how: Any) -> None:
    given = (*options, "--dropout=0.1", "--checkpoint-every=8", "--log-every=20")
    whole = train(out, *given, steps=12, **how)
    check_learns(whole)
    forget_checkpoints_after(out, 8)
    assert train(out, *given, "--resume", steps=12, **how) == whole
    assert "step_00000008.pt, step 8" in log_of(out).read_text()


@pytest.mark.slow
def test_float16_leaves_out_a_step_whose_gradient_overflows_and_halves_the_scale(tmp_path: Path) -> None:
    pytest.importorskip("acclimate_sim")
    code = f"""
import sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
from acclimate import get_accelerator
from train_gpt import Trainer, parse
trainer = Trainer(parse([{", ".join(map(repr, TINY))}, "--out={tmp_path}/run"]), get_accelerator())
assert trainer.step()["norm"] is not None
trainer.scaler.update(2.0**40)
before = [p.detach().clone() for p in trainer.model.parameters()]
assert trainer.step()["norm"] is None
assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
assert trainer.scaler.get_scale() == 2.0**39
trainer.scaler.update(2.0**10)
assert trainer.step()["norm"] is not None
assert not any(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(**on_sim("v100-like")), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
