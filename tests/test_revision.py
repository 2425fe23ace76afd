"""Two runs are held against each other by their digests: equal bytes pass, other bytes fail, and what was not compared is never a pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk import cli
from rlk.acceptance.cell import Cell, Platform
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import Findings, conclude, exit_code, judge_cell
from rlk.acceptance.revision import NO_DIGESTS, Outcome, Revision, RevisionRefused, compare_runs
from rlk.acceptance.revision_page import RevisionView, write_comparison
from rlk.acceptance.validate import merge, seal
from rlk.contract.judgments import FORWARD_ACCURACY
from rlk.evidence.accuracy import measure_accuracy
from rlk.evidence.bytes import PIECE, compare, digest
from rlk.evidence.report import render, write_report
from rlk.evidence.rundir import RunDirectory
from rlk.evidence.schema import Comparison, Control, KernelUse, Report, SessionFacts

KERNEL, OTHER_KERNEL = "cpu:rms_norm:0123456789ab", "cpu:rms_norm:ba9876543210"
SAME = torch.arange(6.0)
OTHER = SAME + torch.tensor([0, 0, 0, 0, 0, 2.0**-20])
LOGITS = Cell("cpu", "chain", "train_vs_rollout", "tiny", "logits", strict=(("train", "rms_norm"),))
ACCURACY = Cell("cpu", "ws1", "rms_norm", "short-cpu", "forward_accuracy", expect="close")
ARM = Cell("cpu", "ablation", "G00", "tiny", "logprob", expect="different")
CONTROL = Cell("cpu", "control", "flipped_bit", "tiny", "caught", expect="caught")
ABSENT = Cell("cpu", "chain", "prefill_vs_decode", "tiny", "logp", unsupported="no engine")
CELLS = (LOGITS, ACCURACY, ARM, CONTROL, ABSENT)


@dataclass
class Run:
    """What one revision computes, and how its session went."""

    sha: str = "a" * 40
    cells: tuple[Cell, ...] = CELLS
    logits: Mapping[str, torch.Tensor] = field(default_factory=lambda: {"layers.0": SAME, "layers.1": SAME})
    norm: torch.Tensor = SAME
    native: torch.Tensor = OTHER
    kernel: str = KERNEL
    milliseconds: tuple[float, ...] = (2.0, 1.0, 3.0)
    fault: float = 0.0
    selected: tuple[str, ...] | None = None
    scopes: tuple[str, ...] = ()
    numerics: dict[str, Any] = field(default_factory=lambda: {"contract_version": 1, "kv_split": 64})
    schema_version: int = 2
    platform: Platform = "cpu"

    def findings(self) -> dict[str, Findings]:
        ran = [KernelUse(side="train", op="rms_norm", backend="cpu", kernel_id=self.kernel, calls=1)]
        logits = [compare(name, value + self.fault, value.clone()) for name, value in self.logits.items()]
        accuracy = measure_accuracy("rms_norm.short.y", "rms_norm", "y", FORWARD_ACCURACY, self.norm.bfloat16(), SAME)
        return {
            "logits": Findings(comparisons=logits, kernels=ran, timings_ms={"forward": self.milliseconds}),
            "forward_accuracy": Findings(accuracies=[accuracy]),
            "logprob": Findings(comparisons=[compare("logprob", self.native, SAME)]),
            "caught": Findings(controls=[Control(name="flipped_bit", caught=True, detail="seen")]),
        }

    def write(self, path: Path) -> Path:
        """A run directory as a session leaves it."""
        declared = {self.kernel: ("rms_norm",)}
        cells = tuple(replace(c, platform=self.platform) for c in self.cells)
        session = SessionFacts(platform=self.platform, selected=self.selected, scopes=self.scopes)
        ran = [c for c in cells if c.required and (self.selected is None or c.cell_id in self.selected)]
        raw = [judge_cell(c, self.findings()[c.judgment], [], declared) for c in ran]
        records, verdict = conclude(cells, raw, session)
        lines = [record.model_dump(mode="json") for record in raw]
        provenance = {"source": "git", "sha": self.sha, "dirty": False, "tree_digest": "b" * 64}
        facts = {
            "run_id": path.name,
            "command": "pytest -m cpu acceptance/",
            "started_at": "2025-01-01T00:00:00+00:00",
            "finished_at": "2025-01-01T00:01:00+00:00",
            "matrix_source": "tiny_matrix:cells",
            "session": session.model_dump(mode="json"),
            "verdict": verdict.model_dump(mode="json"),
            "provenance": provenance,
            "environment": {"cpu": "<b>cpu|", "packages": {"torch": "2.13.0"}, "numerics": self.numerics},
            "declared_kernels": declared,
            "matrix": [c.row().model_dump(mode="json") for c in cells],
            "records": [record.model_dump(mode="json") for record in records],
            "schema_version": self.schema_version,
        }
        if self.schema_version == 1:
            for record in [*lines, *facts["records"]]:
                for value in (*record["comparisons"], *record["accuracies"]):
                    del value["digest"]
        report = Report.model_validate(facts)
        directory = RunDirectory.create(path)
        directory.write_json("environment.json", {"provenance": report.provenance.model_dump(mode="json"), **report.environment})
        for line in lines:
            directory.append_json("cells.jsonl", line)
        write_report(directory, report)
        return path


Compare = Callable[[Run, Run], Revision]


@pytest.fixture
def compared(tmp_path: Path) -> Compare:
    """Write two runs and compare them; the cells of the comparison add up."""

    def run(baseline: Run, candidate: Run) -> Revision:
        sides = baseline.write(tmp_path / "baseline"), candidate.write(tmp_path / "candidate")
        revision = compare_runs(*sides, "rlk compare")
        assert [c.cell_id for c in revision.cells] == [row.cell_id for row in revision.matrix]
        assert len({row.cell_id for row in revision.matrix}) == len(revision.matrix)
        return revision

    return run


def outcomes(revision: Revision) -> dict[str, Outcome]:
    return {c.cell_id.split("/", 2)[1] + " " + c.cell_id.rsplit("/", 1)[1]: c.outcome for c in revision.cells}


def test_equal_bytes_pass_under_another_kernel_and_at_another_speed(compared: Compare) -> None:
    revision = compared(Run(), Run(sha="c" * 40, kernel=OTHER_KERNEL, milliseconds=(3.0, 3.0), native=SAME + 1))
    assert (revision.status, revision.reasons, exit_code(revision)) == ("PASS", (), 0)
    assert list(outcomes(revision).values()) == ["equal", "equal", "judged in its run", "judged in its run", "unsupported"]
    assert (sum(c.values for c in revision.cells), sum(c.elements for c in revision.cells)) == (3, 18)
    assert [(k.op, k.baseline, k.candidate) for k in revision.kernels] == [("rms_norm", (KERNEL,), (OTHER_KERNEL,))]
    (timing,) = revision.timings
    assert (timing.baseline.median, timing.baseline.least, timing.baseline.most, timing.baseline.count) == (2.0, 1.0, 3.0, 3)
    assert (timing.candidate.median, timing.percent) == (3.0, 50.0)


@pytest.mark.parametrize(
    ("change", "cell", "names"),
    [
        ({"logits": {"layers.0": SAME, "layers.1": OTHER}}, "chain logits", ("layers.1",)),
        ({"logits": {"layers.0": SAME, "layers.1": SAME.reshape(2, 3)}}, "chain logits", ("layers.1",)),
        ({"norm": SAME + 2.0**-6 * (SAME == 1)}, "ws1 forward_accuracy", ("rms_norm.short.y",)),
    ],
)
def test_other_bytes_fail_though_both_runs_pass(compared: Compare, change: dict[str, Any], cell: str, names: tuple[str, ...]) -> None:
    revision = compared(Run(), Run(**change))
    assert (revision.baseline.status, revision.candidate.status) == ("PASS", "PASS")
    assert (revision.status, exit_code(revision)) == ("FAIL", 1)
    (found,) = [c for c in revision.cells if c.outcome is Outcome.DIFFERENT]
    assert (outcomes(revision)[cell], found.different) == ("different", names)
    assert found.cell_id in revision.reasons[0]


def test_under_another_contract_other_bytes_are_listed_and_neither_pass_nor_fail(compared: Compare, tmp_path: Path) -> None:
    changed = {"numerics": {"contract_version": 2, "kv_split": 64}}
    revision = compared(Run(), Run(logits={"layers.0": OTHER, "layers.1": OTHER}, **changed))
    assert (revision.status, exit_code(revision), outcomes(revision)["chain logits"]) == ("MISSING", 1, "different")
    assert "contract_version 1 → 2" in revision.reasons[0]
    equal = compare_runs(tmp_path / "baseline", Run(**changed).write(tmp_path / "equal"), "")
    assert (equal.status, outcomes(equal)["chain logits"]) == ("MISSING", "equal")


def test_a_baseline_older_than_digests_is_missing_never_a_pass(compared: Compare) -> None:
    revision = compared(Run(schema_version=1), Run())
    assert (revision.status, exit_code(revision), outcomes(revision)["chain logits"]) == ("MISSING", 1, "not comparable")
    assert {c.detail for c in revision.cells if c.outcome is Outcome.NOT_COMPARABLE} == {NO_DIGESTS}
    assert "no value was compared between the revisions" in revision.reasons


def test_a_cell_that_is_gone_is_missing_and_a_new_one_is_listed(compared: Compare, tmp_path: Path) -> None:
    fewer, dropped = CELLS[1:], (replace(LOGITS, unsupported="too slow"), *CELLS[1:])
    revision = compared(Run(), Run(cells=fewer))
    assert (revision.status, outcomes(revision)["chain logits"]) == ("MISSING", "gone")
    assert LOGITS.cell_id in revision.reasons[0]
    excused = compare_runs(tmp_path / "baseline", Run(cells=dropped).write(tmp_path / "excused"), "")
    assert (excused.status, excused.cells[0].outcome, excused.cells[0].detail) == ("MISSING", "gone", "too slow")
    added = compare_runs(tmp_path / "candidate", tmp_path / "baseline", "")
    assert (added.status, outcomes(added)["chain logits"]) == ("PASS", "new")


def test_a_value_that_is_gone_is_missing_and_another_expectation_too(compared: Compare, tmp_path: Path) -> None:
    revision = compared(Run(), Run(logits={"layers.0": SAME, "layers.2": SAME}))
    (found,) = [c for c in revision.cells if c.outcome is Outcome.NOT_COMPARABLE]
    assert revision.status == "MISSING"
    assert found.detail == "1 values of the baseline are gone, first layers.1; 1 new values, first layers.2"
    weakened = Run(cells=(replace(LOGITS, expect="different"), *CELLS[1:]), fault=1.0).write(tmp_path / "weakened")
    assert compare_runs(tmp_path / "baseline", weakened, "").cells[0].outcome is Outcome.NOT_COMPARABLE


def test_a_red_run_is_no_pass_and_has_no_times(compared: Compare, tmp_path: Path) -> None:
    revision = compared(Run(), Run(fault=1.0))
    assert (revision.status, outcomes(revision)["chain logits"], revision.timings) == ("FAIL", "red", ())
    assert revision.reasons == ("the candidate's own run is FAIL",)
    assert compare_runs(tmp_path / "candidate", tmp_path / "baseline", "").reasons == ("the baseline's own run is FAIL",)


def test_a_narrowed_pair_is_partial_and_ends_with_0_for_whole_scopes_alone(compared: Compare, tmp_path: Path) -> None:
    whole = {"selected": (LOGITS.cell_id,), "scopes": ("chain",)}
    revision = compared(Run(**whole), Run(**whole))
    assert (revision.status, revision.green_scopes, exit_code(revision)) == ("PARTIAL", ("chain",), 0)
    one = Run(selected=(LOGITS.cell_id,)).write(tmp_path / "one")
    assert exit_code(compare_runs(one, tmp_path / "candidate", "")) == 3
    full = Run().write(tmp_path / "full")
    mixed = compare_runs(full, one, "")
    assert (mixed.status, exit_code(mixed)) == ("PARTIAL", 3)
    assert {c.detail for c in mixed.cells if c.outcome is Outcome.NOT_SELECTED} == {"in the baseline alone"}
    caught = [Run(selected=(CONTROL.cell_id,)).write(tmp_path / name) for name in ("caught", "again")]
    assert compare_runs(*caught, "").reasons == ("no value was compared between the revisions",)


def test_runs_that_are_not_what_they_were_are_refused(compared: Compare, tmp_path: Path) -> None:
    compared(Run(), Run())
    seal(tmp_path / "candidate")
    compare_runs(tmp_path / "baseline", tmp_path / "candidate", "")
    for name in ("cells.jsonl", "report.json"):
        path = tmp_path / "candidate" / name
        path.write_text(path.read_text().replace(digest(SAME), digest(OTHER)))
    with pytest.raises(RevisionRefused, match=r"cells\.jsonl was changed after the run was sealed"):
        compare_runs(tmp_path / "baseline", tmp_path / "candidate", "")
    path = tmp_path / "baseline" / "report.json"
    path.write_text(path.read_text().replace(digest(SAME), digest(OTHER)))
    with pytest.raises(RevisionRefused, match=r"not those of cells\.jsonl"):
        compare_runs(tmp_path / "baseline", tmp_path / "candidate", "")
    whole = Run().write(tmp_path / "whole")
    with pytest.raises(RevisionRefused, match="both sides are run whole"):
        compare_runs(whole, whole, "")
    merge([whole], tmp_path / "joined")
    merge([tmp_path / "joined"], tmp_path / "joined_again")
    for joined in ("joined", "joined_again"):
        with pytest.raises(RevisionRefused, match="both sides are run whole"):
            compare_runs(whole, tmp_path / joined, "")
    with pytest.raises(RevisionRefused, match="no run directory"):
        compare_runs(tmp_path / "none", tmp_path / "candidate", "")


def test_a_red_measurement_turned_green_everywhere_is_refused(compared: Compare, tmp_path: Path) -> None:
    compared(Run(), Run())
    for name in ("cells.jsonl", "report.json"):
        path = tmp_path / "candidate" / name
        path.write_text(re.sub(r'"worst_excess": ?[^,\s}]+', '"worst_excess": 1.0', path.read_text()))
    with pytest.raises(RevisionRefused, match=r"the candidate is not sealed, and \S+forward_accuracy is PASS, but its own evidence says"):
        compare_runs(tmp_path / "baseline", tmp_path / "candidate", "")


def test_two_platforms_are_refused(tmp_path: Path) -> None:
    cells = (replace(LOGITS, strict=()),)
    there = Run(cells=cells, platform="rocm", kernel="triton:rms_norm:0123456789ab", selected=()).write(tmp_path / "rocm")
    with pytest.raises(RevisionRefused, match="cpu against one on rocm"):
        compare_runs(Run().write(tmp_path / "cpu"), there, "")


def test_the_pages_say_it_and_escape_what_they_show(compared: Compare, tmp_path: Path) -> None:
    revision = compared(Run(), Run(sha="c" * 40, logits={"layers.0": OTHER, "layers.1": SAME}, kernel=OTHER_KERNEL))
    page = write_comparison(revision, RunDirectory.create(tmp_path / "out"))
    assert Revision.model_validate_json((tmp_path / "out" / "revision.json").read_text()) == revision
    shown = page.read_text()
    assert "&lt;b&gt;cpu|" in shown
    assert "<b>cpu" not in shown
    for text in ("FAIL", LOGITS.cell_id, "1 values differ: layers.0", "1 of 2 values, 12 elements", "+0.0 %", "Reviewer", OTHER_KERNEL):
        assert text in shown, text
    lines = render("revision", "md", RevisionView(revision)).splitlines()
    rows = [line for line in lines if line.startswith("| cpu, ")]
    assert len(rows) == 4
    assert all(len(row.replace("\\|", "").split("|")) == 11 for row in rows)
    assert "tiny: forward | aaaaaaaaaaaa | cccccccccccc | 1 of 2 values, 12 elements | 2 (1 to 3, 3) / 2" in rows[0]
    assert f"- `{LOGITS.cell_id}`: 1 values differ: layers.0" in lines


def test_the_command_writes_the_page_and_refuses_without_writing(
    compared: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.chdir(tmp_path)
    compared(Run(), Run(sha="c" * 40))
    code, out, _ = call("baseline", "candidate", "--out", "out")
    assert (code, out) == (0, f"PASS: {tmp_path}/out/revision.html\n")
    assert {p.name for p in Path("out").iterdir()} == {"revision.html", "revision.json", "revision.md"}
    code, out, err = call("baseline", "candidate", "--out", "out")
    assert (code, out) == (2, "")
    assert "choose another --out" in err
    code, out, err = call("baseline", "nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, _ = call("baseline", "candidate")
    assert code == 0
    assert Path(out.removeprefix("PASS: ").strip()).parent.parent == tmp_path / "artifacts" / "refactor" / "cpu" / ("c" * 40)


def test_a_digest_names_bytes_shape_and_dtype() -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    assert digest(grid) == digest(grid.t().contiguous().t())
    others = [grid.flatten(), grid.t(), grid.view(torch.int32), grid + 2.0**-20, grid * torch.tensor([-1.0, 1, 1, 1])]
    assert len({digest(grid), *map(digest, others)}) == 6
    large = torch.arange(PIECE // 2 + 5, dtype=torch.int32)
    changed = large.clone()
    changed[-1] += 1
    assert digest(large) == digest(large.clone())
    assert digest(large) != digest(changed)


def test_a_comparison_has_a_digest_only_if_it_is_equal() -> None:
    assert compare("x", SAME, SAME.clone()).digest == digest(SAME)
    assert compare("x", SAME, OTHER).digest == ""
    assert compare("x", SAME / 0, SAME / 0).digest == ""
    with pytest.raises(ValueError, match="one digest"):
        Comparison.model_validate({**compare("x", SAME, OTHER).model_dump(), "digest": digest(SAME)})
    bare = compare("x", SAME, SAME.clone()).model_copy(update={"digest": ""})
    with pytest.raises(ValueError, match="equal without a digest"):
        Evidence().comparison(bare)
    accuracy = measure_accuracy("rms_norm.short.y", "rms_norm", "y", FORWARD_ACCURACY, SAME.bfloat16(), SAME)
    assert accuracy.digest == digest(SAME.bfloat16())
    with pytest.raises(ValueError, match="measured without a digest"):
        Evidence().accuracy(accuracy.model_copy(update={"digest": ""}))
