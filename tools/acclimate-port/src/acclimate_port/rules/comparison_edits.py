"""Edits of comparisons with a device: ``x.device == torch.device("cuda")``, and of dictionary keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Finding
from acclimate_port.source.tree import string_value, walk
from acclimate_port.source_file import SourceFile

HOST_CHANGES = "on a CPU the result may change, and with it the branch taken"
FOR_EACH = "the file has code of its own for each other accelerator"
OTHERS = "other accelerators then take the branch written for CUDA"


def adapt_to_comparison(file: SourceFile, finding: Finding) -> Finding:
    """A finding for a device's name, changed if the device is compared or is a dictionary key.

    An equality stays false on a CPU-only machine, as before: its branch may do what a CPU cannot.
    """
    device = _object(file, finding.node)
    holder = file.tree.parent(device) if device is not None else None
    if device is None or not finding.edits:
        return finding
    if isinstance(holder, cst.DictElement) and holder.key is device:
        return _as_key(file, finding, holder)
    compared = file.tree.parent(holder) if isinstance(holder, cst.ComparisonTarget) else holder
    if isinstance(holder, cst.Element):
        among = file.tree.parent(file.tree.parent(holder) or holder)
        return _unsafe(finding, HOST_CHANGES) if isinstance(among, cst.ComparisonTarget) else finding
    if not isinstance(compared, cst.Comparison):
        return finding
    target = compared.comparisons[-1]
    if len(compared.comparisons) > 1 or not isinstance(target.operator, cst.Equal):
        return _unsafe(finding, HOST_CHANGES)
    literal = next((one for one in walk(device) if isinstance(one, cst.SimpleString)), device)
    stays_false = false_on_host(file, compared, file.quote(literal))
    return dataclasses.replace(_unsafe(finding, OTHERS), edits=(*finding.edits, *stays_false))


def _unsafe(finding: Finding, reason: str) -> Finding:
    return finding if not finding.safe else dataclasses.replace(finding, safe=False, reason=reason)


def _as_key(file: SourceFile, finding: Finding, element: cst.DictElement) -> Finding:
    """A dictionary key. On a CPU-only machine it may equal the key for the CPU, and the last of two equal keys wins."""
    holder = file.tree.parent(element)
    elements = list(holder.elements) if isinstance(holder, cst.Dict) else []
    before = elements[: elements.index(element)] if element in elements else []
    for pair in before:
        if isinstance(pair, cst.DictElement) and any(string_value(one) == "cpu" for one in walk(pair.key)):
            reason = "on a CPU it would replace the entry for the CPU"
            return finding.rule.left(file, finding.node, reason, finding.claims)
    return _unsafe(finding, "the value of the key may be specific to CUDA")


def _object(file: SourceFile, node: cst.CSTNode) -> cst.CSTNode | None:
    """The device object around a name: ``torch.device("cuda")``, or its ``type``."""
    at: cst.CSTNode | None = node
    if isinstance(node, (cst.SimpleString, cst.FormattedString)):
        given = file.tree.given_to(node)
        at = given.call if given is not None else None
    if not isinstance(at, cst.Call) or file.tree.qualified(at.func) != "torch.device":
        return None
    parent = file.tree.parent(at)
    return parent if isinstance(parent, cst.Attribute) and parent.attr.value == "type" else at


def is_tensors_device(node: cst.CSTNode) -> bool:
    """Whether a node is the type of a device object, ``x.device.type``, and not a string of the program's."""
    return isinstance(node, cst.Attribute) and node.attr.value == "type"


def host_test(quote: str, kinds: Sequence[str] = (), *, is_host: bool = False, host: str = "cpu") -> str:
    """The code after a device type that tests that it is not the CPU: ``!= "cpu"``.

    Args:
        quote: the quote for the strings.
        kinds: other device types to treat like the CPU: ``not in ("cpu", "mps")``.
        is_host: whether to test that it is the CPU, or one of ``kinds``, instead: ``== "cpu"``.
        host: the name to compare with, which is the CPU's.
    """
    operator = ("in" if is_host else "not in") if kinds else ("==" if is_host else "!=")
    return f"{operator} {host_names(quote, kinds, host)}"


def host_names(quote: str, kinds: Sequence[str] = (), host: str = "cpu") -> str:
    """The string ``"cpu"``, or a tuple of it and other device types: ``("cpu", "mps")``."""
    names = ", ".join(f"{quote}{kind}{quote}" for kind in (host, *kinds))
    return f"({names})" if kinds else names


def host_guard(file: SourceFile, quote: str) -> str:
    """The target's condition for code that must not run on a CPU-only machine."""
    if isinstance(file.target, AcclimateTarget):
        return f"{file.target.device_type} {host_test(quote)}"
    return file.target.not_host


def false_on_host(
    file: SourceFile,
    test: cst.BaseExpression,
    quote: str,
    kinds: Sequence[str] = (),
    *,
    negated: bool = False,
    name: str = "",
    host: str = "cpu",
) -> list[Edit]:
    """Edits that make a test false on a CPU-only machine: ``a == name() and name() != "cpu"``.

    Args:
        file: the file.
        test: the test, whose other edits put the accelerator's name in it.
        quote: the quote for the strings.
        kinds: other device types on which it must be false too.
        negated: whether the test is ``a != b`` or ``a not in b``, and must be true there instead.
        name: the expression for the accelerator's name; the default is its device type.
        host: its value on a CPU-only machine.
    """
    condition = f"{name or file.target.device_type} {host_test(quote, kinds, host=host)}"
    parent = file.tree.parent(test)
    joins = isinstance(parent, cst.BooleanOperation) and isinstance(parent.operator, cst.And)
    is_alone = joins or isinstance(
        parent, (cst.If, cst.While, cst.Assert, cst.Assign, cst.AnnAssign, cst.Return, cst.Arg, cst.CompIf)
    )
    open_, close = ("", "") if is_alone else ("(", ")")
    place = file.span(test)
    if not negated or not isinstance(test, cst.Comparison):
        edits = [insert(place.end, f" and {condition}{close}")]
        return [insert(place.start, open_), *edits] if open_ else edits
    target = test.comparisons[0]
    operator = "==" if isinstance(target.operator, cst.NotEqual) else "in"
    return [
        insert(place.start, f"{open_}not ("),
        replace(file.span(target.operator), operator),
        insert(place.end, f" and {condition}){close}"),
    ]
