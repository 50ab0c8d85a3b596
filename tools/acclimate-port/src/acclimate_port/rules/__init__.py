"""All rules, in the order in which they check a node."""

from __future__ import annotations

from acclimate_port.rules import (
    comparisons,
    device_indices,
    devices,
    distributed,
    graphs,
    imports,
    precision,
    runtime,
    tensor_types,
    tensors,
    wrappers,
)
from acclimate_port.rules.base import Example, Finding, Outcome, Rule

RULES: tuple[Rule, ...] = (
    imports.CudaImport(),
    runtime.CurrentDevice(),
    graphs.DefaultGenerators(),
    graphs.Graphs(),
    graphs.Ranges(),
    tensor_types.DefaultTensorType(),
    tensor_types.TensorType(),
    precision.MixedPrecision(),
    precision.AutocastState(),
    runtime.RuntimeCall(),
    runtime.RuntimeReference(),
    imports.OtherUse(),
    devices.AvailableChoice(),
    device_indices.DeviceObject(),
    devices.DeviceFormat(),
    comparisons.DeviceComparison(),
    devices.DeviceString(),
    tensors.CudaMethod(),
    tensors.IsCuda(),
    tensors.PinMemory(),
    distributed.CommunicationBackend(),
    wrappers.DeviceIds(),
    distributed.VisibleDevices(),
    distributed.ProfilerActivities(),
    wrappers.SyncBatchNorm(),
    wrappers.DataParallel(),
    distributed.OpBuilders(),
    device_indices.IntegerDevice(),
)
"""The first rule with a finding for a node wins."""

BY_NAME: dict[str, Rule] = {key: rule for rule in RULES for key in (rule.code, rule.name)}

__all__ = ["BY_NAME", "RULES", "Example", "Finding", "Outcome", "Rule"]
