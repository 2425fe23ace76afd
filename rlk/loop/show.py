"""Runs for a person: progress on a terminal, one line per update, tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlk.evidence.bytes import describe
from rlk.evidence.rundir import COMPLETE
from rlk.evidence.schema import Report
from rlk.loop.doctor import Finding
from rlk.loop.plan import RunPlan
from rlk.loop.plan import describe as describe_plan
from rlk.loop.records import RunSummary, StepResult
from rlk.loop.validate import failure, is_loop_run, read_run


class Screen:
    """Observer of a run: a progress bar on standard error where that is a terminal, and one line per update on standard output."""

    def __init__(self, plan: RunPlan, out: Console) -> None:
        self._plan, self._out = plan, out
        columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        screen = Console(stderr=True)
        self._progress = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        self._task = self._progress.add_task("", total=plan.steps)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def phase(self, step: int, name: str) -> None:
        """Name the phase beside the bar."""
        self._progress.update(self._task, description=f"update {step}: {name}" if step else f"starting {name}")

    def finished(self, result: StepResult) -> None:
        """Print the update and advance the bar."""
        self._progress.update(self._task, completed=result.step)
        self._out.print(step_line(result, self._plan.steps), soft_wrap=True, highlight=False)


def step_line(result: StepResult, steps: int) -> str:
    """One update in one line."""
    notes = []
    if result.refused:
        notes.append(f"{len(result.refused)} refused")
    if empty := len(result.empty_samples) - len(result.refused):
        notes.append(f"{empty} without a token")
    if result.flat_groups:
        notes.append(f"{len(result.flat_groups)} groups with equal rewards")
    return (
        f"update {result.step}/{steps}: {result.logprob.mismatched_elements} of {result.logprob.elements} tokens differ, "
        f"reward {result.reward_mean:.3f} ± {result.reward_std:.3f}, kl {result.kl:.4g}, loss {result.loss:.3g}, "
        f"norm {result.grad_norm:.3g}, weights {result.hash_before[:8]} → {result.hash_after[:8]}, "
        f"{sum(result.timings_s.values()):.1f} s" + "".join(f", {note}" for note in notes)
    )


def plan_table(plan: RunPlan) -> Table:
    """What a run would do."""
    return _pairs(f"rlk run {plan.run_id}", describe_plan(plan))


def summary_table(summary: RunSummary) -> Table:
    """A finished run in figures."""
    first, last, manifest = summary.steps[0], summary.steps[-1], summary.manifest
    bad = sum(comparison.mismatched_bytes for comparison in summary.comparisons)
    differing = next((comparison for comparison in summary.comparisons if not comparison.equal), None)
    sides = {side: sorted({use.op for use in manifest.kernels if use.side == side}) for side in ("train", "rollout")}
    source = manifest.provenance
    clean = "clean" if not source["dirty"] and not source["problem"] else str(source["problem"] or "dirty checkout")
    rows = [
        ("run directory", str(summary.directory)),
        ("updates", str(len(summary.steps))),
        ("logprobs", f"{summary.tokens} tokens compared, {summary.mismatched_tokens} differ ({bad} bytes)"),
        *([("first difference", describe(differing))] if differing else []),
        ("reward", f"{first.reward_mean:.3f} in the first update, {last.reward_mean:.3f} in the last"),
        ("KL to the start", f"{last.kl:.4g} in the last update"),
        (
            "weights",
            f"{summary.model_hashes[0][:16]}… → {summary.model_hashes[-1][:16]}…, {len(set(summary.model_hashes))} different hashes",
        ),
        *((f"rlk operators, {side}", ", ".join(ops) or "none") for side, ops in sides.items()),
        ("sources", f"{str(source['sha'])[:12] or 'unknown commit'}, {clean}"),
    ]
    return _pairs(f"run {manifest.run_id}: {manifest.outcome}", rows)


def run_report(path: Path) -> tuple[Table | None, list[str]]:
    """Table of one run of the loop; None with problems if its files cannot tell."""
    run, problems = read_run(path)
    if run is None or not run.steps:
        return None, problems or ["the run failed before its first update was complete"]
    return summary_table(RunSummary(directory=run.path, manifest=run.manifest, steps=tuple(run.steps))), problems


def workspace_table(workspace: Path) -> Table:
    """All runs below a workspace, of the loop and of acceptance, with what became of them."""
    table = Table("run", "kind", "outcome", "report", title=str(workspace))
    for path in run_directories(workspace):
        kind = "loop" if is_loop_run(path) else "acceptance"
        page = path / "report.html"
        table.add_row(str(path.relative_to(workspace)), kind, outcome(path), str(page) if page.is_file() else "")
    return table


def run_directories(workspace: Path) -> list[Path]:
    """Directories below ``workspace`` that hold a run, oldest name first; links are not followed."""
    found = {marker.parent for name in ("plan.json", "report.json") for marker in workspace.rglob(name) if not marker.is_symlink()}
    return sorted(path for path in found if path.resolve().is_relative_to(workspace.resolve()))


def outcome(path: Path) -> str:
    """What the files of a run say became of it: one word, with the reason where it failed or never ended."""
    sealed = ", sealed" if (path / COMPLETE).is_file() else ""
    if reason := failure(path):
        return f"failed: {reason}"
    if is_loop_run(path):
        run, problems = read_run(path)
        return f"unfinished: {problems[0]}" if run is None else run.manifest.outcome + sealed
    try:
        return Report.model_validate_json((path / "report.json").read_bytes()).verdict.status + sealed
    except (OSError, ValidationError):
        return "unreadable report.json"


def doctor_lines(findings: Sequence[Finding]) -> list[str]:
    """One line per finding."""
    return [f"{'ok  ' if f.ok else 'FAIL'}  {f.name}: {f.found}{'' if f.ok else f' → {f.remedy}'}" for f in findings]


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for what, value in rows:
        table.add_row(what, value)
    return table
