"""Prints the table of losses in docs/deepspeed.md: DeepSpeed's own CPU accelerator beside ours.

    python tests/compat/deepspeed_losses.py [--ranks 1 2]

Needs an environment with DeepSpeed: `make test-deepspeed` makes one. The tests of the same trainings compare
every step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from test_deepspeed_training import NVME, OFFLOADED, SETTINGS, WHOLE, launched, results

COLUMNS = {"own": ("cpu", ""), "cpu": ("cpu", "0"), "sim": ("sim", "0"), "cpu, our ops": ("cpu", "1")}
"""For each column: the accelerator, and the switch of our op builders; "" without acclimate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    say(f"| ZeRO, offload, dtype | ranks | {' | '.join(COLUMNS)} |")
    say(f"|---|---|{'---|' * len(COLUMNS)}")
    for ranks in parser.parse_args().ranks:
        losses = {}
        for column, (accelerator, ops) in COLUMNS.items():
            variables = {"DS_ACCELERATOR": accelerator, **({"ACCLIMATE_DEEPSPEED_OPS": ops} if ops else {})}
            settings = (*OFFLOADED, *NVME) if ops == "1" else SETTINGS
            with tempfile.TemporaryDirectory() as folder:
                run = launched(ranks, *(["--deepspeed"] if ops else []))
                found = results(Path(folder), run, settings, **variables)
            losses[column] = {each: f"{found[each]['losses'][-1]:.9f}" for each in settings}
        for setting in (*WHOLE, *OFFLOADED, *NVME):
            cells = [losses[column].get(setting, "") for column in COLUMNS]
            say(f"| {setting.replace(',', ', ')} | {ranks} | {' | '.join(cells)} |")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
