"""``python -m acclimate`` is ``acclimate``."""

from __future__ import annotations

import sys

from acclimate.cli import main

sys.exit(main())
