"""AutoTP over tiny random models of 46 architectures: right and really split?

    python benchmarks/autotp.py                       # all architectures, all settings
    python benchmarks/autotp.py --only llama,mixtral --setting "3 ranks"

Every rank is a process. Each parameter is random, biases and norms too. A row is right if the logits of
every rank differ by less than 1e-4 from the whole model's, greedy generation with a cache gives the same
text, and (on 2 ranks) no rank holds more than 0.60 of the parameters besides embeddings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parallel"))

from architectures import ARCHITECTURES
from rank_group import RankGroup

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 key/value head": (2, {"num_key_value_heads": 1}),
    "3 ranks": (3, {}),
    "4 ranks": (4, {}),
}
LARGEST_SHARE = 0.60


def verdict(found: dict[str, Any], size: int) -> str:
    if "refused" in found:
        return "refused"
    if "failed" in found:
        return "failed"
    if not found["error"] < 1e-4 or not found["same_text"]:
        return "wrong"
    if size == 2 and found["share"] > LARGEST_SHARE:
        return "not split"
    return f"{found['share']:.2f}{'p' if found['padded'] else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="architectures, separated by commas")
    parser.add_argument("--setting", choices=SETTINGS, help="one setting")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else ARCHITECTURES
    settings = [args.setting] if args.setting else list(SETTINGS)
    table: dict[str, dict[str, str]] = {name: {} for name in names}
    notes: list[str] = []
    for setting in settings:
        size, changes = SETTINGS[setting]
        with RankGroup(size) as ranks:
            for name in names:
                found = ranks.compare(name, **changes)
                table[name][setting] = said = verdict(found, size)
                print(
                    f"{setting:18}{name:18}{said:10}", *(f"{k}={v}" for k, v in found.items() if k != "trace")
                )
                if not said[0].isdigit():
                    notes.append(f"{name}, {setting}: {found}")
    print(f"\n{'largest share':18}" + "".join(f"{each:>18}" for each in settings))
    for name, row in table.items():
        print(f"{name:18}" + "".join(f"{row[each]:>18}" for each in settings))
    good = [sum(row[each][0].isdigit() for row in table.values()) for each in settings]
    print(f"{'right and split':18}" + "".join(f"{f'{count} of {len(names)}':>18}" for count in good))
    print("p: padded, attention runs over all heads and its cache holds them all.", *notes, sep="\n")
    return 0 if all(count == len(names) for count in good) else 1


if __name__ == "__main__":
    sys.exit(main())
