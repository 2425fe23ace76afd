"""det_gemm against torch.mm in fp32, on one thread, round by round in the same run.

    pytest benchmarks/operators/bench_det_gemm.py

Each case first checks its result, then alternates one round of the peer with one of det_gemm. The ratio is the peer's fastest round over
det_gemm's fastest: 1 is equal speed, more is faster than the peer. The peer multiplies the same values, already widened to fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad

Run = Callable[[], torch.Tensor]
LEAVES = 8
REQUIRED_RATIO = 0.2


@dataclass(frozen=True)
class Case:
    """One product of m rows, depth k and n columns; ``required`` cases must reach REQUIRED_RATIO."""

    m: int
    k: int
    n: int
    rounds: int
    required: bool = False


CASES = (
    Case(256, 768, 256, 60, required=True),
    Case(1024, 4096, 1024, 6, required=True),
    Case(64, 1024, 1024, 40),
    Case(1, 4096, 4096, 30),
    Case(4, 4096, 4096, 30),
    Case(16, 4096, 4096, 20),
)


def _forward(m: int, k: int, n: int, splits: int) -> tuple[Run, Run]:
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    a, b = x.float(), w.float().T
    return lambda: det_gemm(x, w, splits=splits, out_dtype=torch.float32), lambda: torch.mm(a, b)


def _input_grad(m: int, k: int, n: int) -> tuple[Run, Run]:
    """m tokens, contracted over k outputs into n inputs."""
    dy, w = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    a, b = dy.float(), w.float()
    return lambda: torch.ops.rlk.det_gemm_input_grad(dy, w, LEAVES), lambda: torch.mm(a, b)


def _weight_grad(m: int, k: int, n: int) -> tuple[Run, Run]:
    """m outputs, contracted over k tokens into n inputs."""
    dy, x = torch.randn(k, m).bfloat16(), torch.randn(k, n).bfloat16()
    index, offsets = torch.arange(k), torch.arange(0, k + 1, k // LEAVES)
    a, b = dy.float().T, x.float()
    return lambda: det_gemm_weight_grad(x, dy, index, offsets), lambda: torch.mm(a, b)


CONTRACTIONS: dict[str, Callable[[int, int, int], tuple[Run, Run]]] = {
    "forward plain": lambda m, k, n: _forward(m, k, n, 1),
    "forward split": lambda m, k, n: _forward(m, k, n, LEAVES),
    "input gradient": _input_grad,
    "weight gradient": _weight_grad,
}
DECODE_ROWS = 4
"""Up to this many rows only the forward pass is of interest."""
MEASURED = [(case, name) for case in CASES for name in CONTRACTIONS if case.m > DECODE_ROWS or name.startswith("forward")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("case", "contraction"), MEASURED, ids=[f"{name} {c.m}x{c.k}x{c.n}" for c, name in MEASURED])
def test_speed(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], case: Case, contraction: str) -> None:
    torch.manual_seed(0)
    ours, peer = CONTRACTIONS[contraction](case.m, case.k, case.n)
    exact = peer()
    torch.testing.assert_close(ours().float(), exact, atol=2e-2 * float(exact.abs().max()), rtol=2e-2)
    peer_times = []

    def time_peer() -> None:
        start = time.perf_counter()
        peer()
        peer_times.append(time.perf_counter() - start)

    benchmark.group = contraction
    benchmark.pedantic(ours, setup=time_peer, rounds=case.rounds, warmup_rounds=1)
    assert benchmark.stats is not None
    fastest = benchmark.stats.stats.min
    ratio = min(peer_times) / fastest
    benchmark.extra_info.update(torch_mm_fp32_seconds=min(peer_times), ratio=ratio)
    with capsys.disabled():
        print(f"\n{contraction} {case.m}x{case.k}x{case.n}: {ratio:.2f} of torch.mm fp32 ({fastest * 1e3:.2f} ms)", end=" ")
    assert not case.required or ratio >= REQUIRED_RATIO, f"{contraction}: {ratio:.2f} of torch.mm, required is {REQUIRED_RATIO}"
