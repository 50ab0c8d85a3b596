"""All rules, in the order in which they check a node."""

from __future__ import annotations

from typing import Any

from acclimate_port.rules.acc101_runtime_call import RuntimeCall
from acclimate_port.rules.acc102_current_device import CurrentDevice
from acclimate_port.rules.acc103_runtime_reference import RuntimeReference
from acclimate_port.rules.acc104_default_generators import DefaultGenerators
from acclimate_port.rules.acc105_graphs import Graphs
from acclimate_port.rules.acc106_nvtx import Ranges
from acclimate_port.rules.acc107_cuda_import import CudaImport
from acclimate_port.rules.acc199_other_use import OtherUse
from acclimate_port.rules.acc201_device_string import DeviceString
from acclimate_port.rules.acc202_available_choice import AvailableChoice
from acclimate_port.rules.acc203_device_format import DeviceFormat
from acclimate_port.rules.acc204_device_comparison import DeviceComparison
from acclimate_port.rules.acc205_device_object import DeviceObject
from acclimate_port.rules.acc206_integer_device import IntegerDevice
from acclimate_port.rules.acc301_cuda_method import CudaMethod
from acclimate_port.rules.acc302_is_cuda import IsCuda
from acclimate_port.rules.acc303_pin_memory import PinMemory
from acclimate_port.rules.acc304_tensor_type import TensorType
from acclimate_port.rules.acc305_default_tensor_type import DefaultTensorType
from acclimate_port.rules.acc306_cuda_option import CudaOption
from acclimate_port.rules.acc307_checkpoint_device import CheckpointDevice
from acclimate_port.rules.acc401_mixed_precision import MixedPrecision
from acclimate_port.rules.acc402_autocast_state import AutocastState
from acclimate_port.rules.acc501_communication_backend import CommunicationBackend
from acclimate_port.rules.acc502_device_ids import DeviceIds
from acclimate_port.rules.acc503_visible_devices import VisibleDevices
from acclimate_port.rules.acc504_profiler_activities import ProfilerActivities
from acclimate_port.rules.acc505_sync_batch_norm import SyncBatchNorm
from acclimate_port.rules.acc506_data_parallel import DataParallel
from acclimate_port.rules.acc601_op_builder import OpBuilders
from acclimate_port.rules.acc602_native_extension import NativeExtension
from acclimate_port.rules.base import Example, Finding, Outcome, Rule

RULES: tuple[Rule[Any], ...] = (
    CudaImport(),
    CurrentDevice(),
    DefaultGenerators(),
    Graphs(),
    Ranges(),
    DefaultTensorType(),
    TensorType(),
    MixedPrecision(),
    AutocastState(),
    RuntimeCall(),
    RuntimeReference(),
    OtherUse(),
    AvailableChoice(),
    DeviceObject(),
    DeviceFormat(),
    DeviceComparison(),
    DeviceString(),
    CudaMethod(),
    IsCuda(),
    PinMemory(),
    CudaOption(),
    CheckpointDevice(),
    CommunicationBackend(),
    DeviceIds(),
    VisibleDevices(),
    ProfilerActivities(),
    SyncBatchNorm(),
    DataParallel(),
    OpBuilders(),
    NativeExtension(),
    IntegerDevice(),
)
"""The first rule with a finding for a node wins."""

BY_NAME: dict[str, Rule[Any]] = {key: rule for rule in RULES for key in (rule.code, rule.name)}

__all__ = ["BY_NAME", "RULES", "Example", "Finding", "Outcome", "Rule"]
