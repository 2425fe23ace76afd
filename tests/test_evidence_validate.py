"""A run is believed only if its files are whole and agree; every edit that would change what it says is a problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.acceptance.cell import Cell
from rlk.acceptance.judge import Findings, conclude, judge_cell
from rlk.acceptance.matrix import all_cells, enumerate_cells
from rlk.acceptance.validate import ValidationRefused, merge, seal, validate_run
from rlk.evidence.bytes import compare
from rlk.evidence.provenance import Provenance
from rlk.evidence.report import write_report
from rlk.evidence.rundir import RunDirectory, RunDirectoryError
from rlk.evidence.schema import KernelUse, Report, SessionFacts

KERNEL = "cpu:rms_norm:0123456789ab"
DECLARED = {KERNEL: ("rms_norm",)}
CELLS = tuple(Cell("cpu", "chain", "train_vs_rollout", "tiny", name, strict=(("train", "rms_norm"),)) for name in ("qkv", "logits", "logp"))
IDS = tuple(c.cell_id for c in CELLS)
Edit = Callable[[dict[str, Any]], Any]


def source(**changes: Any) -> Provenance:
    return Provenance(**{"source": "git", "sha": "a" * 40, "dirty": False, "tree_digest": "b" * 64} | changes)


def make_run(
    path: Path, ids: tuple[str, ...] = IDS, *, red: tuple[str, ...] = (), whole: bool = False, seconds: float = 1.0, **changes: Any
) -> Path:
    """A run over ``ids`` as a session leaves it; ``whole`` if nothing was narrowed. changes: fields of the report."""
    session = SessionFacts(platform="cpu", selected=None if whole else ids, trouble=changes.pop("trouble", ()))
    findings = {}
    for cell in CELLS:
        a = torch.arange(4.0)
        findings[cell.cell_id] = Findings(
            comparisons=[compare("x", a + (cell.cell_id in red), a)],
            kernels=[KernelUse(side="train", op="rms_norm", backend="cpu", kernel_id=KERNEL, calls=1)],
            timings_ms={"forward": (seconds,)},
        )
    raw = [judge_cell(c, findings[c.cell_id], [], DECLARED) for c in CELLS if c.cell_id in ids]
    records, verdict = conclude(CELLS, raw, session)
    report = Report(
        **{
            "run_id": path.name,
            "command": "pytest",
            "started_at": "2025-01-01T00:00:00+00:00",
            "finished_at": "2025-01-01T00:01:00+00:00",
            "matrix_source": "tiny_matrix:cells",
            "session": session,
            "verdict": verdict,
            "provenance": source(),
            "environment": {"packages": {"torch": "2.13.0"}, "numerics": {"mma_k": 16}},
            "declared_kernels": DECLARED,
            "matrix": tuple(c.row() for c in CELLS),
            "records": tuple(records),
        }
        | changes
    )
    directory = RunDirectory.create(path)
    directory.write_json("environment.json", {"provenance": report.provenance.model_dump(mode="json"), **report.environment})
    for record in raw:
        directory.append_json("cells.jsonl", record.model_dump(mode="json"))
    write_report(directory, report)
    return path


def edit_json(path: Path, edit: Edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_line(path: Path, number: int, edit: Edit) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    edit(record)
    lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def turn_green(record: dict[str, Any]) -> None:
    record.update(status="PASS", reasons=[])


def test_a_run_is_valid_and_so_is_a_red_one(tmp_path: Path) -> None:
    assert validate_run(make_run(tmp_path / "green", whole=True)) == []
    assert validate_run(make_run(tmp_path / "red", whole=True, red=IDS[:1])) == []
    assert validate_run(make_run(tmp_path / "missing", IDS[:2])) == []


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda r: r["verdict"].update(status="PASS", reasons=[], passed=3, failed=0), "does not follow from the records"),
        (lambda r: turn_green(r["records"][0]), "are not those of cells.jsonl"),
        (lambda r: r["records"][0]["reasons"].append("more"), "are not those of cells.jsonl"),
        (lambda r: r["records"][1].update(timings_ms={"forward": [0.1]}), "are not those of cells.jsonl"),
        (lambda r: r["records"].pop(), "are not those of cells.jsonl"),
        (lambda r: r["records"].reverse(), "holds other records"),
        (lambda r: r["matrix"].pop(0), "does not follow from the records"),
        (lambda r: r["matrix"][0].update(unsupported="no engine"), "does not follow from the records"),
        (lambda r: r["matrix"][0].update(judgment="q_norm"), "describes"),
        (lambda r: r["matrix"][0].update(platform="tpu"), "not a report"),
        (lambda r: r["session"].update(selected=[]), "does not follow from the records"),
        (lambda r: r["session"].update(trouble=["crash"]), "does not follow from the records"),
        (lambda r: r["provenance"].update(dirty=True), "the session does not say so"),
        (lambda r: r["provenance"].update(sha=""), "the commit is unknown"),
        (lambda r: r["environment"].update(packages={}), "environment.json and report.json disagree"),
        (lambda r: r["declared_kernels"].update({"mine": ["rms_norm"]}), "not backend:operator:hash"),
        (lambda r: r["declared_kernels"].clear(), "own evidence says"),
        (lambda r: r.update(schema_version=3), "not a report"),
        (lambda r: r["records"][1]["comparisons"][0].update(digest=""), "has no digest"),
        (lambda r: r["records"][1]["comparisons"][0].update(digest="0" * 64), "are not those of cells.jsonl"),
        (lambda r: r.update(extra=1), "not a report"),
        (lambda r: r.update(matrix_source="rlk.acceptance.matrix:enumerate_cells"), "not the one this version of rlk enumerates"),
    ],
)
def test_a_hand_edited_report_is_seen(tmp_path: Path, edit: Edit, problem: str) -> None:
    run = make_run(tmp_path / "run", whole=True, red=IDS[:1])
    edit_json(run / "report.json", edit)
    assert any(problem in line for line in validate_run(run)), validate_run(run)


def test_a_red_cell_turned_green_everywhere_is_refuted_by_its_own_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", whole=True, red=IDS[:1])
    edit_line(run / "cells.jsonl", 0, turn_green)

    def forge(report: dict[str, Any]) -> None:
        turn_green(report["records"][0])
        report["verdict"].update(status="PASS", reasons=[], passed=3, failed=0)

    edit_json(run / "report.json", forge)
    assert validate_run(run) == [f"{IDS[0]} is PASS, but its own evidence says: {judge_words(run)}"]


def judge_words(run: Path) -> str:
    comparison = json.loads((run / "report.json").read_text())["records"][0]["comparisons"][0]
    first = comparison["first"]
    return (
        f"x: 4 of 4 elements differ ({comparison['mismatched_bytes']} bytes), first at [0]: {first['actual_hex']} against "
        f"{first['expected_hex']}, {first['ulp']} ulp, max {comparison['max_ulp']} ulp"
    )


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda run: (run / "report.json").unlink(), "no report.json"),
        (lambda run: (run / "report.json").write_text("{"), "not a report"),
        (lambda run: (run / "cells.jsonl").unlink(), "are not those of cells.jsonl"),
        (lambda run: (run / "cells.jsonl").write_bytes((run / "cells.jsonl").read_bytes()[:-1]), "truncated"),
        (lambda run: (run / "cells.jsonl").write_bytes((run / "cells.jsonl").read_bytes()[:-20]), "line 3 is not a record"),
        (lambda run: (run / "cells.jsonl").write_bytes(b"\xff\n"), "cannot be read"),
        (lambda run: edit_line(run / "cells.jsonl", 0, lambda r: r.update(cell_id="cpu/mine")), "are not those of cells.jsonl"),
        (lambda run: (run / "environment.json").unlink(), "environment.json is missing"),
        (lambda run: (run / "environment.json").write_text("{"), "environment.json is not JSON"),
        (lambda run: (run / "report.html").unlink(), "report.html is missing"),
        (lambda run: (run / "report.md").unlink(), "report.md is missing"),
    ],
)
def test_a_damaged_run_is_seen_and_cannot_be_sealed(tmp_path: Path, damage: Callable[[Path], None], problem: str) -> None:
    run = make_run(tmp_path / "run", whole=True)
    damage(run)
    assert any(problem in line for line in validate_run(run)), validate_run(run)
    with pytest.raises(ValidationRefused, match="run: "):
        seal(run)
    assert not (run / "COMPLETE").exists()


def test_no_directory_is_a_problem() -> None:
    assert validate_run(Path("absent")) == ["no run directory absent: check the path"]


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (lambda run: (run / "report.html").write_text("PASS"), "report.html was changed"),
        (
            lambda run: (run / "cells.jsonl").write_text((run / "cells.jsonl").read_text().replace("qkv", "qkv")[:-1] + "\n\n"),
            "cells.jsonl was changed",
        ),
        (lambda run: (run / "report.md").unlink(), "report.md was removed"),
        (lambda run: (run / "note.txt").write_text("x"), "note.txt was added"),
        (lambda run: (run / "COMPLETE").write_text("{}"), "not a seal"),
    ],
)
def test_a_sealed_run_keeps_every_byte(tmp_path: Path, tamper: Callable[[Path], None], problem: str) -> None:
    run = make_run(tmp_path / "run", whole=True)
    assert seal(run) == run / "COMPLETE"
    assert validate_run(run) == []
    with pytest.raises(ValidationRefused, match="sealed already"):
        seal(run)
    with pytest.raises(RunDirectoryError, match="is sealed"):
        RunDirectory(run).append_json("cells.jsonl", {})
    tamper(run)
    assert any(problem in line for line in validate_run(run)), validate_run(run)


def test_shards_join_into_one_verdict(tmp_path: Path) -> None:
    shards = [make_run(tmp_path / f"shard{i}", IDS[i::2]) for i in (0, 1)]
    verdict = merge(shards, tmp_path / "whole")
    assert (verdict.status, verdict.passed, verdict.not_selected) == ("PASS", 3, 0)
    assert validate_run(tmp_path / "whole") == []
    assert json.loads((tmp_path / "whole" / "environment.json").read_text())["shards"] == ["shard0", "shard1"]
    merge([tmp_path / "whole"], tmp_path / "again")
    assert json.loads((tmp_path / "again" / "environment.json").read_text())["shards"][1:] == ["shard0", "shard1"]
    assert merge([*shards, shards[0]], tmp_path / "same_twice").status == "PASS"
    assert merge(shards[:1], tmp_path / "half").status == "MISSING"
    with pytest.raises(RunDirectoryError, match="exists"):
        merge(shards, tmp_path / "whole")


def test_a_red_shard_and_a_troubled_one_make_the_whole_red(tmp_path: Path) -> None:
    green = make_run(tmp_path / "green", IDS[:2])
    assert merge([green, make_run(tmp_path / "red", IDS[2:], red=IDS[2:])], tmp_path / "a").status == "FAIL"
    verdict = merge([green, make_run(tmp_path / "crashed", IDS[2:], trouble=("a worker crashed",))], tmp_path / "b")
    assert (verdict.status, verdict.reasons) == ("FAIL", ("crashed: a worker crashed",))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"provenance": source(sha="c" * 40)}, "differ in commit"),
        ({"provenance": source(tree_digest="c" * 64)}, "differ in tree"),
        ({"provenance": source(dirty=True), "trouble": ("dirty",)}, "clean checkout"),
        ({"provenance": source(sha="", problem="?"), "trouble": ("?",)}, "clean checkout"),
        ({"environment": {"packages": {"torch": "2.12.0"}, "numerics": {"mma_k": 16}}}, "differ in packages"),
        ({"environment": {"packages": {"torch": "2.13.0"}, "numerics": {"mma_k": 8}}}, "differ in numerics"),
        ({"environment": {"packages": {"torch": "2.13.0"}, "numerics": {"mma_k": 16}, "gpus": [{"name": "A"}]}}, "differ in cards"),
        ({"declared_kernels": {**DECLARED, "cpu:rope:0123456789ab": ("rope",)}}, "differ in kernels"),
        ({"matrix": tuple(c.row().model_copy(update={"facts": ("x",)}) for c in CELLS)}, "own evidence says"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    shards = [make_run(tmp_path / "one", IDS[:2]), make_run(tmp_path / "two", IDS[2:], **changes)]
    with pytest.raises(ValidationRefused, match=problem):
        merge(shards, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_two_results_of_one_cell_that_disagree_are_refused(tmp_path: Path) -> None:
    shards = [make_run(tmp_path / "one", IDS[:2]), make_run(tmp_path / "two", IDS[1:], seconds=2.0)]
    with pytest.raises(ValidationRefused, match=f"different results of {IDS[1]}"):
        merge(shards, tmp_path / "whole")
    with pytest.raises(ValidationRefused, match="nothing to merge"):
        merge([], tmp_path / "whole")


def test_the_matrix_survives_the_trip_through_a_report() -> None:
    assert len({c.cell_id for c in all_cells()}) == len(all_cells())
    assert tuple(Cell.from_row(c.row()) for c in all_cells()) == all_cells()
    assert enumerate_cells("cpu") == enumerate_cells("cpu")


def test_a_seal_names_every_file_by_the_digest_of_all_its_bytes(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    contents = {"weights/v1/model": bytes(range(256)) * (1 << 13), "empty": b"", "weights/v2/model": b"x"}
    for name, content in contents.items():
        (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
        (directory.path / name).write_bytes(content)
    assert directory.digests() == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    before = directory.digests()
    (directory.path / "weights/v1/model").write_bytes(contents["weights/v1/model"][:-1] + b"\0")
    assert {name for name, found in directory.digests().items() if found != before[name]} == {"weights/v1/model"}
