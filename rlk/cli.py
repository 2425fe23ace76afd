"""The command line: ``rlk`` and ``rlk-repro``. Reads options, calls the floors below, prints; nothing else.

Exit codes: 0 done, 1 the run or check failed, 2 the command cannot be done as given (one line on standard error, nothing written),
130 interrupted.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rlk.loop.profile import DEFAULT_MODEL, Profile, flags, load_profile

if TYPE_CHECKING:
    from rlk.loop.records import RunSummary

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Trainer and rollout engine compute the same bytes, and prove it.")
out = Console(width=None if sys.stdout.isatty() else 160)

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for an unknown option or a missing value."""


class Refused(ValueError):
    """The command cannot be done as given."""


def with_profile(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Profile` and hand it the merged one as its first argument."""

    def wrapped(profile: Path | None = None, **options: Any) -> None:
        given = {name: options.pop(name) for name in Profile.model_fields}
        command(load_profile({name: value for name, value in given.items() if value is not None}, profile), **options)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    help_text = "JSON file of options, instead of $RLK_REPRO_PROFILE or .rlk-profile.json"
    parameters = [_option("profile", Path | None, typer.Option("--profile", metavar="FILE", help=help_text))]
    for name, field in Profile.model_fields.items():
        shown = f" [{field.default}]" if field.default is not None else ""
        parameters.append(_option(name, str | None, typer.Option(*flags(name), metavar="VALUE", help=f"{field.description}{shown}")))
    wrapped.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *parameters)}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def _option(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


JsonFlag = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


@app.command()
@with_profile
def plan(
    profile: Profile,
    *,
    as_json: JsonFlag = False,
    cells: Annotated[bool, typer.Option("--cells", help="list the acceptance matrix instead of a run")] = False,
    cell: Annotated[list[str] | None, typer.Option("--cell", metavar="ID", help="show one cell of it; may be repeated")] = None,
    case: Annotated[int | None, typer.Option("--case", metavar="N", help="with --cells: what owns public failure N")] = None,
    platform: Annotated[str, typer.Option("--platform", help="platform of --cells and --cell: cpu, cuda or rocm")] = "cpu",
) -> None:
    """Show exactly what `rlk run` would do with the same options, or the cells of the acceptance matrix."""
    if case is not None:
        _show_case(case, as_json)
        return
    if cells or cell:
        _list_cells(platform, cell or [], as_json)
        return
    from rlk.loop.plan import make_plan
    from rlk.loop.show import plan_table

    resolved = make_plan(profile)
    if as_json:
        print(json.dumps(resolved.as_json(), indent=1))
    else:
        out.print(plan_table(resolved))


@app.command()
@with_profile
def run(profile: Profile) -> None:
    """Run the loop: generate, score, compare, update and publish, for --steps updates."""
    _run(profile)


@app.command()
@with_profile
def verify(profile: Profile) -> None:
    """Run two updates (or --steps) and accept nothing but equal bytes and changed, confirmed weights, checked again from the files."""
    from rlk.loop.validate import validate_run

    if profile.mode != "consistency":
        raise Refused("verify proves equal bytes, which mode=native does not promise: use `rlk run --mode native`")
    chosen = profile if "steps" in profile.model_fields_set else profile.model_copy(update={"steps": 2})
    _report_problems(validate_run(_run(chosen).directory), "verified")


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="run directories")],
    seal: Annotated[bool, typer.Option("--seal", help="write COMPLETE with the digest of every file if nothing is wrong")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="judge several shards of one acceptance run together")] = False,
    into: Annotated[Path | None, typer.Option("--into", help="new directory for the result of --merge")] = None,
) -> None:
    """Check finished runs from their files alone; seal one, or merge shards."""
    from rlk.acceptance import validate as acceptance
    from rlk.loop import validate as loop

    if merge != (into is not None) or (merge and seal):
        raise Refused("--merge RUN… needs --into DIR, and stands without --seal")
    for path in runs:
        if not path.is_dir():
            raise Refused(f"no run directory {path}: check the path")
    if merge and into is not None:
        if into.exists():
            raise Refused(f"{into} exists: choose another --into, runs are never overwritten")
        verdict = acceptance.merge(runs, into)
        print(f"{verdict.status}: {verdict.passed} of {verdict.required} cells passed, {into / 'report.html'}")
        raise typer.Exit(0 if verdict.status == "PASS" else 1)
    for path in runs:
        room: Any = loop if loop.is_loop_run(path) else acceptance
        _report_problems(room.validate_run(path), f"{path}: valid")
        if seal:
            try:
                print(f"sealed: {room.seal(path)}")
            except acceptance.ValidationRefused as refused:
                _report_problems([str(refused)], "")


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="run directory of the baseline revision")],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="run directory of the candidate revision")],
    target: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="new directory for the comparison")] = None,
) -> None:
    """Compare two acceptance runs of one platform: does the candidate compute the baseline's bytes?"""
    from rlk.acceptance.judge import exit_code
    from rlk.acceptance.revision import compare_runs
    from rlk.acceptance.revision_page import write_comparison
    from rlk.evidence.rundir import RunDirectory

    if target is not None and target.exists():
        raise Refused(f"{target} exists: choose another --out, runs are never overwritten")
    revision = compare_runs(baseline, candidate, shlex.join(["rlk", *sys.argv[1:]]))
    default = Path("artifacts", "refactor", revision.platform, revision.candidate.sha or "unknown-sha", f"{revision.run_id}-compared")
    page = write_comparison(revision, RunDirectory.create(target or default))
    for reason in revision.reasons:
        print(reason)
    print(f"{revision.status}: {page}")
    raise typer.Exit(exit_code(revision))


@app.command()
@with_profile
def report(
    profile: Profile,
    *,
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="one run: its directory, or its name in the workspace")] = None,
) -> None:
    """List the runs of the workspace, or show one."""
    from rlk.loop import show

    if name is None:
        if not profile.workspace.is_dir():
            raise Refused(f"no workspace {profile.workspace}: check --workspace, or start with `rlk run`")
        out.print(show.workspace_table(profile.workspace))
        return
    path = Path(name) if Path(name).is_dir() else profile.workspace / name
    if not path.is_dir():
        raise Refused(f"no run {name}, neither as a directory nor in {profile.workspace}: list them with `rlk report`")
    page = path / "report.html"
    if page.is_file():
        print(f"{show.outcome(path)}: {page}")
        return
    table, problems = show.run_report(path)
    if table is not None:
        out.print(table)
    _report_problems(problems if table is None else [], show.outcome(path))


@app.command()
def prepare(
    tiny: Annotated[bool, typer.Option("--tiny", help="the small model for CPUs, trained here")] = False,
    synthetic: Annotated[str | None, typer.Option("--synthetic", metavar="SHAPE", help="random weights of tiny, qwen3-8b, …")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="with --synthetic: fewer layers than the shape has")] = None,
    target: Annotated[Path | None, typer.Option("--out", metavar="DIR", help=f"new checkpoint directory [{DEFAULT_MODEL}]")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="names the start weights and the training data")] = 0,
    steps: Annotated[int | None, typer.Option("--warm-up-steps", min=1, help="with --tiny: supervised updates")] = None,
) -> None:
    """Make a checkpoint for the loop: the tiny one, trained here on the bundled arithmetic within a minute, or a synthetic one."""
    if tiny == (synthetic is not None):
        raise Refused("prepare needs --tiny or --synthetic SHAPE, one of them; `rlk run --model DIR` takes your own Qwen3 checkpoint")
    if synthetic is not None:
        _prepare_synthetic(synthetic, layers, target, seed, steps)
        return
    from rlk.loop.prepare import prepare_tiny

    if layers is not None:
        raise Refused("--layers belongs to --synthetic: leave it out")
    target = target or DEFAULT_MODEL
    made = prepare_tiny(target, seed=seed, steps=steps)
    print(f"{made.path}: {made.steps} updates, loss {made.final_loss:.4f}, model {made.model_hash}")


@app.command()
@with_profile
def doctor(profile: Profile) -> None:
    """Check what a run needs on this machine, each with its remedy."""
    from rlk.loop.doctor import examine
    from rlk.loop.show import doctor_lines

    findings = examine(profile)
    print("\n".join(doctor_lines(findings)))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _prepare_synthetic(shape: str, layers: int | None, target: Path | None, seed: int, steps: int | None) -> None:
    from rlk.loop.synthetic import prepare_synthetic

    if target is None or steps is not None:
        raise Refused("--synthetic needs --out DIR and takes no --warm-up-steps")
    made = prepare_synthetic(shape, target, layers=layers, seed=seed)
    print(f"{made.path}: synthetic {shape}, {made.config.num_hidden_layers} layers, made on {made.device}, model {made.model_hash}")


def _run(profile: Profile) -> RunSummary:
    from rlk.loop.controller import RunFailed, run_loop
    from rlk.loop.plan import make_plan
    from rlk.loop.show import Screen, summary_table

    resolved = make_plan(profile)
    print(f"run directory {resolved.directory}", flush=True)
    try:
        with Screen(resolved, out) as screen:
            summary = run_loop(resolved, observer=screen, command=shlex.join(["rlk", *sys.argv[1:]]))
    except RunFailed as failed:
        _complain(str(failed))
        raise typer.Exit(1) from failed
    except KeyboardInterrupt as stopped:
        _complain(f"interrupted, what was done is in {resolved.directory}")
        raise typer.Exit(130) from stopped
    out.print(summary_table(summary))
    return summary


def _list_cells(platform: str, ids: list[str], as_json: bool) -> None:
    from rlk.acceptance.cell import PLATFORMS
    from rlk.acceptance.matrix import enumerate_cells
    from rlk.acceptance.selection import select_cells

    if platform not in PLATFORMS:
        raise Refused(f"--platform {platform!r} is unknown: use {', '.join(PLATFORMS)}")
    cells = enumerate_cells(platform)
    chosen = select_cells(cells, ids, None)
    cells = tuple(cell for cell in cells if chosen is None or cell.cell_id in chosen)
    if as_json:
        print(json.dumps([cell.row().model_dump() for cell in cells], indent=1))
        return
    for cell in cells:
        print(cell.cell_id + (f"  (unsupported: {cell.unsupported})" if cell.unsupported else ""))
        if chosen is not None:
            print(f"  expects {cell.expect}; repeat it with: pytest -m {platform} acceptance/ --cell {cell.cell_id}")
    if chosen is None:
        required = sum(cell.required for cell in cells)
        print(f"{len(cells)} cells: {required} required, {len(cells) - required} unsupported")


def _show_case(number: int, as_json: bool) -> None:
    from rlk.acceptance.cases import lookup

    try:
        case = lookup(number)
    except KeyError as error:
        raise Refused(f"--case: {error.args[0]}") from None
    if as_json:
        print(json.dumps(asdict(case), indent=1))
        return
    print(f"case {case.number}: {case.failure} (seen: {case.seen})")
    for cell_id in case.cells:
        print(f"  cell  {cell_id}")
    for test in case.tests:
        print(f"  test  tests/{test}")
    if case.missing:
        print(f"  MISSING: waits for {case.missing}")


def _report_problems(problems: list[str], good: str) -> None:
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        raise typer.Exit(1)
    print(good)


def _complain(message: str) -> None:
    print(f"rlk: {' '.join(message.split())}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="rlk", standalone_mode=False)
    except USAGE_ERROR as error:
        _complain(f"{error.format_message()} (`rlk --help` lists commands and options)")  # type: ignore[attr-defined]
        code = 2
    except (ValueError, RuntimeError) as error:
        if not type(error).__module__.startswith("rlk."):
            raise
        _complain(str(error))
        code = 2
    except OSError as error:
        _complain(f"{error.filename or 'a file'}: {error.strerror or error}: check the path and its permissions")
        code = 2
    except typer.Abort:
        code = 130
    sys.exit(code or 0)
