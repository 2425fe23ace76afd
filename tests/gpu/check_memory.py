"""Runs every part of ``small_shapes.py`` under compute-sanitizer's memcheck and racecheck, all at once:

    OUT=. PYTHONPATH=. python tests/gpu/check_memory.py [part ...]

A first run without the checker compiles the kernels. Writes $OUT/memory.json and the logs of parts that are not clean beside it, and exits
1 if there is one. A part is clean if the checker counts no error and the part reached its end. A kernel of our own that reads past its
operand, and one that races, must be seen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import environment
from small_shapes import PARTS

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck")
CONTROLS = {"memcheck": "past the end", "racecheck": "race"}
LIMIT_S = 240
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def check(tool: str, part: str) -> dict[str, Any]:
    """One part under one tool: errors that it counts, whether the part ended, and the first lines of what it says."""
    script = HERE / ("faulty_kernels.py" if part in CONTROLS.values() else "small_shapes.py")
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    command = ["compute-sanitizer", "--tool", tool, sys.executable, str(script), part]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **settings})
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        text = f"no end within {LIMIT_S} s\n" + "".join(x.decode() if isinstance(x, bytes) else x or "" for x in (late.stdout, late.stderr))
    counted = _SUMMARY.search(text)
    said = [
        line.removeprefix("=========").strip()
        for line in text.splitlines()
        if line.startswith("=========") and (" at " in line or "rror" in line or "nvalid" in line)
    ]
    found = {"errors": int(counted[1]) if counted else None, "ended": f"{part} ran" in text, "said": said[:6]}
    if not clean(found):
        (Path(os.environ.get("OUT", ".")) / f"{tool}_{part.replace(' ', '_')}.log").write_text(text[:20000])
    return found


def clean(found: dict[str, Any]) -> bool:
    return found["errors"] == 0 and bool(found["ended"])


def main() -> None:
    parts = sys.argv[1:] or list(PARTS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(
            pool.map(
                lambda part: subprocess.run([sys.executable, str(HERE / "small_shapes.py"), part], check=True, stdout=subprocess.DEVNULL),
                parts,
            )
        )
        asked = [(tool, part) for tool in TOOLS for part in (*parts, CONTROLS[tool])]
        results = dict(zip(asked, pool.map(lambda pair: check(*pair), asked), strict=True))
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    failed = [f"{tool} {part}" for (tool, part), found in results.items() if clean(found) == (part == CONTROLS[tool])]
    facts = {**environment(), "sanitizer": version, "failed": failed, "results": {f"{t} {p}": found for (t, p), found in results.items()}}
    (Path(os.environ.get("OUT", ".")) / "memory.json").write_text(json.dumps(facts, indent=1) + "\n")
    for (tool, part), found in results.items():
        print(
            f"{tool:10s}{part:24s}", "clean" if clean(found) else f"{found['errors']} errors, ended: {found['ended']} {found['said'][:2]}"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
