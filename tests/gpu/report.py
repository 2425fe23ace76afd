"""What a check on a card finds: comparisons byte for byte and within tolerances, controls that must fire, and times; written as JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from rlk.kernels.dispatch import readback


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the bytes of all tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def graphed(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A graph of ``run``: how to replay it, and the tensors that a replay fills. Replays time the card, not the host's launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph.replay, captured


def microseconds(run: Callable[[], Any], flush: torch.Tensor) -> float:
    """Of one run by the card's own clock, after ``flush``, which is larger than the second-level cache, was written."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


class Report:
    """Collects results by section; a failed check is printed at once and does not stop the others."""

    def __init__(self) -> None:
        self.started = time.time()
        self.checks: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self.times: dict[str, Any] = {}

    def _record(self, name: str, ok: bool, **facts: Any) -> None:
        entry = self.checks.setdefault(name, {"ok": True, "cases": 0})
        entry["cases"] += 1
        if not ok:
            entry["ok"] = False
            entry.setdefault("failures", [])
            if len(entry["failures"]) < 4:
                entry["failures"].append(facts)
                print(f"FAIL {name}: {facts}", flush=True)
            if name not in self.failed:
                self.failed.append(name)
        elif entry["ok"]:
            entry.update(facts)

    def same(self, name: str, case: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Every byte equal, and no NaN on either side."""
        right = actual.shape == expected.shape and actual.dtype == expected.dtype
        bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
        differing = int((actual.contiguous().view(bits) != expected.contiguous().view(bits)).sum()) if right else -1
        finite = bool(actual.isfinite().all())
        facts = {"case": case, "differing": differing, "of": actual.numel(), "finite": finite}
        self._record(name, differing == 0 and finite, **({} if differing == 0 and finite else facts))

    def differs(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """A planted fault: some byte must differ."""
        differing = int((actual != expected).sum())
        self._record(f"planted: {name}", differing > 0, differing=differing, of=actual.numel())

    def close(
        self, name: str, actual: torch.Tensor, reference: torch.Tensor, atol: float, rtol: float, other: torch.Tensor | None = None
    ) -> None:
        """|actual − reference| <= atol + rtol·|reference|; ``other`` is another implementation's result, reported beside it."""
        error = (actual.double() - reference.double()).abs()
        ok = bool((error <= atol + rtol * reference.double().abs()).all())
        facts = {"max_error": float(error.max()), "mean_error": float(error.mean())}
        if other is not None:
            theirs = (other.double() - reference.double()).abs()
            facts |= {"other_max_error": float(theirs.max()), "other_mean_error": float(theirs.mean())}
        self._record(name, ok, **facts)

    def holds(self, name: str, ok: bool, **facts: Any) -> None:
        """Any other condition."""
        self._record(name, ok, **facts)

    def repeats(self, name: str, count: int, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        """``count`` runs give one digest."""
        first = run()
        bits = [{2: torch.int16, 4: torch.int32}[x.element_size()] for x in first]
        wrong = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for _ in range(count - 1):
            for a, b, kind in zip(first, run(), bits, strict=True):
                wrong += (a.view(kind) != b.view(kind)).sum()
        self._record(name, int(wrong) == 0, repetitions=count, digest=digest(*first))

    def timed(self, name: str, arms: dict[str, Callable[[], Any]], repetitions: int = 15, **facts: Any) -> None:
        """Median and spread in microseconds of each arm: interleaved, CUDA events, second-level cache flushed before each run."""
        flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        for run in arms.values():
            for _ in range(3):
                run()
        measured: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(repetitions):
            for arm, run in arms.items():
                measured[arm].append(microseconds(run, flush))
        row: dict[str, Any] = dict(facts)
        for arm, values in measured.items():
            low, _, high = statistics.quantiles(values, n=4)
            row[arm] = {"median_us": round(statistics.median(values), 1), "quartiles_us": [round(low, 1), round(high, 1)]}
        self.times[name] = row
        print(f"{name:34s}" + "  ".join(f"{arm} {row[arm]['median_us']}" for arm in arms), flush=True)

    def facts(self) -> dict[str, Any]:
        """Everything found so far, as plain values."""
        return {
            "failed": self.failed,
            "checks": self.checks,
            "times": self.times,
            "kernels": sorted({ran.kernel_id for ran in readback()}),
            "operators": sorted({ran.op for ran in readback()}),
            "seconds": round(time.time() - self.started, 1),
        }

    def host_time(self, name: str, arms: dict[str, Callable[[], Any]], repetitions: int = 200) -> None:
        """Microseconds of the host per call, the card not waited for."""
        row = {}
        for arm, run in arms.items():
            run()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(repetitions):
                run()
            row[arm] = {"host_us": round((time.perf_counter() - started) * 1e6 / repetitions, 1)}
            torch.cuda.synchronize()
        self.times[name] = row
        print(f"{name:34s}" + "  ".join(f"{arm} {entry['host_us']}" for arm, entry in row.items()), flush=True)

    def run(self, name: str, section: Callable[[Report], None]) -> None:
        """One section; an exception is a failure of it."""
        try:
            section(self)
            torch.cuda.synchronize()
        except Exception as error:
            traceback.print_exc()
            self.holds(f"section {name} ran", False, error=f"{type(error).__name__}: {error}"[:500])


def environment() -> dict[str, Any]:
    """The card, its driver and the versions in use."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "card": torch.cuda.get_device_properties(0).name,
        "driver": next(iter(driver.stdout.split()), ""),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def main(name: str, sections: dict[str, Callable[[Report], None]], alone: str = "times") -> None:
    """Run ``sections``, each in a process of its own and all at once, then ``alone`` on a quiet card; write $OUT/<name>.json.

    Kernels of different sections compile on different cores this way. Exits 1 if a check failed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", default=list(sections), help=", ".join(sections))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    if given.child:
        report.run(given.sections[0], sections[given.sections[0]])
        given.child.write_text(json.dumps(report.facts()))
        return
    started, folder = time.time(), Path(tempfile.mkdtemp())
    wanted = [section for section in given.sections if section != alone]
    children = {
        section: subprocess.Popen([sys.executable, sys.argv[0], section, "--child", str(folder / section)], stdout=log, stderr=log)
        for section in wanted
        for log in [(folder / f"{section}.log").open("w")]
    }
    found = {}
    for section, child in children.items():
        child.wait()
        print((folder / f"{section}.log").read_text()[-3000:], end="")
        if child.returncode:
            report.holds(f"section {section} ran", False, exit=child.returncode)
        else:
            found[section] = json.loads((folder / section).read_text())
            print(f"-- {section}: {found[section]['seconds']} s", flush=True)
    if alone in given.sections:
        report.run(alone, sections[alone])
    found[alone] = report.facts()
    joined: dict[str, Any] = {key: sorted({x for part in found.values() for x in part[key]}) for key in ("failed", "kernels", "operators")}
    joined |= {key: {k: v for part in found.values() for k, v in part[key].items()} for key in ("checks", "times")}
    result = {
        "name": name, "date": time.strftime("%Y-%m-%d", time.gmtime(started)), **environment(), "seconds": round(time.time() - started, 1),
        "sections": {section: part["seconds"] for section, part in found.items()}, **joined,
    }  # fmt: skip
    (Path(os.environ.get("OUT", ".")) / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for check, entry in result["checks"].items():
        print(("ok   " if entry["ok"] else "FAIL ") + f"{check}  ({entry['cases']})")
    print(f"{name}: {len(result['checks'])} checks, {len(joined['failed'])} failed, {result['seconds']} s")
    sys.exit(1 if joined["failed"] else 0)
