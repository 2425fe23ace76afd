"""One training step of tensor parallel ranks, a card each: Megatron-core against rlk strict, step by step in one run.

    rlk prepare --synthetic qwen3-8b --layers 4 --out DIR
    PYTHONPATH=. python3 benchmarks/e2e/training_tp.py DIR results.json [ranks]

Work and native arms are those of ``training.py``; Megatron sums over ranks by NCCL's all-reduce, in its linears, its embedding, its cross
entropy, its gradient norm and the gradients of q/k norm gains. The strict trainer takes its steps over NCCL and over peer memory in turn.
Times are milliseconds of the slowest rank. Bytes come first: a pass over NCCL and one over peer memory over the same weights must leave
equal gradients on every rank, and the strict and the native scores must agree within bf16. Otherwise no time is shown.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from training import AS_IT_COMES, LR, MICRO_BATCH, NATIVE, SAMPLES, STEPS, TOKENS, WARM_UP, Fused, profiled, samples
from where import where

from rlk.contract.numerics import HOPPER
from rlk.contract.update import MAX_GRAD_NORM, AdamParams, GrpoParams
from rlk.model import shards
from rlk.model.layout import pack_weights
from rlk.model.weights import load_checkpoint
from rlk.parallel.collectives import MOVERS
from rlk.parallel.pool import Pool, free_port, require
from rlk.parallel.transport import Gloo, Transport
from rlk.train.batch import Sample
from rlk.train.megatron import megatron_settings
from rlk.train.native import NativeModel
from rlk.train.objective import BatchLoss
from rlk.train.trainer import MegatronTrainer

TRANSPORTS: dict[str, tuple[Transport, ...]] = {"cuda": ("nccl", "peer"), "cpu": ("gloo", "shm")}
"""The strict arms of a device; the first transport is the job's."""
PROMPT = TOKENS // 2
CLOSE = 0.5
"""Of bf16 logprobs over random weights, against a trainer whose sums are rounded at other places."""


class RankModel(NativeModel):
    """Megatron's stock model on a tensor parallel rank, whose linears, embedding and cross entropy sum over the ranks."""

    def _module(self) -> GPTModel:
        settings = TransformerConfig(**megatron_settings(self.config, self.parallel.topology, self.device))
        return self._stock(settings, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))

    def from_packed(self, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tp, outer = self.parallel.tp, len(self.parallel.shards)
        held = {name: shards.part(name, tensor, tp) for name, tensor in packed.items()}
        return {name: self._swap(tensor, outer, 2) if self._gated(name) else tensor for name, tensor in held.items()}

    def _logp(self, sample: Sample) -> torch.Tensor:
        answer = torch.tensor(sample.response.token_ids, device=self.device)
        logits = self._logits(sample)[-len(answer) - 1 : -1].float() / sample.request.sampling.scoring_temperature
        return -vocab_parallel_cross_entropy(logits[:, None], answer[:, None])[:, 0]


class RankUpdate:
    """Gradients of replicated q/k norm gains summed, norm over all ranks, clip and torch's fused AdamW over fp32 masters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        held = AdamParams()
        self.parameters, self.group = list(parameters.values()), parallel_state.get_tensor_model_parallel_group()
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.gradients: list[torch.Tensor] = [parameter.main_grad for parameter in self.parameters]  # type: ignore[attr-defined]
        for master, gradient in zip(self.masters, self.gradients):
            master.grad = gradient
        self.heads = [p.main_grad for name, p in parameters.items() if name.endswith(("q_norm", "k_norm"))]  # type: ignore[attr-defined]
        once = [1.0 if shards.dimension(name) is not None else 1.0 / dist.get_world_size(self.group) for name in parameters]
        self.share = torch.tensor(once, device=self.masters[0].device)
        self.adam = torch.optim.AdamW(
            self.masters, lr=LR, betas=(held.beta1, held.beta2), eps=held.eps, weight_decay=held.weight_decay, fused=True
        )

    def __call__(self) -> None:
        joined = torch.cat(self.heads)
        dist.all_reduce(joined, group=self.group)
        torch._foreach_copy_(self.heads, list(joined.split([head.numel() for head in self.heads])))
        square = (torch.stack(torch._foreach_norm(self.gradients)).square() * self.share).sum()
        dist.all_reduce(square, group=self.group)
        torch._foreach_mul_(self.gradients, (MAX_GRAD_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0))
        self.adam.step()
        torch._foreach_copy_([parameter.data for parameter in self.parameters], self.masters)


class Ranks:
    """This rank's two trainers over one job and one batch."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        checkpoint, device = Path(job["checkpoint"]), torch.device(job["device"], rank) if job["device"] == "cuda" else torch.device("cpu")
        self.transports = TRANSPORTS[device.type]
        self.trainer = MegatronTrainer(
            checkpoint, device=str(device), numerics=HOPPER, micro_batch_size=MICRO_BATCH, tp=job["ranks"], rank=rank, port=job["port"],
            timeout=120.0, transport=self.transports[0],
        )  # fmt: skip
        self.trainer._reference.clear()  # no step reads it
        parallel = self.trainer.parallel
        self.group, handle = parallel.tp, parallel_state.get_tensor_model_parallel_group()
        self.movers: dict[str, Gloo] = {name: MOVERS[name](parallel.link, handle) for name in self.transports}
        source = load_checkpoint(checkpoint)
        self.native = RankModel(source.config, HOPPER, pack_weights(source.tensors, source.config, HOPPER), parallel, device)
        self.samples = samples(source.config.vocab_size, PROMPT)
        self.old = self.trainer.score(self.samples)
        self.native_update, self.strict_update = RankUpdate(self.native.parameters), partial(self.trainer.optimizer.update, LR)

    def accumulate(self, model: Any) -> None:
        """Forward and backward of all micro-batches of either model."""
        rewards = [float(i % 2) for i in range(len(self.samples))]
        loss = BatchLoss(self.samples, rewards, [0] * len(self.samples), self.old, None, GrpoParams())
        torch._foreach_zero_([parameter.main_grad for parameter in model.parameters.values()])
        for batch in self.trainer._batches(self.samples):
            model.accumulate(batch, partial(loss.seeds, batch))
        loss.summary()

    def strict(self, transport: str) -> None:
        """:meth:`accumulate` of the strict trainer, whose ranks agree on the batch first, as in its own step."""
        self.group._mover = self.movers[transport]
        with self.trainer.parallel.link.unit("step", self.trainer._batch_note(self.samples)):
            self.accumulate(self.trainer.model)

    def attended(self, attentions: Sequence[torch.nn.Module]) -> None:
        """:meth:`accumulate` of the native trainer with one of ``attentions`` in each layer."""
        for layer, attention in zip(self.native.module.decoder.layers, attentions, strict=True):
            layer.self_attention.core_attention = attention
        self.accumulate(self.native)

    def proved(self) -> dict[str, Any]:
        """Elements of gradients that differ between transports, and the largest distance of a native score."""
        held = []
        for transport in self.transports:
            self.strict(transport)
            held.append({name: gradient.clone() for name, gradient in self.trainer.optimizer.gradients.items()})
        first, again = held
        differ = sum(int((first[name].view(torch.int32) != again[name].view(torch.int32)).count_nonzero()) for name in first)
        native = [score for batch in self.trainer._batches(self.samples) for score in self.native.score(batch)]
        strict = [score for row in self.old for score in row]
        return {"differ": differ, "farthest native score": max(abs(a - b) for a, b in zip(native, strict, strict=True))}

    def arms(self) -> dict[str, tuple[Callable[[], None], Callable[[], Any]]]:
        """Gradients and update of each arm, by name."""
        own = [layer.self_attention.core_attention for layer in self.native.module.decoder.layers]
        native = {AS_IT_COMES: own, NATIVE: [Fused() for _ in own]}
        arms: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
            name: (partial(self.attended, attentions), self.native_update) for name, attentions in native.items()
        }
        return arms | {strict_name(t): (partial(self.strict, t), self.strict_update) for t in self.transports}


def strict_name(transport: str) -> str:
    """The strict arm over a transport."""
    return f"rlk strict, {transport}"


def run(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """One rank: proof, then milliseconds of every step by arm and part, then rank 0's profile of one step of each."""
    torch.manual_seed(0)
    ranks = Ranks(rank, job)
    result: dict[str, Any] = {**ranks.proved(), "times_ms": {}, "profile": {}}
    arms = ranks.arms()
    gc.freeze()  # as the loop's trainers do: a full collection stops a step for a quarter of a second and more
    wait = torch.cuda.synchronize if job["device"] == "cuda" else lambda: None
    for number in range(WARM_UP + STEPS):
        order = list(arms.items())
        for name, parts in order if number % 2 == 0 else order[::-1]:
            took = []
            for part in parts:
                wait()
                dist.barrier(parallel_state.get_tensor_model_parallel_group())
                wait()
                began = time.perf_counter()
                part()
                wait()
                took.append(1000 * (time.perf_counter() - began))
            if number >= WARM_UP:
                result["times_ms"].setdefault(name, []).append([*took, sum(took)])
        if rank == 0:
            print(number, {name: round(times[-1][2], 1) for name, times in result["times_ms"].items()}, flush=True)
    if job["device"] == "cuda":
        for name, parts in arms.items():
            result["profile"][name] = profiled(partial(_step, parts))
    return result


def _step(parts: Sequence[Callable[[], Any]]) -> dict[str, float]:
    for part in parts:
        part()
    return {}


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """[gradients, update, step] of every step by arm, each the most of all ranks."""
    return {
        name: [[max(values) for values in zip(*held)] for held in zip(*(rank["times_ms"][name] for rank in ranks))]
        for name in ranks[0]["times_ms"]
    }


def table(times: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Median milliseconds of each part, as Markdown; ratios are of Megatron with fused attention."""
    lines = [f"| ms | {' | '.join(times)} |", "|---" * (len(times) + 1) + "|"]
    for at, part in enumerate(("gradients", "update", "step")):
        found = {name: statistics.median(took[at] for took in held) for name, held in times.items()}
        cells = [f"{took:.1f} ({took / found[NATIVE]:.2f})" for took in found.values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 if a byte differs between transports, or a score is far from the native one."""
    checkpoint, target = Path(sys.argv[1]), Path(sys.argv[2])
    ranks, device = int(sys.argv[3]) if len(sys.argv) > 3 else 2, "cuda" if torch.cuda.is_available() else "cpu"
    job = {"checkpoint": str(checkpoint), "ranks": ranks, "port": free_port(), "device": device}
    work = {"samples": SAMPLES, "tokens": TOKENS, "prompt": PROMPT, "micro_batch": MICRO_BATCH}
    with Pool(ranks) as pool:
        found = require(pool.run(ranks, Path(__file__), "run", job, timeout=300))
    red = {key: [rank[key] for rank in found] for key in ("differ", "farthest native score")}
    times = slowest(found)
    held = {"where": where(), "checkpoint": checkpoint.name, "ranks": ranks, "work": work, **red}
    if any(red["differ"]) or max(red["farthest native score"]) > CLOSE:
        target.write_text(json.dumps(held, indent=1) + "\n")
        print(f"red: {red}: no time")
        return 1
    target.write_text(json.dumps({**held, "times_ms": times, "profile": found[0]["profile"]}, indent=1) + "\n")
    print(red, table(times), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
