"""Hopper products of det_gemm in CUDA C++ (``sm90.cu.h``): operands and launch. Which shapes come here says ``sm90_plans``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran, tensor_maps
from rlk.kernels._native.wgmma import instruction
from rlk.kernels._triton.launch import processors
from rlk.kernels.det_gemm.sm90_plans import DEPTH, MOST_LEAVES, Plan, kept_floats, shared_bytes, stage_bytes
from rlk.kernels.dispatch import hopper

HERE = Path(__file__).parent
NATIVE = HERE.parent / "_native"
PARTS = (HERE / "sm90_cluster.h", NATIVE / "sm90.h")
SOURCE = CudaSource("det_gemm", HERE / "sm90.cu.h", *PARTS, NATIVE / "wgmma.py", Path(__file__), HERE / "sm90_plans.py")


class _Problem(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rows", "columns", "depth", "leaves", "bytes"))]


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, leaves: int, depth: int) -> bool:
    """Whether this card has these kernels, and its copy engine can read the operands in stages that end where leaves of ``depth`` end."""
    if not hopper(out.device) or not out.numel() or not a.numel() or leaves > MOST_LEAVES:
        return False
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 for x in (a, b))
    return aligned and out.shape[1] % 8 == 0 and depth % DEPTH == 0


def contract(op: str, a: torch.Tensor, b: torch.Tensor, across: bool, leaves: int, out: torch.Tensor, plan: Plan) -> None:
    """out = a·bᵀ (a·b when b lies ``across``), contracted in ``leaves`` leaves. a: [rows, depth], unit strides along rows."""
    (rows, columns), each = out.shape, leaves // plan.groups
    kernel = _kernel(out.device, plan, each, across, out.dtype == torch.float32)
    tiles = -(-rows // plan.cluster_rows) * -(-columns // plan.cluster_columns)
    clusters = tiles if plan.groups > 1 else min(tiles, processors(out.device) // plan.cluster)
    a_rows = plan.rows // 2 if plan.pair == "a" else min(plan.rows, rows)  # few rows: what the others hold is never read back
    b_rows = DEPTH if across else plan.columns // (2 if plan.pair == "b" else 1)
    filled = stage_bytes(plan, across) - (0 if plan.pair == "a" else (plan.rows - a_rows) * DEPTH * 2 * plan.lines)
    problem = _Problem(out.data_ptr(), rows, columns, a.shape[1] // leaves, each, filled)
    kernel.launch(clusters * plan.cluster, (_map(a, a_rows), _map(b, b_rows), problem), out.device, waits=True)
    ran(op, SOURCE)


@functools.cache
def _kernel(device: torch.device, plan: Plan, leaves: int, across: bool, float_out: bool) -> CudaKernel:
    code = compiled(plan, leaves, across, float_out)
    return CudaKernel(code, "product", device, 128 * plan.consumers + 128, shared_bytes(plan, leaves, across))


def compiled(plan: Plan, leaves: int, across: bool, float_out: bool) -> bytes:
    """Machine code of a plan whose blocks join ``leaves`` leaves each."""
    definitions = {
        "CONSUMERS": plan.consumers, "COLUMNS": plan.columns, "LINES": plan.lines, "STAGES": plan.stages, "GROUPS": plan.groups,
        "PAIR": ord(plan.pair or "\0"), "ACROSS": int(across), "FLOAT_OUT": int(float_out), "LEVELS": leaves.bit_length() - 1,
        **{f"KEEP{level}": floats for level, floats in enumerate(kept_floats(plan, leaves))},
    }  # fmt: skip
    headers = {path.name: path.read_text() for path in PARTS}
    return SOURCE.compiled(definitions, {"wgmma.h": instruction("multiply", plan.columns, held=False, across=across), **headers})


def _map(x: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return _mapped(x.data_ptr(), (x.shape[0], x.shape[1]), x.stride(0), rows)


@functools.lru_cache(maxsize=4096)
def _mapped(data: int, shape: tuple[int, int], stride: int, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return tensor_maps(data, shape, stride, (rows,))
