"""Run by test_update.py under TRITON_INTERPRET=1: the fused steps against their composition, every fp32 and fp64 byte."""

from __future__ import annotations

import math
from unittest import mock

import torch

from rlk.contract.update import AdamParams
from rlk.kernels.update import AdamTensors
from rlk.kernels.update import cpu as composed
from rlk.kernels.update import triton as fused

ROOM = 16
"""Elements before and behind a tensor that nothing may touch."""


def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    bits = torch.int64 if expected.dtype == torch.float64 else torch.int32
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)), name
    print("ok", name)


def inner(held: torch.Tensor, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    return held[ROOM + offset : ROOM + offset + math.prod(shape)].view(shape)


def check_adam(shapes: tuple[tuple[int, ...], ...], offset: int, scale: float) -> None:
    """Several tensors that begin ``offset`` elements behind a multiple of 16."""
    made = [[torch.randn(math.prod(shape) + 3 * ROOM) for _ in range(4)] for shape in shapes]
    for state in made:
        state[2].abs_()
        state.insert(0, state[0].bfloat16())
    copies = [[tensor.clone() for tensor in state] for state in made]
    for states, run in ((made, fused.adam), (copies, composed.adam)):
        views = [[inner(tensor, shape, offset) for tensor in state] for state, shape in zip(states, shapes)]
        change = run([AdamTensors(*state) for state in views], [at % 2 == 0 for at in range(len(views))])
        change(AdamParams(lr=1e-3).step(3), float(torch.tensor(scale)))
    for at, (actual, expected) in enumerate(zip(made, copies)):
        for kind, a, b in zip(AdamTensors._fields[1:], actual[1:], expected[1:]):
            same(f"{kind} {at} of {shapes}, {offset} elements off, scale {scale}", a, b)
        # The interpreter rounds to bf16 in its own way.
        torch.testing.assert_close(actual[0].float(), expected[0].float(), atol=0.0, rtol=1e-2)


for tensors in (((1,), (1024,), (3001,)), ((64, 80), (2048,), (16,)), ((7, 5),)):
    for behind, factor in ((0, 1.0), (0, 0.125), (1, 0.3)):
        check_adam(tensors, behind, factor)

whole = torch.randn(6, 40)
odd = [
    whole[None],
    whole.unflatten(0, (2, -1)),
    whole.unflatten(1, (4, -1)).movedim(1, 0),
    whole.flatten()[None, :7],
    whole[:, None],
]
wide = torch.randn(16, 64)
even = [wide[None], wide.unflatten(0, (4, -1)), wide.unflatten(1, (4, -1)).movedim(1, 0), wide.flatten()[None, :1008]]
for listed, blocks in ((odd, (16,)), (even, (16, 64)), (odd + even, (64,))):
    for block in blocks:
        name = f"squares {[tuple(shards.shape) for shards in listed]} {block}"
        same(name, fused.square_sums(listed, block)(), composed.square_sums(listed, block)())
with mock.patch.multiple(fused, _WIDTH=4, _TILE=16):  # block sums in columns of 4, 16 and 128, which several programs fold
    for width in (15, 37, 130):
        many = [torch.randn(2, 8 * width), torch.randn(1, 70)]
        same(f"squares of {width} blocks", fused.square_sums(many, 8)(), composed.square_sums(many, 8)())
print("every byte is right")
