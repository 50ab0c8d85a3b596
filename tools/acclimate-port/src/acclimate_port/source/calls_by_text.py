"""The functions that get code by a text: a module, class, function or attribute by its name, or a command.

One table for all who look for them: in syntax trees, in Python's own trees, and in texts that are not parsed.
"""

from __future__ import annotations

IMPORTING = ("import_module", "__import__", "find_spec", "locate", "run_module")
"""Functions whose first argument is the name of a module."""
IMPORTING_BY_NAME = (*IMPORTING[:2], f"importlib.{IMPORTING[0]}")
"""Those that import it, also by their full names."""
FINDING = ("instantiate", "get_class", "get_object", "get_method", "find_class")
"""Functions that find a class or a function by a name that is in their argument."""
NAMED_AT = {"getattr": 1, "hasattr": 1, **dict.fromkeys(IMPORTING, 0)}
"""Functions that get the name of an attribute or a module, and its position."""
RUNNING_FILES = ("run_path", "spec_from_file_location", "SourceFileLoader", "load_source")
"""Functions that run a file of Python whose path they get."""

STARTING = r"\bsubprocess\.\w+|\bos\.(?:system|popen|exec\w+|spawn\w+)"
"""The full names of functions that run a command line, as a pattern."""
STARTING_WORDS = ("subprocess", "os.system", "os.popen", "os.exec", "os.spawn", "Popen(")
"""One of these is in each file that calls one; looking for them takes a tenth of the time of a pattern."""
