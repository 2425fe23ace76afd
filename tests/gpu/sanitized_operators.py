"""Runs every Triton operator but attention and logprobs once at small shapes, for a memory checker:

    export PYTHONPATH=.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitized_operators.py
    compute-sanitizer --tool racecheck python3 tests/gpu/sanitized_operators.py

Arguments name parts. Shapes are odd on purpose: rows, columns and depths that end inside a tile, rows enough for leaves in registers and
for parked ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad
from rlk.kernels.embedding import embedding, embedding_weight_grad
from rlk.kernels.lm_head import lm_head
from rlk.kernels.pack import pack, unpack
from rlk.kernels.qk_norm import qk_norm, qk_norm_gamma_grad
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad
from rlk.kernels.rope import rope
from rlk.kernels.silu import silu
from rlk.kernels.swiglu import swiglu

LENGTHS = (11, 16, 13, 19)
TOKENS = sum(LENGTHS)


def make(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16().requires_grad_()


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    order = token_leaves(LENGTHS)
    return torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")


def products(splits: int) -> None:
    for rows in (1, 59, 300, 520):
        for depth, columns in ((512, 136), (72, 40)):
            det_gemm(make(rows, depth), make(columns, depth).detach(), splits=splits, grad_splits=splits).sum().backward()


def token_products() -> None:
    for columns in (136, 37):
        det_gemm_weight_grad(make(TOKENS, 264).detach(), make(TOKENS, columns).detach(), *leaves())


def norms() -> None:
    for width in (4096, 96):
        x = make(TOKENS, width)
        rms_norm(x, x[0].detach(), 1e-6).sum().backward()
        rms_norm_gamma_grad(x.detach(), x.detach(), 1e-6, *leaves())
    heads = make(TOKENS, 8, 128)
    qk_norm(heads, heads[0, 0].detach(), 1e-6).sum().backward()
    qk_norm_gamma_grad(heads.detach(), heads.detach(), 1e-6, *leaves(), 8)


def elementwise() -> None:
    rope(make(TOKENS, 8, 128), torch.arange(TOKENS, device="cuda"), torch.randn(2, 64, 64, device="cuda")).sum().backward()
    silu(make(5, 300)).sum().backward()
    swiglu(make(TOKENS, 2 * 8 * 24), 8).sum().backward()


def rows() -> None:
    ids, weight = torch.randint(50, (TOKENS,), device="cuda"), make(64, 300).detach()
    embedding(ids, weight, 50)
    embedding_weight_grad(ids, make(TOKENS, 300).detach(), *leaves(), 64)
    mask = torch.arange(20, device="cuda")[None] < torch.tensor(LENGTHS, device="cuda")[:, None]
    pack(unpack(make(TOKENS, 33), mask), mask).sum().backward()


PARTS: dict[str, Callable[[], None]] = {
    "plain": lambda: products(1),
    "split": lambda: products(8),
    "tokens": token_products,
    "lm_head": lambda: lm_head(make(TOKENS, 96), make(264, 96).detach()).sum().backward(),
    "norms": norms,
    "elementwise": elementwise,
    "rows": rows,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print(f"{name} ran", flush=True)
