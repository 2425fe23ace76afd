"""Cases of the operators and what is measured of them: names, rows, layouts, poisoned memory, the dimensions that the contract asks for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlk.acceptance.poison import poisoned_memory
from rlk.acceptance.ws1 import ws1_cells
from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_INVARIANCE, JUDGMENTS, LAYOUT_TRANSFORMS, OPERATORS, tolerance
from rlk.contract.layouts import Piece, Placement, canonical, placements
from rlk.contract.models import QWEN3_8B
from rlk.contract.numerics import ContractError
from rlk.contract.operators import (
    COMPOSITION,
    LOGPROB_4,
    LOGPROB_27,
    LONG,
    SHAPES,
    THREADS,
    TIERS,
    OperatorShape,
    compared,
    dependencies,
    evidence_names,
    shape,
)
from rlk.contract.workloads import WS1, RaggedBatch
from rlk.evidence.accuracy import describe_accuracy, measure_accuracy
from rlk.evidence.bytes import compare
from rlk.kernels.case import Launch, OperatorCase, build_case
from rlk.kernels.dispatch import BackendUnavailable

NAMES = [op.name for op in OPERATORS]
BATCHES = {s.batch for name in NAMES for tier in TIERS for s in SHAPES[name][tier]}
MADE = {"neighbours": (16, 65, 2200), "shifts": (1, 16)}


def _case(name: str) -> OperatorCase:
    return build_case(name, SHAPES[name]["short"][0], "cpu")


# Layouts


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: f"{b.packed} rows")
@pytest.mark.parametrize("layout", [n for n in LAYOUT_TRANSFORMS if n not in ("batch_neighbours", "decode_against_prefill")])
def test_a_layout_holds_every_token_once_or_once_per_launch(batch: RaggedBatch, layout: str) -> None:
    launches = placements(layout, batch, **MADE)
    whole = {(i, p) for i, n in enumerate(batch.lengths) for p in range(n)}
    held = [[(p.sample, p.first + i) for p in launch.pieces for i in range(p.count)] for launch in launches]
    if layout == "tile_position":
        assert all(sorted(h) == sorted(whole) for h in held)
    else:
        assert sorted(t for h in held for t in h) == sorted(whole)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: f"{b.packed} rows")
def test_rows_of_a_launch_are_taken_once_and_the_rest_are_gaps(batch: RaggedBatch) -> None:
    for layout in LAYOUT_TRANSFORMS:
        for launch in placements(layout, batch, **MADE):
            taken = sorted([*(range(p.row, p.row + p.count) for p in launch.pieces), *launch.gaps], key=lambda r: (r.start, r.stop))
            assert (taken[0].start, taken[-1].stop) == (0, launch.rows)
            assert all(a.stop == b.start for a, b in pairwise(taken))


def test_layouts_of_the_operator_workload() -> None:
    def made(layout: str) -> list[tuple[int, list[tuple[int, ...]]]]:
        return [(at.rows, [(p.sample, p.first, p.count, p.row) for p in at.pieces]) for at in placements(layout, WS1, **MADE)]

    assert made("batch_neighbours")[0] == (16, [(0, 0, 11, 0)])
    assert made("batch_neighbours")[2][0] == 2200
    assert made("permutation") == [(59, [(0, 0, 11, 13), (1, 0, 16, 43), (2, 0, 13, 0), (3, 0, 19, 24)])]
    assert made("packing") == [(27, [(0, 0, 11, 0), (1, 0, 16, 11)]), (32, [(2, 0, 13, 0), (3, 0, 19, 13)])]
    assert made("chunking")[2] == (7, [(1, 14, 2, 0), (3, 14, 5, 2)])
    assert made("decode_against_prefill") == [(4, [(0, 10, 1, 0), (1, 15, 1, 1), (2, 12, 1, 2), (3, 18, 1, 3)])]
    assert made("padding_left")[0] == (80, [(0, 0, 11, 9), (1, 0, 16, 24), (2, 0, 13, 47), (3, 0, 19, 61)])


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ContractError, match="sideways is not a layout: use one of batch_neighbours"):
        placements("sideways", WS1, **MADE)
    with pytest.raises(ContractError, match="batch_neighbours has no launch"):
        placements("batch_neighbours", WS1, neighbours=(3,), shifts=(1,))
    cut = Placement(4, (Piece(0, 0, 2, 0), Piece(0, 2, 2, 2)))
    for broken in (cut, *placements("decode_against_prefill", WS1, **MADE)):
        with pytest.raises(ContractError, match="token leaves need whole samples"):
            broken.starts()


# Cases


@pytest.mark.parametrize("op", OPERATORS, ids=NAMES)
def test_a_case_gives_every_declared_value_and_its_reference(op: object) -> None:
    operator = next(o for o in OPERATORS if o is op)
    case = _case(operator.name)
    launch = case.canonical()
    outputs = case.forward(launch)
    rows = case.gradients(launch)
    weights = case.finish_weights(case.weight_gradients(launch, case.leaves(launch.placement, launch.placement.samples)))
    assert tuple(outputs) == operator.outputs
    assert sorted((*rows, *weights)) == sorted(operator.gradients)
    for values, references in ((outputs, case.reference(False)), ({**rows, **weights}, case.reference(True))):
        assert {n: v.shape for n, v in values.items()} == {n: r.shape for n, r in references.items()}
        assert all(r.dtype == torch.float32 for r in references.values())
    assert all(len(value) == WS1.packed for value in (*outputs.values(), *rows.values()))
    assert all(weights[name].dtype == torch.float32 for name in weights)
    assert (case.composed is not None) == operator.composed


def test_a_launch_places_tokens_and_fills_the_rest() -> None:
    case = _case("rms_norm")
    (left,) = placements("padding_left", WS1, **MADE)
    launch = case.launch(left)
    assert launch["x"][case.places(left)].equal(case.rows["x"][case.tokens(left)])
    assert launch["x"][~launch.live].isnan().all()
    assert int(launch.live.sum()) == WS1.packed
    moved = case.launch(placements("tile_position", WS1, **MADE)[1])
    assert moved.live.all()
    assert moved["x"].isfinite().all()
    assert moved["x"][16:].equal(case.rows["x"])
    (decode,) = placements("decode_against_prefill", WS1, **MADE)
    assert case.launch(decode)["x"].equal(case.rows["x"][torch.tensor([10, 26, 39, 58])])


def test_backends_that_cannot_run_are_refused() -> None:
    at = SHAPES["silu"]["short"][0]
    with pytest.raises(BackendUnavailable, match="unknown backend 'numpy'"):
        build_case("silu", at, "numpy")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="needs a GPU"):
            build_case("silu", at, "triton")


# What the contract asks for


def test_every_operator_is_judged_in_every_layout_on_every_value() -> None:
    for op in OPERATORS:
        for tier in TIERS:
            for judgment in JUDGMENTS:
                own = [n for n in evidence_names(op.name, tier, judgment) if n.startswith(f"{op.name}.")]
                found = {n.split(".", 2)[2] for n in own}
                values = op.gradients if judgment.gradient else op.outputs
                assert found == ({f"{v}/{x}" for v in values for x in compared(op.name, judgment)} if judgment.exact else set(values))
                assert len(own) == len(set(own))


def test_only_the_gradient_of_decoding_is_left_out() -> None:
    for op in OPERATORS:
        everything = {*LAYOUT_TRANSFORMS, THREADS, *([COMPOSITION] if op.composed else [])}
        assert set(compared(op.name, FORWARD_ACCURACY)) == everything
        assert set(compared(op.name, GRADIENT_INVARIANCE)) == everything - {"decode_against_prefill"}


def test_dependencies_are_judged_again() -> None:
    assert dependencies("batch_invariant_logp") == ("det_gemm", "lm_head", "logp")
    names = evidence_names("batch_invariant_logp", "primary", GRADIENT_INVARIANCE)
    assert {"det_gemm.qkv.weight/chunking", "lm_head.ws1.hidden/permutation", "logp.ws1.logits/packing"} <= set(names)


def test_primary_shapes_are_those_of_the_model() -> None:
    def sizes(name: str, at: str) -> dict[str, int]:
        return shape(name, at).sizes

    assert (shape("det_gemm", "m8").batch.packed, sizes("det_gemm", "m8")["k"], sizes("det_gemm", "m8")["n"]) == (8, 4096, 4096)
    assert (shape("det_gemm", "m59").batch.packed, sizes("det_gemm", "m59")["k"], sizes("det_gemm", "m59")["n"]) == (59, 4096, 12288)
    attention = {s.name: s for s in SHAPES["attention"]["primary"]}
    assert [attention[n].batch.lengths for n in ("b1_sq8", "b4_sq19", "sq1_skv32", "long")] == [(8,), (19,) * 4, (32,), (2048, 65)]
    assert all((s.sizes["q_heads"], s.sizes["kv_heads"], s.sizes["dim"]) == (32, 8, 128) for s in attention.values())
    assert [(s.batch, s.sizes["vocab"]) for s in SHAPES["logp"]["primary"]] == [(LOGPROB_4, 151936), (LOGPROB_27, 151936)]
    assert (LOGPROB_4.packed, LOGPROB_27.packed) == (4, 27)
    assert sizes("lm_head", "m4") == {"k": 4096, "n": QWEN3_8B.padded_vocab(), "weight_rows": 256}
    assert sizes("batch_invariant_logp", "m4")["hidden"] == 4096


def _summed_over(name: str, at: OperatorShape, value: str) -> tuple[str, int]:
    """What a value of a product is summed over, and how much of it the shape holds."""
    size = {"y": "k", "logits": "k", "x": "n", "hidden": "n"}[value]
    return size, at.sizes[size]


@pytest.mark.parametrize(("name", "full"), [("det_gemm", {"k": (4096,), "n": (4096, 12288)}), ("lm_head", {"k": (4096,), "n": (152576,)})])
def test_nothing_that_is_summed_over_is_sampled(name: str, full: dict[str, tuple[int, ...]]) -> None:
    for at in SHAPES[name]["primary"]:
        for value in at.judged or ("y", "x"):
            if value != "weight" and (name, value) not in (("lm_head", "y"), ("lm_head", "x")):
                size, held = _summed_over(name, at, value)
                assert held in full[size]


def test_prompts_of_two_thousand_tokens_and_65_rows_are_judged() -> None:
    assert LONG.lengths == (2048, 65)
    for name in NAMES:
        batches = [s.batch for tier in TIERS for s in SHAPES[name][tier]]
        assert LONG in batches or name == "logp"
    edges = SHAPES["rms_norm"]["short"][0].neighbours
    assert {31, 32, 33, 63, 64, 65, 255, 256, 257, 2048} <= set(edges)


def test_the_scope_lists_every_combination_with_a_reason_or_a_requirement() -> None:
    for platform, required in (("cpu", 96), ("cuda", 116), ("rocm", 96)):
        cells = list(ws1_cells(platform))
        assert len(cells) == len({c.cell_id for c in cells}) == 12 * 2 * 4 * 3
        assert sum(c.required for c in cells) == required
        assert all(c.strict and c.names and c.backend in c.workload for c in cells)
        assert all(c.expect == ("equal" if "invariance" in c.judgment else "close") for c in cells)
    (one,) = [c for c in ws1_cells("cpu") if c.cell_id == "cpu/ws1/rms_norm/short-triton/forward_accuracy"]
    assert one.unsupported == "Triton kernels run on a GPU"
    threads = f"rms_norm.ws1.y/{THREADS}"
    found = [threads in c.names for p in ("cpu", "cuda") for c in ws1_cells(p) if c.judgment == "forward_invariance" and c.required]
    assert found.count(True) == 3  # the short cell of rms_norm and both of qk_norm, which depends on it
    assert not [c for c in ws1_cells("cuda") if any(n.endswith(THREADS) for n in c.names)]


# Poisoned memory


def _leaves_a_row_unwritten(launch: Launch) -> torch.Tensor:
    y = torch.empty_like(launch["x"])
    y[:-1] = launch["x"][:-1]
    return y


def test_an_unwritten_row_is_caught() -> None:
    launch = _case("silu").canonical()
    with poisoned_memory():
        y, again = (_leaves_a_row_unwritten(launch) for _ in range(2))
    assert y[-1].isnan().all()
    assert compare("y", y, again).problem == "NaN or Inf: 256 actual, 256 expected"
    assert compare("y", y[:-1], again[:-1]).equal


def test_poison_reaches_every_kind_of_empty() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with poisoned_memory():
            made = torch.empty(3, dtype=dtype), torch.empty_like(torch.ones(3, dtype=dtype)), torch.ones(1, dtype=dtype).new_empty(3)
        assert all(t.isnan().all() for t in made)
    with poisoned_memory():
        assert torch.empty(2, dtype=torch.int64).eq(2**63 - 1).all()


def test_poisoned_memory_puts_torch_back() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    for error in (None, ValueError("inside")):
        try:
            with poisoned_memory():
                assert torch.are_deterministic_algorithms_enabled()
                if error:
                    raise error
        except ValueError:
            pass
        assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before


# Accuracy


def test_an_accuracy_carries_the_contracts_tolerance_and_the_rounding_of_bf16() -> None:
    reference = torch.tensor([1.0, -2.0, 1 + 2**-12])
    found = measure_accuracy("silu.ws1.y", "silu", "y", FORWARD_ACCURACY, torch.tensor([1.035, -2.0, 1.0]), reference)
    allowed = tolerance("silu", FORWARD_ACCURACY, "bf16")
    assert (found.atol, found.rtol, found.elements, found.passed) == (allowed.atol, allowed.rtol, 3, True)
    assert found.max_abs == pytest.approx(0.035, rel=1e-5)
    assert found.reference_bf16_error == 2**-12
    assert "within 0.02 + 0.016" in describe_accuracy(found)


@pytest.mark.parametrize(
    ("candidate", "reference", "words"),
    [
        (torch.tensor([1.037]), torch.tensor([1.0]), "beyond"),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), "NaN or Inf: 1 candidate, 0 reference"),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), "NaN or Inf: 0 candidate, 1 reference"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0]), "shape (2,) against (1,)"),
        (torch.tensor([]), torch.tensor([]), "no element"),
        (torch.tensor([1.0]), torch.tensor([1.0]).bfloat16(), "the reference is bfloat16, not float32"),
    ],
)
def test_what_is_not_accurate_has_not_passed(candidate: torch.Tensor, reference: torch.Tensor, words: str) -> None:
    found = measure_accuracy("silu.ws1.y", "silu", "y", FORWARD_ACCURACY, candidate, reference)
    assert not found.passed
    assert words in describe_accuracy(found)


def test_fp32_values_are_judged_as_fp32() -> None:
    off = torch.tensor([1.0]), torch.tensor([1.001])
    assert measure_accuracy("silu.ws1.y", "silu", "y", FORWARD_ACCURACY, *off).passed
    assert not measure_accuracy("logp.ws1.logp", "logp", "logp", FORWARD_ACCURACY, *off).passed


def test_canonical_is_packed_in_id_order() -> None:
    assert [p.row for p in canonical(WS1).pieces] == list(WS1.starts)
    assert canonical(WS1).gaps == ()
