"""The trainer's side of the chain on a card, in a process of its own: full depth, every layout, gradients; no optimizer state.

Whole traces and gradients of a large model are compared where they lie; what the rollout is compared with goes to safetensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlk.contract.numerics import Numerics
from rlk.contract.records import Request, Response
from rlk.contract.topology import Topology
from rlk.contract.update import GrpoParams
from rlk.evidence.bytes import compare
from rlk.evidence.schema import Comparison
from rlk.kernels import dispatch
from rlk.model.config import Qwen3Config
from rlk.model.layout import Unpacked, pack_weights
from rlk.model.trace import Trace
from rlk.model.weights import load_checkpoint, model_hash
from rlk.train import process, readback
from rlk.train.batch import MicroBatch, Sample, micro_batch, pair
from rlk.train.objective import BatchLoss
from rlk.train.strict import StrictModel

Rows = dict[str, torch.Tensor]
"""Kept rows of every intermediate by name, samples in id order, positions ascending."""


@functools.cache
def _packed(checkpoint: str, numerics: Numerics) -> tuple[Qwen3Config, Rows]:
    source = load_checkpoint(Path(checkpoint))
    return source.config, pack_weights(source.tensors, source.config, numerics)


def load(rank: int, job: dict[str, Any]) -> None:
    """Bring the job's weights into memory, before a :func:`chain` that wants them."""
    _packed(job["checkpoint"], Numerics(**job["numerics"]))


def chain(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Score the job's samples in every layout, back-propagate, and compare.

    job: checkpoint, device, numerics (fields), requests and responses (plain), positions to keep of each sample, permutation of the
    samples, learner (the sample whose gradients are taken alone), out (file of the packed layout's rows, "{sample}/{name}" with their
    ".positions").
    Returns comparisons by judgment (plain), the engine's read-back and the hash of the weights that computed.
    """
    device, numerics = process.require_device(job["device"]), Numerics(**job["numerics"])
    parallel = process.start(rank, 0, Topology(numerics=numerics), device=device)
    dispatch.reset_readback()
    config, packed = _packed(job["checkpoint"], numerics)
    model = StrictModel(config, numerics, packed, parallel, device)
    samples = pair([Request.from_plain(r) for r in job["requests"]], [Response.from_plain(r) for r in job["responses"]])
    pass_ = _Passes(model, samples, job["positions"], device)
    together = pass_.traced([range(len(samples))])
    judgments = {
        "batch_of_one": _compare(pass_.traced([[at] for at in range(len(samples))]), together),
        "permuted": _compare(pass_.traced([job["permutation"]]), together),
    }
    save_file(pass_.by_sample(together), job["out"])
    del together
    judgments |= pass_.learned(int(job["learner"]))
    weights = {name: parameter.detach() for name, parameter in model.parameters.items()}
    return {
        "judgments": {name: [c.model_dump(mode="json") for c in found] for name, found in judgments.items()},
        "model_hash": model_hash(Unpacked(weights, config, numerics)),
        "engine": {
            "engine": "megatron-core",
            "mode": "strict",
            **readback.process(device),
            "numerics": numerics.record(config.vocab_size, dispatch.declared(device)),
            "modules": readback.modules(model.module),
            "gradient_scales": readback.gradient_scales(model.module.config),
            "kernels": readback.kernels(),
        },
    }


class _Passes:
    """Forward and backward passes of one model over the same samples."""

    def __init__(self, model: StrictModel, samples: Sequence[Sample], positions: Sequence[Sequence[int]], device: torch.device) -> None:
        self.model, self.samples, self.positions, self.device = model, samples, positions, device
        everything = self._packed(range(len(samples)))
        self._old = everything.per_sample(model.score(everything))

    def traced(self, batches: Sequence[Sequence[int]]) -> Rows:
        """Score the samples in these micro-batches (indices into the samples, in row order)."""
        parts: dict[int, Rows] = {}
        for batch in batches:
            kept = [self.positions[at] for at in batch]
            starts = torch.tensor([0, *(len(self.samples[at].ids) for at in batch)]).cumsum(0).tolist()
            rows = torch.tensor([start + p for start, keep in zip(starts, kept) for p in keep], device=self.device)
            trace = Trace(rows)
            self.model.score(self._packed(batch), trace)
            cuts = [len(keep) for keep in kept]
            for name, tensor in trace.tensors().items():
                for at, part in zip(batch, tensor.split(cuts), strict=True):
                    parts.setdefault(at, {})[name] = part
        return {name: torch.cat([parts[at][name] for at in range(len(self.samples))]) for name in parts[0]}

    def by_sample(self, rows: Rows) -> Rows:
        """The same rows by "{sample}/{name}", on the CPU, and where they stand."""
        result: Rows = {}
        for name, tensor in rows.items():
            for sample, kept, part in zip(self.samples, self.positions, tensor.cpu().split([len(kept) for kept in self.positions])):
                result[f"{sample.sample_id}/{name}"] = part.clone()
                result[f"{sample.sample_id}/{name}.positions"] = torch.tensor(kept)
        return result

    def learned(self, learner: int) -> dict[str, list[Comparison]]:
        """Loss and slopes of all samples, each alone against all together; and all gradients of one sample's loss, alone and packed among
        the others, whose rows then carry no loss."""
        every = range(len(self.samples))
        losses, slopes = [], []
        for batches in ([[at] for at in every], [every]):
            loss = self._loss()
            slopes.append(torch.cat([self._backward(batch, loss, set(batch)) for batch in batches]))
            losses.append(torch.tensor([loss.summary().loss], dtype=torch.float64))
        self._backward(every, self._loss(), {learner}, afresh=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the activations of many tokens leave behind does not fit a copy of the gradients
        first = {name: gradient.clone() for name, gradient in self._gradients().items()}
        self._backward([learner], self._loss(), {learner}, afresh=True)
        packed, alone = (Unpacked(held, self.model.config, self.model.numerics) for held in (first, self._gradients()))
        return {
            "loss": [compare("loss", *losses), compare("slope", *slopes)],
            "gradients": [compare(name, alone[name], packed[name]) for name in alone],
        }

    def _gradients(self) -> Rows:
        return {name: parameter.main_grad for name, parameter in self.model.parameters.items()}  # type: ignore[attr-defined]

    def _loss(self) -> BatchLoss:
        """A batch in one group, whose rewards alternate, before its first update."""
        rewards = [float(at % 2) for at in range(len(self.samples))]
        return BatchLoss(self.samples, rewards, [0] * len(rewards), self._old, None, GrpoParams(kl_coef=0.0))

    def _backward(self, batch: Sequence[int], loss: BatchLoss, learners: set[int], afresh: bool = False) -> torch.Tensor:
        """Accumulate the gradients of a micro-batch in which only ``learners`` carry loss, from +0 if ``afresh``; returns dL/dlogp of its
        tokens, fp64."""
        if afresh:
            for gradient in self._gradients().values():
                gradient.zero_()
        learns = [at in learners for at in batch for _ in self.samples[at].response.token_ids]
        seen: list[torch.Tensor] = []

        def seeds(scores: torch.Tensor) -> torch.Tensor:
            slopes = loss.seeds(packed, scores)
            seen.append(slopes)
            return torch.where(torch.tensor(learns, device=slopes.device), slopes, 0.0)

        packed = self._packed(batch)
        self.model.accumulate(packed, seeds)
        return seen[0]

    def _packed(self, batch: Sequence[int]) -> MicroBatch:
        return micro_batch([self.samples[at] for at in batch], self.model.numerics).to(self.device)


def _compare(actual: Rows, expected: Rows) -> list[Comparison]:
    return [compare(name, actual[name], rows) for name, rows in expected.items()]
