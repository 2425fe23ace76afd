"""Real vLLM and real Megatron-core for the cells: the loop's own runs, traced passes, and hand-in of what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.matrix import ROLLOUT_TP2
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.update import AdamParams, GrpoParams
from rlk.contract.workloads import SAMPLING_ROWS, SamplingRow
from rlk.evidence.bytes import Token
from rlk.evidence.rundir import new_run_id
from rlk.evidence.updates import Update, facts_of
from rlk.loop.cluster import Cluster, Remote
from rlk.loop.controller import run_loop
from rlk.loop.plan import EngineMode, RunPlan, make_plan
from rlk.loop.prepare import prepare_tiny
from rlk.loop.profile import DEFAULT_MODEL, Profile
from rlk.loop.records import RunSummary, StepResult, logprobs_file

PROMPTS, GROUP, KL_COEF = 8, 8, 1e-2
"""Of one update in an integration cell: 64 samples."""

CHAIN_PROMPTS = (5, 16, 33, 64, 100, 129)
"""Prompt lengths of the chain: below, at and above a page, a tile, a split and the token budget of one engine step."""
CHAIN_TOKENS = 24


def tiny_checkpoint(root: Path) -> Path:
    """The checkpoint of `rlk prepare --tiny`, prepared now if nobody has; a run verifies it before it starts."""
    path = root / DEFAULT_MODEL
    if not path.exists():
        prepare_tiny(path)
    return path


class Runs:
    """Every run that cells read, done at most once and in fresh directories under ``workspace``."""

    def __init__(self, cluster: Cluster, checkpoint: Path, workspace: Path, scratch: Path) -> None:
        self.cluster, self.checkpoint, self.workspace, self.scratch = cluster, checkpoint, workspace, scratch
        self._session = new_run_id()
        self._done: dict[str, RunSummary | Exception] = {}
        self._chain: Chain | None = None

    def plan(self, name: str, sampling: SamplingParams, **profile: Any) -> RunPlan:
        """A run of the tiny checkpoint as `rlk run` would resolve it."""
        given = {"prompts": PROMPTS, "group_size": GROUP, "kl_coef": KL_COEF, **profile}
        return make_plan(
            Profile(
                model=self.checkpoint,
                workspace=self.workspace,
                run_id=f"acceptance-{self._session}-{name}",
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_response_len=sampling.max_tokens,
                **given,
            )
        )

    def once(self, name: str, make: Callable[[], RunSummary]) -> RunSummary:
        """The run called ``name``; one that failed before fails again with the same reason, it is not repeated."""
        if name not in self._done:
            try:
                self._done[name] = make()
            except Exception as error:
                self._done[name] = error
        done = self._done[name]
        if isinstance(done, Exception):
            raise done
        return done

    def integration(self, cell: Cell) -> RunSummary:
        """The run of an integration cell: a sampling row of the contract, on one or two rollout ranks."""
        row = next(r for r in SAMPLING_ROWS if r.name == cell.workload.partition("-")[2])
        ranks = 2 if cell.subject == ROLLOUT_TP2 else 1
        return self.once(
            f"{cell.subject}-{row.name}", lambda: run_loop(self._row_plan(cell.subject, row, ranks), self.cluster, command="acceptance")
        )

    def _row_plan(self, subject: str, row: SamplingRow, ranks: int) -> RunPlan:
        # Greedy responses to one prompt are equal, so that row takes as many prompts as it takes samples.
        shape = {"prompts": PROMPTS * GROUP, "group_size": 1} if row.sampling.greedy else {}
        return self.plan(f"{subject}-{row.name}", row.sampling, steps=row.updates, rollout_tp=ranks, **shape)

    def arm(self, train: EngineMode, rollout: EngineMode) -> RunSummary:
        """One update in which each side is strict or native; sampling does not truncate, since a native engine returns no retained ids."""
        name = f"arm-{train}-{rollout}"

        def make() -> RunSummary:
            plan = self.plan(name, SamplingParams(), steps=1, prompts=4, group_size=4)
            return run_loop(plan.model_copy(update={"train_mode": train, "rollout_mode": rollout}), self.cluster, command="acceptance")

        return self.once(name, make)

    def chain(self) -> Chain:
        """Traced passes of both engines over the same tokens."""
        if self._chain is None:
            self._chain = Chain.record(self)
        return self._chain


def hand_in_engines(evidence: Evidence, engines: Mapping[str, Mapping[str, Any]]) -> None:
    """Kernels and identity of each side, as the engine itself read them back."""
    for side, found in engines.items():
        evidence.kernels(side, found["kernels"])
        evidence.fact(f"{side}_engine", {name: value for name, value in found.items() if name not in ("kernels", "modules")})


def hand_in_run(evidence: Evidence, summary: RunSummary) -> None:
    """Kernels, engines and figures of a run of the loop."""
    hand_in_engines(evidence, summary.manifest.engines)
    evidence.fact("run_directory", summary.directory.name)
    for name, value in facts_of([_update(step) for step in summary.steps]).items():
        evidence.fact(name, value)


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
        rows = load_file(summary.directory / logprobs_file(step.step))
        tokens: list[Token] = list(zip(rows["sample_ids"].tolist(), rows["positions"].tolist()))
        evidence.compare_tokens(f"update {step.step}: logprob", tokens, rows["train"], tokens, rows["rollout"])


def hash_bytes(hexadecimal: str) -> torch.Tensor:
    """A model hash as uint8 [32]."""
    return torch.tensor(list(bytes.fromhex(hexadecimal)), dtype=torch.uint8)


@dataclass(frozen=True)
class Chain:
    """Intermediates of three passes. decode: vLLM generating; prefill: vLLM reading the same tokens as prompts; train: Megatron scoring.

    Each maps "{sample}/{name}" to rows, and "{sample}/{name}.positions" to the logical positions of these rows.
    """

    responses: tuple[Response, ...]
    decode: Mapping[str, torch.Tensor]
    prefill: Mapping[str, torch.Tensor]
    train: Mapping[str, torch.Tensor]
    engines: Mapping[str, Mapping[str, Any]]
    model_hash: str

    @classmethod
    def record(cls, runs: Runs) -> Chain:
        """Greedy generation, so that a prefill of the generated tokens predicts the same next token."""
        plan = runs.plan("chain", SamplingParams(temperature=0.0, max_tokens=CHAIN_TOKENS))
        rollout, train = runs.cluster.rollout("strict"), runs.cluster.train("strict")
        served = open_engines(plan, rollout, train)
        text = b"Add step by step: 3+8+5+9\n3+8=11;11+5=16;16+9=25;#25 " * 3
        requests = [Request(i, tuple(text[i : i + n]), plan.sampling) for i, n in enumerate(CHAIN_PROMPTS)]
        files = {name: runs.scratch / f"{name}.safetensors" for name in ("decode", "prefill", "train")}
        responses = rollout.call("trace", requests, files["decode"])
        once = SamplingParams(temperature=0.0, max_tokens=1)
        again = [Request(r.sample_id, (*r.prompt_ids, *r.token_ids[:-1]), once) for r in responses]
        rollout.call("trace", again, files["prefill"])
        train.call("trace", requests, responses, files["train"])
        engines = {"rollout": rollout.call("readback"), "train": train.call("readback")}
        loaded = {name: load_file(path) for name, path in files.items()}
        return cls(tuple(responses), loaded["decode"], loaded["prefill"], loaded["train"], engines, served)

    def pairs(self, cell: Cell) -> Mapping[str, tuple[list[Token], torch.Tensor, list[Token], torch.Tensor]]:
        """What a chain cell compares: per intermediate (of every layer) both sides' rows with their tokens."""
        names = {key.partition("/")[2] for key in self.decode if not key.endswith(".positions")}
        wanted = sorted(n for n in names if n.split(".")[-1] == cell.judgment)
        return {n: self._sides(n, cell.subject) for n in wanted}

    def _sides(self, name: str, subject: str) -> tuple[list[Token], torch.Tensor, list[Token], torch.Tensor]:
        sides: tuple[list[Token], list[torch.Tensor], list[Token], list[torch.Tensor]] = ([], [], [], [])
        for response in self.responses:
            key = f"{response.sample_id}/{name}"
            at = self.decode[f"{key}.positions"]
            if subject == "train_vs_rollout":
                mine, other = self.decode[key], self.train[key][at]
            else:
                # Generated positions only: the prompt's were prefilled on both sides.
                keep = at >= len(response.prompt_ids)
                found = self.prefill[f"{key}.positions"]
                common = keep & torch.isin(at, found)
                at, mine = at[common], self.decode[key][common]
                other = self.prefill[key][torch.isin(found, at)]
            tokens = [(response.sample_id, int(p)) for p in at]
            for to, add in zip(sides, (tokens, [mine], tokens, [other])):
                to.extend(add)
        return sides[0], torch.cat(sides[1]), sides[2], torch.cat(sides[3])


def open_engines(plan: RunPlan, rollout: Remote, train: Remote) -> str:
    """Both engines on the plan's checkpoint under one version; returns the model hash that both read back."""
    train.call("open", plan.checkpoint.path, plan.micro_batch_size, GrpoParams(), AdamParams())
    version, served = rollout.call("open", plan.checkpoint.path, plan.checkpoint.context)
    held = train.call("adopt", plan.checkpoint.path, version)
    if held != (version, served):
        raise RuntimeError(f"the trainer holds {held}, the rollout serves {(version, served)}")
    return str(served)
