"""The judge as a pure function: whatever is handed in, only a whole green matrix is PASS."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.acceptance.cell import Cell
from rlk.acceptance.judge import Findings, conclude, exit_code, judge_cell
from rlk.contract.judgments import FORWARD_ACCURACY, tolerance
from rlk.evidence.bytes import compare_fp32
from rlk.evidence.schema import Accuracy, CellRecord, KernelUse, SessionFacts, Status

CELLS = (
    *(Cell("cpu", "chain", "train_vs_rollout", "tiny", name) for name in ("qkv", "logits", "logp")),
    Cell("cpu", "control", "flipped_bit", "tiny", "caught"),
    Cell("cpu", "chain", "prefill_vs_decode", "tiny", "logp", unsupported="one engine only"),
)
IDS = [c.cell_id for c in CELLS]
REQUIRED = IDS[:4]
GREEN = compare_fp32("x", [1.0], [1.0])
CLOSE = Cell("cpu", "ws1", "silu", "short-cpu", FORWARD_ACCURACY.name, expect="close", names=("silu.ws1.y",))


def record(cell_id: str, green: bool) -> CellRecord:
    if green:
        return CellRecord(cell_id=cell_id, status=Status.PASS, comparisons=(GREEN,))
    return CellRecord(cell_id=cell_id, status=Status.FAIL, reasons=("red",))


@settings(max_examples=400)
@given(
    handed_in=st.lists(st.builds(record, st.sampled_from([*IDS, "cpu/mine"]), st.booleans()), max_size=7),
    selected=st.none() | st.lists(st.sampled_from(REQUIRED), unique=True).map(tuple),
    scopes=st.sampled_from([(), ("chain",), ("control",), ("chain", "control")]),
    trouble=st.sampled_from([(), ("crash",)]),
    development=st.booleans(),
)
def test_only_a_whole_green_matrix_passes(
    handed_in: list[CellRecord], selected: tuple[str, ...] | None, scopes: tuple[str, ...], trouble: tuple[str, ...], development: bool
) -> None:
    session = SessionFacts(platform="cpu", selected=selected, scopes=scopes, trouble=trouble, development=development)
    records, verdict = conclude(CELLS, handed_in, session)
    asked = [i for i in REQUIRED if selected is None or i in selected]
    green = sorted(r.cell_id for r in handed_in) == sorted(asked) and all(r.status is Status.PASS for r in handed_in) and not trouble
    assert [r.cell_id for r in records] == asked
    assert (verdict.status is Status.PASS) == (green and selected is None and not development)
    assert (verdict.status is Status.PARTIAL) == (green and (selected is not None or development))
    whole_scopes = selected is not None and set(selected) == {c.cell_id for c in CELLS[:4] if c.scope in scopes}
    assert (exit_code(verdict) == 0) == (green and not development and (selected is None or (bool(scopes) and whole_scopes)))


@pytest.mark.parametrize("order", [(0, 0), (0, 1, 0)])
def test_a_matrix_that_lists_a_cell_twice_never_passes(order: tuple[int, ...]) -> None:
    cells = [CELLS[i] for i in order]
    _, verdict = conclude(cells, [record(c.cell_id, True) for c in {c.cell_id: c for c in cells}.values()], SessionFacts(platform="cpu"))
    assert verdict.status is Status.FAIL
    assert "the matrix lists" in verdict.reasons[0]


def test_a_matrix_of_another_platform_never_passes() -> None:
    _, verdict = conclude(CELLS, [record(i, True) for i in REQUIRED], SessionFacts(platform="cuda"))
    assert verdict.status is Status.FAIL


def accuracy(**changes: object) -> Accuracy:
    allowed = tolerance("silu", FORWARD_ACCURACY, "bf16")
    whole = {"name": "silu.ws1.y", "subject": "silu", "value": "y", "dtype": "bfloat16", "shape": (2,), "elements": 2}
    return Accuracy.model_validate(whole | {"atol": allowed.atol, "rtol": allowed.rtol, "worst_excess": -0.01} | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"worst_excess": 1e-6}, "beyond"),
        ({"atol": 1.0}, "the contract allows"),
        ({"rtol": 1.0}, "the contract allows"),
        ({"problem": "NaN or Inf"}, "NaN or Inf"),
        ({"subject": "rms_norm", "name": "rms_norm.ws1.y"}, "not handed in"),
        ({"subject": "rms_norm"}, "no tolerance"),
        ({"value": "x"}, "no tolerance"),
    ],
)
def test_an_accuracy_is_judged_by_the_contracts_own_tolerance(changes: dict[str, object], reason: str) -> None:
    judged = judge_cell(CLOSE, Findings(accuracies=[accuracy(**changes)]), [], {})
    assert (judged.status is Status.PASS) == (not reason)
    assert reason in " ".join(judged.reasons)


@pytest.mark.parametrize(
    ("op", "backend", "reason"),
    [
        ("rope", "triton", ""),
        ("rope.table", "cpu", ""),
        ("rope", "cpu", "rope on the train side ran on undeclared backend 'cpu'"),
        ("rope.table", "triton", "rope.table on the train side ran on undeclared backend 'triton'"),
    ],
)
def test_a_card_computes_everything_but_the_rope_table(op: str, backend: str, reason: str) -> None:
    cell = Cell("cuda", "chain", "train_vs_rollout", "tiny", "qkv")
    use = KernelUse(side="train", op=op, backend=backend, kernel_id=f"{backend}:rope:0", calls=1)
    judged = judge_cell(cell, Findings(comparisons=[GREEN], kernels=[use]), [], {use.kernel_id: ("rope",)})
    assert judged.reasons == ((reason,) if reason else ())


def test_a_comparison_is_no_accuracy() -> None:
    assert judge_cell(CLOSE, Findings(comparisons=[GREEN]), [], {}).reasons == ("nothing was measured",)


def test_the_matrix_does_not_depend_on_hash_order() -> None:
    code = "import hashlib; from rlk.acceptance.matrix import all_cells; print(hashlib.sha256(repr(all_cells()).encode()).hexdigest())"
    seen = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
