"""The fused residual sum and norm on Hopper in CUDA C++ (``sm90.cu.h``): operands and launch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran
from rlk.kernels.dispatch import hopper

HERE = Path(__file__).parent
ROWS = HERE.parent / "_native" / "rows.h"
SOURCE = CudaSource("serving", HERE / "sm90.cu.h", ROWS, HERE / "sm90.py")
THREADS = 256
WIDEST = 8192


class Step(ctypes.Structure):
    """The kernel's parameters."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("x", "y", "gamma", "total", "normed")), ("eps", ctypes.c_float)]


def takes(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor) -> bool:
    """Whether this card has the kernel, and it reads rows of these contiguous tensors in pairs."""
    width = x.shape[1]
    aligned = all(tensor.data_ptr() % 4 == 0 for tensor in (x, y, gamma))
    return hopper(x.device) and x.shape[0] > 0 and width % 2 == 0 and 2 * THREADS <= width <= WIDEST and aligned


def definitions(width: int) -> dict[str, int]:
    """What the source is compiled with."""
    return {"WIDTH": width, "BLOCK": 1 << (width - 1).bit_length(), "THREADS": THREADS}


def prepare(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """The kernel's parameters, and its results."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    return Step(*(tensor.data_ptr() for tensor in (x, y, gamma, total, normed)), eps), total, normed


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    step, total, normed = prepare(x, y, gamma, eps)
    _kernel(x.device, x.shape[1]).launch(x.shape[0], (step,), x.device, waits=True)
    ran("rms_norm", SOURCE)
    return total, normed


@functools.cache
def _kernel(device: torch.device, width: int) -> CudaKernel:
    return CudaKernel(SOURCE.compiled(definitions(width), {ROWS.name: ROWS.read_text()}), "add_norm", device, THREADS, 8 * THREADS)
