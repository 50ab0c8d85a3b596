"""``python -m acclimate_port`` and the program ``acclimate-port``, which need no acclimate."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from acclimate_port import __version__
from acclimate_port.command import add_arguments, run
from acclimate_port.exit_codes import INTERRUPTED, NEGATIVE_RESULT, USER_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code.

    Args:
        argv: the arguments without the program's name. ``None``: this process's.
    """
    parser = argparse.ArgumentParser(
        prog="acclimate-port", description="Turns CUDA-only source into source for any accelerator."
    )
    parser.add_argument("--version", action="version", version=f"acclimate-port {__version__}")
    add_arguments(parser)
    try:
        code = run(parser.parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("acclimate-port: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output at exit
        return NEGATIVE_RESULT
    except OSError as error:
        sys.stderr.write(f"acclimate-port: error: {error}\n")
        return USER_ERROR
    return code


if __name__ == "__main__":
    sys.exit(main())
