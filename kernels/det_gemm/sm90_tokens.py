"""Hopper weight gradients of det_gemm in CUDA C++ (``sm90_tokens.cu.h``): operands, workspace and launch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import FLOAT32, CudaKernel, CudaSource, ran, tensor_map, tensor_maps
from rlk.kernels._native.wgmma import instruction
from rlk.kernels._triton.launch import processors
from rlk.kernels.det_gemm.sm90 import NATIVE, PARTS
from rlk.kernels.dispatch import hopper

SOURCE = CudaSource("det_gemm", Path(__file__).with_name("sm90_tokens.cu.h"), *PARTS, NATIVE / "wgmma.py", Path(__file__))
LEAVES = 8
ROWS, COLUMNS, DEPTH, STAGES = 128, 128, 32, 10
"""Rows and columns of a block's tile, tokens of a stage, stages of the ring."""
_CHUNK, _CLUSTER, _WORKERS, _SCHEDULE_THREADS = 64, 2, 256, 128
_LEAST_WEIGHTS, _MOST_FILL = 1 << 20, 1.03
SHARED_BYTES = 1024 + STAGES * ((ROWS + COLUMNS) * DEPTH * 2 + 16) + 4 * _WORKERS * COLUMNS // 2 + 4 * LEAVES
"""Shared memory of a block: stages, barriers, leaves that wait, steps of each leaf."""


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("copies", "index", "offsets")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "tokens")),
    ]


def takes(x: torch.Tensor, dy: torch.Tensor, leaves: int) -> bool:
    """Whether this card has this kernel, there is enough to do for it, and its copy engine can read the operands."""
    if not hopper(x.device) or not x.numel() or leaves != LEAVES or x.shape[1] * dy.shape[1] < _LEAST_WEIGHTS:
        return False
    return all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 and t.shape[1] % _CHUNK == 0 for t in (x, dy))


def short_runs(index: torch.Tensor, tokens: int) -> bool:
    """Whether so many groups of ``index`` are filled up that samples are short, or their runs of tokens end inside most steps.

    Then the copy engine takes longer to read rows in place than to have them gathered before.
    """
    return index.numel() > _MOST_FILL * tokens


def weight_grad(op: str, x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor | None, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """out = dyᵀ·x, [N, K] fp32, contracted over tokens in leaf order (``det_gemm_weight_grad``); no index: the rows lie in leaf order."""
    rows, columns = out.shape
    steps = (x.shape[0] if index is None else index.numel()) // DEPTH + LEAVES  # at most: a leaf may end inside a step
    copies = offsets.new_empty(steps, DEPTH)
    tiles = -(-rows // (_CLUSTER * ROWS)) * -(-columns // COLUMNS)
    blocks = min(tiles, processors(out.device) // _CLUSTER) * _CLUSTER
    problem = _Problem(copies.data_ptr(), None if index is None else index.data_ptr(), offsets.data_ptr(), rows, columns, x.shape[0])
    product, schedule = _kernels(out.device)
    schedule.launch(-(-32 * steps // _SCHEDULE_THREADS), (problem,), out.device)
    product.launch(blocks, (_maps(dy, ROWS), _maps(x, COLUMNS), _out_map(out.data_ptr(), rows, columns), problem), out.device)
    ran(op, SOURCE)


@functools.cache
def _kernels(device: torch.device) -> tuple[CudaKernel, CudaKernel]:
    code = compiled()
    return CudaKernel(code, "product", device, _WORKERS + 128, SHARED_BYTES), CudaKernel(code, "schedule", device, _SCHEDULE_THREADS, 0)


def compiled() -> bytes:
    """Machine code of both kernels."""
    headers = {path.name: path.read_text() for path in PARTS}
    return SOURCE.compiled({}, {"wgmma.h": instruction("multiply", COLUMNS, held=False, across=True, a_across=True), **headers})


def _maps(x: torch.Tensor, values: int) -> ctypes.Array[ctypes.c_uint64]:
    return _mapped(x.data_ptr(), (x.shape[0], x.shape[1]), x.stride(0), values // _CHUNK)


@functools.lru_cache(maxsize=4096)
def _mapped(data: int, shape: tuple[int, int], stride: int, chunks: int) -> ctypes.Array[ctypes.c_uint64]:
    """Boxes of 1, 2, 4 … tokens and one chunk of 64 values, then of a whole step's tokens and ``chunks`` chunks."""
    tokens, width = shape
    runs = tensor_maps(data, shape, stride, [1 << level for level in range(DEPTH.bit_length() - 1)])
    step = tensor_map(data, (_CHUNK, tokens, width // _CHUNK), (stride, _CHUNK), (_CHUNK, DEPTH, chunks))
    return (ctypes.c_uint64 * (len(runs) + len(step)))(*runs, *step)


@functools.lru_cache(maxsize=4096)
def _out_map(data: int, rows: int, columns: int) -> ctypes.Array[ctypes.c_uint64]:
    """Boxes of a warpgroup's 64 rows and 32 columns."""
    return tensor_map(data, (columns, rows), (columns,), (32, 64), FLOAT32)
