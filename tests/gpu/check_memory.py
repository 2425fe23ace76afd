"""Runs every part of ``small_shapes.py`` under a tool of compute-sanitizer, all at once:

    OUT=. PYTHONPATH=. python tests/gpu/check_memory.py memcheck [part ...]
    OUT=. PYTHONPATH=. python tests/gpu/check_memory.py racecheck [part ...]

A first run without the tool compiles the kernels. Writes $OUT/<tool>.json and the logs of parts that are not clean beside it, and exits 1
if there is one. A part is clean if the tool counts no error and the part reached its end. A kernel that reads past its operand, and one
that races, must be seen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from report import environment
from small_shapes import PARTS

HERE = Path(__file__).parent
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
    tool, *parts = sys.argv[1:]
    parts = parts or list(PARTS)
    alone = [[sys.executable, str(HERE / "small_shapes.py"), part] for part in parts]
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(subprocess.run, check=True, stdout=subprocess.DEVNULL), alone))
        asked = {pool.submit(check, tool, part): part for part in (*parts, CONTROLS[tool])}
        for done in as_completed(asked):
            part, result = asked[done], done.result()
            found[part] = result
            said = "clean" if clean(result) else f"{result['errors']} errors, ended: {result['ended']}, {result['said'][:1]}"
            print(f"{tool} {part}: {said}", flush=True)
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    failed = sorted(part for part, result in found.items() if clean(result) == (part == CONTROLS[tool]))
    facts = {**environment(), "sanitizer": version, "tool": tool, "failed": failed, "parts": {part: found[part] for part in sorted(found)}}
    (Path(os.environ.get("OUT", ".")) / f"{tool}.json").write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
