"""The folders below need a process that uses sim: test_sim_folders.py starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # sim_process, also for the folders below

if os.environ.get("ACCLIMATE_ACCELERATOR") != "sim":
    collect_ignore = ["on_sim", "with_limits", "with_sync_check"]
