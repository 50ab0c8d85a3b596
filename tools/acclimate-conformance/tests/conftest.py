"""Makes the repository's own test support importable, for a run of these tests by themselves too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))

from warm_starts import pytest_sessionstart as pytest_sessionstart
from warm_starts import pytest_unconfigure as pytest_unconfigure
from warm_starts import warm_python as warm_python
from warm_starts import warm_starts as warm_starts
