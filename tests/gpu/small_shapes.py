"""Runs every Triton operator once at small shapes, for a memory checker (``check_memory.py``):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool memcheck python3 tests/gpu/small_shapes.py

Arguments name parts. Shapes are odd on purpose: rows, columns, depths, keys and vocabularies that end inside a tile, rows enough for leaves
in registers and for parked ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from check_sm90 import TABLES

from rlk.contract.numerics import DEFAULT
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import token_leaves
from rlk.contract.update import AdamParams
from rlk.kernels.attention import attention, paged_attention
from rlk.kernels.attention.vendor_library import BLOCK
from rlk.kernels.attention.vendor_rows import place_rows
from rlk.kernels.batch_invariant_logp import batch_invariant_logp_weight_grad, batch_invariant_logp_with_lse
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad, sm90, sm90_plans, sm90_tokens
from rlk.kernels.dispatch import readback
from rlk.kernels.embedding import embedding, embedding_weight_grad
from rlk.kernels.lm_head import lm_head
from rlk.kernels.logp import logp_with_lse
from rlk.kernels.pack import pack, unpack
from rlk.kernels.qk_norm import qk_norm, qk_norm_gamma_grad
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad
from rlk.kernels.rope import rope
from rlk.kernels.serving import add_rms_norm, rotate_into_cache, store_kv
from rlk.kernels.silu import silu
from rlk.kernels.swiglu import swiglu
from rlk.kernels.update import AdamTensors, adam, square_sums
from rlk.rollout.sampling_device import DeviceSampler

LENGTHS = (11, 16, 13, 19)
TOKENS = sum(LENGTHS)


def make(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16().requires_grad_()


def leaves(lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    order = token_leaves(lengths)
    return torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")


def products(splits: int, rows: int) -> None:
    for depth, columns in ((512, 136), (72, 40)):
        det_gemm(make(rows, depth), make(columns, depth).detach(), splits=splits, grad_splits=splits).sum().backward()


def hopper_products(table: Sequence[tuple[object, object, sm90_plans.Plan | None]], leaves: int, across: bool) -> None:
    """Every plan of one table of the Hopper products, at tiles that end inside a cluster's."""
    for plan in dict.fromkeys(plan for *_, plan in table if plan):
        for dtype in (torch.bfloat16, torch.float32):
            x, w, out = make(300, 512), make(512, 520) if across else make(520, 512), torch.empty(300, 520, dtype=dtype, device="cuda")
            sm90.contract("det_gemm", x.detach(), w.detach(), across, leaves, out, plan)


def hopper_tokens() -> None:
    """Tiles that end inside a cluster's rows and inside its columns."""
    x, dy, out = make(TOKENS, 448).detach(), make(TOKENS, 320).detach(), torch.empty(320, 448, device="cuda")
    sm90_tokens.weight_grad("det_gemm.weight_grad", x, dy, *leaves(), out)


def token_product(columns: int) -> None:
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


def serve() -> None:
    heads, group, dim, page = 2, 4, 128, 16
    cache, slots = make(3, heads, page, 2 * dim).detach(), torch.tensor([3, -1, 47, 0, 48], device="cuda")
    qkv, gamma = make(len(slots), heads * (group + 2) * dim).detach(), make(dim).detach()
    table = torch.randn(2, 40, dim // 2, device="cuda")
    rotate_into_cache(qkv, gamma, gamma, 1e-6, torch.tensor([0, 39, 40, 7, 8], device="cuda"), table, cache, slots)
    store_kv(make(len(slots), heads, dim).detach(), make(len(slots), heads, dim).detach(), cache, slots)
    for width in (96, 1000):
        add_rms_norm(make(TOKENS, width).detach(), make(TOKENS, width).detach(), make(width).detach(), 1e-6)


def update() -> None:
    """Tensors whose sizes and addresses are multiples of 16, and odd ones, among them rows with gaps."""
    for shapes in (((37, 300), (4096,)), ((48, 320), (7, 16))):
        states = [[torch.rand(shape, device="cuda") for _ in range(4)] for shape in shapes]
        held = [AdamTensors(state[0].bfloat16(), *state) for state in states]
        adam(held, [True, False])(AdamParams().step(1), 0.5)
        square_sums([state[0][None] for state in states] + [states[0][0].unflatten(1, (4, -1)).transpose(0, 1)], 1024)()


def place() -> None:
    """Two sequences, of 5 and of one row more than a block."""
    places = torch.tensor([[0, 5, 0], [5, BLOCK + 1, 1]], device="cuda")
    place_rows(make(BLOCK + 6, 2, 40).detach(), make(BLOCK + 6, 2, 40).detach(), places, 3)


def attend(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, tile: int, split: int) -> None:
    """Training with its gradients, then over pages: each sequence's last row alone (decoding), then all rows that fit (prefill)."""
    order, offsets = {"scale": dim**-0.5, "kv_tile": tile, "kv_split": split}, torch.tensor([0, *lengths], device="cuda").cumsum(0)
    q, k, v = make(sum(lengths), heads, dim), make(sum(lengths), kv_heads, dim), make(sum(lengths), kv_heads, dim)
    attention(q, k, v, offsets, **order).sum().backward()
    page = 16
    pages = -(-max(lengths) // page)
    cache = make(len(lengths) * pages, kv_heads, page, 2 * dim).detach()
    table = torch.arange(len(cache), dtype=torch.int32, device="cuda").view(len(lengths), pages)
    ends = torch.tensor(lengths, device="cuda")
    paged_attention(q[: len(lengths)].detach(), cache, table, torch.arange(len(lengths) + 1, device="cuda"), ends, **order)
    paged_attention(q.detach(), cache, table, offsets, ends, **order)


def score(tokens: int, vocab: int, padded: int, hidden: int, supported: bool) -> None:
    h, w = make(tokens, hidden), make(padded, hidden).detach()
    ids, temperature = torch.randint(0, vocab, (tokens,), device="cuda"), torch.rand(tokens, device="cuda") + 0.5
    seed = torch.randn(tokens, device="cuda")
    support = active = None
    if supported:
        support = torch.rand(tokens, padded, device="cuda") < 0.2
        support[:, vocab:] = False
        support[torch.arange(tokens, device="cuda"), ids] = True
        active = torch.arange(tokens, device="cuda") % 3 != 1
    logits = torch.randn(tokens, padded, device="cuda").requires_grad_()
    logp_with_lse(logits, ids, temperature, vocab_size=vocab, padded_vocab=padded, support=support, active=active)[0].backward(seed)
    out, lse = batch_invariant_logp_with_lse(h, w, ids, temperature, vocab_size=vocab, padded_vocab=padded, support=support, active=active)
    out.backward(seed)
    batch_invariant_logp_weight_grad(
        h.detach(), w, ids, temperature, lse, seed, *leaves((tokens,)), vocab_size=vocab, support=support, active=active
    )  # fmt: skip


def draw(vocab: int, padded: int) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 200, "temperature": 0.7},
    )  # fmt: skip
    sampler = DeviceSampler(len(kinds), vocab, padded, DEFAULT, torch.device("cuda"))
    logits = torch.randn(len(kinds), vocab, device="cuda")
    sampler.sample(logits, sampler.stage([SamplingParams(**kind) for kind in kinds], range(len(kinds))))
    sampler.sample(torch.zeros_like(logits), sampler.stage([SamplingParams(top_p=0.5)] * len(kinds), range(len(kinds))))
    sampler.check()


PARTS: dict[str, Callable[[], None]] = {
    **{f"plain {count}": partial(products, 1, count) for count in (1, 59, 300, 520)},
    **{f"split {count}": partial(products, 8, count) for count in (1, 59, 300, 520)},
    **{f"Hopper, {name}": partial(hopper_products, *table) for name, table in TABLES.items()},
    "Hopper, tokens": hopper_tokens,
    "tokens": partial(token_product, 136),
    "tokens, odd columns": partial(token_product, 37),
    "lm_head": lambda: lm_head(make(TOKENS, 96), make(264, 96).detach()).sum().backward(),
    "norms": norms,
    "elementwise": elementwise,
    "rows": rows,
    "attention, splits": partial(attend, (1, 33, 70), 8, 2, 64, 32, 64),
    "attention, one split": partial(attend, (45, 19), 6, 2, 128, 64, 0),
    "attention, Hopper": partial(attend, (45, 1, 70), 8, 2, 128, 64, 64),
    "attention, rows for the vendor": place,
    "serving": serve,
    "update": update,
    "logp": partial(score, 5, 1000, 1024, 64, False),
    "logp, supports": partial(score, 5, 1000, 1024, 64, True),
    "sampling": partial(draw, 301, 1024),
    "sampling, several blocks": partial(draw, 5000, 5120),
}


def kernels() -> str:
    """Line with the ids of the kernels that this process has run."""
    return " ".join(["kernels", *sorted({ran.kernel_id for ran in readback()})])


if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print(f"{name} ran", flush=True)
    print(kernels(), flush=True)
