"""AutoTP over tiny random models of 46 architectures: right and really split?

    python benchmarks/autotp.py                       # all architectures, all settings
    python benchmarks/autotp.py --only llama,mixtral --setting "3 ranks"
    python benchmarks/autotp.py --peers               # and 2 ranks of DeepSpeed's and of transformers'

Every rank is a process. Each parameter is random, biases and norms too. A row is right if the logits of
every rank differ by less than 1e-4 from the whole model's, greedy generation with a cache gives the same
text, and (on 2 ranks) no rank holds more than 0.60 of the parameters besides embeddings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "llm" / "split"))

import results
from architectures import ARCHITECTURES
from peers import deepspeed_python
from rank_group import RankGroup

PEER = Path(__file__).with_name("autotp_peer.py")

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 key/value head": (2, {"num_key_value_heads": 1}),
    "3 ranks": (3, {}),
    "4 ranks": (4, {}),
}
LARGEST_SHARE = 0.60
PEER_TIMEOUT_S = 90.0
FAILED = ("failed", "wrong", "not split", "refused")


def rows_of_peers(names: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields what each peer makes of each architecture on 2 ranks, with its name and the architecture's."""
    for peer, python in (("deepspeed", str(deepspeed_python())), ("transformers", sys.executable)):
        # A rank that fails alone leaves the other in a collective.
        with RankGroup(2, (python, str(PEER)), (peer,), timeout_s=PEER_TIMEOUT_S) as ranks:
            for name in names:
                found = ranks.compare(name)
                yield peer, name, found
                if "failed" in found:  # its ranks may not be where they should be
                    ranks.restart()


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
    parser.add_argument("--peers", action="store_true", help="the peers too, on 2 ranks")
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
    columns = list(settings)
    if args.peers:
        for peer, name, found in rows_of_peers(names):
            table[name][peer] = said = verdict(found, 2)
            print(f"{peer:18}{name:18}{said:10}", *(f"{k}={v}" for k, v in found.items()), flush=True)
        columns += ["deepspeed", "transformers"]
    print(f"\n{'largest share':18}" + "".join(f"{column:>18}" for column in columns))
    for name, row in table.items():
        print(f"{name:18}" + "".join(f"{row[column]:>18}" for column in columns))
    good = {column: sum(row[column] not in FAILED for row in table.values()) for column in columns}
    print(
        f"{'right and split':18}" + "".join(f"{f'{good[column]} of {len(names)}':>18}" for column in columns)
    )
    print("p: padded, attention runs over all heads and its cache holds them all.", *notes, sep="\n")
    if "2 ranks" in good:
        shown = {"deepspeed": "DeepSpeed"}  # as the other benchmarks name it
        peers = {
            shown.get(column, column): float(good[column]) for column in columns if column not in settings
        }
        title = f"architectures of {len(names)} right and split"
        results.record(
            "autotp",
            [
                results.Figure(
                    f"{title}, {ranks}", "models", good[ranks], peers if ranks == "2 ranks" else {}
                )
                for ranks in settings
            ],
        )
    # One may be refused or fail in transformers itself, whole too.
    return 0 if all(good[ranks] >= len(names) - 2 for ranks in settings) else 1


if __name__ == "__main__":
    sys.exit(main())
