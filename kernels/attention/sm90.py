"""Attention over packed sequences in CUDA C++ for Hopper (``sm90_*.cu.h``): operands, work and launch. Same bytes as Triton's kernels."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran, tensor_map
from rlk.kernels._native.wgmma import instruction
from rlk.kernels._triton.launch import processors
from rlk.kernels.attention.counters import counters
from rlk.kernels.dispatch import hopper

HERE = Path(__file__).parent
NATIVE = HERE.parent / "_native"
TILE, DIM, BLOCK, STAGES = 64, 128, 128, 4
_CHUNK = 64 * TILE * 2
_PARTS = (HERE / "sm90_blocks.h", NATIVE / "sm90.h")
FORWARD = CudaSource("attention", HERE / "sm90_forward.cu.h", *_PARTS, NATIVE / "wgmma.py", Path(__file__))
BACKWARD = CudaSource("attention", HERE / "sm90_backward.cu.h", *_PARTS, NATIVE / "wgmma.py", Path(__file__))
_INSTRUCTIONS = {
    FORWARD: instruction("scores_held", 64, held=True, across=False) + instruction("values", 136, held=True, across=True),
    BACKWARD: instruction("scores_held", 64, held=True, across=False)
    + instruction("scores", 64, held=False, across=False)
    + instruction("add_rows", 128, held=True, across=True),
}
_SHARED = {
    "attention_forward_sm90": (4 + STAGES * 5) * _CHUNK,
    "attention_query_gradient_sm90": (8 + STAGES * 4) * _CHUNK,
    "attention_key_gradient_sm90": (8 + STAGES * 4) * _CHUNK,
}
_CACHED = 32 << 20
"""Bytes of keys and values of all heads that the second-level cache holds beside what else it holds."""


class _Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_longlong), ("head_stride", ctypes.c_int)]


class _Queue(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("segments", "taken")),
        *((name, ctypes.c_int) for name in ("count", "owned", "tokens", "kv_heads", "blocks", "heads_first")),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "lse2")), ("k", _Matrix), ("v", _Matrix), ("split_tiles", ctypes.c_int),
        ("c", ctypes.c_float),
    ]  # fmt: skip


class _Backward(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("q", "d_out", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("lse2", "delta")),
        *((name, ctypes.c_longlong) for name in ("sum_row_stride", "sum_head_stride")),
        *((name, ctypes.c_void_p) for name in ("first", "second")),
        *((name, ctypes.c_float) for name in ("c", "scale")),
    ]  # fmt: skip


def takes(heads: int, kv_heads: int, segments: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether these kernels run here: a Hopper card, heads of 128, at most 64 of them a group, rows that the copy engine can read.

    tensors: [rows, heads, 128], each with its heads inside a row; segments: int64.
    """
    group = heads // kv_heads
    if not hopper(tensors[0].device) or 64 % group or segments.dtype != torch.int64:
        return False
    return all(map(_readable, tensors))


def _readable(x: torch.Tensor) -> bool:
    row, head, unit = x.stride()
    aligned = x.data_ptr() % 16 == 0 and row % 8 == 0 and head % 8 == 0
    return x.shape[2] == DIM and x.numel() > 0 and aligned and unit == 1 and head >= DIM and (x.shape[1] - 1) * head + DIM <= row


def forward(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, count: int, owned: bool, scale: float, kv_split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, 128] and lse2 [T, Hq]. segments: as triton_forward.describe reads them, ``owned`` or whole sequences."""
    out, lse2 = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    problem = _Forward(out.data_ptr(), lse2.data_ptr(), _matrix(k), _matrix(v), kv_split // TILE, scale * math.log2(math.e))
    maps = (_states(q, k), _rows(k), _rows(v))
    _launch(op, FORWARD, "attention_forward_sm90", q, k, maps, segments, count, owned, BLOCK * k.shape[1] // q.shape[1], problem)
    return out, lse2


def query_gradient(
    op: str, inputs: tuple[torch.Tensor, ...], segments: torch.Tensor, count: int, owned: bool, scale: float
) -> torch.Tensor:
    """dq [T, Hq, 128]. inputs: q, k, v, d_out, lse2, delta, the last two with equal strides."""
    q, k, v, d_out = inputs[:4]
    dq = q.new_empty(q.shape)
    maps = (_states(q, k), _states(d_out, k), _rows(k), _rows(v))
    name, step = "attention_query_gradient_sm90", BLOCK * k.shape[1] // q.shape[1]
    _launch(op, BACKWARD, name, q, k, maps, segments, count, owned, step, _backward(inputs, dq, dq, scale))
    return dq


def key_gradient(
    op: str, inputs: tuple[torch.Tensor, ...], segments: torch.Tensor, count: int, owned: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk, dv [rows, Hk, 128]. inputs: as of :func:`query_gradient`."""
    q, k, v, d_out = inputs[:4]
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    maps = tuple(_rows(x) for x in (q, d_out, k, v))
    _launch(op, BACKWARD, "attention_key_gradient_sm90", k, k, maps, segments, count, owned, BLOCK, _backward(inputs, dk, dv, scale), q)
    return dk, dv


def _backward(inputs: tuple[torch.Tensor, ...], first: torch.Tensor, second: torch.Tensor, scale: float) -> _Backward:
    q, k, v, d_out, lse2, delta = inputs
    return _Backward(
        *(_matrix(x) for x in (q, d_out, k, v)), lse2.data_ptr(), delta.data_ptr(), *delta.stride(), first.data_ptr(), second.data_ptr(),
        scale * math.log2(math.e), scale,
    )  # fmt: skip


def _launch(
    op: str, source: CudaSource, name: str, own: torch.Tensor, k: torch.Tensor, maps: tuple[ctypes.Array[ctypes.c_uint64], ...],
    segments: torch.Tensor, count: int, owned: bool, step: int, problem: ctypes.Structure, q: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """own: the side whose rows the blocks own, ``step`` positions each; q: the queries if that side is the keys."""
    kv_heads, heads = k.shape[1], (own if q is None else q).shape[1]
    blocks = own.shape[0] // step + count
    heads_first = k.numel() * 4 <= _CACHED
    queue = _Queue(segments.data_ptr(), counters(own.device).data_ptr(), count, owned, own.shape[0], kv_heads, blocks, heads_first)
    grid = min(processors(own.device), blocks * kv_heads)
    _kernel(own.device, source, name, heads // kv_heads).launch(grid, (*maps, queue, problem), own.device)
    ran(op, source)


@functools.cache
def _kernel(device: torch.device, source: CudaSource, name: str, group: int) -> CudaKernel:
    headers = {"wgmma.h": _INSTRUCTIONS[source], **{path.name: path.read_text() for path in _PARTS}}
    code = source.compiled({"GROUP": group, "STAGES": STAGES}, headers)
    return CudaKernel(code, name, device, 384, 1024 + _SHARED[name])


def _matrix(x: torch.Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), x.stride(0), x.stride(1))


def _rows(x: torch.Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """64 rows of 64 columns of x [rows, heads, 128], a row's heads one behind the other."""
    return _mapped(x.data_ptr(), ((x.shape[1] - 1) * x.stride(1) + DIM, x.shape[0]), (x.stride(0),), (64, TILE))


def _states(x: torch.Tensor, k: torch.Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """64 columns of 64 states of x [rows, heads, 128]: positions times the heads of a group."""
    group = x.shape[1] // k.shape[1]
    return _mapped(x.data_ptr(), (DIM, x.shape[1], x.shape[0]), (x.stride(1), x.stride(0)), (64, group, TILE // group))


@functools.lru_cache(maxsize=4096)
def _mapped(data: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint64]:
    return tensor_map(data, sizes, strides, box)
