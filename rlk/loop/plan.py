"""A resolved, validated run: everything that `rlk run` will do, before anything is written or started."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from rlk.contract.arms import Mode
from rlk.contract.numerics import DEFAULT, Numerics
from rlk.contract.records import Request
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import Topology
from rlk.contract.update import AdamParams, GrpoParams
from rlk.evidence.rundir import new_run_id
from rlk.loop.arithmetic import Problem, problems
from rlk.loop.labels import LABEL_FILE, verify_checkpoint
from rlk.loop.profile import DEFAULT_MODEL, NUMERICS, Device, Profile
from rlk.loop.tokenizer import TextTokenizer
from rlk.model.config import Qwen3Config
from rlk.model.weights import load_checkpoint
from rlk.parallel.transport import Transport

ROLLOUT_TP: dict[Device, tuple[int, ...]] = {"cpu": (1, 2), "cuda": (1, 2, 4, 8)}
"""Ranks of vLLM in the loop."""
TRAIN_RANKS = 8
"""Most ranks of the trainer in the loop."""
PREPARED_LR = 1e-4
"""Every update changes bf16 weights of a prepared model, and the tiny one's rewards rise steadily; at 3e-4 only in larger batches."""
LOOPBACK = "127.0.0.1"
UNLABELLED = "unlabelled"
"""Kind of a checkpoint that `rlk prepare` did not make."""


class PlanError(ValueError):
    """A run that cannot be done here; one line with the remedy."""


class CheckpointFacts(BaseModel):
    """A verified start checkpoint. kind: its label, "unlabelled" without one. positions: most tokens of prompt and response together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    kind: str
    model_hash: str
    positions: int


class RunPlan(BaseModel):
    """What a run does. Made by :func:`make_plan`; acceptance derives its arms with ``model_copy``.

    device: what both engines compute on. train_mode, rollout_mode: "strict" computes with this project's operators, "native" is the stock
    engine; only the ablation has others. context: tokens of prompt and response together. sampling: of every request, but for its seed.
    unusable_prompts: numbers (from 0, over the whole run) of prompts that do not fit the context; they are sent all the same, come back
    refused and are reported. transport: what moves bytes between ranks that have a card each, None for each engine's own
    choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    directory: Path
    device: Device
    train_mode: Mode
    rollout_mode: Mode
    checkpoint: CheckpointFacts
    context: int
    topology: Topology
    sampling: SamplingParams
    steps: int
    prompts: int
    group_size: int
    micro_batch_size: int
    adam: AdamParams
    grpo: GrpoParams
    seed: int
    keep_versions: int
    ray_address: str | None
    port: int
    shortest_prompt: int
    longest_prompt: int
    unusable_prompts: tuple[int, ...] = ()
    transport: Transport | None = None

    @property
    def strict(self) -> bool:
        """Both engines are strict: every logprob byte must be equal."""
        return self.train_mode == self.rollout_mode == "strict"

    @property
    def samples(self) -> int:
        """Samples of one update."""
        return self.prompts * self.group_size

    @property
    def group_samples(self) -> int:
        """Samples whose rewards are compared with each other: the responses to one prompt.

        Greedy responses to one prompt are equal and would teach nothing, so there it is all samples of the update.
        """
        return self.samples if self.sampling.greedy else self.group_size

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")

    def tasks(self, step: int) -> list[Problem]:
        """Problems of update ``step`` (1 is the first)."""
        return problems(step * self.prompts, self.seed)[-self.prompts :]

    def requests(self, step: int, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
        """``group_size`` requests per prompt. Sample ids count over the whole run; each seed follows from (seed, step, sample id)."""
        first = (step - 1) * self.samples
        return [
            Request(i, prompts[(i - first) // self.group_size], replace(self.sampling, seed=sample_seed(self.seed, step, i)))
            for i in range(first, first + len(prompts) * self.group_size)
        ]

    def group(self, sample_id: int) -> int:
        """Number of the sample's group, over the whole run."""
        return sample_id // self.group_samples


def sample_seed(run_seed: int, step: int, sample_id: int) -> int:
    """Seed of one request: 63 bits of SHA-256 over the three numbers."""
    digest = hashlib.sha256(f"{run_seed} {step} {sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_plan(profile: Profile) -> RunPlan:
    """Resolve and check a profile; reads the checkpoint and writes nothing.

    Raises PlanError, ContractError, CheckpointError or PrepareError, each one line that names the value and the remedy.
    """
    mode: Mode = "strict" if profile.mode == "consistency" else "native"
    topology = _topology(profile, mode)
    sampling = SamplingParams(profile.temperature, profile.top_p, profile.top_k, profile.max_response_len)
    if mode == "native" and sampling.truncates:
        raise PlanError(
            "mode=native: the stock engine does not hand over retained ids, so top_p < 1 or top_k > 0 cannot be scored: drop them"
        )
    grpo = GrpoParams(group_size=profile.group_size, kl_coef=profile.kl_coef)
    run_id = profile.run_id or new_run_id()
    directory = profile.workspace.absolute() / run_id
    if directory.exists():
        raise PlanError(f"run directory {directory} exists: choose another --run-id, runs are never overwritten")
    _require_device(profile.device)
    _require_writable(directory)
    _require_port(profile.port)
    if profile.ray_address:
        _require_answer(profile.ray_address)
    checkpoint = resolve_checkpoint(profile.model, topology.numerics)
    context = profile.context or checkpoint.positions
    if context > checkpoint.positions:
        raise PlanError(f"context={context} exceeds the {checkpoint.positions} positions of the model: use fewer")
    tokenizer = TextTokenizer.load(checkpoint.path)
    lr = profile.lr if profile.lr is not None else PREPARED_LR if checkpoint.kind != UNLABELLED else AdamParams.lr
    lengths = [len(tokenizer.encode(task.prompt)) for task in problems(profile.steps * profile.prompts, profile.seed)]
    return RunPlan(
        run_id=run_id,
        directory=directory,
        device=profile.device,
        train_mode=mode,
        rollout_mode=mode,
        checkpoint=checkpoint,
        context=context,
        topology=topology,
        sampling=sampling,
        steps=profile.steps,
        prompts=profile.prompts,
        group_size=profile.group_size,
        micro_batch_size=profile.micro_batch_size,
        adam=AdamParams(lr=lr, weight_decay=profile.weight_decay),
        grpo=grpo,
        seed=profile.seed,
        keep_versions=profile.keep_versions,
        ray_address=profile.ray_address,
        port=profile.port,
        shortest_prompt=min(lengths),
        longest_prompt=max(lengths),
        unusable_prompts=unusable_prompts(lengths, sampling.max_tokens, context),
        transport=profile.transport,
    )


def describe(plan: RunPlan) -> list[tuple[str, str]]:
    """The plan as (what, value) rows for a person."""
    t, s, numerics = plan.topology, plan.sampling, plan.topology.numerics
    kept = f"top-p {s.top_p:g}, top-k {s.top_k}" if s.truncates else "every token kept"
    engines = f"trainer {plan.train_mode} (Megatron-core), rollout {plan.rollout_mode} (vLLM), on {plan.device}"
    cluster = f"the one at {plan.ray_address}" if plan.ray_address else "an own local one, loopback, no dashboard"
    rows = [
        ("run directory", str(plan.directory)),
        ("engines", engines),
        ("checkpoint", f"{plan.checkpoint.path} ({plan.checkpoint.kind}, {plan.checkpoint.model_hash[:16]}…)"),
        ("topology", f"trainer TP {t.tp} × CP {t.cp}, rollout TP {t.rollout_tp} × CP {t.rollout_cp}"),
        ("contract", ", ".join(f"{name} {value}" for name, value in numerics.as_dict().items())),
        ("sampling", f"{'greedy' if s.greedy else f'temperature {s.temperature:g}'}, {kept}, at most {s.max_tokens} tokens"),
        ("work", f"{plan.steps} updates × {plan.prompts} prompts × {plan.group_size} responses, micro-batches of {plan.micro_batch_size}"),
        ("prompts", f"{plan.shortest_prompt}…{plan.longest_prompt} tokens in a context of {plan.context}"),
        ("groups", "all responses of an update (greedy ones to a prompt are equal)" if s.greedy else "the responses to a prompt"),
        ("update", f"GRPO, lr {plan.adam.lr:g}, weight decay {plan.adam.weight_decay:g}, KL coefficient {plan.grpo.kl_coef:g}"),
        ("seed", str(plan.seed)),
        ("published weights", f"one version per update, the last {plan.keep_versions} kept"),
        ("Ray", f"{cluster}; trainer rendezvous on {f'port {plan.port}' if plan.port else 'a free port'}"),
        (
            "ends as failed on",
            "a differing logprob byte, an unchanged or unconfirmed hash" if plan.strict else "an unchanged or unconfirmed hash",
        ),
    ]
    if plan.unusable_prompts:
        rows.append(("refused prompts", f"{len(plan.unusable_prompts)} do not fit the context, first number {plan.unusable_prompts[0]}"))
    return rows


def _topology(profile: Profile, mode: Mode) -> Topology:
    numerics = NUMERICS[profile.device]
    topology = Topology(tp=profile.tp, cp=profile.cp, rollout_tp=profile.rollout_tp, rollout_cp=profile.rollout_cp, numerics=numerics)
    if topology.rollout_cp != 1:
        raise PlanError(f"rollout_cp={topology.rollout_cp} does not run in the loop: vLLM here has no context parallelism, leave it at 1")
    place = f"tp={topology.tp}, cp={topology.cp}"
    if topology.train_ranks > TRAIN_RANKS:
        raise PlanError(f"{place} does not run here: the trainer has at most {TRAIN_RANKS} ranks")
    if topology.train_ranks > 1 and mode == "native":
        raise PlanError(f"mode=native with {place}: the stock trainer runs on one rank, leave --tp and --cp out")
    ranks, cpus = topology.rollout_tp, len(os.sched_getaffinity(0))
    if ranks not in ROLLOUT_TP[profile.device]:
        allowed = ", ".join(map(str, ROLLOUT_TP[profile.device]))
        raise PlanError(f"rollout_tp={ranks} does not run on {profile.device}: use one of {allowed}")
    if ranks > 1 and mode == "native":
        raise PlanError(f"mode=native with rollout_tp={ranks}: the stock engine runs on one rank, leave --rollout-tp out")
    usable = lambda count: max(n for n in ROLLOUT_TP[profile.device] if n <= count)
    if ranks > cpus:
        raise PlanError(f"rollout_tp={ranks} needs as many CPUs, here are {cpus}: use {usable(cpus)}")
    if profile.device == "cuda" and ranks > 1 and 0 < (cards := torch.cuda.device_count()) < ranks:
        raise PlanError(f"rollout_tp={ranks} needs as many cards, torch sees {cards}: use {usable(cards)}")
    if profile.transport and (profile.device == "cpu" or 0 < torch.cuda.device_count() < topology.train_ranks):
        raise PlanError(f"transport={profile.transport} wants a card for each rank of an engine: leave --transport out")
    return topology


def resolve_checkpoint(model: Path | None, numerics: Numerics = DEFAULT) -> CheckpointFacts:
    """Load and check the checkpoint that a run would start from; ``None`` is the one that `rlk prepare --tiny` writes.

    Raises PlanError if there is none, CheckpointError, PrepareError or ContractError for one that cannot be used.
    """
    path = (model or DEFAULT_MODEL).absolute()
    if not path.is_dir():
        remedy = "run `rlk prepare --tiny`, or give --model DIR" if model is None else "check --model, or run `rlk prepare --tiny`"
        raise PlanError(f"no checkpoint in {path}: {remedy}")
    label = verify_checkpoint(path) if (path / LABEL_FILE).exists() else None
    config = Qwen3Config.from_json(path)
    config.require(numerics)
    return CheckpointFacts(
        path=path,
        kind=label.kind if label else UNLABELLED,
        model_hash=label.model_hash if label else load_checkpoint(path).model_hash,
        positions=config.max_position_embeddings,
    )


def unusable_prompts(lengths: Sequence[int], response: int, context: int) -> tuple[int, ...]:
    """Numbers of the prompts that leave no room; PlanError if none is usable or a usable one leaves too little for a response."""
    usable = [length for length in lengths if length < context]
    if not usable:
        raise PlanError(f"every prompt (from {min(lengths)} tokens) fills the context of {context}: use a checkpoint with a longer context")
    if max(usable) + response > context:
        raise PlanError(
            f"max_response_len={response} after a prompt of {max(usable)} tokens exceeds the context of {context}: "
            f"use {context - max(usable)} or less"
        )
    return tuple(at for at, length in enumerate(lengths) if length >= context)


def _require_device(device: Device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("device=cuda: torch sees no CUDA card here: use --device cpu, or a machine with a card and torch's CUDA build")


def _require_writable(directory: Path) -> None:
    nearest = next(parent for parent in directory.parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = "a file" if not nearest.is_dir() else "not writable"
        raise PlanError(f"no run directory can be made in {directory.parent}, {nearest} is {what}: choose another --workspace")


def _require_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise PlanError(
                f"port {port} on {LOOPBACK} cannot be opened ({error.strerror}): choose another, or 0 for a free one"
            ) from error


def _require_answer(address: str) -> None:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise PlanError(
            f"ray_address={address} does not answer ({error}): start Ray there, or leave --ray-address out for an own cluster"
        ) from error
