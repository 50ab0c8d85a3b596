"""The packages that only NVIDIA GPUs run, and packages of kernels that a CPU cannot run.

The lists differ, as each is compared with something else: a package, parts of a module's name, or a message.
"""

from __future__ import annotations

import re

_FOR_CUDA = {
    *("apex", "flash_attn", "flash_attn_interface", "transformer_engine", "xformers", "flashinfer"),
    *("causal_conv1d", "mamba_ssm", "bmtrain", "cutlass", "deep_gemm", "deep_ep", "quack"),
    *("cuequivariance_torch", "cuequivariance_ops_torch"),
}
CUDA_PACKAGES = _FOR_CUDA | {
    *(
        "cupy",
        "fast_hadamard_transform",
        "fused_dense_lib",
        "tinycudann",
        "nvdiffrast",
        "gsplat",
        "simple_knn",
    ),
    *("diff_gaussian_rasterization", "diff_surfel_rasterization", "isaacgym", "nerfacc", "exllama_ext"),
    *("warpconvnet", "fvdb", "curobo", "fused_ssim", "diff_gauss", "pointops"),
    *("neural_renderer", "soft_renderer", "warp_rnnt", "lightseq", "torchqrnn"),
    *("exllamav2_ext", "awq_inference_engine", "awq_ext", "sageattention", "knn_cuda", "pointnet2_ops"),
    # Models have modules of these names too, so only a top-level package counts.
    *("dropout_layer_norm", "rotary_emb", "selective_scan"),
}
"""Top-level packages whose functions need CUDA."""
KERNEL_PACKAGES = _FOR_CUDA | {
    # These run on other accelerators too, but not on a CPU.
    *("triton", "tilelang", "helion", "unsloth")
}
"""Packages of kernels, which may be any part of a module's name: ``mypackage.kernels.triton.attention``."""
PACKAGE_IN_TEXT = re.compile(
    r"\b(apex|bitsandbytes|triton|tilelang|flash.?attn|flash.?attention|xformers|transformer.?engine|tensorrt)\b",
    re.IGNORECASE,
)
"""Such a package in a message to the user, which spells it as people do: ``FlashAttention``."""
KERNEL_LANGUAGES = {"cutlass", "cupy"}
"""Packages in whose language a file defines kernels of its own, which only NVIDIA GPUs run."""
RUNTIMES = {
    "tensorrt": "TensorRT",
    "torch_tensorrt": "TensorRT",
    "tensorrt_llm": "TensorRT",
    "pycuda": "PyCUDA",
    "cupy": "CuPy",
    "cpm_kernels": "cpm_kernels",
    "pynvml": "NVML",
    "py3nvml": "NVML",
    "nvidia_smi": "NVML",
    "GPUtil": "GPUtil",
    "gpustat": "gpustat",
    "nvitop": "nvitop",
    "cuda": "NVIDIA's driver",
}
"""Packages that run or query NVIDIA GPUs without torch, and what messages call them."""
QUERIES = ("NVML", "GPUtil", "gpustat", "nvitop")
"""Those that only query GPUs."""
OPERATORS = (
    *(
        "torch_scatter",
        "torch_sparse",
        "torch_cluster",
        "torch_spline_conv",
        "pyg_lib",
        "pytorch3d",
        "pykeops",
    ),
    *("mmcv.ops", "torch_points_kernels", "lietorch", "kaolin", "nvidia.dali"),
    *(
        f"torch_geometric.nn.{name}"
        for name in (
            "knn",
            "knn_graph",
            "radius",
            "radius_graph",
            "fps",
            "nearest",
            "knn_interpolate",
            "voxel_grid",
        )
    ),
    *(
        f"torch_geometric.nn.{name}"
        for name in ("DynamicEdgeConv", "XConv", "GravNetConv", "graclus", "SplineConv")
    ),
    *("natten", "k2", "torchaudio.functional.forced_align", "torchaudio.functional.rnnt_loss"),
    *("torchaudio.transforms.RNNTLoss", "torchaudio.models.decoder"),
    *("horovod", "warpctc_pytorch", "warprnnt_pytorch", "spatial_correlation_sampler", "inplace_abn"),
)
"""Packages, and functions of packages, that run on a CPU and with CUDA, and nowhere else."""
NEEDED = {
    *(name for name in CUDA_PACKAGES if name not in ("selective_scan", "rotary_emb", "dropout_layer_norm")),
    *("bitsandbytes", "pycuda", "tensorrt", "torch_tensorrt", "MinkowskiEngine", "spconv", "torchsparse"),
    *("cuml", "cudf", "cugraph", "cuvs", "rmm", "cumm", "torch2trt", "trtorch"),
}
"""Packages for NVIDIA GPUs without which a program that imports them in any case does not start."""
ONLY_QUERY = {"pynvml", "py3nvml", "nvidia_smi"}
"""Packages that are imported anywhere, and whose functions need NVIDIA's driver."""
