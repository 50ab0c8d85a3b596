"""Runs snippets of a page one after another in one namespace, and tells what each of them came to.

Reads ``[{"line": …, "code": …, "wrong": …}, …]`` from the file that is its argument, and writes
``{line: outcome}`` into the file after it. A right snippet's outcome is what it printed; a wrong one's is the
error it raised, else the warning it gave, else what it printed. The first right one that raises is the last.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    snippets, outcomes = Path(sys.argv[1]), Path(sys.argv[2])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    told: dict[int, str] = {}
    for snippet in json.loads(snippets.read_text()):
        try:
            told[snippet["line"]] = _run(snippet, namespace)
        except Exception:
            told[snippet["line"]] = traceback.format_exc()
            break
    outcomes.write_text(json.dumps(told))


def _run(snippet: dict[str, Any], namespace: dict[str, Any]) -> str:
    # Empty lines in front, so that a traceback names the page's lines.
    code = compile("\n" * (snippet["line"] - 1) + snippet["code"], snippet["page"], "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if not snippet["wrong"]:
            exec(code, namespace)
            return printed.getvalue()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            try:
                exec(code, namespace)
            except Exception as error:
                return f"{type(error).__name__}: {error}\n"
    return f"{given[0].category.__name__}: {given[0].message}\n" if given else printed.getvalue()


if __name__ == "__main__":  # not in the processes that a DataLoader of a snippet starts
    main()
