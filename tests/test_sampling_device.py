"""The batched sampler: the Triton kernels follow the numpy rule, and the step around them stages, scores, logs and refuses as it says."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.sampling import SamplingParams
from rlk.kernels._triton import aot
from rlk.kernels.logp import logp, support_mask
from rlk.kernels.sampling import WHOLE, cpu, fixed_point
from rlk.rollout.sampling import retained_ids, sample_rows
from rlk.rollout.sampling_device import DeviceSampler, SupportLog

VOCAB, PADDED, CPU = 301, 1024, torch.device("cpu")


def _logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(29))


def _sampler() -> DeviceSampler:
    return DeviceSampler(8, VOCAB, PADDED, DEFAULT, CPU)


def test_the_triton_kernels_follow_the_rule() -> None:
    script = Path(__file__).with_name("interpreted_sampling.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("the Triton sampler follows the rule\n")


def test_every_kernel_compiles_for_both_targets_without_spills_or_fused_sums() -> None:
    compiled = list(aot.compile_all(("sampling",)))
    for target in aot.TARGETS:
        names = {row.kernel for row in compiled if row.target == target}
        assert names == {"_highest", "_count", "_gather", "_find", "_retain", "_pick"}
    assert [row.line() for row in compiled if row.spills] == []
    unwanted = re.compile(r"fma\.rn\.f32|\.ftz\b|ex2\.approx|\b(?:div|rcp)\.(?:approx|full)")
    assert [row.line() for row in compiled if row.target == "cuda:90" and unwanted.search(row.text)] == []


def test_weights_are_close_to_the_exponential_and_rise_with_it() -> None:
    t = np.concatenate([np.linspace(-29, 0, 1 << 18), -np.logspace(-9, 1, 1 << 12)]).astype(np.float32)
    t.sort()
    w = cpu.weights(t)
    assert w[-1] == 1 << 44
    assert (np.diff(w) >= 0).all()
    exact = np.exp(t.astype(np.float64)) * 2.0**44
    assert (np.abs(w - exact) <= 1 + 4e-6 * exact).all()
    far = np.array([0.0, -31.0, -1e4, -3e38], np.float32)
    assert cpu.weights(far).tolist() == [1 << 44, 0, 0, 0]


def test_sums_fit_the_largest_vocabulary() -> None:
    assert int(cpu.weights(np.zeros(1 << 18, np.float32)).sum()) == 1 << 62
    sampler = DeviceSampler(1, (1 << 18) + 1, 1 << 19, DEFAULT, CPU)
    staged = sampler.stage([SamplingParams()], [0])
    with pytest.raises(ValueError, match="sampling: logits"):
        sampler.sample(torch.zeros(1, (1 << 18) + 1), staged)


def test_the_order_of_float_sums_shows_and_that_of_integers_does_not() -> None:
    t = np.log(np.array([1.0, *[2**-26] * 64], np.float32))
    floats, w = np.exp(t), cpu.weights(t)
    assert floats.cumsum()[-1] == 1.0
    assert floats[::-1].cumsum()[-1] == np.float32(1 + 2**-20)
    assert w.cumsum()[-1] == w[::-1].cumsum()[-1]


def test_fixed_point() -> None:
    assert fixed_point(1.0) == WHOLE
    assert fixed_point(0.5) % (1 << 64) == 1 << 63
    assert fixed_point(0.25) == 1 << 62
    assert fixed_point(1 - 2**-53) % (1 << 64) == (1 << 64) - (1 << 11)
    assert fixed_point(5e-324) == 0


def test_a_step_equals_the_rows_one_by_one(mixed: list[SamplingParams]) -> None:
    logits, positions = _logits(len(mixed)), [0, 5, 1, 2, 9, 10**6]
    sampler = _sampler()
    drawn = sampler.sample(logits, sampler.stage(mixed, positions))
    expected = sample_rows(logits, mixed, positions, vocab_size=VOCAB, padded_vocab=PADDED, numerics=DEFAULT)
    assert torch.equal(drawn.ids, expected.ids)
    assert torch.equal(drawn.logprobs.view(torch.int32), expected.logprobs.view(torch.int32))
    log = SupportLog(VOCAB, PADDED, CPU, block_rows=7)
    assert drawn.support is not None
    for step in range(3):
        log.put(drawn.support, [(i, step) if params.truncates else None for i, params in enumerate(mixed)])
    for i, params in enumerate(mixed):
        if params.truncates:
            kept = log.ids((i, 1))
            assert list(kept) == retained_ids(logits[i], params)
            assert [log.listed()[i, step] for step in range(3)] == [list(kept)] * 3
            again = logp(
                logits[i : i + 1], drawn.ids[i : i + 1], torch.tensor([params.scoring_temperature]), vocab_size=VOCAB, padded_vocab=PADDED,
                support=torch.from_numpy(log.bits((i, 2))[None]),
            )  # fmt: skip
            assert torch.equal(again.view(torch.int32), drawn.logprobs[i : i + 1].view(torch.int32))
        else:
            with pytest.raises(KeyError):
                log.ids((i, 1))
    assert set(log.listed()) == {(i, step) for i, params in enumerate(mixed) if params.truncates for step in range(3)}
    sampler.check()
    log.clear()
    assert log.listed() == {}
    with pytest.raises(KeyError):
        log.bits((2, 1))


def test_what_is_staged_follows_the_parameters(mixed: list[SamplingParams]) -> None:
    """Parameters that stay, that change in one row, and fewer rows."""
    sampler, logits = _sampler(), _logits(len(mixed))
    stay, other = tuple(mixed), (*mixed[:3], replace(mixed[3], seed=99), *mixed[4:])
    for asked, first in ((stay, 0), (stay, 7), (other, 7), (other, 8), (list(stay), 7), (stay[2:4], 7), (stay[:2], 0), (stay, 3)):
        positions = range(first, first + len(asked))
        drawn = sampler.sample(logits[: len(asked)], sampler.stage(asked, positions))
        expected = sample_rows(logits[: len(asked)], asked, positions, vocab_size=VOCAB, padded_vocab=PADDED, numerics=DEFAULT)
        assert torch.equal(drawn.ids, expected.ids)
        assert torch.equal(drawn.logprobs.view(torch.int32), expected.logprobs.view(torch.int32))
        assert (drawn.support is None) == (not any(p.truncates for p in asked))


def test_without_limits_there_are_no_supports() -> None:
    sampler = _sampler()
    params = [SamplingParams(seed=3), SamplingParams(temperature=0, top_k=4)]
    drawn = sampler.sample(_logits(2), sampler.stage(params, [0, 0]))
    assert drawn.support is None
    assert int(drawn.ids[1]) == int(_logits(2)[1].argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_raised_once_by_name(bad: float, mixed: list[SamplingParams]) -> None:
    sampler, logits = _sampler(), _logits(3)
    logits[1, 7] = bad
    sampler.sample(logits, sampler.stage(mixed[2:5], [10, 11, 12]))
    with pytest.raises(FloatingPointError, match="seed 4 at position 11"):
        sampler.check()
    sampler.check()


def test_a_step_that_overlooks_a_limit_is_raised(mixed: list[SamplingParams]) -> None:
    """As a graph would that was captured without limits."""
    sampler = _sampler()
    staged = sampler.stage(mixed[2:4], [0, 1])
    sampler.sample(_logits(2), replace(staged, by_weight=False))
    with pytest.raises(RuntimeError, match="seed 3 at position 0 truncates"):
        sampler.check()


def test_refusals(mixed: list[SamplingParams]) -> None:
    sampler = _sampler()
    with pytest.raises(ValueError, match="at most 8 rows"):
        sampler.stage([SamplingParams()] * 9, [0] * 9)
    with pytest.raises(ValueError, match="2 rows and 1 positions"):
        sampler.stage([SamplingParams()] * 2, [0])
    staged = sampler.stage(mixed[:2], [0, 0])
    for wrong in (_logits(3), _logits(2).double(), _logits(2)[:, :300]):
        with pytest.raises(ValueError, match="sampling: "):
            sampler.sample(wrong, staged)
    with pytest.raises(ValueError, match="block of 4"):
        SupportLog(VOCAB, PADDED, CPU, block_rows=4).put(torch.zeros(5, PADDED // 8, dtype=torch.uint8), [None] * 5)


def test_packed_supports_are_checked_like_masks() -> None:
    logits, ids, ones = _logits(2), torch.tensor([3, 300]), torch.ones(2)
    mask = support_mask([range(0, 301, 3), [5, 300]], VOCAB, width=PADDED)
    bits = torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "padded_vocab": PADDED}
    by_mask = logp(logits, ids, ones, **sizes, support=mask[:, :VOCAB].contiguous())
    for width in (PADDED // 8, 38):
        by_bits = logp(logits, ids, ones, **sizes, support=bits[:, :width].contiguous())
        assert torch.equal(by_bits.view(torch.int32), by_mask.view(torch.int32))
    with pytest.raises(ValueError, match="row 1 selects id 4, outside its own support"):
        logp(logits, torch.tensor([3, 4]), ones, **sizes, support=bits)
    with pytest.raises(ValueError, match="support"):
        logp(logits, ids, ones, **sizes, support=bits[:, :37].contiguous())
    bits[0, 302 // 8] |= 1 << (302 % 8)
    with pytest.raises(ValueError, match="row 0 supports id 302"):
        logp(logits, ids, ones, **sizes, support=bits)
