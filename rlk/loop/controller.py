"""The loop: generate, score independently, compare bytes, reward, update, publish, load, read back; everything on record."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

import rlk
from rlk.contract.records import Request, Response
from rlk.evidence.bytes import compare, describe
from rlk.evidence.clock import Clock
from rlk.evidence.environment import freeze
from rlk.evidence.provenance import Provenance, read_provenance
from rlk.evidence.rundir import RunDirectory
from rlk.evidence.schema import Comparison, KernelUse
from rlk.loop.actors import EngineFault, Identity
from rlk.loop.arithmetic import Problem
from rlk.loop.cluster import Cluster, ClusterError, EngineLost, Remote
from rlk.loop.interrupt import remembered_interrupts
from rlk.loop.plan import RunPlan
from rlk.loop.records import MANIFEST, METRICS, PLAN, SAMPLES, Manifest, RunSummary, SampleLine, StepResult, logprobs_file
from rlk.loop.rewards import reward_of
from rlk.loop.tokenizer import TextTokenizer

ROOT = Path(rlk.__file__).resolve().parent.parent
RANK_FACTS = ("pid", "device", "parallel", "traffic", "kernels", "model_hash")
"""What is kept of each rank of a trainer with several; everything else is rank 0's."""


class RunFailed(RuntimeError):
    """The run ended for a named reason; its directory holds what happened until then."""

    def __init__(self, reason: str, directory: Path) -> None:
        super().__init__(f"{reason} (see {directory})")
        self.reason, self.directory = reason, directory


class _Stop(RuntimeError):
    """A check of the loop failed; carries the comparison that shows it, if one does."""

    def __init__(self, reason: str, comparison: Comparison | None = None) -> None:
        super().__init__(reason)
        self.comparison = comparison


class Observer(Protocol):
    """Told what the loop does, for progress on a screen."""

    def phase(self, step: int, name: str) -> None:
        """A phase of an update begins; step 0 is the start of the engines."""

    def finished(self, result: StepResult) -> None:
        """An update is complete and on record."""


class _Checked:
    """An observer that lets no phase begin and no update end after an interrupt."""

    def __init__(self, observer: Observer, check: Callable[[], None]) -> None:
        self._observer, self._check = observer, check

    def phase(self, step: int, name: str) -> None:
        self._check()
        self._observer.phase(step, name)

    def finished(self, result: StepResult) -> None:
        self._check()
        self._observer.finished(result)


class _Silent:
    def phase(self, step: int, name: str) -> None:
        pass

    def finished(self, result: StepResult) -> None:
        pass


def run_loop(
    plan: RunPlan,
    cluster: Cluster | None = None,
    *,
    tasks: Callable[[int], Sequence[Problem]] | None = None,
    observer: Observer | None = None,
    command: str = "",
) -> RunSummary:
    """Do the run in a new directory ``plan.directory``.

    cluster: an open one whose engines are reused; None starts one for this run. tasks: problems of an update, instead of the plan's.
    Raises RunDirectoryError if the directory exists. Any later failure leaves a manifest and FAILED with the reason in the directory and
    raises RunFailed; KeyboardInterrupt and other exits pass through, recorded in the same way.
    """
    with remembered_interrupts() as check:
        run = _Run(plan, tasks or plan.tasks, _Checked(observer or _Silent(), check), command)
        with run.recorded():
            if cluster is not None:
                return run.execute(cluster)
            run.observer.phase(0, "Ray")
            began = time.monotonic()
            own = Cluster(device=plan.device, ray_address=plan.ray_address, port=plan.port, numerics=plan.topology.numerics)
            with own, run.recorded():
                run.timings["ray"] = time.monotonic() - began
                return run.execute(own)


def align(responses: Sequence[Response], scores: Mapping[int, Sequence[float]]) -> dict[str, torch.Tensor]:
    """Rows by (sample id, position): sample_ids, positions, token_ids (int64), train, rollout (fp32).

    Raises ValueError where the trainer scored another sample or another number of tokens than the rollout generated.
    """
    rows: dict[str, list[Any]] = {"sample_ids": [], "positions": [], "token_ids": [], "train": [], "rollout": []}
    if scores.keys() != {r.sample_id for r in responses}:
        raise ValueError(f"samples {sorted(scores.keys() ^ {r.sample_id for r in responses})[:5]} were generated or scored, not both")
    for response in sorted(responses, key=lambda r: r.sample_id):
        count, mine = len(response.token_ids), scores[response.sample_id]
        if len(mine) != count:
            raise ValueError(f"sample {response.sample_id}: {len(mine)} scores for {count} tokens")
        rows["sample_ids"] += [response.sample_id] * count
        rows["positions"] += range(count)
        rows["token_ids"] += response.token_ids
        rows["train"] += mine
        rows["rollout"] += response.logprobs
    kinds = {"train": torch.float32, "rollout": torch.float32}
    return {name: torch.tensor(values, dtype=kinds.get(name, torch.int64)) for name, values in rows.items()}


class _Run:
    """State of one run; every method that fails names the reason."""

    def __init__(self, plan: RunPlan, tasks: Callable[[int], Sequence[Problem]], observer: Observer, command: str) -> None:
        self.plan, self.tasks, self.observer, self.command = plan, tasks, observer, command
        self.started_at = datetime.now(UTC)
        self.provenance = read_provenance(ROOT)
        self.files = RunDirectory.create(plan.directory)
        self.files.write_json(PLAN, plan.as_json())
        self.tokenizer = TextTokenizer.load(plan.checkpoint.path)
        self.steps: list[StepResult] = []
        self.start: Identity | None = None
        self.engines: dict[str, dict[str, Any]] = {}
        self.timings: dict[str, float] = {}
        self.manifest: Manifest | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Put whatever ends the run on record before it goes further; nested uses record once."""
        try:
            yield
        except RunFailed:
            raise
        except (_Stop, EngineFault, EngineLost, ClusterError, OSError) as error:
            self._failed(str(error), error)
            raise RunFailed(str(error), self.plan.directory) from error
        except (KeyboardInterrupt, SystemExit) as error:
            self._failed("interrupted" if isinstance(error, KeyboardInterrupt) else "terminated", error)
            raise
        except BaseException as error:
            self._failed(f"{type(error).__name__}: {' '.join(str(error).split())}", error)
            raise

    def execute(self, cluster: Cluster) -> RunSummary:
        """All updates on an open cluster."""
        plan = self.plan
        if cluster.device != plan.device:
            raise ClusterError(f"the cluster's engines run on {cluster.device}, the plan asks for {plan.device}: open a cluster for it")
        topology = plan.topology
        rollout = cluster.rollout(plan.rollout_mode, topology.rollout_tp, plan.transport)
        train = cluster.train(plan.train_mode, topology.tp, topology.cp, plan.transport)
        self._open(rollout, train)
        try:
            for step in range(1, plan.steps + 1):
                result = self._step(step, rollout, train)
                self.files.append_json(METRICS, result.model_dump(mode="json"))
                self.steps.append(result)
                self.observer.finished(result)
        except _Stop:
            with suppress(EngineFault, EngineLost):
                self._read_back(rollout, train)
            raise
        self._drop_old_weights()
        self._read_back(rollout, train)
        return RunSummary(directory=plan.directory, manifest=self._end("finished"), steps=tuple(self.steps))

    def _open(self, rollout: Remote, train: Remote) -> None:
        """Start both engines at once, or take both back to the start weights, under one version."""
        plan, began = self.plan, time.monotonic()
        self.observer.phase(0, "engines")
        waiting = rollout.start("open", plan.checkpoint.path, plan.context)
        train.call("open", plan.checkpoint.path, plan.micro_batch_size, plan.grpo, plan.adam)
        self.timings["open_train"] = time.monotonic() - began
        version, found = waiting.result()
        self.timings["open"] = time.monotonic() - began
        mine: Identity = train.call("adopt", plan.checkpoint.path, version)
        self.start = (version, found)
        if mine != self.start or found != plan.checkpoint.model_hash:
            raise _Stop(f"the engines start from {mine} and {self.start}, the plan from {plan.checkpoint.model_hash}: prepare it again")

    def _step(self, step: int, rollout: Remote, train: Remote) -> StepResult:
        plan, clock = self.plan, _Clock(step, self.observer)
        version, before = self._current()
        tasks = self.tasks(step)
        requests = plan.requests(step, [self.tokenizer.encode(task.prompt) for task in tasks])
        with clock("generate"):
            answering = rollout.start("generate", requests)
            self._drop_old_weights()
            responses: list[Response] = answering.result()
        _require_answers(step, requests, responses, version)
        with clock("score"):
            # The trainer is not even sent what it is compared with.
            blind = [replace(response, logprobs=(0.0,) * len(response.token_ids)) for response in responses]
            scores: dict[int, list[float]] = train.call("score", requests, blind)
        with clock("compare"):
            rewards = self._write_samples(step, tasks, requests, responses)
            logprob = self._compare(step, responses, scores)
        with clock("reference"):
            train.call("reference")
        with clock("update"):
            metrics = train.call("update", rewards, {i: plan.group(i) for i in rewards}, plan.adam.lr)
        published_version = version + 1
        with clock("publish"):
            published = self._publish(step, train, published_version, before, metrics)
        with clock("load"):
            loading = rollout.start("load", self._weights(published_version), published_version, published)
            # Ranks put whole weights together to hash them: a card holds those of one engine at a time.
            served: Identity | None = loading.result() if plan.topology.train_ranks > 1 else None
            held: Identity = train.call("identity")
            hashes = train.call("gradient_hashes")
            served = served or loading.result()
        if not served == held == (published_version, published):
            raise _Stop(f"update {step}: published {(published_version, published)}, rollout serves {served}, trainer holds {held}")
        names = StepResult.model_fields.keys() & metrics.keys()
        return StepResult(
            **{name: metrics[name] for name in names},
            step=step,
            weight_version=version,
            logprob=logprob,
            refused={r.sample_id: r.finish_reason for r in responses if r.finish_reason.startswith("refused")},
            finish_reasons=dict(Counter(r.finish_reason.split(":")[0] for r in responses)),
            cached_tokens=sum(r.cached_tokens for r in responses),
            gradient_hashes=hashes,
            hash_before=before,
            hash_after=metrics["model_hash_after"],
            published_version=published_version,
            rollout=served,
            train=held,
            timings_s=clock.seconds,
            parts_s={
                f"{side} {part}": seconds
                for side, engine in (("train", train), ("rollout", rollout))
                for part, seconds in engine.start("seconds").each()[0].items()
            },
        )

    def _current(self) -> Identity:
        """Version and hash that both engines hold now."""
        assert self.start is not None
        return self.steps[-1].rollout if self.steps else self.start

    def _compare(self, step: int, responses: Sequence[Response], scores: Mapping[int, Sequence[float]]) -> Comparison:
        try:
            rows = align(responses, scores)
        except ValueError as error:
            raise _Stop(f"update {step}: {error}") from error
        if not len(rows["train"]):
            raise _Stop(f"update {step}: no response has a token: nothing to compare or to learn from")
        save_file(rows, self.files.path / logprobs_file(step))
        comparison = compare(f"update {step}: logprobs, trainer against rollout", rows["train"], rows["rollout"])
        if comparison.problem or (self.plan.strict and not comparison.equal):
            raise _Stop(describe(comparison), comparison)
        return comparison

    def _write_samples(
        self, step: int, tasks: Sequence[Problem], requests: Sequence[Request], responses: Sequence[Response]
    ) -> dict[int, float]:
        """Put every sample on record; returns rewards by sample id."""
        rewards: dict[int, float] = {}
        lines = []
        for at, (request, response) in enumerate(zip(requests, responses, strict=True)):
            task, text = tasks[at // self.plan.group_size], self.tokenizer.decode(response.token_ids)
            rewards[response.sample_id] = reward_of(self.plan.checkpoint.kind, task, response.token_ids, text)
            line = SampleLine(
                step=step,
                sample_id=response.sample_id,
                group=self.plan.group(response.sample_id),
                seed=request.sampling.seed,
                prompt=task.prompt,
                prompt_ids=response.prompt_ids,
                token_ids=response.token_ids,
                text=text,
                reward=rewards[response.sample_id],
                finish_reason=response.finish_reason,
                cached_tokens=response.cached_tokens,
                weight_version=response.weight_version,
                retained=None if response.support is None else tuple(len(kept) for kept in response.support),
            )
            lines.append(line.model_dump(mode="json"))
        self.files.append_json(SAMPLES, *lines)
        return rewards

    def _publish(self, step: int, train: Remote, version: int, before: str, metrics: Mapping[str, Any]) -> str:
        after: str = metrics["model_hash_after"]
        if metrics["model_hash_before"] != before:
            raise _Stop(f"update {step}: the trainer updated {metrics['model_hash_before']}, the rollout had served {before}")
        if after == before:
            flat, groups = len(metrics["flat_groups"]), self.plan.samples // self.plan.group_samples
            raise _Stop(
                f"update {step} changed no bf16 weight (gradient norm {metrics['grad_norm']:g}, {flat} of {groups} groups with "
                f"equal rewards): raise --lr above {metrics['lr']:g}, --group-size or --temperature"
            )
        published: str = train.call("publish", self._weights(version), version)
        if published != after:
            raise _Stop(f"update {step}: the trainer holds {after} and published {published}")
        return published

    def _weights(self, version: int) -> Path:
        return self.files.path / "weights" / f"v{version}"

    def _drop_old_weights(self) -> None:
        """Of all but the last ``keep_versions``; gigabytes take their time, so it is done while the rollout engine works."""
        old = self._current()[0] - self.plan.keep_versions
        if old > 0:
            shutil.rmtree(self._weights(old), ignore_errors=True)

    def _read_back(self, rollout: Remote, train: Remote) -> None:
        first, *others = train.start("readback").each()
        if others:
            first = {**first, "ranks": [{name: found[name] for name in RANK_FACTS} for found in (first, *others)]}
        self.engines = {"rollout": rollout.call("readback"), "train": first}

    def _failed(self, reason: str, error: BaseException) -> None:
        if self.manifest is not None:
            return
        trace = getattr(error, "trace", "")
        self.files.mark_failed(f"{reason}\n\n{trace}" if trace else reason)
        self._end("failed", reason, getattr(error, "comparison", None))

    def _end(self, outcome: str, reason: str = "", comparison: Comparison | None = None) -> Manifest:
        hashes = ([self.start[1]] if self.start else []) + [step.hash_after for step in self.steps]
        self.manifest = Manifest.model_validate(
            {
                "run_id": self.plan.run_id,
                "outcome": outcome,
                "reason": reason,
                "failed_comparison": comparison,
                "command": self.command,
                "started_at": self.started_at.isoformat(timespec="seconds"),
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "provenance": self._provenance().model_dump(mode="json"),
                "environment": freeze(ROOT),
                "start": self.start,
                "model_hashes": hashes,
                "kernels": [KernelUse(side=side, **ran) for side, found in self.engines.items() for ran in found["kernels"]],
                "engines": self.engines,
                "timings_s": self.timings,
            }
        )
        self.files.write_json(MANIFEST, self.manifest.model_dump(mode="json"))
        return self.manifest

    def _provenance(self) -> Provenance:
        """Of the start; a problem if the sources are others by now."""
        if read_provenance(ROOT) == self.provenance:
            return self.provenance
        return self.provenance.model_copy(update={"problem": "the sources changed during the run"})


class _Clock(Clock):
    """Seconds per phase; tells the observer which one begins."""

    def __init__(self, step: int, observer: Observer) -> None:
        super().__init__()
        self._step, self._observer = step, observer

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._observer.phase(self._step, name)
        with super().__call__(name):
            yield


def _require_answers(step: int, requests: Sequence[Request], responses: Sequence[Response], version: int) -> None:
    """One response per request, in order, with the request's prompt, from the current weights."""
    if [(r.sample_id, r.prompt_ids) for r in requests] != [(r.sample_id, r.prompt_ids) for r in responses]:
        raise _Stop(f"update {step}: the rollout engine did not answer the {len(requests)} requests one by one")
    for response in responses:
        if response.weight_version != version:
            raise _Stop(f"update {step}: sample {response.sample_id} comes from weight version {response.weight_version}, not {version}")
