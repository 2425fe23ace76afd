"""A fault planted in one operator turns its own cells red and those of the operators that depend on it, and no others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import rlk.evidence.accuracy
from rlk.acceptance import measure as measuring
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import judge_cell
from rlk.acceptance.ws1 import ws1_cells
from rlk.contract.judgments import JUDGMENTS, OPERATORS, Judgment, Tolerance, tolerance
from rlk.contract.operators import SHAPES, TIERS, dependencies
from rlk.evidence.schema import CellRecord, Status
from rlk.kernels.registry import declared_kernels

Function = Callable[..., Any]
NAMES = [op.name for op in OPERATORS]
ACCURACY = {j.name for j in JUDGMENTS if not j.exact}
INVARIANCE = {j.name for j in JUDGMENTS if j.exact}
TABLES = {
    "embedding": ("_FORWARD", "_WEIGHT_GRAD"),
    "rms_norm": ("_FORWARD", "_GAMMA_GRAD"),
    "qk_norm": ("_FORWARD", "_GAMMA_GRAD"),
    "det_gemm": ("_FORWARD", "_WEIGHT_GRAD"),
    "rope": ("_FORWARD",),
    "attention": ("_ATTENTION", "_PAGED"),
    "silu": ("_FORWARD",),
    "swiglu": ("_FORWARD",),
    "lm_head": ("_FORWARD", "_WEIGHT_GRAD"),
    "logp": ("_FORWARD",),
    "batch_invariant_logp": ("_FORWARD", "_WEIGHT_GRAD"),
    "pack": ("_PACK", "_UNPACK"),
}
SHAPE_OF = {"rms_norm": "m59", "qk_norm": "m59", "attention": "b4_sq19"}
SMALL_VOCABULARY = {"vocab": 1500, "padded": 2048, "weight_rows": 64}
LEAVES_AT = {"embedding": 2, "rms_norm": 3, "qk_norm": 3, "det_gemm": 2, "lm_head": 2, "batch_invariant_logp": 8}
"""Where leaf_index stands among the arguments of a weight gradient; leaf_offsets follow."""


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One shape per operator, with few neighbours: what is tested here is which cells turn red.

    Another order inside one row changes few bf16 results in ten thousand: norms and attention need the dimensions of a model to show it.
    """
    for name in NAMES:
        at = next(at for tier in TIERS for at in SHAPES[name][tier] if at.name == SHAPE_OF.get(name, SHAPES[name]["short"][0].name))
        sizes = {**at.sizes, **SMALL_VOCABULARY} if "logp" in name else at.sizes
        small = replace(at, sizes=sizes, neighbours=(at.batch.packed + 6,), shifts=(1,))
        monkeypatch.setitem(SHAPES, name, {"short": (small,), "primary": ()})
    measuring._case.cache_clear()
    yield
    measuring._case.cache_clear()


def _judge(name: str, judgment: Judgment) -> CellRecord:
    cell = next(c for c in ws1_cells("cpu") if (c.subject, c.workload, c.judgment) == (name, "short-cpu", judgment.name))
    evidence, trouble = Evidence(), []
    try:
        measuring.measure(name, "short", judgment, "cpu", evidence)
    except Exception as error:  # as in an acceptance session, where it fails the cell
        trouble.append(repr(error))
    return judge_cell(cell, evidence.close(), trouble, declared_kernels())


def _red(judgments: Iterable[Judgment] = JUDGMENTS) -> dict[str, set[str]]:
    """Operator → judgments that are red."""
    asked, found = list(judgments), dict[str, set[str]]()
    for name in NAMES:
        for judgment in asked:
            if _judge(name, judgment).status is not Status.PASS:
                found.setdefault(name, set()).add(judgment.name)
    return found


def _touched(name: str) -> set[str]:
    return {other for other in NAMES if other == name or name in dependencies(other)}


def test_nothing_is_red_without_a_fault() -> None:
    assert _red() == {}


# An unwritten row


class _HoleInGradient(torch.autograd.Function):
    """The identity; the last row of its gradient is never written."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _with_hole(grad)


def _with_hole(written: torch.Tensor) -> torch.Tensor:
    hole = torch.empty_like(written, memory_format=torch.contiguous_format)
    if written.ndim > 1 and len(written) == 1:  # pack: a batch of one line, its rows lie in the second dimension
        hole[:, :-1] = written[:, :-1]
    else:
        hole[:-1] = written[:-1]
    return hole


def _forgets_a_row(run: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        first, *rest = arguments
        if first.is_floating_point() and first.requires_grad:
            first = _HoleInGradient.apply(first)
        result = run(first, *rest)
        return tuple(map(_with_hole, result)) if isinstance(result, tuple) else _with_hole(result)

    return faulty


@pytest.mark.parametrize("name", NAMES)
def test_an_unwritten_row_is_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"rlk.kernels.{name}")
    for table in TABLES[name]:
        entries = getattr(module, table)
        monkeypatch.setitem(entries, "cpu", _forgets_a_row(entries["cpu"]))
    red = _red()
    assert set(red) == _touched(name)
    assert all(judgments == ACCURACY | INVARIANCE for judgments in red.values()), red


# Another order of reduction where a batch is large: accurate, and not invariant


def _shuffle(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(3))


def _product(run: Function) -> Function:
    """K and N in another order."""

    def faulty(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        k, n = _shuffle(w.shape[1]), _shuffle(w.shape[0])
        result: torch.Tensor = run(x[:, k].contiguous(), w[n][:, k].contiguous(), *rest)[:, n.argsort()]
        return result

    return faulty


class _Instead(torch.autograd.Function):
    """The value of ``other`` with the gradient of ``real``."""

    @staticmethod
    def forward(ctx: Any, real: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _norm(run: Function) -> Function:
    """Squares added one after another."""

    def faulty(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
        exact = x.detach().float()
        total, *rest = (exact * exact).unbind(-1)
        for square in rest:
            total = total + square
        rstd = 1 / (total[..., None] / x.shape[-1] + eps).sqrt()
        other = ((exact * rstd).bfloat16().float() * gamma.float()).bfloat16()
        result: torch.Tensor = _Instead.apply(run(x, gamma, eps), other)
        return result

    return faulty


def _key_tiles(run: Function) -> Function:
    """Keys in tiles of 16; kv_tile is the last argument but one."""
    return lambda *arguments: run(*arguments[:-2], 16, arguments[-1])


def _small_tiles(run: Function) -> Function:
    """The vocabulary in tiles of another size; vocab_tile is the last argument."""
    return lambda *arguments: run(*arguments[:-1], 96)


def _one_leaf(at: int) -> Callable[[Function], Function]:
    """All tokens in one leaf."""

    def plant(run: Function) -> Function:
        def faulty(*arguments: Any) -> torch.Tensor:
            merged = torch.tensor([0, arguments[at].numel()])
            result: torch.Tensor = run(*arguments[: at + 1], merged, *arguments[at + 2 :])
            return result

        return faulty

    return plant


def _rounds_twice(run: Function) -> Function:
    """Elementwise operators reduce nothing: another path rounds its result's input once more."""
    return lambda x, *rest: run((x * 1.01).bfloat16() / 1.01, *rest)


def _shifted(run: Function) -> Function:
    """Copies reduce nothing: another path is off by one row."""
    return lambda *arguments: run(*arguments).roll(1, dims=-1)


SWAPPED: dict[str, Callable[[Function], Function]] = {
    "rms_norm": _norm,
    "qk_norm": _norm,
    "det_gemm": _product,
    "lm_head": _product,
    "attention": _key_tiles,
    "logp": _small_tiles,
    "batch_invariant_logp": _small_tiles,
    "rope": _rounds_twice,
    "silu": _rounds_twice,
    "swiglu": _rounds_twice,
    "pack": _shifted,
}


def _in_large_batches(limit: int, run: Function, fault: Function) -> Function:
    def rows(argument: torch.Tensor) -> int:
        return argument.shape[0] * (argument.shape[1] if argument.shape[0] == 1 and argument.ndim > 1 else 1)

    return lambda first, *rest: (fault if rows(first) > limit else run)(first, *rest)


@pytest.mark.parametrize("name", NAMES)
def test_another_order_in_large_batches_is_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"rlk.kernels.{name}")
    tables, limit = TABLES[name], SHAPES[name]["short"][0].batch.packed
    if name in SWAPPED:
        forward = getattr(module, tables[0])
        monkeypatch.setitem(forward, "cpu", _in_large_batches(limit, forward["cpu"], SWAPPED[name](forward["cpu"])))
    if name in LEAVES_AT:
        gradient = getattr(module, tables[1])
        monkeypatch.setitem(gradient, "cpu", _in_large_batches(limit, gradient["cpu"], _one_leaf(LEAVES_AT[name])(gradient["cpu"])))
    red = _red()
    assert set(red) == _touched(name)
    expected = {"forward_invariance"} if name in SWAPPED else set()
    expected |= {"gradient_invariance"} if name in LEAVES_AT else set()
    assert all(expected <= judgments <= INVARIANCE for judgments in red.values()), red


# A private tolerance


@pytest.mark.parametrize("name", NAMES)
def test_a_private_tolerance_is_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def private(subject: str, judgment: Judgment, storage: Any) -> Tolerance:
        allowed = tolerance(subject, judgment, storage)
        return replace(allowed, atol=2 * allowed.atol) if subject == name else allowed

    monkeypatch.setattr(rlk.evidence.accuracy, "tolerance", private)
    assert _red(j for j in JUDGMENTS if not j.exact) == dict.fromkeys(_touched(name), ACCURACY)


def test_a_missing_gradient_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measuring.shape_evidence
    monkeypatch.setattr(measuring, "shape_evidence", lambda *a: tuple(n for n in found(*a) if ".weight" not in n))
    for judgment in JUDGMENTS:
        record = _judge("det_gemm", judgment)
        assert (record.status is Status.FAIL) == judgment.gradient
        assert not record.reasons or ("were not handed in" in record.reasons[0] and "weight" in record.reasons[0])


def test_an_invariance_without_kernels_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "readback", list)
    for judgment in JUDGMENTS:
        assert any("no read-back" in reason for reason in _judge("silu", judgment).reasons)
