"""rms_norm of heads and gradients of wide rows on Hopper in CUDA C++ (``sm90.cu.h``): operands and launches."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran
from rlk.kernels.dispatch import hopper

HERE = Path(__file__).parent
ROWS = HERE.parent / "_native" / "rows.h"
SOURCE = CudaSource("rms_norm", HERE / "sm90.cu.h", ROWS, HERE / "sm90.py")
THREADS = 256
"""Of a row's block."""
WARPS = 8
"""Of a block of one leaf and 64 columns: each sums 16 tokens at a time."""
WIDEST, HEAD = 8192, 128
HEADS = 8 * THREADS // 32
"""Of a block: eight a warp."""


class Step(ctypes.Structure):
    """The parameters of every kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gamma", "dy", "dx", "scales", "index", "offsets", "parts", "y")),
        ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64), ("eps", ctypes.c_float), ("rows", ctypes.c_int),
        ("heads", ctypes.c_int),
    ]  # fmt: skip


def takes_heads(x: torch.Tensor, gamma: torch.Tensor, token_stride: int, head_stride: int) -> bool:
    """Whether this card has the kernel of heads, and it reads these in pairs."""
    aligned = all(number % 4 == 0 for number in (x.data_ptr(), gamma.data_ptr(), 2 * token_stride, 2 * head_stride))
    return hopper(x.device) and x.shape[-1] == HEAD and 0 < x.numel() // HEAD < 2**31 - HEADS and aligned


def takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether this card has the kernels, and they read rows of these contiguous tensors in pairs."""
    width = x.shape[-1]
    aligned = all(tensor.data_ptr() % 4 == 0 for tensor in (x, *others))
    return hopper(x.device) and x.numel() > 0 and width % 2 == 0 and 2 * THREADS <= width <= WIDEST and aligned


def definitions(width: int) -> dict[str, int]:
    """What the source is compiled with."""
    wide = max(width, 2 * THREADS)
    return {"WIDTH": wide, "BLOCK": 1 << (wide - 1).bit_length(), "THREADS": THREADS, "WARPS": WARPS}


def normalise_heads(
    op: str, x: torch.Tensor, gamma: torch.Tensor, y: torch.Tensor, rows: int, heads: int, token_stride: int, head_stride: int, eps: float
) -> None:
    """y of ``rows`` heads of x, which lie ``head_stride`` and ``token_stride`` elements apart; y and gamma contiguous."""
    step = heads_step(x, gamma, y, rows, heads, token_stride, head_stride, eps)
    _kernel("norm_heads", x.device, HEAD).launch(-(-rows // HEADS), (step,), x.device)
    ran(op, SOURCE)


def heads_step(
    x: torch.Tensor, gamma: torch.Tensor, y: torch.Tensor, rows: int, heads: int, token_stride: int, head_stride: int, eps: float
) -> Step:
    """The parameters of the kernel of heads."""
    pointers = {name: tensor.data_ptr() for name, tensor in (("x", x), ("gamma", gamma), ("y", y))}
    return Step(**pointers, token_stride=token_stride // 2, head_stride=head_stride // 2, eps=eps, rows=rows, heads=heads)


def gradient(op: str, x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, eps: float) -> None:
    """dx of every row of x; all contiguous."""
    width = x.shape[-1]
    step = Step(*(tensor.data_ptr() for tensor in (x, gamma, dy, dx)), eps=eps)
    _kernel("norm_gradient", x.device, width).launch(x.numel() // width, (step,), x.device)
    ran(op, SOURCE)


def gain_parts(op: str, x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Gradient of gamma of every leaf, [leaves, width] fp32; x, dy: [tokens, width]; all contiguous."""
    (tokens, width), leaves = x.shape, offsets.numel() - 1
    scales, parts = (x.new_empty(size, dtype=torch.float32) for size in ((tokens,), (leaves, width)))
    step = Step(x.data_ptr(), None, dy.data_ptr(), None, *(tensor.data_ptr() for tensor in (scales, index, offsets, parts)), eps=eps)
    _kernel("row_scales", x.device, width).launch(tokens, (step,), x.device)
    _kernel("gain_leaves", x.device, width).launch(leaves * -(-width // 64), (step,), x.device)
    ran(op, SOURCE)
    return parts


@functools.cache
def _kernel(name: str, device: torch.device, width: int) -> CudaKernel:
    threads, shared = (32 * WARPS, 2 * 8 * 32 * WARPS) if name == "gain_leaves" else (THREADS, 2 * 8 * THREADS)
    return CudaKernel(SOURCE.compiled(definitions(width), {ROWS.name: ROWS.read_text()}), name, device, threads, shared)
