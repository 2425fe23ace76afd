"""The report says what report.json holds, adds up, and shows hostile text as text."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.acceptance.cell import Cell
from rlk.acceptance.judge import Findings, conclude, judge_cell
from rlk.evidence.bytes import compare, compare_fp32
from rlk.evidence.report import render_html, render_markdown, write_report
from rlk.evidence.rundir import RunDirectory, RunDirectoryError
from rlk.evidence.schema import Control, KernelUse, Report, SessionFacts, Waiver
from rlk.evidence.updates import Update, facts_of, updates_of
from rlk.evidence.view import View

KERNEL = "cpu:rms_norm:0123456789ab"
DECLARED = {KERNEL: ("rms_norm",)}
HOSTILE = '<script>alert("x")</script>|`*'
STRICT = (("train", "rms_norm"), ("rollout", "rms_norm"))
CHAIN = Cell("cpu", "chain", "train_vs_rollout", "tiny", "logp", strict=STRICT)
RUN = Cell("cpu", "integration", "RR", "tiny-full", "logprob")
ARM = Cell("cpu", "ablation", "G00", "tiny", "logprob", expect="different", native=("train",))
CONTROL = Cell("cpu", "control", "flipped_bit", "tiny", "caught", expect="caught")
ABSENT = Cell("cpu", "chain", "prefill_vs_decode", "tiny", "logp", unsupported=f"no engine {HOSTILE}")
CELLS = (CHAIN, ABSENT, RUN, ARM, CONTROL)
UPDATES = [
    Update(step, 64, 0, 0.5 * step, 1e-4, f"{step:064x}", f"{step + 1:064x}", f"{step + 1:064x}", f"{step + 1:064x}") for step in (1, 2)
]


def _uses(*sides: str) -> list[KernelUse]:
    return [KernelUse(side=side, op="rms_norm", backend="cpu", kernel_id=KERNEL, calls=3) for side in sides]


def _findings(red: bool) -> dict[str, Findings]:
    value = torch.arange(6.0)
    other = value.clone()
    other[4] = 4.5
    return {
        CHAIN.cell_id: Findings(
            comparisons=[compare(HOSTILE, other if red else value.clone(), value)],
            kernels=_uses("train") if red else _uses("train", "rollout"),
            timings_ms={"forward": (3.0, 1.0, 2.0)},
        ),
        RUN.cell_id: Findings(
            comparisons=[compare_fp32(f"update {n}: logprob", [1.0] * 64, [1.0] * 64) for n in (1, 2)], facts=facts_of(UPDATES)
        ),
        ARM.cell_id: Findings(comparisons=[compare("logprob", other, value)]),
        CONTROL.cell_id: Findings(controls=[Control(name="flipped_bit", caught=not red, detail="seen by the comparator")]),
    }


def make(red: bool = False, **session: Any) -> Report:
    facts = SessionFacts(platform="cpu", trouble=(f"dirty {HOSTILE}",) if red else (), **session)
    findings = _findings(red)
    ran = [c for c in CELLS if c.required and c.cell_id in (session.get("selected") or findings) and not (red and c is RUN)]
    records, verdict = conclude(CELLS, [judge_cell(c, findings[c.cell_id], [], DECLARED) for c in ran], facts)
    return Report(
        run_id="20250101T000000Z-abcd",
        command=f"pytest -m cpu acceptance/ {HOSTILE if red else ''}",
        started_at="2025-01-01T00:00:00+00:00",
        finished_at="2025-01-01T00:01:30+00:00",
        matrix_source="tiny_matrix:cells",
        session=facts,
        verdict=verdict,
        provenance={
            "source": "git",
            "sha": "a" * 40,
            "dirty": red,
            "dirty_files": [HOSTILE] if red else [],
            "tree_digest": "b" * 64,
            "problem": "",
        },
        environment={"python": "3.11.7", "memory_bytes": 2**34, "packages": {"torch": "2.13.0"}, "gpus": []},
        declared_kernels=DECLARED,
        matrix=tuple(c.row() for c in CELLS),
        records=tuple(records),
        waivers=(Waiver(cell_id=CHAIN.cell_id, sha="a" * 40, reason=HOSTILE, expires="2030-01-01"),) if red else (),
    )


class _Page(HTMLParser):
    """Tags, balanced, and the text between them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [str(value) for name, value in attrs if name in ("href", "src")]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += " " + " ".join(data.split())


@pytest.mark.parametrize("red", [False, True])
def test_the_page_is_whole_self_contained_and_shows_hostile_text_as_text(red: bool) -> None:
    source = render_html(make(red))
    page = _Page(source)
    assert page.open == []
    assert "script" not in page.tags
    assert all(target.startswith("#") and target[1:] in page.ids for target in page.targets)
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)|@import|url\(", source)
    assert HOSTILE not in source
    assert html.escape(HOSTILE) in source.replace("&#34;", "&quot;")
    assert ("FAIL" if red else "PASS") in page.text
    for needed in ("a" * 12, "2025-01-01 00:00:00 UTC, 90 s", "16.0 GiB", "2.13.0"):
        assert needed in page.text


def test_green_numbers() -> None:
    text = _Page(render_html(make())).text
    assert "4 required = 4 passed + 0 failed + 0 missing + 0 not selected" in text
    assert "128 tokens, 140 elements in 4 cells" in text
    assert "forward 2 1 3 3 cpu/chain/train_vs_rollout/tiny/logp" in text
    assert "G00 different PASS 1 6 16.7 %" in text
    assert "flipped_bit yes seen by the comparator" in text
    assert f"rms_norm cpu {KERNEL} × 3 cpu {KERNEL} × 3" in text
    assert "RR tiny-full 1 64 0 0.5 0.0001 000000000000 → 000000000000" in text


def test_red_numbers_come_first_with_reason_hex_and_repro() -> None:
    text = _Page(render_html(make(red=True))).text
    assert "4 required = 1 passed + 2 failed + 1 missing + 0 not selected" in text
    assert text.index("Why not PASS") < text.index("Red cells") < text.index("Matrix")
    assert "first at [4]: 40900000 against 40800000, 1048576 ulp" in text
    assert f"pytest -m cpu acceptance/ --cell {CHAIN.cell_id}" in text
    assert "no result: the cell did not run to its end" in text
    assert "flipped_bit NO" in text
    assert "required, not read back" in text
    assert "Nothing recorded" in text


def test_coverage_adds_up_per_scope_and_over_all() -> None:
    report = make(selected=(CHAIN.cell_id,))
    view = View(report)
    for c in view.coverage:
        assert c.required == c.passed + c.failed + c.missing + c.not_selected
    for name in ("required", "passed", "failed", "missing", "not_selected", "unsupported"):
        assert sum(getattr(c, name) for c in view.coverage) == getattr(report.verdict, name)
    assert view.unsupported == [(ABSENT.unsupported, [ABSENT.cell_id])]
    assert report.verdict.status == "PARTIAL"


def test_markdown_holds_the_same_and_escapes_it() -> None:
    text = render_markdown(make(red=True))
    assert text.startswith("# FAIL · cpu\n")
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", text)
    assert f"`pytest -m cpu acceptance/ --cell {CHAIN.cell_id}`" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) > 2
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_three_files_are_written_once(tmp_path: Path) -> None:
    directory, report = RunDirectory.create(tmp_path / "run"), make()
    assert write_report(directory, report) == tmp_path / "run" / "report.html"
    assert Report.model_validate(json.loads((tmp_path / "run" / "report.json").read_text())) == report
    with pytest.raises(RunDirectoryError, match="never overwritten"):
        write_report(directory, report)


def test_updates_survive_the_trip_through_facts() -> None:
    assert updates_of(facts_of(UPDATES), []) == [Update(**(vars(u) | {"mismatched_bytes": None})) for u in UPDATES]


@pytest.mark.parametrize("first", [0, 1])
def test_updates_are_read_from_a_runs_own_facts(first: int) -> None:
    comparisons = [compare_fp32(f"update {first + n}: logprob", [1.0, 2.0], [1.0, 2.0 + n]) for n in (0, 1)]
    facts = {"model_hashes": ["a", "b", "c"], "reward_per_step": [0.5, None], "tokens_compared": 4}
    read = updates_of(facts, comparisons)
    assert [(u.step, u.tokens, u.reward, u.before, u.after) for u in read] == [(1, 2, 0.5, "a", "b"), (2, 2, None, "b", "c")]
    assert [u.mismatched_bytes for u in read] == [0, 1]


def test_no_updates_in_facts_of_another_shape() -> None:
    assert updates_of({"model_hashes": "abc", "reward_per_step": None}, []) == []
