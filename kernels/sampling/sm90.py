"""Hopper's sampling in CUDA C++ (``sm90.cu.h``): one launch draws for all rows, each held by a cluster of blocks in shared memory."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rlk.kernels._native.cuda import CudaKernel, CudaSource, ran
from rlk.kernels.sampling.cpu import POWER

HERE = Path(__file__).parent
SOURCE = CudaSource("sampling", HERE / "sm90.cu.h", HERE / "sm90.py", HERE / "cpu.py")
CLUSTER = 8
"""Blocks that share a row: as many as every Hopper card launches together."""
FEW_ROWS = 12
"""Up to here a block has up to 1024 threads and a multiprocessor to itself; beyond, 512, and one of two reads while the other computes."""
WORDS = 2048 + 36
"""Numbers of 64 bits beside the row in shared memory: bins, desks, parts."""
FEWEST = 2048 // CLUSTER
"""Threads of a block, one for each bin that it sums, or more."""


class Step(ctypes.Structure):
    """The kernel's parameters."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_p", "top_k", "seed", "position", "ids", "support", "failed")),
        ("row_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("vocab", "words", "groups", "by_count", "by_weight")),
    ]


def deal(ids: int, most: int) -> tuple[int, int]:
    """(threads of a block, at most ``most``; groups of 128 ids of each warp) that a row of ``ids`` needs."""
    groups = -(-ids // (CLUSTER * 4 * most))
    return max(FEWEST, 32 * -(-ids // (CLUSTER * 128 * groups))), groups


def shared_bytes(threads: int, groups: int) -> int:
    """Dynamic shared memory of a block."""
    return 8 * WORDS + 16 * threads * groups


def definitions(threads: int) -> dict[str, int]:
    """What the source is compiled with."""
    return {"CLUSTER": CLUSTER, "THREADS": threads}


def headers() -> dict[str, str]:
    """The file that the source includes: the rule's polynomial."""
    return {"power.h": "".join(f"constexpr float POWER{i} = {c!r}f;\n" for i, c in enumerate(POWER))}


@functools.cache
def _kernel(device: torch.device, threads: int, groups: int) -> CudaKernel:
    return CudaKernel(SOURCE.compiled(definitions(threads), headers()), "sample", device, threads, shared_bytes(threads, groups))


def prepare(
    groups: int, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, seed: torch.Tensor,
    position: torch.Tensor, failed: torch.Tensor, vocab_size: int, padded_vocab: int, by_count: bool, by_weight: bool,
) -> tuple[Step, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The kernel's parameters for ``groups`` of each warp, and its results: ids, supports in words of 32 ids."""
    ids = torch.empty_like(seed)
    support = seed.new_empty(len(seed), padded_vocab // 32, dtype=torch.int32) if by_count or by_weight else None
    step = Step(
        *(x.data_ptr() for x in (logits, temperature, top_p, top_k, seed, position, ids)), None if support is None else support.data_ptr(),
        failed.data_ptr(), logits.stride(0), vocab_size, padded_vocab // 32, groups, by_count, by_weight,
    )  # fmt: skip
    return step, ids, support


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    failed: torch.Tensor, vocab_size: int, padded_vocab: int, by_count: bool, by_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    threads, groups = deal(padded_vocab, 1024 if len(logits) <= FEW_ROWS else 512)
    step, ids, support = prepare(
        groups, logits, temperature, top_p, top_k, seed, position, failed, vocab_size, padded_vocab, by_count, by_weight
    )  # fmt: skip
    if len(logits):
        _kernel(logits.device, threads, groups).launch(len(logits) * CLUSTER, (step,), logits.device)
        ran("sampling", SOURCE)
    return ids, None if support is None else support.view(torch.uint8)
