"""Checks shared by the operators' tests: every layout of the operator workload must give the canonical layout's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from rlk.acceptance.poison import poisoned_memory
from rlk.contract.judgments import OPERATORS, Judgment, tolerance
from rlk.contract.numerics import DEFAULT
from rlk.contract.orders import fold_pairs
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import owned, token_leaves
from rlk.contract.workloads import GEMM_ROWS, WS1
from rlk.evidence.bytes import compare, describe
from rlk.loop.prepare import tiny_config
from rlk.loop.tokenizer import byte_tokenizer_files
from rlk.model.layout import hf_shapes
from rlk.model.weights import save_checkpoint

RowFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
LeafFunction = Callable[..., torch.Tensor]
BATCHES = (*GEMM_ROWS, 2048)
THREADS = (1, 2, 3, 5)

# A busy machine must not turn a law red, and a law must try the same examples in every run.
settings.register_profile("rlk", deadline=None, derandomize=True)
settings.load_profile("rlk")


@pytest.fixture
def mixed() -> list[SamplingParams]:
    """Rows of every kind: whole, greedy, top_p, top_k, both, and a top_k beyond a vocabulary of 301 ids."""
    return [
        SamplingParams(seed=1),
        SamplingParams(temperature=0, top_p=0.5, seed=2),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3),
        SamplingParams(temperature=1.3, top_k=20, seed=4),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.8, seed=5),
        SamplingParams(top_k=306, seed=2**63 - 1),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny shape with random weights and a byte tokenizer; read it, never write it."""
    path = tmp_path_factory.mktemp("model") / "random"
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in hf_shapes(tiny_config()).items()}
    save_checkpoint(path, tiny_config(), tensors, files=byte_tokenizer_files(512))
    return path


def _assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    comparison = compare(name, actual, expected)
    assert comparison.equal, describe(comparison)


def _at_threads(count: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _scatter(rows: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
    """``rows`` at ``places`` of a batch of ``total`` rows; the others are NaN, or 0 for integers."""
    batch = torch.full((total, *rows.shape[1:]), float("nan") if rows.is_floating_point() else 0, dtype=rows.dtype)
    batch[places] = rows
    return batch


def _layouts() -> dict[str, tuple[torch.Tensor, tuple[int, ...], int]]:
    """Layout name → (place of each canonical row, first row of each sample, rows of the batch)."""

    def layout(starts: tuple[int, ...], total: int) -> tuple[torch.Tensor, tuple[int, ...], int]:
        return torch.tensor([start + i for start, n in zip(starts, WS1.lengths) for i in range(n)]), starts, total

    padded = len(WS1.lengths) * WS1.pad_to
    return {
        "permutation": layout(WS1.permuted_starts, WS1.packed),
        "padding_left": layout(WS1.padded_starts(left=True), padded),
        "padding_right": layout(WS1.padded_starts(left=False), padded),
    }


@pytest.fixture(autouse=True)
def poisoned_operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the tests of an operator, ``test_<operator>….py``, uninitialised memory is NaN: an unwritten row shows."""
    tested = request.path.stem.removeprefix("test_")
    if not any(tested == op.name or tested.startswith(f"{op.name}_") for op in OPERATORS):
        yield
        return
    with poisoned_memory():
        yield


@pytest.fixture
def assert_accurate() -> Callable[[str, Judgment, torch.Tensor, torch.Tensor], None]:
    """check(operator, judgment, candidate, reference): |c − r| <= atol + rtol·|r| with the operator's bf16 tolerance; all finite."""

    def check(operator: str, judgment: Judgment, candidate: torch.Tensor, reference: torch.Tensor) -> None:
        allowed = tolerance(operator, judgment, "bf16")
        assert candidate.isfinite().all()
        torch.testing.assert_close(candidate.double(), reference.double(), atol=allowed.atol, rtol=allowed.rtol)

    return check


@pytest.fixture
def assert_rows_invariant() -> Callable[..., None]:
    """check(run, *rows): run(*rows) gives one output row per token; each must keep its bytes wherever its token stands.

    rows: tensors of WS1.packed tokens. Layouts: single rows, chunks of 7, permuted samples, padding left and right with NaN rows,
    row 0 among GEMM_ROWS and 2048 tokens, every position in a tile, thread counts.
    """

    def check(run: RowFunction, *rows: torch.Tensor) -> None:
        def flat(*batch: torch.Tensor) -> torch.Tensor:
            result = run(*batch)
            parts = result if isinstance(result, tuple) else (result,)
            return torch.cat([part.detach().flatten(1) for part in parts], dim=1)

        assert all(len(r) == WS1.packed for r in rows)
        expected = flat(*rows)
        for size in (1, WS1.chunk):
            pieces = [flat(*(r[at : at + size] for r in rows)) for at in range(0, WS1.packed, size)]
            _assert_same(f"chunks of {size}", torch.cat(pieces), expected)
        for name, (places, _, total) in _layouts().items():
            _assert_same(name, flat(*(_scatter(r, places, total) for r in rows))[places], expected)
        for count in BATCHES:
            neighbours = (torch.arange(count) * 13) % WS1.packed
            _assert_same(f"row 0 among {count}", flat(*(r[neighbours] for r in rows))[:1], expected[:1])
        for shift in range(1, 18):
            moved = torch.arange(-shift, WS1.packed) % WS1.packed
            _assert_same(f"moved by {shift}", flat(*(r[moved] for r in rows))[shift:], expected)
        for count in THREADS:
            _assert_same(f"{count} threads", _at_threads(count, lambda: flat(*rows)), expected)

    return check


@pytest.fixture
def assert_leaves_invariant() -> Callable[..., None]:
    """check(run, *rows): the weight gradient run(*rows, leaf_index, leaf_offsets) keeps its bytes in every layout and cut over CP.

    rows: tensors of WS1.packed tokens. Layouts: permuted samples, padding left and right with NaN rows, leaves computed by 2, 4 and 8
    CP ranks and joined by the pair tree, thread counts.
    """

    def check(run: LeafFunction, *rows: torch.Tensor) -> None:
        leaves = token_leaves(WS1.lengths)
        index, offsets = torch.tensor(leaves.index), torch.tensor(leaves.offsets)
        expected = run(*rows, index, offsets)
        for name, (places, starts, total) in _layouts().items():
            moved = torch.tensor(token_leaves(WS1.lengths, starts=starts).index)
            _assert_same(name, run(*(_scatter(r, places, total) for r in rows), moved, offsets), expected)
        for ranks in (2, 4, 8):
            parts = []
            for rank in range(ranks):
                own = owned(ranks, rank, DEFAULT.canonical_cp)
                first, last = leaves.offsets[own.start], leaves.offsets[own.stop]
                parts.append(run(*rows, index[first:last], offsets[own.start : own.stop + 1] - first))
            _assert_same(f"cp={ranks}", fold_pairs(parts, torch.add), expected)
        for count in THREADS:
            _assert_same(f"{count} threads", _at_threads(count, lambda: run(*rows, index, offsets)), expected)

    return check
