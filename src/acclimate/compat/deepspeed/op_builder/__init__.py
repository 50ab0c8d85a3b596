"""The replacement of ``deepspeed.ops.op_builder`` without DeepSpeed.

Accelerators written for DeepSpeed list the modules of this folder, except ``builder``, and look for builders
in each; :mod:`.by_name` has all builders.
"""
