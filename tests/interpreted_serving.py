"""Run by test_serving.py under TRITON_INTERPRET=1: rows, halves and slots that the fused steps read and write, within a loose tolerance."""

from __future__ import annotations

import torch

from rlk.kernels.rope import rope_table
from rlk.kernels.serving import triton as serving

EPS = 1e-6


def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2, equal_nan=True, msg=lambda text: f"{name}: {text}")
    print("ok", name)


def norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, gamma.shape, gamma, EPS)


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table[0, positions][:, None], table[1, positions][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def stored(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    expected = cache.clone()
    page = cache.shape[2]
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.shape[0] * page:
            expected[slot // page, :, slot % page] = torch.cat([key[row], value[row]], dim=-1)
    return expected


def run(groups: int, each: int, dim: int) -> None:
    tokens, page, slots = 7, 4, torch.tensor([3, -1, 19, 0, 7, 20, 12])
    wide = torch.full((tokens, groups * (each + 2) * dim + 3), float("nan"))
    qkv = wide[:, : groups * (each + 2) * dim]
    qkv.copy_(torch.randn(qkv.shape))
    positions, table = torch.tensor([0, 5, 39, 1, 2, 3, 4]), rope_table(dim, 1e4, 40)
    q_gamma, k_gamma = torch.randn(dim), torch.randn(dim)
    cache = torch.full((5, groups, page, 2 * dim), float("nan"))
    heads = qkv.unflatten(1, (groups, each + 2, dim))
    key, value = rotated(norm(heads[:, :, each], k_gamma), positions, table), heads[:, :, each + 1]
    expected = stored(cache, key, value, slots)
    q = serving.rotate_into_cache(qkv, q_gamma, k_gamma, EPS, positions, table, cache, slots)
    same(f"queries {groups} {each} {dim}", q, rotated(norm(heads[:, :, :each].flatten(1, 2), q_gamma), positions, table))
    same(f"cache {groups} {each} {dim}", cache, expected)
    moved = slots.roll(2)
    expected = stored(cache, value, key, moved)
    serving.store_kv(value, key, cache, moved)
    same(f"stored {groups} {each} {dim}", cache, expected)
    beyond = serving.rotate_into_cache(qkv, q_gamma, k_gamma, EPS, positions + 40, table, cache, torch.full_like(slots, -1))
    assert bool(beyond.isnan().all())
    same("a row without a slot writes nothing", cache, expected)


for shape in ((2, 4, 16), (3, 1, 8), (1, 2, 32)):
    run(*shape)
for width in (96, 128):
    x, y, gamma = torch.randn(19, width), torch.randn(19, width), torch.randn(width)
    total, normed = serving.add_rms_norm(x, y, gamma, EPS)
    same(f"sum {width}", total, x + y)
    same(f"norm {width}", normed, norm(x + y, gamma))
print("every index and mask is right")
