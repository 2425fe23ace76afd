"""Run by test_sampling_device.py under TRITON_INTERPRET=1: the Triton sampler gives the ids and supports of the numpy rule, to the byte.

All its sums are sums of integers and its fp32 steps are IEEE, so that what the interpreter computes is what a card computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rlk.kernels.logp import triton as score
from rlk.kernels.sampling import WHOLE, Rows, cpu, fixed_point, triton

INT = torch.int64
Sample = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def rows(count: int, seed: int = 0) -> Rows:
    """Every combination of limits in turn, and greedy rows."""
    kinds = [(WHOLE, -1), (fixed_point(0.9), -1), (WHOLE, 20), (fixed_point(0.5), 40), (WHOLE, 0), (fixed_point(0.3), 10**6), (WHOLE, 1),
             (fixed_point(1e-9), -1), (fixed_point(1 - 2**-53), -1), (fixed_point(0.9), 0)]  # fmt: skip
    taken = [kinds[i % len(kinds)] for i in range(count)]
    temperature = torch.tensor([(0.7, 1.0, 1.3)[i % 3] if taken[i][1] else 1.0 for i in range(count)])
    seeds = torch.tensor([(2**63 - 1 - i if i % 2 else 7919 * i) + seed for i in range(count)]).clamp(max=2**63 - 1)
    return Rows(temperature, torch.tensor([p for p, _ in taken]), torch.tensor([k for _, k in taken]), seeds, torch.arange(count) * 3)


def at(chosen: Rows, places: list[int]) -> Rows:
    """Some of the rows."""
    values = (chosen.temperature, chosen.top_p, chosen.top_k, chosen.seed, chosen.position)
    return Rows(*(x[places] for x in values))


def draw(
    run: Sample, logits: torch.Tensor, r: Rows, vocab: int = 130, padded: int = 160, by_count: bool = True, by_weight: bool = True,
    failed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    failed = torch.zeros(3, dtype=INT) if failed is None else failed
    return run(logits, r.temperature, r.top_p, r.top_k, r.seed, r.position, failed, vocab, padded, by_count, by_weight)


def both(
    run: Sample, name: str, logits: torch.Tensor, chosen: Rows, vocab: int, padded: int, by_count: bool = True, by_weight: bool = True
) -> None:
    """``run`` gives the ids, supports and failures of the numpy rule."""
    failed, wanted_failed = torch.zeros(3, dtype=INT), torch.zeros(3, dtype=INT)
    ids, support = draw(run, logits, chosen, vocab, padded, by_count, by_weight, failed)
    wanted_ids, wanted_support = draw(cpu.sample, logits, chosen, vocab, padded, by_count, by_weight, wanted_failed)
    assert torch.equal(ids, wanted_ids), (name, ids, wanted_ids)
    assert (support is None) == (wanted_support is None)
    if support is not None and wanted_support is not None:
        scaled = logits[:, :vocab] / chosen.temperature[:, None]
        differing = ((support != wanted_support).any(1) & scaled.isfinite().all(1)).nonzero()[:, 0].tolist()
        assert differing == [] or wanted_failed[0] == 2, (name, differing)
    assert torch.equal(failed, wanted_failed), (name, failed, wanted_failed)
    print("ok", name)


def uniforms(run: Sample) -> None:
    numbers = [(0, 0), (1, 0), (7919, 3), (2**63 - 1, 10**9), (12345678901234567, 2**62)]
    vocab = 1 << 11
    for seed, position in numbers:  # equal weights: the id is the first 11 bits of the number
        one = torch.ones(1, dtype=INT)
        row = Rows(torch.ones(1), WHOLE * one, -one, one * seed, one * position)
        ids, _ = draw(run, torch.zeros(1, vocab), row, vocab, vocab, False, False)
        assert int(ids) == int(np.random.Philox(key=seed, counter=position).random_raw()) >> 53
    print("ok uniforms")


def follow_the_rule(run: Sample) -> None:
    """Limits alone and together, rows that are hard to cut, rows that fail, and rows alone."""
    generator = torch.Generator().manual_seed(3)
    for scale, width in ((0.02, 133), (1.0, 130), (6.0, 160)):
        logits = torch.full((10, width), float("nan"))
        logits[:, :130] = scale * torch.randn(10, 130, generator=generator)
        both(run, f"scale {scale}", logits, rows(10), 130, 160)
    logits = logits[:, :130]
    mixed, whole_mass, whole_count = rows(10), torch.full((10,), WHOLE), torch.full((10,), -1)
    both(run, "top_k alone", logits, replace(mixed, top_p=whole_mass), 130, 160, by_weight=False)
    both(run, "top_p alone", logits, replace(mixed, top_k=whole_count), 130, 160, by_count=False)
    both(run, "no limits", logits, replace(mixed, top_p=whole_mass, top_k=whole_count), 130, 160, by_count=False, by_weight=False)
    both(run, "overlooked top_k", logits[2:3], at(mixed, [2]), 130, 160, by_count=False)
    both(run, "overlooked top_p", logits[1:2], at(mixed, [1]), 130, 160, by_weight=False)
    few = at(mixed, [1, 2, 3, 8])
    for name, row in {
        "all equal": torch.full((130,), -3.0),
        "two values": (torch.arange(130) % 7 == 0).float(),
        "signed zeros": torch.tensor([0.0, -0.0, -1.0]).repeat(44)[:130],
        "far apart": torch.linspace(-3e4, 3e4, 130),
        "one id holds all": torch.nn.functional.one_hot(torch.tensor(77), 130) * 1000.0,
        "largest numbers": torch.tensor([3e38, -3e38, 0.0, 1e-40]).repeat(33)[:130],
    }.items():
        both(run, name, row.repeat(4, 1), few, 130, 160)
    both(run, "one block", logits[:4, :64], few, 64, 64)
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = logits[:2].clone()
        broken[1, 77] = bad
        both(run, f"a logit {bad}", broken, at(mixed, [2, 3]), 130, 160)
    whole, whole_support = draw(run, logits, mixed)
    assert whole_support is not None
    for i in (3, 9):
        ids, support = draw(run, logits[i : i + 1], at(mixed, [i]))
        assert support is not None
        assert torch.equal(ids, whole[i : i + 1])
        assert torch.equal(support, whole_support[i : i + 1])
    print("ok one row alone")
    later, _ = draw(cpu.sample, logits, replace(mixed, position=mixed.position + 1))
    _, wider = draw(cpu.sample, logits, replace(mixed, top_k=mixed.top_k + (mixed.top_k > 0).long()))
    assert wider is not None
    assert not torch.equal(later, whole), "another position must show"
    assert not torch.equal(wider, whole_support), "one id more must show"
    uniforms(run)


def logp_over_bits() -> None:
    """logp reads a support of bits as it reads a mask."""
    generator, mixed = torch.Generator().manual_seed(3), rows(10)
    logits = 6.0 * torch.randn(10, 130, generator=generator)
    whole, whole_support = draw(triton.sample, logits, mixed)
    assert whole_support is not None
    mask = torch.from_numpy(np.unpackbits(whole_support.numpy(), axis=1, bitorder="little")).bool()
    by_bits = score.run_logp(logits, whole, mixed.temperature, whole_support, None, 130, 160, 2, 32)
    by_mask = score.run_logp(logits, whole, mixed.temperature, mask[:, :130].contiguous(), None, 130, 160, 2, 32)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(by_bits, by_mask, strict=True))
    print("ok logp over bits")


if __name__ == "__main__":
    triton.BLOCK, triton.CHUNK = 128, 16
    follow_the_rule(triton.sample)
    logp_over_bits()
    print("the Triton sampler follows the rule")
