"""Runs every part of ``small_shapes.py`` under memory checks:

    OUT=. PYTHONPATH=. python tests/gpu/check_memory.py [--checks end,start,memcheck,racecheck] [part ...]

memcheck, racecheck: the tools of compute-sanitizer. end, start: memory that ends, or starts, where no page is mapped (``guard_pages.py``),
which holds for code that a tool cannot follow. Parts share processes, and are repeated one by one where a process is not clean. Writes
$OUT/memory.json as results come, and the logs of what is not clean, and exits 1 if a part is not. A part is clean if the check counts no
error and the part reached its end. Planted faults must be seen. What each check ran is kept by kernel id.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from report import environment
from small_shapes import PARTS

HERE = Path(__file__).parent
CONTROLS = {
    "end": ("past the end", "one past the end"),
    "start": ("before the start",),
    "memcheck": ("past the end",),
    "racecheck": ("race",),
}
"""What each check must see, of ``faulty_kernels.py``; the first checks compile what the tools then find compiled."""
LIMIT_S = 240
GROUPS, MOST_AT_ONCE = 9, 16
"""Processes of a check, and of all checks at a time."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def check(name: str, *parts: str) -> dict[str, Any]:
    """Parts in one process under one check: errors that it counts, whether all parts ended, and the first lines of what it says."""
    pages, planted = name in ("end", "start"), parts[0] in CONTROLS[name]
    script = HERE / ("guard_pages.py" if pages else "faulty_kernels.py" if planted else "small_shapes.py")
    tool = [] if pages else ["compute-sanitizer", "--tool", name]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name == "memcheck" else {}
    command = [*tool, sys.executable, str(script), *([name] if pages else []), *parts]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **settings})
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        text = f"no end within {LIMIT_S} s\n" + "".join(x.decode() if isinstance(x, bytes) else x or "" for x in (late.stdout, late.stderr))
        code = 1
    counted = _SUMMARY.search(text)
    errors = (int(counted[1]) if counted else None) if tool else int(code != 0)
    said = [line.removeprefix("=========").strip() for line in text.splitlines() if re.search(r"^=+.* at |rror|nvalid|azard", line)]
    ended = set(parts) <= {line.removesuffix(" ran") for line in text.splitlines()}
    kernels = [word for line in text.splitlines() if line.startswith("kernels ") for word in line.split()[1:]]
    found = {"errors": errors, "ended": ended, "said": said[:6] if errors != 0 else [], "kernels": kernels}
    if not clean(found):
        file = f"{name}_{'_'.join(parts)[:60].replace(' ', '_').replace(',', '')}.log"
        (Path(os.environ.get("OUT", ".")) / file).write_text(text[:20000])
    return found


def clean(found: dict[str, Any]) -> bool:
    return found["errors"] == 0 and bool(found["ended"])


def check_each(name: str, *parts: str) -> dict[str, dict[str, Any]]:
    """Parts together, or one by one if they are not clean."""
    found = check(name, *parts)
    together = len(parts) == 1 or clean(found)
    return {part: found if together else check(name, part) for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part")
    parser.add_argument("--checks", default=",".join(CONTROLS))
    asked = parser.parse_args()
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    where, failed = environment(), list[str]()
    found: dict[str, dict[str, Any]] = {name: {} for name in asked.checks.split(",")}
    kernels: dict[str, set[str]] = {name: set() for name in found}
    groups = [group for i in range(GROUPS) if (group := asked.parts[i::GROUPS])]
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)) as pool:
        tasks = [(name, group) for name in found for group in (*groups, *([part] for part in CONTROLS[name]))]
        running = {pool.submit(check_each, name, *group): name for name, group in tasks}
        for done in as_completed(running):
            name = running[done]
            found[name] |= done.result()
            for part, result in done.result().items():
                kernels[name].update(result.pop("kernels", ()))  # parts of one process share their result
                print(f"{name} {part}: {'clean' if clean(result) else result}"[:200], flush=True)
            failed = sorted(
                f"{name}: {part}" for name, held in found.items() for part, r in held.items() if clean(r) == (part in CONTROLS[name])
            )
            ran = {name: sorted(ids) for name, ids in kernels.items()}
            facts = {**where, "sanitizer": version, "failed": failed, "kernels": ran, "checks": found}
            (Path(os.environ.get("OUT", ".")) / "memory.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
