"""Checks every Triton operator but attention and logprobs on a card, with no pytest and no install of rlk:

    PYTHONPATH=. python3 tests/gpu/check_operators.py [part ...]

Without arguments all parts run, the checks side by side in processes of their own, the times alone, and their results are joined in
$OUT/operators.json; the exit code is 1 if a check failed. A part's name runs that part alone. Needs pydantic, for the contract's cells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the references' matrix products run while deterministic algorithms are on

import operator_cells
import operator_products
import operator_runs
import operator_times
import torch
from report import Report

OPERATORS = ("embedding", "rms_norm", "qk_norm", "det_gemm", "rope", "silu", "swiglu", "lm_head", "pack")
CHECKS: dict[str, tuple[Callable[[Report], None], ...]] = {
    **{f"cells_{name}": (partial(operator_cells.cells, operator=name),) for name in OPERATORS},
    "cpu_bytes": (operator_cells.cpu_bytes,),
    "tiles": (operator_products.tiles, operator_products.tokens),
    "vendor": (operator_products.vendor,),
    "runs": (operator_runs.repeats, operator_runs.refusals, operator_runs.planted_sum),
}
TIMES: dict[str, tuple[Callable[[Report], None], ...]] = {
    "times": (operator_times.products, operator_times.rows),
    "tile_times": (operator_times.tiles,),
}


def one(name: str) -> None:
    """Run a part and leave its JSON in $OUT."""
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    report = Report(name)
    for part in {**CHECKS, **TIMES}[name]:
        try:
            part(report)
        except Exception as error:
            import traceback

            traceback.print_exc()
            report.holds(f"{name} ends without an error", False, error=repr(error)[:300])
    report.finish()


def everything(times: bool) -> int:
    """All parts; their results are joined after the checks and again after each part with times."""
    began = time.time()
    compiled = operator_products.precompile()
    print(f"{len(compiled)} products compiled in {time.time() - began:.0f} s", *filter(None, compiled), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OUT": folder}

        def start(name: str) -> subprocess.Popen[str]:
            command = [sys.executable, __file__, name]
            return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        running = {name: start(name) for name in CHECKS}
        failed = [name for name, process in running.items() if _show(name, process)]
        _join(Path(folder), failed, time.time() - began)
        for name in TIMES if times else ():
            failed += [name] if _show(name, start(name)) else []
            _join(Path(folder), failed, time.time() - began)
    print(f"parts failed: {', '.join(failed) or 'none'}; {time.time() - began:.0f} s")
    return 1 if failed else 0


def _join(folder: Path, failed: list[str], seconds: float) -> None:
    """Write the results of all parts so far to $OUT/operators.json."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    joined = {key: next(iter(parts.values()))[key] for key in ("date", "card", "torch", "triton", "cuda", "hip")}
    joined |= {"seconds": round(seconds, 1), "failed": failed, "without result": [name for name in CHECKS if name not in parts]}
    joined["kernels"] = sorted({kernel for part in parts.values() for kernel in part["kernels"]})
    joined["checks"] = {name: entry for part in parts.values() for name, entry in part["checks"].items()}
    joined["times"] = {name: entry for part in parts.values() for name, entry in part["times"].items()}
    (Path(os.environ.get("OUT", ".")) / "operators.json").write_text(json.dumps(joined, indent=1) + "\n")


def _show(name: str, process: subprocess.Popen[str]) -> bool:
    """Print a part's output when it has ended; whether it failed."""
    output, _ = process.communicate()
    kept = [line for line in output.splitlines() if not line.startswith("ok ")]
    print(f"--- {name}: {process.returncode}", *kept[-40:], sep="\n", flush=True)
    return process.returncode != 0


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked and asked != ["--no-times"]:
        one(asked[0])
    sys.exit(everything(times=not asked))
