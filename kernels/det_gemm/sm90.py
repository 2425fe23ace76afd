"""Hopper products of det_gemm in CUDA C++ (``sm90.cu.h``): operands, workspace and launch. Which shapes come here says ``sm90_plans``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran, tensor_maps
from rlk.kernels._triton.launch import processors
from rlk.kernels.det_gemm.sm90_plans import DEPTH, MOST_LEAVES, Desks, Plan, desks, stage_bytes

HERE = Path(__file__).parent
SOURCE = CudaSource("det_gemm", HERE / "sm90.cu.h", HERE / "sm90.py", HERE / "sm90_plans.py")


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "desks")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "depth", "leaves", "bytes")),
    ]


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, leaves: int, depth: int) -> bool:
    """Whether this card has these kernels, and its copy engine can read the operands in stages that end where leaves of ``depth`` end."""
    if not _hopper(out.device) or not out.numel() or not a.numel() or leaves > MOST_LEAVES:
        return False
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 for x in (a, b))
    return aligned and out.shape[1] % 8 == 0 and depth % DEPTH == 0


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) == (9, 0)


def contract(op: str, a: torch.Tensor, b: torch.Tensor, across: bool, leaves: int, out: torch.Tensor, plan: Plan) -> None:
    """out = a·bᵀ (a·b when b lies ``across``), contracted in ``leaves`` leaves. a: [rows, depth], unit strides along rows."""
    (rows, columns), each = out.shape, leaves // plan.groups
    waiting = desks(plan, each)
    kernel = _kernel(out.device, plan, waiting, across, out.dtype == torch.float32)
    tiles = -(-rows // plan.cluster_rows) * -(-columns // plan.cluster_columns)
    clusters = tiles if plan.groups > 1 else min(tiles, processors(out.device) // plan.cluster)
    blocks = clusters * plan.cluster
    a_rows = plan.rows // 2 if plan.pair == "a" else min(plan.rows, rows)  # few rows: what the others hold is never read back
    b_rows = DEPTH if across else plan.columns // (2 if plan.pair == "b" else 1)
    filled = stage_bytes(plan, across) - (0 if plan.pair == "a" else (plan.rows - a_rows) * DEPTH * 2)
    workspace = out.new_empty(blocks * waiting.workspace, dtype=torch.float32)
    problem = _Problem(out.data_ptr(), workspace.data_ptr(), rows, columns, a.shape[1] // leaves, each, filled)
    kernel.launch(blocks, (_map(a, a_rows), _map(b, b_rows), problem), out.device, waits=True)
    ran(op, SOURCE)


@functools.cache
def _kernel(device: torch.device, plan: Plan, waiting: Desks, across: bool, float_out: bool) -> CudaKernel:
    definitions = {
        "CONSUMERS": plan.consumers, "COLUMNS": plan.columns, "STAGES": plan.stages, "GROUPS": plan.groups, "PAIR": ord(plan.pair or "\0"),
        "ACROSS": int(across), "FLOAT_OUT": int(float_out),
        **{f"KEEP{level}": kept for level, kept in enumerate(waiting.kept)},
        **{f"SHARED{level}": shared for level, shared in enumerate(waiting.shared)},
    }  # fmt: skip
    code = SOURCE.compiled(definitions, {"wgmma.h": _instruction(plan.columns, across)})
    workers = 128 * plan.consumers
    shared = 1024 + plan.stages * (stage_bytes(plan, across) + 16) + 4 * workers * sum(waiting.shared)
    exchanged = 1024 + 4 * workers * plan.columns // 2 if plan.groups > 1 else 0
    return CudaKernel(code, "product", device, workers + 128, max(shared, exchanged))


def _instruction(columns: int, across: bool) -> str:
    """The matrix instruction of 64 rows, ``columns`` columns and 16 products, as a function: its operands are the accumulators by name."""
    floats = columns // 2
    names, operands = (", ".join(template.format(i) for i in range(floats)) for template in ("%{}", '"+f"(acc[{}])'))
    return (
        f"__device__ __forceinline__ void multiply(float (&acc)[{floats}], unsigned long long a, unsigned long long b, int keep) {{\n"
        f'asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{floats + 2}, 0;\\n"\n'
        f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{names}}}, %{floats}, %{floats + 1}, keep, 1, 1, '
        f'0, {int(across)};\\n}}" : {operands} : "l"(a), "l"(b), "r"(keep));\n}}\n'
    )


def _map(x: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return _mapped(x.data_ptr(), (x.shape[0], x.shape[1]), x.stride(0), rows)


@functools.lru_cache(maxsize=4096)
def _mapped(data: int, shape: tuple[int, int], stride: int, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return tensor_maps(data, shape, stride, (rows,))
