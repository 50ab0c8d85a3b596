"""The processes of a run share the work of rewriting the assertions of test modules.

In a fresh clone each of them would else rewrite all modules at the same time, for 3 s of processor time each.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Writes the bytecode of this process's share of the modules, where there is none."""
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    folders = [config.rootpath / name for name in config.getini("testpaths")]
    files = sorted(
        file for folder in folders for name in ("test_*.py", "conftest.py") for file in folder.rglob(name)
    )
    # pytest has no public way to rewrite a module without running it.
    state = config.stash[rewrite.assertstate_key]
    for file in files[number::count]:
        folder = rewrite.get_cache_dir(file)
        written = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if not written.exists() and rewrite.try_makedirs(folder):
            with suppress(SyntaxError):  # its import says so later
                source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source, written)
