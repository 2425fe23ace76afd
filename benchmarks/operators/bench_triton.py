"""Times of the Triton operators on a card against torch's defaults, interleaved and with a cold cache:

    PYTHONPATH=. python3 benchmarks/operators/bench_triton.py

This is the section ``times`` of tests/gpu/check_operators.py alone; it writes $OUT/operators.json.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

CHECKS = Path(__file__).resolve().parent.parent.parent / "tests" / "gpu"

if __name__ == "__main__":
    sys.path.insert(0, str(CHECKS))
    sys.argv = [str(CHECKS / "check_operators.py"), "times"]
    runpy.run_path(sys.argv[0], run_name="__main__")
