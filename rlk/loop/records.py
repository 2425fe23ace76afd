"""What a run of the loop leaves behind, as records: one line per update, one manifest, both together as a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from rlk.evidence.schema import Comparison, KernelUse, Record

SCHEMA_VERSION = 1

PLAN, MANIFEST, METRICS, SAMPLES = "plan.json", "manifest.json", "metrics.jsonl", "samples.jsonl"


def logprobs_file(step: int) -> str:
    """Tensors of one update: train, rollout (fp32), sample_ids, positions, token_ids (int64), one row per response token."""
    return f"logprobs-step{step}.safetensors"


class StepResult(Record):
    """One update, a line of ``metrics.jsonl``.

    weight_version: of the weights that generated and scored. logprob: trainer against rollout over all response tokens, by
    (sample id, position). flat_groups: groups whose rewards are all equal; empty_samples: ids without a response token; refused: sample
    id → why the rollout engine refused it. hash_before, hash_after: the trainer's model; published_version: the version of hash_after.
    rollout, train: (version, hash) that each engine read back when it had taken the publication. timings_s: seconds by phase. parts_s: of
    the parts that each engine's first rank timed within them, by side and part; empty in a run that timed none.
    """

    step: int
    weight_version: int
    logprob: Comparison
    tokens: int
    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float
    grad_scale: float
    lr: float
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    flat_groups: tuple[int, ...]
    empty_samples: tuple[int, ...]
    refused: dict[int, str]
    finish_reasons: dict[str, int]
    cached_tokens: int
    gradient_hashes: dict[str, str]
    hash_before: str
    hash_after: str
    published_version: int
    rollout: tuple[int, str]
    train: tuple[int, str]
    timings_s: dict[str, float]
    parts_s: dict[str, float] = Field(default_factory=dict)


class SampleLine(Record):
    """One sample, a line of ``samples.jsonl``. retained: kept ids per token where sampling truncated."""

    step: int
    sample_id: int
    group: int
    seed: int
    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    reward: float
    finish_reason: str
    cached_tokens: int
    weight_version: int
    retained: tuple[int, ...] | None


class Manifest(Record):
    """``manifest.json``, written once when the run ends, whichever way.

    reason: why it failed, "" if it did not. failed_comparison: the comparison that ended it. start: (version, hash) of the weights before
    the first update. kernels, engines: read back from both engines at the end; empty where an engine was lost.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    outcome: Literal["finished", "failed"]
    reason: str = ""
    failed_comparison: Comparison | None = None
    command: str
    started_at: str
    finished_at: str
    provenance: dict[str, JsonValue]
    environment: dict[str, JsonValue]
    start: tuple[int, str] | None
    model_hashes: tuple[str, ...]
    kernels: tuple[KernelUse, ...] = ()
    engines: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    timings_s: dict[str, float] = Field(default_factory=dict)


class RunSummary(Record):
    """A finished run: everything that acceptance and the report need."""

    directory: Path
    manifest: Manifest
    steps: tuple[StepResult, ...]

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Logprob comparison of every update."""
        return tuple(step.logprob for step in self.steps)

    @property
    def tokens(self) -> int:
        """Tokens compared."""
        return sum(step.logprob.elements for step in self.steps)

    @property
    def mismatched_tokens(self) -> int:
        """Tokens whose logprobs differ in at least one byte."""
        return sum(step.logprob.mismatched_elements for step in self.steps)

    @property
    def model_hashes(self) -> tuple[str, ...]:
        """Hash before the first update and after each one."""
        return self.manifest.model_hashes

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean reward of every update."""
        return tuple(step.reward_mean for step in self.steps)

    @property
    def kls(self) -> tuple[float, ...]:
        """KL estimate against the start weights of every update."""
        return tuple(step.kl for step in self.steps)
