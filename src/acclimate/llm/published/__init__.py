"""Quantised weights as they are published in safetensors files: GPTQ, AWQ, compressed-tensors and FP8."""
