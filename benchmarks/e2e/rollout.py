"""Rollout speed on one card: vLLM as it comes, vLLM's own batch-invariant mode, and rlk strict, in one run, round by round.

    PYTHONPATH=. python3 benchmarks/e2e/rollout.py artifacts/models/qwen3-8b-synthetic results.json

Each arm is an engine in a process of its own; all stay on the card and only one computes at a time, so that arms alternate within a round.
All do the same work: fresh random prompts, temperature 0.7, top-p 0.95, no early end, and the logprob of every sampled token is returned.
What only rlk returns, the ids that top-p retained for each token, is timed apart.
A run of the strict arm first proves its bytes: a batch of 16 against each of its rows alone. Where they differ, no time is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "vllm": ("native", {}),
    "vllm batch-invariant": ("native", {"VLLM_BATCH_INVARIANT": "1"}),
    "rlk strict": ("strict", {}),
}
"""Arm -> mode of the engine, variables of its process."""
STRICT, SLOW = "rlk strict", "vllm batch-invariant"
WITH_IDS = "rlk strict, retained ids returned"
KV_BYTES = 12 << 30
CONTEXT = 4096
ANSWER = "rlk-benchmark:"


@dataclass(frozen=True)
class Row:
    """batch requests of ``prompt`` random tokens, each answered by ``response`` tokens."""

    batch: int
    prompt: int
    response: int

    @property
    def name(self) -> str:
        return f"{self.batch} × {self.prompt} in, {self.response} out"

    @property
    def shape(self) -> dict[str, int]:
        """What an arm is asked for."""
        return {"batch": self.batch, "prompt": self.prompt}


ROWS = (Row(1, 256, 256), Row(16, 256, 256), Row(128, 256, 256), Row(1, 2048, 1024))
ROUNDS = 3
START_SHARE = 0.75
"""Of the time limit, for the engines to start."""
PROFILED = ROWS[1:3]
"""Rows whose first steps are profiled, after all times."""
PROFILE_STEPS = 16
PROFILE_S, IDS_S = 12.0, 15.0
"""Seconds that an arm's profiles take, and a row with retained ids."""


class Arm:
    """One engine's process, asked by lines of JSON."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        mode, variables = ARMS[name]
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(checkpoint), "--serve", mode],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self, seconds: float) -> dict[str, Any]:
        """Wait until the engine is up: "start_s" since its process began, and what it read back. RuntimeError if it is not in time."""
        found: dict[str, Any] = self._answer(seconds)
        return found

    def ask(self, **order: Any) -> Any:
        """Send an order and wait for its answer."""
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)

    def _answer(self, seconds: float | None = None) -> Any:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"arm {self.name} was not up in time: leave it out with --arm, or raise --limit") from None
        if line is None:
            raise RuntimeError(f"arm {self.name} ended with code {self.process.wait()}: its messages are above")
        return json.loads(line)


def serve(checkpoint: Path, mode: Any) -> None:
    """The process of an arm: start the engine, report what it is, then do what each line of standard input asks for."""
    import psutil
    import torch

    from rlk.contract.numerics import HOPPER
    from rlk.contract.records import Request
    from rlk.contract.sampling import SamplingParams
    from rlk.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(
        checkpoint, mode=mode, device="cuda", numerics=HOPPER, max_model_len=CONTEXT, max_num_batched_tokens=8192, max_num_seqs=128,
        kv_cache_bytes=KV_BYTES, stop_token_ids=(),
    )  # fmt: skip

    def requests(batch: int, prompt: int, response: int, seed: int) -> list[Request]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch * 8191 + prompt)  # no row finds another's prompts cached
        draw = lambda: tuple(torch.randint(0, engine.config.vocab_size, (prompt,), generator=generator).tolist())
        return [Request(i, draw(), SamplingParams(0.7, 0.95, max_tokens=response, seed=seed * 1000 + i)) for i in range(batch)]

    def timed(batch: int, prompt: int, response: int, seed: int, supports: bool = False) -> dict[str, float]:
        asked = requests(batch, prompt, response, seed)
        torch.cuda.synchronize()
        began = time.perf_counter()
        answers = engine.generate(asked, supports=supports)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(len(a.token_ids) for a in answers)}

    def proved() -> dict[str, int]:
        """Tokens of a batch, and how many differ in id, logprob or support when a row is alone."""
        asked = requests(16, 256, 32, 7)
        together, differ = engine.generate(asked), 0
        for request, expected in zip(asked, together, strict=True):
            engine.reset_prefix_cache()
            (alone,) = engine.generate([request])
            rows = zip(alone.token_ids, alone.logprobs, alone.support or (), strict=True)
            wanted = zip(expected.token_ids, expected.logprobs, expected.support or (), strict=True)
            differ += sum(a != b for a, b in zip(rows, wanted, strict=True))
        return {"tokens": sum(len(a.token_ids) for a in together), "differ": differ}

    def kernels(batch: int, prompt: int, response: int, seed: int) -> dict[str, tuple[int, float]]:
        """Launches and milliseconds on the card of one generation, by kernel."""
        asked = requests(batch, prompt, response, seed)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.generate(asked, supports=False)
            torch.cuda.synchronize()
        return {event.key: (event.count, event.self_device_time_total / 1000) for event in profile.key_averages()}

    def profiled(batch: int, prompt: int) -> dict[str, Any]:
        """Kernels (launches, milliseconds on the card, longest first) of a generation of one token, and of :data:`PROFILE_STEPS` decode
        steps: what a generation of so many tokens more takes beyond that. step_ms: of a decode step, on the card."""
        first = kernels(batch, prompt, 1, 98)
        whole = kernels(batch, prompt, 1 + PROFILE_STEPS, 99)
        more = {name: (count - first.get(name, (0, 0.0))[0], ms - first.get(name, (0, 0.0))[1]) for name, (count, ms) in whole.items()}
        longest = lambda found: sorted(((name[:90], n, round(ms, 3)) for name, (n, ms) in found.items() if n > 0), key=lambda row: -row[2])
        return {
            "prefill": longest(first)[:25],
            "decode": longest(more)[:40],
            "prefill_ms": sum(ms for _, ms in first.values()),
            "step_ms": sum(ms for _, ms in more.values()) / PROFILE_STEPS,
        }

    def memory() -> dict[str, int]:
        return {"peak_reserved": torch.cuda.max_memory_reserved(), "peak_allocated": torch.cuda.max_memory_allocated()}

    def answer(value: Any) -> None:
        print(f"\n{ANSWER}{json.dumps(value)}", flush=True)

    started = time.time() - psutil.Process().create_time()
    found = {name: value for name, value in engine.readback().items() if name not in ("modules", "ranks", "environment")}
    answer({"start_s": started, "read_back": found})
    does: dict[str, Callable[..., Any]] = {"timed": timed, "proved": proved, "profiled": profiled, "memory": memory}
    for line in sys.stdin:
        order = json.loads(line)
        answer(does[order.pop("do")](**order))


def measure(checkpoint: Path, names: Sequence[str], limit: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start these arms at once, the strict one among them, prove it, then time the rows round by round; ``keep`` is given the result as it
    grows.

    :data:`SLOW`, which takes several times as long as the others, is timed in the first round only, and in the long row after all rounds.
    limit: seconds after which nothing is begun that would not end in time; a row that was never timed is named in "skipped", an arm that
    was not up after :data:`START_SHARE` of them in "failed".
    """
    began = time.monotonic()
    left = lambda: began + limit - time.monotonic()
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "arms": {}, "rows": {}, "skipped": [], "failed": [], "profile": {}}
    started = {name: Arm(name, checkpoint) for name in names}
    try:
        _prepare(started, result, lambda: left() - (1 - START_SHARE) * limit)
        keep(result)
        arms = [started[name] for name in names if name in result["arms"]]
        if STRICT not in result["arms"] or result["proof"]["differ"]:
            return result
        result["arms"] = {arm.name: result["arms"][arm.name] for arm in arms}
        _time(arms, result, left, keep)
        result["skipped"] = [row.name for row in ROWS if row.name not in result["rows"]]
        for arm in arms:
            result["arms"][arm.name]["memory"] = arm.ask(do="memory")
        keep(result)
        for row in ROWS:
            if row.name in result["rows"] and left() > IDS_S:
                ran = started[STRICT].ask(do="timed", **row.shape, response=row.response, seed=9, supports=True)
                result["rows"][row.name][WITH_IDS] = [ran["tokens"] / ran["seconds"]]
        keep(result)
        for arm in arms:
            if arm.name != SLOW and left() > PROFILE_S:
                result["profile"][arm.name] = {f"{row.batch} × {row.prompt} in": arm.ask(do="profiled", **row.shape) for row in PROFILED}
                keep(result)
    finally:
        for arm in started.values():
            arm.close()
    return result


def _prepare(started: Mapping[str, Arm], result: dict[str, Any], left: Callable[[], float]) -> None:
    """Wait for every arm, the strict one first, and let it run every shape once, which may compile on first use; prove the strict one."""
    for arm in sorted(started.values(), key=lambda arm: (arm.name != STRICT, arm.name == SLOW)):
        try:
            found = arm.ready(max(0.0, left()))
        except RuntimeError as error:  # the others are measured all the same
            result["failed"].append(str(error))
            arm.close()
            if arm.name == STRICT:
                return
            continue
        result["arms"][arm.name] = found
        print(f"{arm.name} was up after {found['start_s']:.0f} s", flush=True)
        if arm.name == STRICT:
            result["proof"] = arm.ask(do="proved")
            if result["proof"]["differ"]:
                return
        for row in ROWS:
            arm.ask(do="timed", **row.shape, response=8, seed=1)


def _time(arms: Sequence[Arm], result: dict[str, Any], left: Callable[[], float], keep: Callable[[dict[str, Any]], None]) -> None:
    """Tokens per second of every row and arm, round by round, as long as there is time."""
    fast, slow = [arm for arm in arms if arm.name != SLOW], [arm for arm in arms if arm.name == SLOW]
    took: dict[tuple[str, str], float] = {}
    rounds = [(number, row, arms if number == 0 and row is not ROWS[-1] else fast) for number in range(ROUNDS) for row in ROWS]
    for number, row, timed in [*rounds, (0, ROWS[-1], slow)]:
        expected = sum(took.get((arm.name, row.name), row.response / (40 if arm.name == SLOW else 150)) for arm in timed)
        if not timed or left() < expected:
            continue
        for arm in timed if number % 2 == 0 else reversed(timed):
            ran = arm.ask(do="timed", **row.shape, response=row.response, seed=10 + number)
            took[arm.name, row.name] = ran["seconds"]
            result["rows"].setdefault(row.name, {}).setdefault(arm.name, []).append(ran["tokens"] / ran["seconds"])
        speeds = result["rows"][row.name]
        print(row.name, {name: [round(speed, 1) for speed in each] for name, each in speeds.items()}, flush=True)
        keep(result)


def table(result: dict[str, Any]) -> str:
    """Median tokens per second and spread of every row, as Markdown."""
    names = [*result["arms"], WITH_IDS]
    lines = [f"| tokens/s | {' | '.join(names)} | strict of vLLM |", "|---" * (len(names) + 2) + "|"]
    for row, speeds in result["rows"].items():
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        cells = [f"{medians[name]:.0f} ({min(speeds[name]):.0f}–{max(speeds[name]):.0f})" if name in speeds else "" for name in names]
        ratio = f"{medians[STRICT] / medians['vllm']:.2f}" if {STRICT, "vllm"} <= medians.keys() else ""
        lines.append(f"| {row} | {' | '.join(cells)} | {ratio} |")
    starts = [f"{arm['start_s']:.0f}" for arm in result["arms"].values()]
    peaks = [f"{arm['memory']['peak_reserved'] / (1 << 30):.1f}" for arm in result["arms"].values()]
    lines += [f"| start, s | {' | '.join(starts)} | | |", f"| peak memory, GiB | {' | '.join(peaks)} | | |"]
    for arm, profiles in result["profile"].items():
        for name, found in profiles.items():
            lines.append(f"\n{arm}, {name}: {found['prefill_ms']:.1f} ms of the card for the prompts, {found['step_ms']:.2f} a decode step")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 if the strict arm's bytes are red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument(
        "--arm", action="append", choices=tuple(ARMS), help="measure this arm beside the strict one (repeatable; default: all)"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing is begun")
    parser.add_argument("--serve", choices=("native", "strict"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.checkpoint, arguments.serve)
        return 0
    from where import where

    found = where()

    def keep(result: dict[str, Any]) -> None:
        if arguments.results:
            arguments.results.write_text(json.dumps({"where": found, **result}, indent=1) + "\n", encoding="utf-8")

    names = [name for name in ARMS if name in (*(arguments.arm or ARMS), STRICT)]
    result = measure(arguments.checkpoint, names, arguments.limit, keep)
    for problem in result["failed"]:
        print(f"failed: {problem}")
    if "proof" not in result:
        return 1
    if result["proof"]["differ"]:
        print(f"red: {result['proof']['differ']} of {result['proof']['tokens']} tokens of a batch differ when a row is alone: no time")
        return 1
    print(table(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
