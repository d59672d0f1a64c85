"""Names of frameworks: one spelling for each, and which distributions provide which.

People name what they import (`cupy`, `cv2`, `sklearn`); a Python environment lists distributions
(`cupy-cuda12x`, `opencv-python-headless`, `scikit-learn`). A requirement on a family's name is met by any
member of the family; one on a member's own name, such as `cupy-cuda12x`, by that member alone. Names are
spelled as PEP 503 says, except the pseudo frameworks `torch.cuda`, `torch.rocm` and `torch.mps`, which keep
their dot.
"""

from __future__ import annotations

import re
from functools import lru_cache

PSEUDO_FRAMEWORKS = frozenset({"torch.cuda", "torch.rocm", "torch.mps"})

# What is imported, where the distribution is called otherwise: canonical module name -> name of the family.
_ALIASES = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "llama-cpp": "llama-cpp-python",
    "paddle": "paddlepaddle",
    "pil": "pillow",
    "pytorch": "torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}

# The family's name -> the distributions that provide its module; a final `*` stands for any ending.
_FAMILIES = {
    "cudf": ("cudf", "cudf-cu*"),
    "cuml": ("cuml", "cuml-cu*"),
    "cupy": ("cupy", "cupy-cuda*", "cupy-rocm-*"),
    "dgl": ("dgl", "dgl-cu*"),
    "faiss": ("faiss", "faiss-cpu", "faiss-gpu*"),
    "mxnet": ("mxnet", "mxnet-cu*"),
    "onnxruntime": (
        "onnxruntime",
        "onnxruntime-azure",
        "onnxruntime-cann",
        "onnxruntime-directml",
        "onnxruntime-gpu",
        "onnxruntime-gpu-*",
        "onnxruntime-migraphx",
        "onnxruntime-openvino",
        "onnxruntime-qnn",
        "onnxruntime-rocm",
        "onnxruntime-silicon",
        "onnxruntime-training",
        "onnxruntime-training-*",
        "onnxruntime-vitisai",
        "ort-nightly",
        "ort-nightly-*",
    ),
    "onnxruntime-gpu": ("onnxruntime-gpu", "onnxruntime-gpu-*", "ort-nightly-gpu"),
    "opencv-python": (
        "opencv-python",
        "opencv-python-headless",
        "opencv-contrib-python",
        "opencv-contrib-python-headless",
    ),
    "paddlepaddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "pillow": ("pillow", "pillow-simd"),
    "psycopg2": ("psycopg2", "psycopg2-binary"),
    "pynvml": ("pynvml", "nvidia-ml-py"),
    "spconv": ("spconv", "spconv-cu*"),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-cpu-aws",
        "tensorflow-gpu",
        "tensorflow-intel",
        "tensorflow-macos",
        "tensorflow-rocm",
        "intel-tensorflow",
        "tf-nightly",
        "tf-nightly-cpu",
        "tf-nightly-gpu",
    ),
    "tensorrt": ("tensorrt", "tensorrt-cu*"),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
    "xgboost": ("xgboost", "xgboost-cpu"),
}


def canonical_name(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503); pseudo frameworks keep their dot."""
    lowered = name.strip().lower()
    return lowered if lowered in PSEUDO_FRAMEWORKS else re.sub(r"[-_.]+", "-", lowered)


def framework_name(name: str) -> str:
    """The one name of what a requirement calls by module or by distribution."""
    canonical = canonical_name(name)
    return _ALIASES.get(canonical, canonical)


@lru_cache(maxsize=4096)
def provides(distribution: str, framework: str) -> bool:
    """Whether the distribution, in canonical spelling, provides what a requirement calls `framework`."""
    return any(_matches(distribution, pattern) for pattern in _FAMILIES.get(framework, (framework,)))


def _matches(distribution: str, pattern: str) -> bool:
    return distribution.startswith(pattern[:-1]) if pattern.endswith("*") else distribution == pattern
