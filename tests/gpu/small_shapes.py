"""Every attention and logp kernel once at small shapes, to run under compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool memcheck python tests/gpu/small_shapes.py
"""

from __future__ import annotations

import torch

from rlk.contract.topology import token_leaves
from rlk.kernels.attention import attention_with_lse, paged_attention
from rlk.kernels.attention import triton as attention
from rlk.kernels.attention.triton import Tiles
from rlk.kernels.batch_invariant_logp import batch_invariant_logp_weight_grad, batch_invariant_logp_with_lse
from rlk.kernels.logp import logp_with_lse

draw = lambda *shape: torch.randn(*shape, device="cuda")


def attend(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, tile: int, split: int) -> None:
    rows, cu = sum(lengths), torch.tensor([0, *lengths], device="cuda").cumsum(0)
    q, k, v, do = (draw(rows, h, dim).bfloat16() for h in (heads, kv_heads, kv_heads, heads))
    out, lse2 = attention_with_lse(q, k, v, cu, scale=dim**-0.5, kv_tile=tile, kv_split=split)
    for m, programs in ((16, 3), (128, 1)):
        packed, whole = attention.packed(k, v), attention.whole(cu)
        attention.run_forward("attention", q, packed, whole, dim**-0.5, tile, split, True, Tiles(m, tile, 4, 2), programs)
    torch.ops.rlk.attention_backward(q, k, v, out, lse2, do, cu, dim**-0.5)
    page = 16
    cache = draw(len(lengths) * 8, kv_heads, page, 2 * dim).bfloat16()
    table = torch.arange(len(cache), dtype=torch.int32, device="cuda").view(len(lengths), 8)
    ends = torch.tensor(lengths, device="cuda").clamp(max=8 * page)
    starts = torch.arange(len(lengths) + 1, device="cuda")
    paged_attention(q[: len(lengths)], cache, table, starts, ends, scale=dim**-0.5, kv_tile=tile, kv_split=split)


def score(rows: int, vocab: int, padded: int, hidden: int) -> None:
    h, w = draw(rows, hidden).bfloat16(), draw(padded, hidden).bfloat16()
    ids, temperature, seed = torch.randint(0, vocab, (rows,), device="cuda"), torch.rand(rows, device="cuda") + 0.5, draw(rows)
    support = torch.rand(rows, padded, device="cuda") < 0.2
    support[:, vocab:] = False
    support[torch.arange(rows, device="cuda"), ids] = True
    active = torch.arange(rows, device="cuda") % 3 != 1
    leaves = token_leaves((rows,))
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    sizes = {"vocab_size": vocab, "padded_vocab": padded}
    for on, mask in ((None, None), (support, active)):
        logits = draw(rows, padded).requires_grad_()
        logp_with_lse(logits, ids, temperature, **sizes, support=on, active=mask)[0].backward(seed)
        leaf = h.clone().requires_grad_()
        out, lse = batch_invariant_logp_with_lse(leaf, w, ids, temperature, **sizes, support=on, active=mask)
        out.backward(seed)
        batch_invariant_logp_weight_grad(
            h, w, ids, temperature, lse, seed, index, offsets, vocab_size=vocab, support=on, active=mask
        )  # fmt: skip


if __name__ == "__main__":
    attend((1, 33, 70), 8, 2, 64, 32, 64)
    attend((45, 19), 6, 2, 128, 64, 0)
    score(5, 1000, 1024, 64)
    torch.cuda.synchronize()
    print("ran")
