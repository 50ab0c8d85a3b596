"""Devices that are meant to fail: in ``with pytest.raises(...)``, or with an index that no machine has."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.source.tree import called_name, string_value
from acclimate_port.source_file import SourceFile

_EXPECTS = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "assert_raises_regex"}
_OF_MISSING_DEVICES = re.compile(
    r"\b(RuntimeError|AssertionError|Exception|BaseException|AcceleratorError)\b"
)
_MOST = 16
"""More accelerators than a machine has."""
_EXPECTED = "its block expects an error, and an index of a device means the CPU on a host"
_NOT_THERE = "no machine has so many devices: it is meant to fail"


def meant_to_fail(file: SourceFile, device: cst.CSTNode) -> str:
    """Why a device is there to raise an error; ``""`` if it is not.

    Args:
        file: the file.
        device: a device with its index, or the call that gets the index.
    """
    index = _index(device)
    if index is None:
        return ""
    if index >= _MOST:
        return _NOT_THERE
    return _EXPECTED if _error_is_expected(file, device) else ""


def _index(device: cst.CSTNode) -> int | None:
    """The index that a device names; ``None`` if it names none, or none that the code shows."""
    text = string_value(device) or ""
    if text:
        _, _, end = text.rpartition(":")
        return int(end) if end.isdecimal() else None
    if isinstance(device, cst.Integer):
        return int(device.value)
    if isinstance(device, cst.Call):
        words = ("index", "device")
        given = [one.value for one in device.args if one.keyword is None or one.keyword.value in words]
        return _index(given[-1]) if given and not isinstance(given[-1], cst.Call) else None
    return None


def _error_is_expected(file: SourceFile, node: cst.CSTNode) -> bool:
    for around in file.tree.ancestors(node):
        calls = [one.item for one in around.items] if isinstance(around, cst.With) else [around]
        for call in calls:
            if isinstance(call, cst.Call) and called_name(call) in _EXPECTS:
                return _OF_MISSING_DEVICES.search(file.tree.source(call)) is not None
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return False
    return False
