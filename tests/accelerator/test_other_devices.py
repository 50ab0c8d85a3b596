"""The promises of this folder hold for devices that acclimate has no line of code for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fresh_process import FreshProcesses

HERE = Path(__file__).parent
CATEGORIES = ("devices", "random", "streams", "memory", "dtypes", "graphs", "pinning", "ops", "runtime")
RUN = """
import os, sys
os.environ["ACCLIMATE_TESTED_DEVICE"] = DEVICE
import pytest

class Count:
    def __init__(self):
        self.passed, self.failed = [], []
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

count = Count()
code = pytest.main([*FILES, "-p", "no:cacheprovider", "--tb=short"], plugins=[count])
tell(passed=count.passed, failed=count.failed, code=int(code))
"""


@pytest.mark.parametrize("device", ["bare", "whole"])
@pytest.mark.slow
def test_the_interface_keeps_its_promises_on(device: str, fresh: FreshProcesses) -> None:
    files = [str(HERE / f"test_{category}.py") for category in CATEGORIES]
    run = RUN.replace("= DEVICE", f'= "{device}"').replace("FILES", repr(files))
    outcome = fresh.check(run, path=[HERE.parent])
    assert outcome.told["failed"] == [], outcome.stdout
    assert outcome.told["code"] == 0, outcome.stdout
    tried = {category for category in CATEGORIES if f"test_{category}.py" in " ".join(outcome.told["passed"])}
    assert tried == set(CATEGORIES)
