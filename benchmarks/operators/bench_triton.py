"""Operators over rows on a card beside torch's own, eager and compiled; recorded, never a gate.

    OUT=. PYTHONPATH=. pytest benchmarks/operators/bench_triton.py

Qwen3-8B's widths. Bytes come first: a row alone must have the bytes that it has among the others, and the results must be close to
torch's. Only then the arms are timed: captured graphs (cases marked eager: plain calls), interleaved round by round, second-level cache
flushed before each, the card's own clock. The ratio is the median of ours over that of the default operator, compiled where torch.compile
fuses it. Writes quartiles and the most memory of one call to $OUT/triton.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from report import environment, graphed, microseconds

from rlk.contract.models import QWEN3_8B
from rlk.contract.topology import token_leaves
from rlk.kernels.batch_invariant_logp import batch_invariant_logp_with_lse
from rlk.kernels.dispatch import readback
from rlk.kernels.logp import logp
from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad
from rlk.kernels.rope import rope, rope_table
from rlk.kernels.serving import add_rms_norm
from rlk.kernels.swiglu import swiglu

Tensors = tuple[torch.Tensor, ...]
Run = Callable[..., Tensors]
EPS, HIDDEN, HEADS, DIM = QWEN3_8B.rms_norm_eps, 4096, 32, 128
VOCAB, PADDED, SHARDS = 151936, 152576, 8
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "padded_vocab": PADDED, "shards": SHARDS, "vocab_tile": 1024}
ROUNDS = 15


@dataclass(frozen=True)
class Case:
    """rows: arguments of both arms, one row per token. theirs: of the default operator, and how it becomes an arm; it is compiled unless
    the case is ``eager``."""

    rows: Tensors
    ours: Run
    theirs: Callable[..., Any]
    arm: Callable[[Callable[..., Any]], Run]
    eager: bool = False


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _forward(f: Callable[..., torch.Tensor]) -> Run:
    return lambda *rows: (f(*rows),)


def _backward(f: Callable[..., torch.Tensor]) -> Run:
    """Result and gradient in the first argument; the last one is the gradient of the result."""

    def run(x: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        leaf = x.detach().requires_grad_()
        y = f(leaf, *rest[:-1])
        return y.detach(), torch.autograd.grad(y, leaf, rest[-1])[0]

    return run


def _norms(tokens: int) -> dict[str, Case]:
    x, y, dy, gamma = _random(tokens, HIDDEN), _random(tokens, HIDDEN), _random(tokens, HIDDEN), _random(HIDDEN)
    heads, d_heads, head_gamma = _random(tokens, HEADS, DIM), _random(tokens, HEADS, DIM), _random(DIM)
    theirs = lambda v: functional.rms_norm(v, (HIDDEN,), gamma, EPS)
    theirs_heads = lambda v: functional.rms_norm(v, (DIM,), head_gamma, EPS)

    def add(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        total = x + y
        return total, functional.rms_norm(total, (HIDDEN,), gamma, EPS)

    ours, ours_heads = partial(rms_norm, gamma=gamma, eps=EPS), partial(qk_norm, gamma=head_gamma, eps=EPS)
    return {
        "rms_norm": Case((x,), _forward(ours), theirs, _forward),
        "rms_norm, gradient": Case((x, dy), _backward(ours), theirs, _backward),
        "residual and rms_norm": Case((x, y), partial(add_rms_norm, gamma=gamma, eps=EPS), add, lambda f: f),
        "qk_norm": Case((heads,), _forward(ours_heads), theirs_heads, _forward),
        "qk_norm, gradient": Case((heads, d_heads), _backward(ours_heads), theirs_heads, _backward),
    }


def _gains(tokens: int) -> dict[str, Case]:
    """The norm with gradients in its argument and in its gain."""
    x, dy, gamma = _random(tokens, HIDDEN), _random(tokens, HIDDEN), _random(HIDDEN).requires_grad_()
    order = token_leaves((tokens // 4,) * 4)
    index, offsets = torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")
    ours = _backward(partial(rms_norm, gamma=gamma.detach(), eps=EPS))

    def arm(f: Callable[..., torch.Tensor]) -> Run:
        def run(x: torch.Tensor, dy: torch.Tensor) -> Tensors:
            leaf = x.detach().requires_grad_()
            y = f(leaf, gamma)
            return y.detach(), *torch.autograd.grad(y, (leaf, gamma), dy)

        return run

    def both(x: torch.Tensor, dy: torch.Tensor) -> Tensors:
        return *ours(x, dy), *((rms_norm_gamma_grad(x, dy, EPS, index, offsets),) if len(x) == tokens else ())

    return {"rms_norm, both gradients": Case((x, dy), both, lambda x, gain: functional.rms_norm(x, (HIDDEN,), gain, EPS), arm)}


def _turned(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table[:, positions][:, :, None, :]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _elementwise(tokens: int) -> dict[str, Case]:
    heads, d_heads, positions = _random(tokens, HEADS, DIM), _random(tokens, HEADS, DIM), torch.arange(tokens, device="cuda")
    table = rope_table(DIM, 1e6, 8192).to("cuda")
    gate_up, d_mid = _random(tokens, 24576), _random(tokens, 12288)
    ours, theirs = partial(rope, table=table), lambda x, positions: _turned(x, positions, table)

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.unflatten(1, (SHARDS, 2, -1)).unbind(2)
        return (functional.silu(gate) * up).flatten(1)

    return {
        "rope": Case((heads, positions), _forward(ours), theirs, _forward),
        "rope, gradient": Case((heads, positions, d_heads), _backward(ours), theirs, _backward),
        "swiglu": Case((gate_up,), _forward(swiglu), gated, _forward),
        "swiglu, gradient": Case((gate_up, d_mid), _backward(swiglu), gated, _backward),
    }


def _logits(tokens: int) -> dict[str, Case]:
    logits, ids = torch.randn(tokens, VOCAB, device="cuda"), torch.randint(VOCAB, (tokens,), device="cuda")
    ones, seed = torch.ones(tokens, device="cuda"), torch.randn(tokens, device="cuda")
    ours = lambda z, ids, t: logp(z, ids, t, **SIZES)
    theirs = lambda z, ids, t: functional.log_softmax(z, 1).gather(1, ids[:, None])[:, 0]
    return {
        "logp": Case((logits, ids, ones), _forward(ours), theirs, _forward, eager=True),
        "logp, gradient": Case((logits, ids, ones, seed), _backward(ours), theirs, _backward, eager=True),
    }


def _heads(tokens: int) -> dict[str, Case]:
    h, w, ids = _random(tokens, HIDDEN), _random(VOCAB, HIDDEN) * 0.05, torch.randint(VOCAB, (tokens,), device="cuda")
    ones, seed = torch.ones(tokens, device="cuda"), torch.randn(tokens, device="cuda")
    scored = lambda h, w, ids: functional.log_softmax((h @ w.T).float(), 1).gather(1, ids[:, None])[:, 0]

    def ours(h: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, seed: torch.Tensor) -> Tensors:
        leaf = h.detach().requires_grad_()
        y, _ = batch_invariant_logp_with_lse(leaf, w, ids, t, **SIZES)
        return y.detach(), torch.autograd.grad(y, leaf, seed)[0]

    def arm(f: Callable[..., torch.Tensor]) -> Run:
        def run(h: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, seed: torch.Tensor) -> Tensors:
            leaf = h.detach().requires_grad_()
            y = f(leaf, w, ids)
            return y.detach(), torch.autograd.grad(y, leaf, seed)[0]

        return run

    return {"head and logp, gradient": Case((h, ids, ones, seed), ours, scored, arm, eager=True)}


BUILT = {_norms: (16, 4096), _gains: (4096,), _elementwise: (16, 4096), _logits: (4096,), _heads: (2048,)}
NAMES: dict[Callable[[int], dict[str, Case]], tuple[str, ...]] = {
    _norms: ("rms_norm", "rms_norm, gradient", "residual and rms_norm", "qk_norm", "qk_norm, gradient"),
    _gains: ("rms_norm, both gradients",),
    _elementwise: ("rope", "rope, gradient", "swiglu", "swiglu, gradient"),
    _logits: ("logp", "logp, gradient"),
    _heads: ("head and logp, gradient",),
}
ASKED = [(build, name, tokens) for build, sizes in BUILT.items() for tokens in sizes for name in NAMES[build]]


FOUND: dict[str, Any] = {}
"""What was timed so far in this process."""


def _record(name: str, row: dict[str, Any]) -> None:
    FOUND[name] = row
    date = time.strftime("%Y-%m-%d", time.gmtime())
    facts = {"date": date, **environment(), "kernels": sorted({ran.kernel_id for ran in readback()}), "times": FOUND}
    (Path(os.environ.get("OUT", ".")) / "triton.json").write_text(json.dumps(facts, indent=1) + "\n")


def _memory(run: Callable[[], object]) -> int:
    """Bytes that one call needs at most, beside its arguments."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("build", "name", "tokens"), ASKED, ids=[f"{name} {tokens}" for _, name, tokens in ASKED])
def test_speed(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], build: Callable[[int], dict[str, Case]], name: str, tokens: int,
) -> None:  # fmt: skip
    assert torch.cuda.is_available(), "this benchmark needs an NVIDIA card"
    torch.manual_seed(0)
    case = build(tokens)[name]
    ours, eager = case.ours(*case.rows), case.arm(case.theirs)(*case.rows)
    alone = case.ours(*(x[5:6].contiguous() for x in case.rows))
    for a, among in zip(alone, ours):
        assert torch.equal(a.view(torch.uint8), among[5:6].contiguous().view(torch.uint8)), "bytes follow the batch: no timing is shown"
    for a, b in zip(ours, eager):
        assert float((a.float() - b.float()).abs().max()) <= 0.1 + 0.05 * float(b.float().abs().max()), "results are not torch's"
    del ours, eager, alone
    calls: dict[str, Callable[[], object]] = {"ours": partial(case.ours, *case.rows), "torch": partial(case.arm(case.theirs), *case.rows)}
    memory = {arm: _memory(call) for arm, call in calls.items()}
    if not case.eager:
        calls["compiled"] = partial(case.arm(torch.compile(case.theirs, dynamic=False)), *case.rows)
        calls = {arm: graphed(call)[0] for arm, call in calls.items()}
    flush, times = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), {arm: list[float]() for arm in calls}

    def round_() -> None:
        for arm, call in calls.items():
            times[arm].append(microseconds(call, flush))

    benchmark.pedantic(round_, rounds=ROUNDS, warmup_rounds=1)
    quartiles = {arm: [round(x, 2) for x in statistics.quantiles(values[1:], n=4)] for arm, values in times.items() if len(values) > 2}
    if not quartiles:
        return  # benchmarks are disabled: the compiler's caches are filled
    default = "torch" if case.eager else "compiled"
    ratio = round(quartiles["ours"][1] / quartiles[default][1], 3)
    row = {"ratio": ratio, "default": default, "quartiles_us": quartiles, "most_bytes": memory}
    _record(f"{name} {tokens}", row)
    benchmark.extra_info.update(row)
    with capsys.disabled():
        print(f"\n{name} {tokens}: {ratio:.2f} of {default}", {arm: q[1] for arm, q in quartiles.items()}, end=" ")
