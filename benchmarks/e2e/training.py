"""One training step on one card: Megatron-core against rlk strict, step by step in one run.

    rlk prepare --synthetic qwen3-8b --layers 8 --out DIR
    PYTHONPATH=. python3 benchmarks/e2e/training.py DIR results.json [--prompt 32]

A step is forward, loss, backward, gradient norm and Adam; hashes and files are left out of both. Megatron runs with its local layers and
torch's operators, its step ends with torch's fused AdamW. It is measured as it comes, with an attention that writes every score to memory,
and with torch's fused attention in its place, which the ratios are taken against. Megatron computes logits of all tokens, rlk those of the
tokens that are scored: all but the prompt, whose length is an option; each is a row of the results. The strict arm first proves its bytes:
two passes over the same weights leave equal gradients. Where they differ, no time is shown.

Eight layers of Qwen3-8B take 50 GB for each of the two trainers: weights, and gradients, masters and moments in fp32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention
from where import where

from rlk.contract.numerics import HOPPER
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.train.batch import Sample
from rlk.train.objective import BatchLoss
from rlk.train.trainer import MegatronTrainer

AS_IT_COMES, NATIVE, STRICT = "megatron as it comes", "megatron, fused attention", "rlk strict"
Step = Callable[[], dict[str, float]]
SAMPLES, TOKENS, MICRO_BATCH = 4, 2048, 2
STEPS, WARM_UP = 5, 2
LR = 1e-6


def samples(vocabulary: int, prompt: int) -> list[Sample]:
    """Random prompts of ``prompt`` tokens, and responses."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda count: tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())
    made = []
    for i in range(SAMPLES):
        asked, answer = draw(prompt), draw(TOKENS - prompt)
        response = Response(i, asked, answer, (0.0,) * len(answer), None, "length", 0, 0)
        made.append(Sample(Request(i, asked, SamplingParams(max_tokens=len(answer))), response))
    return made


class Fused(torch.nn.Module):
    """torch's causal attention where Megatron's local layers have their own: q [T, 1, Hq, D], k and v [T, 1, Hk, D] -> [T, 1, Hq·D]."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class FusedUpdate:
    """Gradient norm, clip and AdamW as torch does them, over fp32 masters."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        self.parameters, self.max_norm = trainer.model.parameters, trainer.optimizer.max_norm
        self.masters = [parameter.detach().float() for parameter in self.parameters.values()]
        held = trainer.optimizer.params
        self.adam = torch.optim.AdamW(
            self.masters, lr=LR, betas=(held.beta1, held.beta2), eps=held.eps, weight_decay=held.weight_decay, fused=True
        )

    def __call__(self) -> None:
        for master, parameter in zip(self.masters, self.parameters.values()):
            master.grad = parameter.main_grad  # type: ignore[attr-defined]
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm, foreach=True)
        self.adam.step()
        torch._foreach_copy_([parameter.data for parameter in self.parameters.values()], self.masters)


class Arm:
    """One trainer, its batch and the scores before the first update."""

    def __init__(self, mode: Literal["native", "strict"], checkpoint: Path, prompt: int, device: str) -> None:
        self.trainer = MegatronTrainer(checkpoint, mode=mode, device=device, numerics=HOPPER, micro_batch_size=MICRO_BATCH)
        self.trainer._reference.clear()  # no step reads it
        self.samples = samples(self.trainer.config.vocab_size, prompt)
        self.old = self.trainer.score(self.samples)
        self.update = FusedUpdate(self.trainer) if mode == "native" else partial(self.trainer.optimizer.update, LR)

    def gradients(self) -> None:
        """Forward and backward over all micro-batches."""
        trainer = self.trainer
        rewards = [float(i % 2) for i in range(SAMPLES)]
        loss = BatchLoss(self.samples, rewards, [0] * SAMPLES, self.old, None, trainer.grpo)
        trainer.optimizer.zero_gradients()
        for batch in trainer._batches(self.samples):
            trainer.model.accumulate(batch, partial(loss.seeds, batch))
        loss.summary()

    def step(self) -> dict[str, float]:
        """One update; milliseconds of both parts."""
        times = []
        for part in (self.gradients, self.update):
            _wait()
            began = time.perf_counter()
            part()
            _wait()
            times.append(1000 * (time.perf_counter() - began))
        return {"gradients": times[0], "update": times[1], "step": sum(times)}


def attended(arm: Arm, attentions: Sequence[torch.nn.Module]) -> Step:
    """A native arm's step with one of ``attentions`` in each layer."""
    layers = arm.trainer.model.module.decoder.layers

    def step() -> dict[str, float]:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.self_attention.core_attention = attention
        return arm.step()

    return step


def proved(arm: Arm) -> int:
    """Elements of all gradients that differ between two passes over the same weights."""
    arm.gradients()
    first = {name: gradient.clone() for name, gradient in arm.trainer.optimizer.gradients.items()}
    arm.gradients()
    again = arm.trainer.optimizer.gradients
    return sum(int((first[name].view(torch.int32) != again[name].view(torch.int32)).count_nonzero()) for name in first)


def profiled(step: Step) -> tuple[float, list[tuple[str, int, float]]]:
    """Milliseconds that the card is busy in one step, and (kernel, launches, milliseconds) of the longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    rows = [(event.key[:90], event.count, round(event.self_device_time_total / 1000, 3)) for event in profile.key_averages()]
    return round(sum(row[2] for row in rows), 3), sorted(rows, key=lambda row: -row[2])[:40]


def measure(checkpoint: Path, prompt: int, keep: Callable[[dict[str, Any]], None], device: str = "cuda") -> dict[str, Any]:
    """Build and prove the strict trainer, build the native one, let their steps alternate; ``keep`` is given the result as it grows."""
    work = {"samples": SAMPLES, "tokens": TOKENS, "scored": TOKENS - prompt, "micro_batch": MICRO_BATCH}
    found: dict[str, Any] = {part: {} for part in ("times_ms", "peak_allocated", "busy_ms", "profile")}
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "work": work, **found}
    strict = Arm("strict", checkpoint, prompt, device)
    result["differ"] = proved(strict)
    keep(result)
    if result["differ"]:
        return result
    native = Arm("native", checkpoint, prompt, device)
    own = [layer.self_attention.core_attention for layer in native.trainer.model.module.decoder.layers]
    gc.freeze()  # as the loop's trainers do: a full collection stops a step for a quarter of a second and more
    steps: dict[str, Step] = {AS_IT_COMES: attended(native, own), NATIVE: attended(native, [Fused() for _ in own]), STRICT: strict.step}
    for number in range(WARM_UP + STEPS):
        order = list(steps.items())
        for name, step in order if number % 2 == 0 else order[::-1]:
            _wait()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            took = step()
            if number >= WARM_UP:
                result["times_ms"].setdefault(name, []).append(took)
                result["peak_allocated"][name] = torch.cuda.max_memory_allocated() - before
        keep(result)
        print(number, {name: round(times[-1]["step"], 1) for name, times in result["times_ms"].items()}, flush=True)
    for name, step in steps.items():
        result["busy_ms"][name], result["profile"][name] = profiled(step)
        keep(result)
    return result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(result: dict[str, Any]) -> str:
    """Median milliseconds of each part and memory of a step, as Markdown."""
    names = list(result["times_ms"])
    lines = [f"| ms | {' | '.join(names)} | ratio |", "|---" * (len(names) + 2) + "|"]
    for part in ("gradients", "update", "step"):
        found = {name: _median([took[part] for took in times]) for name, times in result["times_ms"].items()}
        lines.append(f"| {part} | {' | '.join(f'{found[name]:.1f}' for name in names)} | {found[STRICT] / found[NATIVE]:.2f} |")
    peaks = {name: peak / (1 << 30) for name, peak in result["peak_allocated"].items()}
    lines.append(f"| memory of a step, GiB | {' | '.join(f'{peaks[name]:.1f}' for name in names)} | |")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def main() -> int:
    """Exit code 1 if the strict arm's bytes are red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="?", help="a file; rows of other prompts stay in it")
    parser.add_argument("--prompt", type=int, default=TOKENS // 2, help=f"tokens of a prompt, of {TOKENS} (default: half)")
    arguments = parser.parse_args()
    found, path = where(), arguments.results
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else {}

    def keep(result: dict[str, Any]) -> None:
        if path:
            rows[f"{result['work']['scored']} of {TOKENS} tokens scored"] = {"where": found, **result}
            path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")

    result = measure(arguments.checkpoint, arguments.prompt, keep)
    if result["differ"]:
        print(f"red: {result['differ']} elements of the gradients differ between two passes: no time")
        return 1
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
