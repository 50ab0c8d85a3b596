"""How a run is divided among several processes (pytest-xdist), and which tests start first."""

from __future__ import annotations

import functools
from pathlib import PurePosixPath
from typing import Any

import pytest

LONGEST_FIRST = (
    "tests/llm/decode",
    "tests/llm/",
    "tests/llm/split",
    "tests/llm/loading",
    "tests/llm/decode/test_delta_rules.py",
    "tools/acclimate-conformance/tests/test_conformance.py",
    "tools/acclimate-conformance/tests/test_mutants.py",
    "tests/llm/decode/test_lean_decode.py",
    "tests/llm/decode/test_convolutions.py",
    "tests/llm/decode/test_adversary.py",
    "tests/launch/test_run_command.py",
    "tests/ops/aio",
    "tests/ops/optimizers/test_optimizer_ops.py",
    "tools/acclimate-conformance/tests/test_sampled.py",
    "tools/acclimate-port/tests/test_safe_edits.py",
    "extensions/acclimate-sim/tests/test_sim_folders.py",
    "tests/ops/optimizers/test_optimizers.py",
    "tests/test_cli_failures.py",
    "tests/test_cli.py",
    "tests/comm",
    "tests/launch/engines/test_ssh.py",
    "tests/launch/remote/test_by_hand.py",
    "tools/acclimate-port/tests/test_properties.py",
    "tests/accelerator/test_graphs.py",
    "extensions/acclimate-sim/tests",
    "tests/test_house.py",
    "tools/acclimate-conformance/tests/test_pointers.py",
    "tests/test_test_support.py",
    "tests/ops/optimizers/test_optimizer_memory.py",
    "tests/examples/test_train_gpt.py",
    "tools/acclimate-conformance/tests/test_runner.py",
    "tests/test_packages.py",
    "tests/ops/test_ops_command.py",
    "tests/selection/test_detection.py",
    "tests/launch/elastic/test_elastic.py",
    "tests/launch/supervise/test_supervisor.py",
    "tests/llm/split/planning",
    "tests/launch/output/test_terminal.py",
    "tests/launch/remote/test_engine_program.py",
    "tests/launch/supervise/test_guard.py",
    "tests/test_info.py",
    "tools/acclimate-port/tests/test_decisions.py",
    "tests/backends/test_cpu.py",
    "tests/launch/output/test_pump.py",
    "tests/compat/test_deepspeed_names.py",
    "tests/backends/test_stand_ins.py",
    "tests/launch/supervise/test_signals.py",
    "tools/acclimate-port/tests/conditions/test_worlds.py",
    "tests/launch/engines/test_slurm.py",
    "tests/launch/engines/test_mpi.py",
    "tests/selection/test_broken_records.py",
    "tests/docs/test_inference_page.py",
    "tests/docs/test_guide.py",
    "tests/selection/test_explicit_choice.py",
    "tests/selection/test_autoload.py",
    "tests/cache/test_folder.py",
)
"""The parts of a run that start first, so that no process is left alone with one of them at the end.

All tests of a file run in one process, as they share what is costly to make. So do all files of a folder that
is named here, and with a final slash those of the folders in it, except those that are named themselves.
"""

_PLACES = {name: place for place, name in enumerate(LONGEST_FIRST)}


def part_of(nodeid: str) -> str:
    """The file or folder whose tests run in the process that runs this one."""
    return _part_with(nodeid.partition("::")[0])


@functools.cache  # asked for every test, by every process of a run
def _part_with(file: str) -> str:
    folders = [str(folder) for folder in PurePosixPath(file).parents]
    names = (file, folders[0], *(f"{folder}/" for folder in folders))
    return next((name for name in names if name in _PLACES), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest parts first."""
    items.sort(key=lambda item: _PLACES.get(part_of(item.nodeid), len(_PLACES)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divides the tests by :func:`part_of` where pytest-xdist would divide them by file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part_of(nodeid)

    return Scheduling(config, log)
