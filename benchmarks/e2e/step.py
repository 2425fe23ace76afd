"""A whole RL step: the loop itself in strict mode against the loop in native mode, run by run in turn.

    rlk prepare --synthetic qwen3-8b --layers 8 --out DIR
    PYTHONPATH=. python3 benchmarks/e2e/step.py DIR results.json [--tp 2 --rollout-tp 2] [--limit 300]

A step is one update of ``rlk run``: generate, score, compare, score under the reference, update, publish, load. Each run starts its own
engines; its first update warms them up and is not timed. Both modes draw at temperature 1 from all tokens, since the stock engine hands
over no retained ids, and both leave the same evidence: hashes of gradients and weights, compared logprobs. Strict runs are judged by the
loop (one differing byte ends one) and must leave equal weights, whatever their ranks. Where they do not, no time is shown.

Native is the loop's: Megatron-core as it comes, with an attention that writes every score to memory, one sample at a time, and Adam of
torch operation by operation; ``training.py`` has the same trainer with fused attention and AdamW. It runs on one rank only, so several
strict ranks are set against one strict rank. Published weights go to a directory beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from where import where

from rlk.loop.arithmetic import Problem
from rlk.loop.cluster import Cluster
from rlk.loop.controller import RunFailed, run_loop
from rlk.loop.plan import RunPlan, make_plan
from rlk.loop.profile import Device, Profile
from rlk.loop.records import RunSummary, StepResult

WARM_UP, UPDATES = 1, 2
ROUNDS = 3
STRICT = "strict"
STEP = "step"


@dataclass(frozen=True)
class Work:
    """One update: ``prompts`` of ``prompt_tokens`` (of a byte tokenizer), ``responses`` of ``response_tokens`` to each."""

    prompts: int = 16
    responses: int = 8
    prompt_tokens: int = 256
    response_tokens: int = 256

    def tasks(self, step: int) -> list[Problem]:
        """Sums of random digits."""
        shortest = len(Problem((1,)).prompt)
        draw = random.Random(step)
        return [Problem(tuple(draw.choices(range(1, 10), k=1 + (self.prompt_tokens - shortest) // 2))) for _ in range(self.prompts)]


@dataclass
class Times:
    """Observer of a run: when the engines were up and when each update was complete."""

    began: float = field(default_factory=time.monotonic)
    seen: list[float] = field(default_factory=list)

    def phase(self, step: int, name: str) -> None:
        """The first phase of the first update comes when the engines are up."""
        if step == 1 and not self.seen:
            self.seen.append(time.monotonic())

    def finished(self, result: StepResult) -> None:
        """Note it, and say it."""
        self.seen.append(time.monotonic())
        took, differ = self.seen[-1] - self.seen[-2], result.logprob.mismatched_elements
        print(f"update {result.step}: {took:.2f} s, {differ} tokens differ", flush=True)


def arms(tp: int, cp: int, rollout_tp: int) -> dict[str, dict[str, Any]]:
    """Options of the run that is measured and of the one that it is set against, by name."""
    if tp == cp == rollout_tp == 1:
        return {STRICT: {"mode": "consistency"}, "native": {"mode": "native"}}
    several = {"mode": "consistency", "tp": tp, "cp": cp, "rollout_tp": rollout_tp}
    return {f"{STRICT}, trainer TP {tp} CP {cp}, rollout TP {rollout_tp}": several, f"{STRICT}, one rank each": {"mode": "consistency"}}


def run(plan: RunPlan, work: Work, patience: float) -> tuple[RunSummary, dict[str, Any]]:
    """One run on engines of its own; seconds of their start and of every update after the first, by phase and part."""
    times = Times()
    with Cluster(device=plan.device, numerics=plan.topology.numerics, timeout_s=patience) as cluster:
        try:
            summary = run_loop(plan, cluster, tasks=work.tasks, observer=times)
        finally:
            cluster.stop()
    updates = []
    for step, (began, ended) in list(zip(summary.steps, pairwise(times.seen), strict=True))[WARM_UP:]:
        updates.append({"seconds": {STEP: ended - began, **step.timings_s, **step.parts_s}, "tokens": step.logprob.elements})
    differ = [step.logprob.mismatched_elements for step in summary.steps]
    return summary, {"start_s": times.seen[0] - times.began, "updates": updates, "tokens that differ": differ}


def measure(
    plans: Mapping[str, Callable[[int], RunPlan]], work: Work, limit: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the arms in turn, each once at least and then as long as the next round would end in ``limit`` seconds.

    ``keep`` is given the result as it grows: "arms" has the runs of each, "red" why no time counts, "failed" why native has no more.
    """
    began, took = time.monotonic(), 0.0
    result: dict[str, Any] = {"work": asdict(work), "arms": {name: [] for name in plans}, "red": "", "failed": ""}
    hashes: set[tuple[str, ...]] = set()
    for number in range(ROUNDS):
        if number and time.monotonic() - began + took > limit:
            break
        started = time.monotonic()
        for name, plan in plans.items():
            print(f"{name}, round {number + 1}, after {time.monotonic() - began:.0f} s", flush=True)
            try:
                summary, found = run(plan(number), work, limit)
            except RunFailed as error:
                print(getattr(error.__cause__, "trace", ""), flush=True)  # the engine's
                result["red" if name.startswith(STRICT) else "failed"] = f"{name}: {error.reason}"
                keep(result)
                return result
            if name.startswith(STRICT):
                hashes.add(summary.model_hashes)
            result["red"] = "" if len(hashes) == 1 else f"strict runs leave {len(hashes)} different weights"
            result["arms"][name].append(found)
            keep(result)
            if result["red"]:
                return result
        took = time.monotonic() - started
    return result


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Median, least and most seconds of every phase and part over all updates that count."""
    rows = [update["seconds"] for each in runs for update in each["updates"]]
    names = dict.fromkeys(name for row in rows for name in row)
    held = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: (statistics.median(values), min(values), max(values)) for name, values in held.items()}


def table(result: Mapping[str, Any]) -> str:
    """Seconds of every phase and part, and what the first arm takes of the second, as Markdown."""
    found = {name: medians(runs) for name, runs in result["arms"].items()}
    first, second = found.values()
    lines = [f"| s | {' | '.join(found)} | ratio |", "|---" * (len(found) + 2) + "|"]
    for name in first | second:
        cells = ["{:.3f} ({:.3f}–{:.3f})".format(*held[name]) if name in held else "" for held in (first, second)]
        ratio = f"{first[name][0] / second[name][0]:.2f}" if name in first and second.get(name, (0.0,))[0] else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 if a strict run is red or a native one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path)
    for name in ("tp", "cp", "rollout-tp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="ranks of the strict arm, a card each (default: 1)")
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"of an update (default: {value})")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no round is begun")
    arguments = parser.parse_args()
    work = Work(**{name: getattr(arguments, name) for name in asdict(Work())})
    found = where()
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"

    def keep(result: dict[str, Any]) -> None:
        held = {"where": found, "device": device, "checkpoint": arguments.checkpoint.name, **result}
        if result["red"]:
            held["arms"] = {}
        arguments.results.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(dir=arguments.checkpoint.absolute().parent) as room:

        def plan(options: Mapping[str, Any], number: int) -> RunPlan:
            run_id = f"{'-'.join(map(str, options.values()))}-{number}"
            profile = Profile(
                device=device, model=arguments.checkpoint, workspace=Path(room), run_id=run_id, steps=WARM_UP + UPDATES,
                prompts=work.prompts, group_size=work.responses, max_response_len=work.response_tokens,
                context=work.prompt_tokens + work.response_tokens, keep_versions=1, **options,
            )  # fmt: skip
            return make_plan(profile)

        chosen = arms(arguments.tp, arguments.cp, arguments.rollout_tp)
        result = measure({name: partial(plan, options) for name, options in chosen.items()}, work, arguments.limit, keep)
    if result["red"]:
        print(f"red: {result['red']}: no time")
        return 1
    print(table(result))
    if result["failed"]:
        print(f"failed: {result['failed']}")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
