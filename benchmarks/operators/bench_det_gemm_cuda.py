"""det_gemm on a card beside torch's default product, at the linear layers of Qwen3-8B; recorded, never a gate.

    pytest benchmarks/operators/bench_det_gemm_cuda.py

Each case first compares every byte with the certified library, leaf by leaf, joined by the contract's tree. Only then both arms are timed:
captured graphs, interleaved round by round, second-level cache flushed before each, the card's own clock. The ratio is the median of
det_gemm over the median of torch, which multiplies the same values without a fixed order and rounds to bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from rlk.contract.models import QWEN3_8B
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import det_gemm, det_gemm_input_part, det_gemm_weight_grad

Run = Callable[[], torch.Tensor]
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 4096, 8192)
TOKENS = 4096
LEAVES = 8
SPLIT_FORWARD = ("o_proj", "down_proj")
LAYERS = {layer.name: layer for layer in QWEN3_8B.gemms() if layer.name != "lm_head"}
ROUNDS = 15


@dataclass(frozen=True)
class Arms:
    """ours and torch's product; ``leaves``: the terms of the tree, one product in plain order each."""

    ours: Run
    torch: Run
    leaves: list[Run]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _slices(size: int, leaves: int) -> list[slice]:
    return [slice(first, first + size // leaves) for first in range(0, size, size // leaves)]


def forward(name: str, rows: int) -> Arms:
    layer, leaves = LAYERS[name], LEAVES if name in SPLIT_FORWARD else 1
    x, w = _random(rows, layer.k), _random(layer.n, layer.k)
    terms: list[Run] = [lambda s=s: det_gemm(x[:, s], w[:, s], out_dtype=torch.float32, backend="vendor") for s in _slices(layer.k, leaves)]  # type: ignore[misc]
    return Arms(lambda: det_gemm(x, w, splits=leaves), lambda: torch.nn.functional.linear(x, w), terms)


def input_gradient(name: str, rows: int) -> Arms:
    layer, leaves = LAYERS[name], 1 if name in SPLIT_FORWARD else LEAVES
    dy, w = _random(rows, layer.n), _random(layer.n, layer.k)
    terms: list[Run] = [lambda s=s: det_gemm_input_part(dy[:, s], w[s], splits=1, backend="vendor") for s in _slices(layer.n, leaves)]  # type: ignore[misc]
    return Arms(lambda: torch.ops.rlk.det_gemm_input_grad(dy, w, leaves), lambda: torch.mm(dy, w), terms)


def weight_gradient(name: str, rows: int) -> Arms:
    layer, order = LAYERS[name], token_leaves((rows // 4,) * 4)
    x, dy = _random(rows, layer.k), _random(rows, layer.n)
    index, offsets = torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")
    terms: list[Run] = [lambda: det_gemm_weight_grad(x, dy, index, offsets, backend="vendor")]
    return Arms(lambda: det_gemm_weight_grad(x, dy, index, offsets), lambda: torch.mm(dy.T, x), terms)


CONTRACTIONS = {"forward": forward, "input gradient": input_gradient, "weight gradient": weight_gradient}
CASES = [(kind, name, rows) for kind in CONTRACTIONS for name in LAYERS for rows in (ROWS if kind == "forward" else (TOKENS,))]


def _graph(run: Run) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _microseconds(replay: Callable[[], None], flush: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


@pytest.mark.parametrize(("kind", "name", "rows"), CASES, ids=[f"{kind} {name} {rows}" for kind, name, rows in CASES])
def test_speed(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], kind: str, name: str, rows: int) -> None:
    assert torch.cuda.is_available(), "this benchmark needs an NVIDIA card"
    torch.manual_seed(0)
    arms = CONTRACTIONS[kind](name, rows)
    found, wanted = arms.ours(), fold_pairs([leaf() for leaf in arms.leaves], torch.add)
    assert torch.equal(found.view(torch.uint8), wanted.to(found.dtype).view(torch.uint8)), "bytes differ: no timing is shown"
    flush, ours, theirs = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), _graph(arms.ours), _graph(arms.torch)
    times: dict[str, list[float]] = {"det_gemm_us": [], "torch_us": []}

    def round_() -> None:
        times["torch_us"].append(_microseconds(theirs, flush))
        times["det_gemm_us"].append(_microseconds(ours, flush))

    benchmark.group = kind
    benchmark.pedantic(round_, rounds=ROUNDS, warmup_rounds=1)
    ratio = statistics.median(times["det_gemm_us"]) / statistics.median(times["torch_us"])
    quartiles = {arm: statistics.quantiles(values, n=4) for arm, values in times.items()}
    benchmark.extra_info.update(ratio=ratio, peak_bytes=torch.cuda.max_memory_allocated(), **quartiles)
    with capsys.disabled():
        print(f"\n{kind} {name} {rows}: {ratio:.2f} of torch ({quartiles['det_gemm_us'][1]:.1f} µs)", end=" ")
