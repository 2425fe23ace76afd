"""Writes what a run found: ``report.json`` for programs, ``report.html`` and ``report.md`` for people."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from rlk.evidence.rundir import RunDirectory
from rlk.evidence.schema import Record, Report
from rlk.evidence.view import View

_MARKDOWN = re.compile(r"([\\`*{}\[\]<>|~&$]|\b_|_\b)")


def write_report(directory: RunDirectory, report: Report) -> Path:
    """Write ``report.json``, ``report.md`` and ``report.html`` into ``directory``; returns the path of the page.

    Raises RunDirectoryError where one of them exists already. The pages show nothing that ``report.json`` does not hold.
    """
    return write_pages(directory, "report", report, View(report))


def write_pages(directory: RunDirectory, name: str, facts: Record, view: object) -> Path:
    """Write ``facts`` as ``<name>.json``, and ``view`` laid out by the templates ``<name>.md.j2`` and ``<name>.html.j2``."""
    pages = {f"{name}.{kind}": render(name, kind, view) for kind in ("md", "html")}
    directory.write_json(f"{name}.json", facts.model_dump(mode="json"))
    for page, text in pages.items():
        path = directory.write_text(page, text)
    return path


def render(name: str, kind: str, view: object) -> str:
    """One self-contained page of a kind, "html" or "md"; every value is escaped."""
    return _templates(kind).get_template(f"{name}.{kind}.j2").render(view=view)


def render_html(report: Report) -> str:
    """The page of a run."""
    return render("report", "html", View(report))


def render_markdown(report: Report) -> str:
    """The same in Markdown."""
    return render("report", "md", View(report))


@cache
def _templates(kind: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlk.evidence"),
        autoescape=kind == "html",
        finalize=_markdown if kind == "md" else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": _count, "number": _number, "short": _short, "code": _code}
    return environment


class _Code(str):
    """A code span, which needs no escape but its own."""


def _code(value: str) -> _Code:
    return _Code("`" + " ".join(value.replace("`", "'").replace("|", "¦").split()) + "`")


def _markdown(value: Any) -> str:
    """A value as text that Markdown shows as it is, on one line."""
    if isinstance(value, _Code):
        return value
    return _MARKDOWN.sub(r"\\\1", " ".join(str(value).split()))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _short(value: str) -> str:
    return value[:12] or "–"
