"""The optimizers' tests of memory and of copies, on sim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "tests" / "ops" / "optimizers"))
pytest.register_assert_rewrite("test_optimizer_memory")

from test_optimizer_memory import *  # noqa: E402, F403
