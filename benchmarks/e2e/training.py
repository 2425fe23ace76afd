"""One training step on one card: Megatron-core as it comes (local layers, torch's operators) against rlk strict, step by step in one run.

    PYTHONPATH=. python3 benchmarks/e2e/training.py DIR results.json

A step is forward, loss, backward, gradient norm and Adam; hashes and files are left out of both. The strict arm first proves its bytes:
two steps from the same weights leave equal gradients. Where they differ, no time is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from where import where

from rlk.contract.numerics import HOPPER
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.train.batch import Sample
from rlk.train.objective import BatchLoss
from rlk.train.trainer import MegatronTrainer

ARMS: dict[str, Literal["native", "strict"]] = {"megatron": "native", "rlk strict": "strict"}
SAMPLES, PROMPT, RESPONSE, MICRO_BATCH = 4, 1024, 1024, 2
STEPS, WARM_UP = 5, 2
LR = 1e-4


def samples(vocabulary: int) -> list[Sample]:
    """Random prompts and responses."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda count: tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())
    made = []
    for i in range(SAMPLES):
        prompt, answer = draw(PROMPT), draw(RESPONSE)
        response = Response(i, prompt, answer, (0.0,) * RESPONSE, None, "length", 0, 0)
        made.append(Sample(Request(i, prompt, SamplingParams(max_tokens=RESPONSE)), response))
    return made


class Arm:
    """One trainer, its batch and the scores before the first update."""

    def __init__(self, mode: Literal["native", "strict"], checkpoint: Path) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.trainer = MegatronTrainer(checkpoint, mode=mode, device="cuda", numerics=HOPPER, micro_batch_size=MICRO_BATCH)
        self.samples = samples(self.trainer.config.vocab_size)
        self.old = self.trainer.score(self.samples)

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
        for part in (self.gradients, lambda: self.trainer.optimizer.update(LR)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            part()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - began))
        return {"gradients": times[0], "update": times[1], "step": sum(times)}


def proved(arm: Arm) -> int:
    """Elements of all gradients that differ between two passes over the same weights."""
    arm.gradients()
    first = {name: gradient.clone() for name, gradient in arm.trainer.optimizer.gradients.items()}
    arm.gradients()
    again = arm.trainer.optimizer.gradients
    return sum(int((first[name].view(torch.int32) != again[name].view(torch.int32)).count_nonzero()) for name in first)


def profiled(arm: Arm) -> list[tuple[str, int, float]]:
    """(kernel, launches, milliseconds) on the card of one step, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        arm.step()
        torch.cuda.synchronize()
    rows = [(event.key, event.count, event.self_device_time_total / 1000) for event in profile.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:30]


def measure(checkpoint: Path) -> dict[str, Any]:
    """Build both trainers, prove the strict one, then let their steps alternate."""
    arms, peak = {}, {}
    for name, mode in ARMS.items():
        before = torch.cuda.memory_allocated()
        arms[name] = Arm(mode, checkpoint)
        arms[name].step()
        peak[name] = torch.cuda.max_memory_allocated() - before
    result: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "work": {"samples": SAMPLES, "tokens": PROMPT + RESPONSE, "micro_batch": MICRO_BATCH},
        "differ": proved(arms["rlk strict"]),
        "peak_allocated": peak,
    }
    if result["differ"]:
        return result
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for number in range(WARM_UP + STEPS):
        order = list(arms.items())
        for name, arm in order if number % 2 == 0 else order[::-1]:
            took = arm.step()
            if number >= WARM_UP:
                times[name].append(took)
    return {**result, "times_ms": times, "profile": {name: profiled(arm) for name, arm in arms.items()}}


def table(result: dict[str, Any]) -> str:
    """Median milliseconds of each part, as Markdown."""
    lines = ["| ms | megatron | rlk strict | ratio |", "|---|---|---|---|"]
    for part in ("gradients", "update", "step"):
        native, strict = (_median([took[part] for took in result["times_ms"][name]]) for name in ARMS)
        lines.append(f"| {part} | {native:.1f} | {strict:.1f} | {strict / native:.2f} |")
    native, strict = (result["peak_allocated"][name] / (1 << 30) for name in ARMS)
    lines.append(f"| peak memory, GiB | {native:.1f} | {strict:.1f} | {strict / native:.2f} |")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def main() -> int:
    """Exit code 1 if the strict arm's bytes are red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    arguments = parser.parse_args()
    result = {"where": where(), **measure(arguments.checkpoint)}
    if arguments.results:
        arguments.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result["differ"]:
        print(f"red: {result['differ']} elements of the gradients differ between two passes: no time")
        return 1
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
