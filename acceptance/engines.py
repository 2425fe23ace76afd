"""Real vLLM and real Megatron-core for the cells: the loop's own runs, traced passes, and hand-in of what they leave behind."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from acceptance.chain import Chain, on_card, on_cpu
from acceptance.once import Once
from rlk.acceptance.cell import Cell, Platform
from rlk.acceptance.collector import Evidence
from rlk.acceptance.matrix import CHAIN_MODEL, CROSS_RANKS, CROSS_TRANSPORTS, SNAPSHOT_WORKLOAD, UPDATED_MODEL, WORKLOAD
from rlk.contract.arms import MIXED_MODES, Mode
from rlk.contract.models import QWEN3_8B, QWEN3_8B_SNAPSHOT, ModelShape
from rlk.contract.sampling import SamplingParams
from rlk.contract.workloads import SAMPLING_ROWS, SamplingRow
from rlk.evidence.bytes import Token
from rlk.evidence.rundir import new_run_id
from rlk.evidence.updates import Update, facts_of
from rlk.loop.cluster import Cluster
from rlk.loop.controller import run_loop
from rlk.loop.plan import RunPlan, make_plan, resolve_checkpoint
from rlk.loop.prepare import prepare_tiny
from rlk.loop.profile import DEFAULT_MODEL, Profile
from rlk.loop.records import RunSummary, StepResult, logprobs_file
from rlk.loop.synthetic import prepare_synthetic
from rlk.model.weights import load_checkpoint

UNIFORM_MODES: tuple[Mode, ...] = ("native", "strict")
PROMPTS, GROUP, KL_COEF = 8, 8, 1e-2
"""Of one update in an integration cell: 64 samples."""
PHASES = ("generate", "score", "update", "publish", "load")
"""What an update spends its time on."""


def tiny_checkpoint(root: Path) -> Path:
    """The checkpoint of `rlk prepare --tiny`, prepared now if nobody has; a run verifies it before it starts."""
    path = root / DEFAULT_MODEL
    if not path.exists():
        prepare_tiny(path)
    return path


def synthetic_checkpoint(root: Path, shape: ModelShape) -> Path:
    """Synthetic weights of a shape, prepared now if nobody has; a run verifies them before it starts."""
    path = root / "artifacts" / "models" / f"{shape.name}-synthetic"
    if not path.exists():
        prepare_synthetic(shape.name, path)
    return path


class Runs:
    """Every run that cells of a platform read, done at most once and in fresh directories below ``root``."""

    def __init__(self, cluster: Cluster, platform: Platform, root: Path, scratch: Path) -> None:
        self.cluster, self.platform, self.root, self.scratch = cluster, platform, root, scratch
        self._session = new_run_id()
        self._kept: list[Path] = []
        self.once = Once()

    @cached_property
    def checkpoint(self) -> Path:
        """What the runs start from."""
        return tiny_checkpoint(self.root) if self.platform == "cpu" else synthetic_checkpoint(self.root, UPDATED_MODEL[self.platform])

    def plan(self, name: str, sampling: SamplingParams, **profile: Any) -> RunPlan:
        """A run of the platform's checkpoint as `rlk run` would resolve it."""
        given = {"prompts": PROMPTS, "group_size": GROUP, "kl_coef": KL_COEF, **profile}
        return make_plan(
            Profile(
                device=self.cluster.device,
                model=self.checkpoint,
                workspace=self.root / "artifacts" / "runs",
                run_id=f"acceptance-{self._session}-{name}",
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_response_len=sampling.max_tokens,
                **given,
            )
        )

    def run(self, plan: RunPlan, cluster: Cluster | None = None) -> RunSummary:
        """Do a run. On a card its weights, which the engines have read back by then, go at its end, since they would fill the disk; those
        that the ranks of an engine hold, with which a cell compares them, go with the last cell."""
        try:
            return run_loop(plan, cluster or self.cluster, command="acceptance")
        finally:
            if self.platform != "cpu" and plan.topology.rollout_tp == 1:
                shutil.rmtree(plan.directory / "weights", ignore_errors=True)
            elif self.platform != "cpu":
                self._kept.append(plan.directory / "weights")

    def drop_weights(self) -> None:
        """After the last cell: remove the weights that runs on a card have left."""
        for weights in self._kept:
            shutil.rmtree(weights, ignore_errors=True)

    def integration(self, cell: Cell) -> RunSummary:
        """The run of an integration cell: a sampling row of the contract, each engine on one rank or, of ``CROSS_TRANSPORTS``, several."""
        row = next(r for r in SAMPLING_ROWS if r.name == cell.workload.rpartition("-")[2])
        if cell.subject in CROSS_TRANSPORTS and self.platform != "cpu":
            self.once(f"ranks-{cell.subject}", lambda: self._start_ranks(cell.subject, row))
        return self.once(f"{cell.subject}-{row.name}", lambda: self.run(self._row_plan(cell.subject, row)))

    def _row_plan(self, subject: str, row: SamplingRow) -> RunPlan:
        # Greedy responses to one prompt are equal, so that row takes as many prompts as it takes samples.
        shape: dict[str, Any] = {"prompts": PROMPTS * GROUP, "group_size": 1} if row.sampling.greedy else {}
        if subject in CROSS_TRANSPORTS:
            shape |= {**asdict(CROSS_RANKS[self.platform]), "transport": CROSS_TRANSPORTS[subject]}
        return self.plan(f"{subject}-{row.name}", row.sampling, steps=row.updates, **shape)

    def arm(self, train: Mode, rollout: Mode) -> RunSummary:
        """One update in which each side has its mode; sampling does not truncate, since a native draw returns no retained ids."""
        name, mixed = f"arm-{train}-{rollout}".replace("+", "_"), bool({train, rollout} & set(MIXED_MODES))
        if self.platform != "cpu" and not mixed:
            self.once("engines", self._start_engines)

        def make() -> RunSummary:
            if self.platform != "cpu" and mixed:
                self.cluster.stop()  # one card does not hold the engines of all arms
            plan = self.plan(name, SamplingParams(), steps=1, prompts=4, group_size=4)
            return self.run(plan.model_copy(update={"train_mode": train, "rollout_mode": rollout}))

        return self.once(name, make)

    def _start_engines(self) -> None:
        """Start the strict and the native engines at once, where the host has the cores for it; a run that opens one waits for it."""
        plan = self.plan("engines", SamplingParams(), steps=1)
        for mode in UNIFORM_MODES:
            self._open(plan, mode)

    def _start_ranks(self, several: str, row: SamplingRow) -> None:
        """Start the engines of a subject with several ranks, and those of one rank unless their run is done, at once; a run that opens one
        waits for it. What ran before ends: beside another session's chain of the whole model a card does not hold the ranks of two
        transports."""
        self.cluster.stop()
        for subject in ("RR", several):
            if f"{subject}-{row.name}" not in self.once:
                self._open(self._row_plan(subject, row), "strict")

    def _open(self, plan: RunPlan, mode: Mode) -> None:
        ranks = plan.topology
        self.cluster.rollout(mode, ranks.rollout_tp, plan.transport).start("open", plan.checkpoint.path, plan.context)
        opened = (plan.checkpoint.path, plan.micro_batch_size, plan.grpo, plan.adam)
        self.cluster.train(mode, ranks.tp, ranks.cp, plan.transport).start("open", *opened)

    def chain(self, cell: Cell) -> Chain:
        """Traced passes of both engines over the same tokens, under the weights that the cell's workload names."""
        scratch = self.scratch / cell.workload
        return self.once(f"chain-{cell.workload}", lambda: self._chain(cell.workload, scratch))

    def _chain(self, workload: str, scratch: Path) -> Chain:
        scratch.mkdir()
        if self.platform == "cpu":
            return on_cpu(self.cluster, resolve_checkpoint(self.checkpoint), scratch)
        if workload == WORKLOAD[self.platform]:
            return on_card(self.cluster, resolve_checkpoint(self.checkpoint), UPDATED_MODEL[self.platform].vocab_size, scratch)
        shape = CHAIN_MODEL[self.platform]
        path = snapshot_checkpoint(self.root) if workload == SNAPSHOT_WORKLOAD else synthetic_checkpoint(self.root, shape)
        return on_card(self.cluster, resolve_checkpoint(path), shape.vocab_size, scratch, alone=True)


def snapshot_checkpoint(root: Path) -> Path:
    """The pinned published weights. Raises FileNotFoundError or ValueError where they are absent, or not the pinned ones."""
    pin, path = QWEN3_8B_SNAPSHOT, root / "artifacts" / "models" / QWEN3_8B.name
    name = f"{pin.repository} at revision {pin.revision}"
    if not path.is_dir():
        raise FileNotFoundError(f"no snapshot of {name} in {path}: put it there")
    if not pin.model_hash:
        raise ValueError(f"the model hash of {name} is not pinned yet: record it in rlk/contract/models.py from a trusted download")
    if (found := load_checkpoint(path).model_hash) != pin.model_hash:
        raise ValueError(f"{path} hashes to {found}, pinned is {pin.model_hash}: download {name} again")
    return path


def kernels_of(side: str, found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Kernels of an engine's read-back by side: all under the engine's name, or, of one that reports its routes, each under its route's and
    what ran outside of them under the engine's. Raises ValueError where a route counts more calls than the engine."""
    outside = {(ran["op"], ran["backend"], ran["kernel_id"]): ran["calls"] for ran in found["kernels"]}
    routes = {f"{side}.{route}": what["kernels"] for route, what in (found.get("routes") or {}).items()}
    for name, kernels in routes.items():
        for ran in kernels:
            kernel = ran["op"], ran["backend"], ran["kernel_id"]
            outside[kernel] = outside.get(kernel, 0) - ran["calls"]
            if outside[kernel] < 0:
                raise ValueError(f"{name} counts more calls of {ran['op']} than its engine: run the arm in a new engine")
    rest = [{"op": op, "backend": backend, "kernel_id": name, "calls": calls} for (op, backend, name), calls in outside.items() if calls]
    return {**routes, side: rest}


def hand_in_engines(evidence: Evidence, engines: Mapping[str, Mapping[str, Any]]) -> None:
    """Kernels and identity of each side, as the engine itself read them back."""
    for side, found in engines.items():
        for name, kernels in kernels_of(side, found).items():
            evidence.kernels(name, kernels)
        evidence.fact(f"{side}_engine", {name: value for name, value in found.items() if name not in ("kernels", "modules")})


def hand_in_run(evidence: Evidence, summary: RunSummary) -> None:
    """Kernels, engines and figures of a run of the loop."""
    hand_in_engines(evidence, summary.manifest.engines)
    evidence.fact("run_directory", summary.directory.name)
    for name, value in facts_of([_update(step) for step in summary.steps]).items():
        evidence.fact(name, value)


def hand_in_timings(evidence: Evidence, summary: RunSummary) -> None:
    """Milliseconds of each phase, one sample per update, the first one's included."""
    for phase in PHASES:
        evidence.timing(phase, (1000 * step.timings_s[phase] for step in summary.steps))


def _update(step: StepResult) -> Update:
    return Update(
        step=step.step,
        tokens=step.logprob.elements,
        reward=step.reward_mean,
        kl=step.kl,
        before=step.hash_before,
        after=step.hash_after,
        published=step.train[1],
        read_back=step.rollout[1],
    )


def compare_logprobs(evidence: Evidence, summary: RunSummary) -> None:
    """Compare every token of every update again, from the tensors that the run wrote down."""
    for step in summary.steps:
        rows, tokens = _logprobs(summary, step.step)
        evidence.compare_tokens(f"update {step.step}: logprob", tokens, rows["train"], tokens, rows["rollout"])


def compare_with_one_rank(evidence: Evidence, summary: RunSummary, alone: RunSummary) -> None:
    """Compare the trainer's logprobs of every token with those of a run whose engines have one rank each."""
    for step in summary.steps:
        (rows, tokens), (others, expected) = (_logprobs(run, step.step) for run in (summary, alone))
        evidence.compare_tokens(f"update {step.step}: logprob of one rank", tokens, rows["train"], expected, others["train"])


def _logprobs(summary: RunSummary, step: int) -> tuple[dict[str, torch.Tensor], list[Token]]:
    rows = load_file(summary.directory / logprobs_file(step))
    return rows, list(zip(rows["sample_ids"].tolist(), rows["positions"].tolist()))


def hash_bytes(hexadecimal: str) -> torch.Tensor:
    """A model hash as uint8 [32]."""
    return torch.tensor(list(bytes.fromhex(hexadecimal)), dtype=torch.uint8)
