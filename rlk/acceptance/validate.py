"""Checks a finished run from its files alone, seals it, and joins shards into one verdict."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlk.acceptance.cell import Cell
from rlk.acceptance.judge import conclude, rejudge
from rlk.acceptance.matrix import enumerate_cells
from rlk.evidence.report import write_report
from rlk.evidence.rundir import COMPLETE, RunDirectory, RunDirectoryError, new_run_id
from rlk.evidence.schema import CellRecord, Record, Report, SessionFacts, Status, Verdict

OWN_MATRIX = "rlk.acceptance.matrix:enumerate_cells"
PAGES = ("report.html", "report.md")
KERNEL_ID = re.compile(r"[a-z]+:[a-z0-9_]+:[0-9a-f]{12,64}")
_SEAL = TypeAdapter(dict[str, dict[str, str]])
T = TypeVar("T", bound=Record)


class ValidationRefused(RuntimeError):
    """A run that cannot be sealed or merged; one line per problem."""


def validate_run(path: Path) -> list[str]:
    """Problems of the run in ``path``, one line each; empty if its files are complete, agree with each other and carry the verdict.

    A red run is valid too: validity says that the evidence is whole, the verdict says what it shows.
    """
    report, problems = read_run(path)
    return problems + (_own_judgment(report) if report is not None else [])


def read_run(path: Path) -> tuple[Report | None, list[str]]:
    """Report of a run of this or an earlier version of rlk, None if it cannot be read, and the problems of its files with each other."""
    try:
        directory = RunDirectory(path)
        report = Report.model_validate_json((path / "report.json").read_bytes())
    except RunDirectoryError as error:
        return None, [str(error)]
    except FileNotFoundError:
        return None, [f"{path} has no report.json: the run did not reach its end"]
    except (OSError, ValidationError) as error:
        return None, [f"report.json is not a report: {_first_line(error)}"]
    records, problems = read_cells(path)
    problems += [f"{name} is missing" for name in PAGES if not (path / name).is_file()]
    problems += _environment(path, report)
    problems += _agreement(report, records)
    problems += _kernel_ids(report)
    if directory.sealed:
        problems += seal_problems(directory)
    return report, problems


def read_cells(path: Path) -> tuple[list[CellRecord], list[str]]:
    """Records of ``cells.jsonl`` and its problems."""
    return read_lines(path / "cells.jsonl", CellRecord)


def read_lines(path: Path, kind: type[T]) -> tuple[list[T], list[str]]:
    """Records of a file of JSON lines and its problems: a last line without its end, a line that is no record. A file that is not there has
    none: nothing was written before the end, and what is written then says so."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], []
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{path.name} cannot be read: {_first_line(error)}"]
    records, problems = [], []
    if text and not text.endswith("\n"):
        problems.append(f"{path.name} is truncated: its last line has no end")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            records.append(kind.model_validate_json(line))
        except ValidationError as error:
            problems.append(f"{path.name} line {number} is not a record: {_first_line(error)}")
    return records, problems


def seal(path: Path) -> Path:
    """Write ``COMPLETE`` with the digest of every file; returns its path. Raises ValidationRefused on any problem or an earlier seal."""
    if (path / COMPLETE).exists():
        raise ValidationRefused(f"{path} is sealed already")
    _require_valid(path)
    return RunDirectory(path).seal()


def merge(paths: Sequence[Path], target: Path) -> Verdict:
    """Join shards into the new run directory ``target`` and judge all of their cells together.

    Every shard must be valid and clean; commit, tree, platform, matrix, kernels, packages, numerics and kinds of card must agree. A cell
    that several shards hold must be the same record in each. Faults of a shard's session are faults of the whole. Raises
    ValidationRefused, or RunDirectoryError if ``target`` exists.
    """
    if not paths:
        raise ValidationRefused("nothing to merge: name at least one run directory")
    for path in paths:
        _require_valid(path)
    reports = [Report.model_validate_json((path / "report.json").read_bytes()) for path in paths]
    for path, report in zip(paths, reports):
        _require_clean(path, report)
        _require_same(paths[0], reports[0], path, report)
    records = _union(paths)
    first = reports[0]
    trouble = [f"{report.run_id}: {reason}" for report in reports for reason in report.session.trouble]
    session = SessionFacts(platform=first.session.platform, trouble=tuple(trouble))
    judged, verdict = conclude([Cell.from_row(row) for row in first.matrix], records, session)
    environment: dict[str, Any] = {**first.environment, "shards": list(dict.fromkeys(run for report in reports for run in run_ids(report)))}
    whole = Report(
        schema_version=first.schema_version,
        run_id=new_run_id(),
        command=shlex.join(["rlk", "validate", "--merge", *map(str, paths), "--into", str(target)]),
        started_at=min(report.started_at for report in reports),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        matrix_source=first.matrix_source,
        session=session,
        verdict=verdict,
        provenance=first.provenance,
        environment=environment,
        declared_kernels=first.declared_kernels,
        matrix=first.matrix,
        records=tuple(judged),
        waivers=tuple(dict.fromkeys(waiver for report in reports for waiver in report.waivers)),
    )
    directory = RunDirectory.create(target)
    directory.write_json("environment.json", {"provenance": first.provenance.model_dump(mode="json"), **environment})
    for record in records:
        directory.append_json("cells.jsonl", record.model_dump(mode="json"))
    write_report(directory, whole)
    return verdict


def run_ids(report: Report) -> list[str]:
    """The run's own id and those of the shards that were joined into it."""
    shards = report.environment.get("shards")
    return [report.run_id, *(map(str, shards) if isinstance(shards, list) else ())]


def cards(report: Report) -> list[tuple[str, str]]:
    """Name and capability of every card that the session saw."""
    gpus = report.environment.get("gpus")
    found = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return [(str(gpu.get("name")), str(gpu.get("capability"))) for gpu in found]


def _environment(path: Path, report: Report) -> list[str]:
    try:
        frozen = json.loads((path / "environment.json").read_bytes())
    except FileNotFoundError:
        return ["environment.json is missing"]
    except (OSError, ValueError) as error:
        return [f"environment.json is not JSON: {_first_line(error)}"]
    expected = {"provenance": report.provenance.model_dump(mode="json"), **report.environment}
    return [] if frozen == expected else ["environment.json and report.json disagree"]


def _agreement(report: Report, records: Sequence[CellRecord]) -> list[str]:
    """Matrix, records and verdict of a report against each other and against ``cells.jsonl``."""
    try:
        cells = [Cell.from_row(row) for row in report.matrix]
    except ValueError as error:
        return [str(error)]
    problems = []
    judged, verdict = conclude(cells, records, report.session)
    stored = {record.cell_id: record for record in report.records}
    differing = [record.cell_id for record in judged if stored.get(record.cell_id) != record]
    if differing:
        problems.append(f"{len(differing)} records of report.json are not those of cells.jsonl, first {differing[0]}")
    elif list(report.records) != judged:
        problems.append("report.json holds other records than cells.jsonl")
    if verdict != report.verdict:
        problems.append(f"the verdict {report.verdict.status} does not follow from the records: they give {verdict.status}")
    if report.provenance.dirty and not (report.session.development or report.session.trouble):
        problems.append("the checkout was dirty and the session does not say so")
    if not report.provenance.sha and not report.session.trouble:
        problems.append("the commit is unknown and the session does not say so")
    return problems


def _own_judgment(report: Report) -> list[str]:
    """Matrix and green records of a report against the matrix and the judge of this version."""
    try:
        cells = [Cell.from_row(row) for row in report.matrix]
    except ValueError:
        return []  # reported by _agreement
    problems = []
    if report.matrix_source == OWN_MATRIX and cells != list(enumerate_cells(report.session.platform)):
        problems.append("the matrix is not the one this version of rlk enumerates: validate with the commit of the run")
    return problems + refuted(report)


def refuted(report: Report) -> list[str]:
    """Green records of a report, whose matrix agrees with itself, that this version's judge does not find green."""
    by_id = {row.cell_id: Cell.from_row(row) for row in report.matrix}
    problems = []
    for record in report.records:
        reasons = rejudge(by_id[record.cell_id], record, report.declared_kernels) if record.cell_id in by_id else []
        problems += [f"{record.cell_id} is PASS, but its own evidence says: {reason}" for reason in reasons[:1]]
    return problems


def _kernel_ids(report: Report) -> list[str]:
    """A malformed id in a red record is what made it red; in a green one, or among the declared, it is a problem."""
    green = [record for record in report.records if record.status is Status.PASS]
    ids = {use.kernel_id for record in green for use in record.kernels} | set(report.declared_kernels)
    return [f"kernel id {kernel_id!r} is not backend:operator:hash" for kernel_id in sorted(ids) if not KERNEL_ID.fullmatch(kernel_id)]


def seal_problems(directory: RunDirectory) -> list[str]:
    """How a sealed directory differs from its seal, one line per file."""
    try:
        sealed = _SEAL.validate_json((directory.path / COMPLETE).read_bytes())["files"]
    except (OSError, ValidationError, KeyError) as error:
        return [f"{COMPLETE} is not a seal: {_first_line(error)}"]
    found = directory.digests()
    problems = [f"{name} was removed after the run was sealed" for name in sorted(sealed.keys() - found.keys())]
    problems += [f"{name} was added after the run was sealed" for name in sorted(found.keys() - sealed.keys())]
    return problems + [
        f"{name} was changed after the run was sealed" for name in sorted(sealed) if found.get(name, sealed[name]) != sealed[name]
    ]


def _require_valid(path: Path) -> None:
    problems = validate_run(path)
    if problems:
        raise ValidationRefused("\n".join(f"{path.name}: {problem}" for problem in problems))


def _require_clean(path: Path, report: Report) -> None:
    if report.provenance.dirty or report.provenance.problem or report.session.development:
        raise ValidationRefused(f"{path.name} does not come from a clean checkout of a known commit: run that shard again")


def _require_same(first_path: Path, first: Report, path: Path, report: Report) -> None:
    pairs = {
        "schema version": (first.schema_version, report.schema_version),
        "commit": (first.provenance.sha, report.provenance.sha),
        "tree": (first.provenance.tree_digest, report.provenance.tree_digest),
        "platform": (first.session.platform, report.session.platform),
        "matrix": (first.matrix, report.matrix),
        "kernels": (first.declared_kernels, report.declared_kernels),
        "packages": (first.environment.get("packages"), report.environment.get("packages")),
        "numerics": (first.environment.get("numerics"), report.environment.get("numerics")),
        "cards": (set(cards(first)), set(cards(report))),  # a session may see more or fewer of one kind
    }
    for what, (a, b) in pairs.items():
        if a != b:
            raise ValidationRefused(f"{path.name} and {first_path.name} differ in {what}: merge shards of one commit and one environment")


def _union(paths: Sequence[Path]) -> list[CellRecord]:
    """Records of all shards; one that several shards hold alike is taken once."""
    found: dict[str, tuple[Path, list[CellRecord]]] = {}
    for path in paths:
        of_shard: dict[str, list[CellRecord]] = {}
        for record in read_cells(path)[0]:
            of_shard.setdefault(record.cell_id, []).append(record)
        for cell_id, records in of_shard.items():
            earlier, same = found.setdefault(cell_id, (path, records))
            if same != records:
                raise ValidationRefused(f"{path.name} and {earlier.name} hold different results of {cell_id}: merge only one of them")
    return [record for _, records in found.values() for record in records]


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return " ".join(lines[:3]) if lines else type(error).__name__
