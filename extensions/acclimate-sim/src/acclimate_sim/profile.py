"""The hardware to emulate: ``ACCLIMATE_SIM="devices=4,memory=8GiB,no=float64+bfloat16"`` or a name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from acclimate_sim.errors import ProfileError

VARIABLE = "ACCLIMATE_SIM"
VISIBLE_DEVICES = "ACCLIMATE_SIM_VISIBLE_DEVICES"
MAX_DEVICES = 16

_GIB = 1 << 30
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": _GIB, "TiB": 1 << 40}

REFUSABLE = {
    "float64": ("float64", "complex128"),  # complex128 has float64 parts
    "float16": ("float16", "complex32"),
    "bfloat16": ("bfloat16",),
    "float8": ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "complex": ("complex32", "complex64", "complex128"),
    "int64": ("int64",),
}
"""The values of ``no=``, each with the dtypes that the device then refuses."""


@dataclass(frozen=True)
class Profile:
    """The limits of an emulated device."""

    devices: int = 2
    """The number of devices."""
    memory_bytes: int = 16 * _GIB
    """The memory of each device in bytes."""
    refused: frozenset[str] = frozenset()
    """Names of the torch dtypes that the device refuses."""
    checks_synchronisation: bool = False
    """Whether a missing synchronisation between streams, or with the host, is an error."""
    replaces_parameters: bool = False
    """Whether ``Module.to()`` creates new Parameters, as on some vendors' devices."""
    asserts: bool = False
    """Whether a kernel that refuses numbers ends its device's context, as CUDA's asserts do."""


NAMED = {
    "mps-like": Profile(devices=1, refused=frozenset(REFUSABLE["float64"])),
    "v100-like": Profile(
        memory_bytes=32 * _GIB, refused=frozenset(REFUSABLE["bfloat16"] + REFUSABLE["float8"])
    ),
    "hpu-like": Profile(replaces_parameters=True),
    "asserts": Profile(asserts=True),
}
"""Named profiles, each with one limit of real hardware."""


def read_profile() -> Profile:
    """The profile of this process, from the environment.

    Raises:
        ProfileError: a variable has an invalid value.
    """
    profile = parse(os.environ.get(VARIABLE, ""))
    visible = os.environ.get(VISIBLE_DEVICES)
    return profile if visible is None else replace(profile, devices=_count_visible(visible, profile.devices))


def parse(text: str) -> Profile:
    """The profile in ``text``: an optional name, then ``key=value`` pairs, all separated by commas.

    Raises:
        ProfileError: a key or value is invalid; the message lists the valid keys.
    """
    profile = Profile()
    for position, part in enumerate(word.strip() for word in text.split(",") if word.strip()):
        key, equals, value = part.partition("=")
        if not equals:
            if part not in NAMED or position > 0:
                raise ProfileError(
                    f'{VARIABLE}: "{part}" is not a profile. Give one of {", ".join(NAMED)} first, '
                    f"or key=value pairs; {_keys()}."
                )
            profile = NAMED[part]
        elif key not in _READERS:
            raise ProfileError(f'{VARIABLE} has no key "{key}"; {_keys()}.')
        else:
            profile = _READERS[key](profile, value)
    return profile


def _devices(profile: Profile, value: str) -> Profile:
    if not value.isdecimal() or not 1 <= int(value) <= MAX_DEVICES:
        raise _wrong("devices", value, f"a whole number from 1 to {MAX_DEVICES}")
    return replace(profile, devices=int(value))


def _memory(profile: Profile, value: str) -> Profile:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B|)", value)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 0 < size < 1 << 62:
        raise _wrong("memory", value, 'a size above 0 of each device, such as "8GiB" or "500MiB"')
    return replace(profile, memory_bytes=size)


def _no(profile: Profile, value: str) -> Profile:
    names = value.split("+")
    if not all(name in REFUSABLE for name in names):
        raise _wrong("no", value, f'some of {", ".join(REFUSABLE)}, joined by "+"')
    refused = {dtype for name in names for dtype in REFUSABLE[name]}
    return replace(profile, refused=profile.refused | refused)


def _sync(profile: Profile, value: str) -> Profile:
    if value not in {"check", "off"}:
        raise _wrong("sync", value, '"check" or "off"')
    return replace(profile, checks_synchronisation=value == "check")


def _replace(profile: Profile, value: str) -> Profile:
    if value not in {"yes", "no"}:
        raise _wrong("replace", value, '"yes" (Module.to makes new Parameters) or "no"')
    return replace(profile, replaces_parameters=value == "yes")


def _asserts(profile: Profile, value: str) -> Profile:
    if value not in {"yes", "no"}:
        raise _wrong("asserts", value, '"yes" (a refused number ends the context, as on CUDA) or "no"')
    return replace(profile, asserts=value == "yes")


_READERS: dict[str, Callable[[Profile, str], Profile]] = {
    "devices": _devices,
    "memory": _memory,
    "no": _no,
    "sync": _sync,
    "replace": _replace,
    "asserts": _asserts,
}


def _keys() -> str:
    return f"the keys are {', '.join(_READERS)}"


def _wrong(key: str, value: str, expected: str) -> ProfileError:
    return ProfileError(
        f'{VARIABLE}: {key}="{value}" is invalid; "{key}" must be {expected}. In all, {_keys()}.'
    )


def _count_visible(text: str, devices: int) -> int:
    """The number of devices in a list such as ``"0,2"``; which ones does not matter, as all are the same."""
    indices = [word.strip() for word in text.split(",") if word.strip()]
    known = {str(index) for index in range(devices)}
    if not indices or not known.issuperset(indices) or len(set(indices)) < len(indices):
        raise ProfileError(
            f'{VISIBLE_DEVICES} is "{text}", but must list some of 0 to {devices - 1}, each once.'
        )
    return len(indices)
