"""How options of ``acclimate run`` are declared, and those that concern every process that starts ranks.

An option is a field of a dataclass. Those of the launcher alone are in ``launch/options.py``.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from acclimate.errors import excerpt


def whole(least: int, most: int = 999_999_999) -> Callable[[str], int]:
    """Returns a converter to a whole number in this range."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a whole number of at least {least}')
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"{int(text)} is too large; it may be at most {most}")
        return int(text)

    return whole_number


def port(text: str) -> int:
    """Converts the number of a port."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a port: a whole number from 1 to 65535')
    return int(text)


def seconds(text: str) -> float:
    """Converts a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be a number of seconds, 0 or more')
    return seconds


def address(text: str) -> str:
    """Converts an address or the name of a host."""
    if not re.fullmatch(r"[\w.:%-]{1,253}", text):
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}" must be an address or the name of a host')
    return text


def words(text: str) -> tuple[str, ...]:
    """Splits text into words like a shell."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{excerpt(text)}": {error}') from None


def option(group: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Returns a field for an option with these spellings; ``settings`` are arguments for argparse."""
    metadata = {"group": group, "names": names, "settings": settings}
    return field(default=default, metadata=metadata)


ranks_option, binding_option = partial(option, "ranks"), partial(option, "binding")
hosts_option, supervision_option = partial(option, "many hosts"), partial(option, "supervision")


def flag(option: Callable[..., Any], *names: str, **settings: Any) -> Any:
    """Returns a field for an option without a value."""
    return option(*names, default=False, action="store_true", **settings)


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options that a :class:`~acclimate.launch.plan.job.JobPlan` carries to all hosts."""

    local_rank_arg: bool = flag(
        ranks_option, "--local_rank_arg", help="append --local_rank=N to the script's arguments"
    )
    bind_cores: bool = flag(
        binding_option, "--bind_cores_to_rank", help="give each rank its own cores, and memory near them"
    )
    core_list: str | None = binding_option(
        "--bind_core_list",
        metavar="CORES",
        help="the only cores to use, as in 0-51,56-107; implies --bind_cores_to_rank",
    )
    use_hyperthreads: bool = flag(
        binding_option,
        "--use_hyperthreads",
        help="with --bind_cores_to_rank: use both hardware threads of each core",
    )
    master_addr: str | None = hosts_option(
        "--master_addr",
        type=address,
        metavar="ADDRESS",
        help="address of the first host, for the other hosts",
    )
    master_port: int | None = hosts_option(
        "--master_port", type=port, metavar="PORT", help="default: a free one"
    )
    launcher_args: tuple[str, ...] = hosts_option(
        "--launcher_args",
        default=(),
        type=words,
        metavar="ARGS",
        help='more arguments for the launcher\'s program, as in --launcher_args="-A project"',
    )
    ssh_port: int | None = hosts_option(
        "--ssh_port", type=port, metavar="PORT", help="ssh port of hosts without one in the hostfile"
    )
    log_dir: str | None = supervision_option(
        "--log_dir", metavar="FOLDER", help="also append each rank's output to a file there"
    )
    grace_s: float = supervision_option(
        "--grace",
        default=5.0,
        type=seconds,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL when ranks must end; default: %(default)g",
    )
    quiet: bool = flag(supervision_option, "-q", "--quiet", help="print only errors and the ranks' output")
    log_level: str = supervision_option(
        "--log_level",
        default="warning",
        choices=LOG_LEVELS,
        help="info also says where each rank runs; default: %(default)s",
    )

    @property
    def binds(self) -> bool:
        """Whether each rank gets its own cores."""
        return self.bind_cores or self.core_list is not None
