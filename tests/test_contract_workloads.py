"""Judgments, tolerances, workloads and ablation arms as data."""

from __future__ import annotations

import math

import pytest

from rlk.contract.arithmetic import AFTER_LAYERS, BEFORE_LAYERS, IN_LAYER, Storage
from rlk.contract.arms import ARMS
from rlk.contract.judgments import (
    FORWARD_ACCURACY,
    FORWARD_INVARIANCE,
    GRADIENT_ACCURACY,
    GRADIENT_INVARIANCE,
    JUDGMENTS,
    OPERATORS,
    TOLERANCES,
    Judgment,
    Tolerance,
    operator,
    tolerance,
)
from rlk.contract.models import QWEN3_8B, TINY, GemmShape
from rlk.contract.numerics import DEFAULT, ContractError
from rlk.contract.topology import Topology
from rlk.contract.workloads import (
    ATTENTION_EDGES,
    ATTENTION_LONG,
    ATTENTION_PREFIX,
    EIGHT_RANK_TRAIN,
    ROLLOUT_TP,
    SAMPLING_ROWS,
    WS1,
)


@pytest.mark.parametrize(
    ("name", "storage", "forward", "gradient"),
    [
        ("rope", "bf16", (2e-2, 1.6e-2), (2e-2, 1.6e-2)),
        ("embedding", "bf16", (2e-2, 1.6e-2), (1e-1, 2e-2)),
        ("det_gemm", "bf16", (5e-2, 2e-2), (1e-1, 2e-2)),
        ("attention", "bf16", (5e-2, 2e-2), (5e-2, 2e-2)),
        ("logp", "bf16", (6e-2, 0.0), (5e-2, 0.0)),
        ("silu", "fp32", (1e-5, 1e-5), (1e-5, 1e-5)),
        ("rms_norm", "fp32", (1e-4, 1e-4), (1e-4, 1e-4)),
        ("attention", "fp32", (1e-4, 1e-4), (1e-4, 1e-4)),
        ("batch_invariant_logp", "fp32", (1e-5, 0.0), (1e-5, 0.0)),
    ],
)
def test_tolerances(name: str, storage: Storage, forward: tuple[float, float], gradient: tuple[float, float]) -> None:
    assert tolerance(name, FORWARD_ACCURACY, storage) == Tolerance(*forward)
    assert tolerance(name, GRADIENT_ACCURACY, storage) == Tolerance(*gradient)


def test_every_class_has_a_tolerance_in_both_types() -> None:
    used = {c for op in OPERATORS for c in (op.op_class, op.gradient_class)}
    assert set(TOLERANCES) == {(c, s) for c in used for s in ("bf16", "fp32")}


@pytest.mark.parametrize("judgment", [FORWARD_INVARIANCE, GRADIENT_INVARIANCE])
def test_invariance_has_no_tolerance(judgment: Judgment) -> None:
    assert judgment in JUDGMENTS
    with pytest.raises(ContractError, match="of rope has no tolerance: compare bytes"):
        tolerance("rope", judgment, "bf16")


def test_tolerance_never_allows_what_is_not_finite() -> None:
    allowed = Tolerance(0.1, 0.5)
    assert allowed.allows(1.5, 1.0)
    assert allowed.allows(-1.5, -1.0)
    assert not allowed.allows(1.7, 1.0)
    for bad in (math.nan, math.inf, -math.inf):
        assert not allowed.allows(bad, 1.0)
        assert not allowed.allows(1.0, bad)
        assert not allowed.allows(bad, bad)


def test_the_twelve_operators_follow_their_dependencies() -> None:
    names = [op.name for op in OPERATORS]
    assert len(names) == len(set(names)) == 12
    for at, op in enumerate(OPERATORS):
        assert set(op.depends_on) <= set(names[:at])
    with pytest.raises(ContractError, match="gelu is not an operator of the contract: use one of embedding, "):
        operator("gelu")


def test_rounding_points_name_operators() -> None:
    known = {op.name for op in OPERATORS} | {"residual"}
    assert {p.operator for p in (*BEFORE_LAYERS, *IN_LAYER, *AFTER_LAYERS)} <= known


def test_operator_workload() -> None:
    assert (WS1.packed, WS1.active) == (59, 27)
    assert WS1.starts == (0, 11, 27, 40)
    assert WS1.permuted_starts == (13, 43, 0, 24)
    assert WS1.padded_starts(left=False) == (0, 20, 40, 60)
    assert WS1.padded_starts(left=True) == (9, 24, 47, 61)
    assert max(WS1.lengths) < WS1.pad_to
    assert [c.start for c in WS1.chunks(3)] == [0, 7, 14]
    assert sorted(WS1.permutation) == list(range(len(WS1.lengths)))


def test_gemm_shapes() -> None:
    assert QWEN3_8B.gemms() == (
        GemmShape("qkv", 6144, 4096),
        GemmShape("o_proj", 4096, 4096),
        GemmShape("gate_up", 24576, 4096),
        GemmShape("down_proj", 4096, 12288),
        GemmShape("lm_head", 152576, 4096),
    )
    assert [(g.n, g.k) for g in TINY.gemms()] == [(1024, 128), (128, 512), (512, 128), (128, 256), (1024, 128)]


def test_attention_workloads_meet_their_edges() -> None:
    for edge in (DEFAULT.mma_k, DEFAULT.kv_tile, DEFAULT.kv_split):
        assert {edge - 1, edge, edge + 1} <= set(ATTENTION_EDGES.lengths)
    assert any(chunk % DEFAULT.kv_split for chunk in ATTENTION_EDGES.chunks)
    assert ATTENTION_PREFIX.lengths[0] == 2 * ATTENTION_PREFIX.page + 1
    assert min(ATTENTION_LONG.lengths) >= 2048
    assert max(ATTENTION_EDGES.lengths) <= TINY.max_positions


def test_sampling_rows() -> None:
    rows = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in SAMPLING_ROWS]
    assert rows == [(1.0, 1.0, -1), (0.7, 0.95, -1), (1.3, 0.99, 128), (0.0, 1.0, -1)]
    assert {r.updates for r in SAMPLING_ROWS} == {2}
    assert all(WS1.prompt + r.sampling.max_tokens <= TINY.max_positions for r in SAMPLING_ROWS)


def test_topologies_are_valid_and_use_eight_ranks() -> None:
    for tp, cp in EIGHT_RANK_TRAIN:
        for rollout_tp in ROLLOUT_TP:
            assert Topology(tp, cp, rollout_tp).train_ranks == 8


def test_arms() -> None:
    arms = {arm.name: arm for arm in ARMS}
    assert len(arms) == len(ARMS) == 12
    assert (arms["M100"].attention, arms["M100"].ffn, arms["M100"].logp) == ("R/R", "P/P", "P/P")
    assert {name for name, arm in arms.items() if arm.must_be_zero} == {"M111", "G01"}
    assert {name for name, arm in arms.items() if arm.must_differ} == {"M000", "G00"}
    assert arms["mixed_PR"].attention == "P/R"
    assert arms["mixed_RP"].logp == "R/P"
