"""Checks a run of the loop from its files alone, and seals it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlk.acceptance.validate import KERNEL_ID, ValidationRefused, read_lines, seal_problems
from rlk.evidence.bytes import compare
from rlk.evidence.rundir import FAILED, RunDirectory, RunDirectoryError
from rlk.loop.arithmetic import Problem
from rlk.loop.plan import RunPlan
from rlk.loop.records import MANIFEST, METRICS, PLAN, SAMPLES, Manifest, SampleLine, StepResult, logprobs_file
from rlk.loop.rewards import reward_of
from rlk.model.config import CheckpointError
from rlk.model.weights import load_checkpoint


@dataclass(frozen=True)
class LoopRun:
    """The files of a finished run, parsed."""

    path: Path
    plan: RunPlan
    manifest: Manifest
    steps: Sequence[StepResult]
    samples: Sequence[SampleLine]


def is_loop_run(path: Path) -> bool:
    """Whether a directory is one that ``rlk run`` made."""
    return (path / PLAN).is_file()


def failure(path: Path) -> str:
    """First line of ``FAILED``, "" for a run that did not fail."""
    if not (path / FAILED).exists():
        return ""
    text = (path / FAILED).read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[0] if text else "without a reason"


def read_run(path: Path) -> tuple[LoopRun | None, list[str]]:
    """Parse a run directory; without the run, the problems say what is unreadable."""
    problems: list[str] = []
    try:
        plan = RunPlan.model_validate_json((path / PLAN).read_bytes())
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        return None, [f"{Path(error.filename).name} is missing: the run is not at its end, or was killed"]
    except (OSError, ValidationError) as error:
        return None, [f"plan.json or manifest.json is unreadable: {_short(error)}"]
    steps, broken = read_lines(path / METRICS, StepResult)
    problems += broken
    samples, broken = read_lines(path / SAMPLES, SampleLine)
    problems += broken
    return (None if problems else LoopRun(path, plan, manifest, steps, samples)), problems


def validate_run(path: Path) -> list[str]:
    """Problems of a run, one line each; empty if it finished, its files agree with each other and they show what it claims.

    Logprobs are compared again from the stored tensors, rewards are counted again from the texts, and kept weights are hashed again.
    """
    try:
        directory = RunDirectory(path)
    except RunDirectoryError as error:
        return [str(error)]
    reason = failure(path)
    if reason:
        return [f"the run failed: {reason}"]
    run, problems = read_run(path)
    if run is not None:
        problems += _ending(run)
        problems += _chain(run)
        problems += _samples(run)
        for step in run.steps:
            problems += _logprobs(run, step)
        problems += _weights(run)
        problems += _kernels(run)
    if directory.sealed:
        problems += seal_problems(directory)
    return problems


def seal(path: Path) -> Path:
    """Write ``COMPLETE``. Raises ValidationRefused for a problem, an earlier seal, or sources that were not a clean, known commit."""
    directory = RunDirectory(path)
    if directory.sealed:
        raise ValidationRefused(f"{path} is sealed already")
    problems = validate_run(path)
    run, _ = read_run(path)
    if run is not None:
        source = run.manifest.provenance
        if source["problem"] or source["dirty"] or not source["sha"]:
            problems.append(f"the sources were not a clean commit ({source['problem'] or 'dirty checkout'}): commit, and run again")
    if problems:
        raise ValidationRefused("; ".join(problems))
    return directory.seal()


def _ending(run: LoopRun) -> Iterator[str]:
    if run.manifest.outcome != "finished":
        yield f"the manifest says {run.manifest.outcome}: {run.manifest.reason}"
    numbers = [step.step for step in run.steps]
    if numbers != list(range(1, run.plan.steps + 1)):
        yield f"{METRICS} holds updates {numbers}, the plan asks for 1 … {run.plan.steps}"


def _chain(run: LoopRun) -> Iterator[str]:
    """Versions and hashes from the start weights to the last publication."""
    if run.manifest.start is None:
        yield f"{MANIFEST} does not say which weights the run started from"
        return
    version, held = run.manifest.start
    if held != run.plan.checkpoint.model_hash:
        yield f"the run started from {held}, the plan from {run.plan.checkpoint.model_hash}"
    for step in run.steps:
        new = (version + 1, step.hash_after)
        if (step.weight_version, step.hash_before) != (version, held):
            yield f"update {step.step} started from {(step.weight_version, step.hash_before)}, before it was {(version, held)}"
        if step.hash_after == step.hash_before:
            yield f"update {step.step} changed no weight"
        if not step.rollout == step.train == new or step.published_version != new[0]:
            yield f"update {step.step} published {new}, rollout read back {step.rollout}, trainer {step.train}"
        version, held = new
    if run.manifest.model_hashes != (run.manifest.start[1], *(step.hash_after for step in run.steps)):
        yield f"the hashes of {MANIFEST} are not those of {METRICS}"


def _samples(run: LoopRun) -> Iterator[str]:
    ids = [sample.sample_id for sample in run.samples]
    if ids != list(range(run.plan.steps * run.plan.samples)):
        yield f"{SAMPLES} holds {len(ids)} samples, not 0 … {run.plan.steps * run.plan.samples - 1} in order"
    for sample in run.samples:
        terms = sample.prompt.strip().rpartition(" ")[2].split("+")
        problem = Problem(tuple(int(term) for term in terms)) if all(term.isdecimal() for term in terms) else None
        kind, answer = run.plan.checkpoint.kind, sample.token_ids
        if problem is None or problem.prompt != sample.prompt or reward_of(kind, problem, answer, sample.text) != sample.reward:
            yield f"sample {sample.sample_id}: reward {sample.reward} does not follow from its prompt and response"
    for step in run.steps:
        rewards = [sample.reward for sample in run.samples if sample.step == step.step]
        if not rewards or abs(sum(rewards) / len(rewards) - step.reward_mean) > 1e-9:
            yield f"update {step.step}: the mean reward {step.reward_mean} is not that of {SAMPLES}"


def _logprobs(run: LoopRun, step: StepResult) -> Iterator[str]:
    name = logprobs_file(step.step)
    try:
        rows = load_file(run.path / name)
        compared = compare(step.logprob.name, rows["train"], rows["rollout"])
        stored = list(zip(rows["sample_ids"].tolist(), rows["positions"].tolist(), rows["token_ids"].tolist(), strict=True))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        yield f"{name} is unreadable: {_short(error)}"
        return
    tokens = [(s.sample_id, at, token) for s in run.samples if s.step == step.step for at, token in enumerate(s.token_ids)]
    if stored != tokens or rows["train"].shape != torch.Size([len(tokens)]):
        yield f"{name} does not hold the tokens of {SAMPLES}, one row each"
    if compared != step.logprob or step.tokens != len(tokens):
        yield f"{name} compares otherwise than {METRICS} says: {compared.mismatched_elements} of {compared.elements} tokens differ"
    if compared.problem or (run.plan.strict and not compared.equal):
        yield f"update {step.step}: {compared.mismatched_elements} of {compared.elements} logprobs differ {compared.problem}".rstrip()


def _weights(run: LoopRun) -> Iterator[str]:
    for step in run.steps[-run.plan.keep_versions :]:
        path = run.path / "weights" / f"v{step.published_version}"
        try:
            found = load_checkpoint(path).model_hash
        except CheckpointError as error:
            yield f"weights of update {step.step}: {error}"
            continue
        if found != step.hash_after:
            yield f"weights of update {step.step} hash to {found}, published was {step.hash_after}"


def _kernels(run: LoopRun) -> Iterator[str]:
    """A strict side names what it ran; a native side ran none of it."""
    for use in run.manifest.kernels:
        if not KERNEL_ID.fullmatch(use.kernel_id):
            yield f"kernel id {use.kernel_id!r} is not backend:operator:hash"
    for side, mode in (("rollout", run.plan.rollout_mode), ("train", run.plan.train_mode)):
        ran = [use for use in run.manifest.kernels if use.side == side]
        if (mode == "strict") != bool(ran):
            yield f"the {mode} {side} engine reports {len(ran)} rlk operators"
        read = run.manifest.engines.get(side, {})
        if read.get("mode") != mode or read.get("model_hash") != run.manifest.model_hashes[-1]:
            yield f"the {side} engine's read-back is not of a {mode} engine with the last published weights"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
