"""Rollout speed on one card or several: vLLM as it comes, vLLM's own batch-invariant mode, and rlk strict, in one run, round by round.

    PYTHONPATH=. python3 benchmarks/e2e/rollout.py artifacts/models/qwen3-8b-synthetic results.json [--tp 1 --tp 2]

Each arm is an engine in a process of its own; those of one number of ranks stay on the card together and only one computes at a time, so
that arms alternate within a round. Arms of more ranks start when those of fewer have ended.
All do the same work: fresh random prompts, temperature 0.7, top-p 0.95, no early end, and the logprob of every sampled token is returned.
What only rlk returns, the ids that top-p retained for each token, is timed apart.
A run of the strict arm first proves its bytes: a batch of 16 against each of its rows alone, and, of several ranks, against the first
strict arm. Where they differ, no time is shown. Of several ranks vLLM sums over them as it comes, but for sums inside NVLink's switch,
which are off on the whole machine; strict ones sum over peer memory or gather by NCCL. Last, each engine is handed the weights once more.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRICT, NATIVE, SLOW = "rlk strict", "vllm", "vllm batch-invariant"


@dataclass(frozen=True)
class Kind:
    """What runs in an arm: the engine's mode, its ranks and what moves their bytes, and variables of its process."""

    mode: str
    tp: int = 1
    transport: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def kinds(ranks: int) -> dict[str, Kind]:
    """The arms of so many ranks, by name."""
    if ranks == 1:
        return {NATIVE: Kind("native"), SLOW: Kind("native", variables={"VLLM_BATCH_INVARIANT": "1"}), STRICT: Kind("strict")}
    named = {NATIVE: Kind("native", ranks), STRICT: Kind("strict", ranks, "peer"), f"{STRICT} over NCCL": Kind("strict", ranks, "nccl")}
    return {f"{name}, TP {ranks}": kind for name, kind in named.items()}


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
RANKS_ROWS = (*ROWS[:3], Row(4, 1024, 1024))
"""Of a run with arms of several ranks; the last one makes the tokens of a step of ``training.py``."""
ROUNDS = 3
START_SHARE = 0.75
"""Of the time limit, for the engines to start."""
PROFILED = ROWS[1:3]
"""Rows whose first steps are profiled, after all times."""
PROFILE_STEPS = 16
PROFILE_S, IDS_S, PUBLISH_S = 12.0, 15.0, 4.0
"""Seconds that an arm's profiles take, a row with retained ids, and new weights."""


class Arm:
    """One engine's process, asked by lines of JSON."""

    def __init__(self, name: str, kind: Kind, checkpoint: Path) -> None:
        self.name, self.strict = name, kind.mode == "strict"
        transport = ["--transport", kind.transport] if kind.transport else []
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(checkpoint), "--serve", kind.mode, "--tp", str(kind.tp), *transport],
            env={**os.environ, **kind.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._began = time.time()
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
        """End the process and those that it has started; nothing if it has ended by itself."""
        import psutil

        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family.append(psutil.Process(self.process.pid))
            family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
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
            took = time.time() - self._began
            raise RuntimeError(f"arm {self.name} was not up after {took:.0f} s: leave it out, or raise --limit") from None
        if line is None:
            raise RuntimeError(f"arm {self.name} ended with code {self.process.wait()}: its messages are above")
        return json.loads(line)


def serve(checkpoint: Path, mode: Any, tp: int, transport: Any) -> None:
    """The process of an arm: start the engine, report what it is, then do what each line of standard input asks for."""
    import psutil
    import torch

    from rlk.contract.numerics import HOPPER
    from rlk.contract.records import Request
    from rlk.contract.sampling import SamplingParams
    from rlk.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(
        checkpoint, mode=mode, device="cuda", numerics=HOPPER, max_model_len=CONTEXT, max_num_batched_tokens=8192, max_num_seqs=128,
        kv_cache_bytes=KV_BYTES, stop_token_ids=(), tensor_parallel_size=tp, transport=transport,
    )  # fmt: skip
    wait: Callable[[], None] = torch.cuda.synchronize if tp == 1 else lambda: None  # ranks of their own hand over their last token's step

    def requests(batch: int, prompt: int, response: int, seed: int) -> list[Request]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch * 8191 + prompt)  # no row finds another's prompts cached
        draw = lambda: tuple(torch.randint(0, engine.config.vocab_size, (prompt,), generator=generator).tolist())
        return [Request(i, draw(), SamplingParams(0.7, 0.95, max_tokens=response, seed=seed * 1000 + i)) for i in range(batch)]

    def timed(batch: int, prompt: int, response: int, seed: int, supports: bool = False) -> dict[str, float]:
        asked = requests(batch, prompt, response, seed)
        wait()
        began = time.perf_counter()
        answers = engine.generate(asked, supports=supports)
        wait()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(len(a.token_ids) for a in answers)}

    def proved() -> dict[str, Any]:
        """Tokens of a batch, how many differ in id, logprob or support when a row is alone, and a digest of all."""
        asked = requests(16, 256, 32, 7)
        together, differ = engine.generate(asked), 0
        for request, expected in zip(asked, together, strict=True):
            engine.reset_prefix_cache()
            (alone,) = engine.generate([request])
            rows = zip(alone.token_ids, alone.logprobs, alone.support or (), strict=True)
            wanted = zip(expected.token_ids, expected.logprobs, expected.support or (), strict=True)
            differ += sum(a != b for a, b in zip(rows, wanted, strict=True))
        digest = hashlib.sha256(repr([(a.token_ids, a.logprobs, a.support) for a in together]).encode()).hexdigest()
        return {"tokens": sum(len(a.token_ids) for a in together), "differ": differ, "digest": digest}

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

    def memory() -> list[dict[str, int]]:
        """Of every rank."""
        return engine.peak_memory()

    def published() -> float:
        """Seconds until the engine serves the weights of a checkpoint as a new version."""
        began = time.perf_counter()
        engine.load_weights(checkpoint, 1)
        return time.perf_counter() - began

    def answer(value: Any) -> None:
        print(f"\n{ANSWER}{json.dumps(value)}", flush=True)

    started = time.time() - psutil.Process().create_time()
    found = {name: value for name, value in engine.readback().items() if name not in ("modules", "ranks", "environment")}
    answer({"start_s": started, "read_back": found})
    does: dict[str, Callable[..., Any]] = {f.__name__: f for f in (timed, proved, profiled, memory, published)}
    for line in sys.stdin:
        order = json.loads(line)
        answer(does[order.pop("do")](**order))


def measure(
    checkpoint: Path, asked: Mapping[str, Kind], rows: Sequence[Row], limit: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Time the arms of one number of ranks after those of another, each in an equal share of the time; ``keep`` is given the result as it
    grows. Where strict bytes differ, also between numbers of ranks, there is no time.

    limit: seconds after which nothing is begun that would not end in time; what was never timed is named in "skipped", an arm that was not
    up after :data:`START_SHARE` of its ranks' share in "failed".
    """
    ended = time.monotonic() + limit
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "arms": {}, "rows": {}, "skipped": [], "failed": [], "profile": {}}
    topologies = sorted({kind.tp for kind in asked.values()})
    for number, ranks in enumerate(topologies):
        together = {name: kind for name, kind in asked.items() if kind.tp == ranks}
        _measure(checkpoint, together, rows, (ended - time.monotonic()) / (len(topologies) - number), result, keep)
        if result.get("proof", {}).get("differ"):
            result["rows"], result["profile"] = {}, {}
            keep(result)
            break
    return result


def _measure(
    checkpoint: Path,
    asked: Mapping[str, Kind],
    rows: Sequence[Row],
    limit: float,
    result: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Start these arms at once, prove the strict ones, then time the rows round by round.

    :data:`SLOW`, which takes several times as long as the others, is timed in the first round only, and in the long row after all rounds.
    """
    began = time.monotonic()
    left = lambda: began + limit - time.monotonic()
    started = {name: Arm(name, kind, checkpoint) for name, kind in asked.items()}
    try:
        _prepare(started, result, rows, lambda: left() - (1 - START_SHARE) * limit)
        keep(result)
        arms = [started[name] for name in asked if name in result["arms"]]
        if "proof" not in result or result["proof"]["differ"]:
            return
        result["arms"] |= {arm.name: result["arms"].pop(arm.name) for arm in arms}  # in the order of the table
        _time(arms, result, rows, left, keep)
        timed = {row.name for row in rows for arm in arms if arm.name in result["rows"].get(row.name, {})}
        result["skipped"] += [f"{row.name}: {', '.join(asked)}" for row in rows if row.name not in timed]
        for arm in arms:
            result["arms"][arm.name]["memory"] = arm.ask(do="memory")
        keep(result)
        for row in rows:
            if any(arm.name == STRICT for arm in arms) and row.name in timed and left() > IDS_S:
                ran = started[STRICT].ask(do="timed", **row.shape, response=row.response, seed=9, supports=True)
                result["rows"][row.name][WITH_IDS] = [ran["tokens"] / ran["seconds"]]
        keep(result)
        for arm in arms:
            if arm.name in (STRICT, NATIVE) and left() > PROFILE_S:
                result["profile"][arm.name] = {f"{row.batch} × {row.prompt} in": arm.ask(do="profiled", **row.shape) for row in PROFILED}
                keep(result)
        for arm in arms:
            if arm.name != SLOW and left() > PUBLISH_S:
                try:
                    result["arms"][arm.name]["new_weights_s"] = arm.ask(do="published")
                except RuntimeError as error:
                    result["failed"].append(str(error))
                keep(result)
    finally:
        for arm in started.values():
            arm.close()


def _prepare(started: Mapping[str, Arm], result: dict[str, Any], rows: Sequence[Row], left: Callable[[], float]) -> None:
    """Wait for every arm, the strict ones first, and let it run every shape once, which may compile on first use; prove the strict ones."""
    for arm in sorted(started.values(), key=lambda arm: (not arm.strict, arm.name == SLOW)):
        try:
            found = arm.ready(max(0.0, left()))
        except RuntimeError as error:  # the others are measured all the same
            result["failed"].append(str(error))
            arm.close()
            continue
        result["arms"][arm.name] = found
        print(f"{arm.name} was up after {found['start_s']:.0f} s", flush=True)
        if arm.strict:
            proof = arm.ask(do="proved")
            proof["differ"] += proof["tokens"] * (proof["digest"] != result.setdefault("proof", proof)["digest"])
            if result["proof"] is not proof:
                for name in ("tokens", "differ"):
                    result["proof"][name] += proof[name]
            if result["proof"]["differ"]:
                return
        for row in rows:
            arm.ask(do="timed", **row.shape, response=8, seed=1)


def _time(
    arms: Sequence[Arm], result: dict[str, Any], rows: Sequence[Row], left: Callable[[], float], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Tokens per second of every row and arm, round by round, as long as there is time."""
    fast, slow = [arm for arm in arms if arm.name != SLOW], [arm for arm in arms if arm.name == SLOW]
    took: dict[tuple[str, str], float] = {}
    rounds = [(number, row, arms if number == 0 and row is not rows[-1] else fast) for number in range(ROUNDS) for row in rows]
    for number, row, timed in [*rounds, (0, rows[-1], slow)]:
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
        pairs = [(name, name.replace(STRICT, NATIVE).replace(" over NCCL", "")) for name in medians if STRICT in name and name != WITH_IDS]
        ratios = [f"{medians[strict] / medians[native]:.2f}" for strict, native in pairs if native in medians]
        lines.append(f"| {row} | {' | '.join(cells)} | {', '.join(ratios)} |")
    arms = result["arms"].values()
    starts = [f"{arm['start_s']:.0f}" for arm in arms]
    peaks = [f"{max(rank['peak_reserved'] for rank in arm['memory']) / (1 << 30):.1f}" for arm in arms]
    published = [f"{arm['new_weights_s']:.1f}" if "new_weights_s" in arm else "" for arm in arms]
    for what, cells in (("start, s", starts), ("peak memory of a rank, GiB", peaks), ("new weights, s", published)):
        lines.append(f"| {what} | {' | '.join(cells)} | | |")
    for arm, profiles in result["profile"].items():
        for name, found in profiles.items():
            lines.append(f"\n{arm}, {name}: {found['prefill_ms']:.1f} ms of the card for the prompts, {found['step_ms']:.2f} a decode step")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 if the strict arm's bytes are red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--tp", action="append", type=int, help="ranks, a card each (repeatable; default: 1)")
    parser.add_argument("--without", action="append", default=[], help="an arm to leave out (repeatable)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing is begun")
    parser.add_argument("--serve", choices=("native", "strict"), help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks = arguments.tp or [1]
    if arguments.serve:
        serve(arguments.checkpoint, arguments.serve, ranks[0], arguments.transport)
        return 0
    from where import where

    found = where()

    def keep(result: dict[str, Any]) -> None:
        if arguments.results:
            arguments.results.write_text(json.dumps({"where": found, **result}, indent=1) + "\n", encoding="utf-8")

    arms = {name: kind for count in ranks for name, kind in kinds(count).items() if name not in arguments.without}
    result = measure(arguments.checkpoint, arms, ROWS if max(ranks) == 1 else RANKS_ROWS, arguments.limit, keep)
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
