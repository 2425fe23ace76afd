"""Run by test_update.py under TRITON_INTERPRET=1: the fused steps against their composition, every fp32 and fp64 byte."""

from __future__ import annotations

from unittest import mock

import torch

from rlk.contract.update import AdamParams
from rlk.kernels import update
from rlk.kernels.update import cpu as composed
from rlk.kernels.update import triton as fused


def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    bits = torch.int64 if expected.dtype == torch.float64 else torch.int32
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)), name
    print("ok", name)


def state(count: int) -> list[torch.Tensor]:
    """weight, master, m, v, gradient with room behind them that nothing may touch."""
    values = [torch.randn(count + 9) for _ in range(4)]
    values[2].abs_()
    return [values[0].bfloat16(), *values]


for count in (1, 1024, 3001):
    for scale, decays in ((1.0, True), (0.125, False), (0.3, True)):
        left, right = state(count), []
        right = [tensor.clone() for tensor in left]
        step = AdamParams(lr=1e-3).step(3)
        for held, run in ((left, fused.adam), (right, composed.adam)):
            run(*(tensor[:count] for tensor in held), step, float(torch.tensor(scale)), decays)
        for name, a, b in zip(("master", "m", "v", "gradient"), left[1:], right[1:], strict=True):
            same(f"{name} {count} {scale} {decays}", a, b)
        torch.testing.assert_close(left[0].float(), right[0].float(), atol=0.0, rtol=1e-2)

whole = torch.randn(6, 40)
for shards in (
    whole[None],
    whole.unflatten(0, (2, -1)),
    whole.unflatten(1, (4, -1)).movedim(1, 0),
    whole.flatten()[None, :7],
    whole[:, None],
):
    for block in (8, 16, 64):
        same(f"squares {tuple(shards.shape)} {block}", fused.block_squares(shards, block), composed.block_squares(shards, block))
for shards in (torch.randn(2, 3, 4, 16)[..., :8], whole[:, None, ::2], whole[:, ::2], whole.t()[None]):
    with mock.patch.dict(update._SQUARES, cpu=fused.block_squares):  # tensors that lie like this reach a backend as rows
        found = update.block_squares(shards, 8)
    same(f"squares of {tuple(shards.shape)}, strides {shards.stride()}", found, composed.block_squares(shards, 8))
print("every byte is right")
