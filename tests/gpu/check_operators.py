"""Checks every Triton operator but attention and logprobs on a card, with no pytest and no install of rlk:

    PYTHONPATH=. python3 tests/gpu/check_operators.py [section ...]

Writes $OUT/operators.json and exits 1 if a check failed. Needs pydantic, for the contract's cells.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the references' matrix products run while deterministic algorithms are on

import operator_cells
import operator_products
import operator_runs
import operator_times
import operator_update
from report import Report, main

OPERATORS = ("embedding", "rms_norm", "qk_norm", "det_gemm", "rope", "silu", "swiglu", "lm_head", "pack")
SECTIONS: dict[str, Callable[[Report], None]] = {
    **{f"cells {name}": partial(operator_cells.cells, operator=name) for name in OPERATORS},
    "cpu bytes": operator_cells.cpu_bytes,
    "tiles": operator_products.tiles,
    "tokens": operator_products.tokens,
    "vendor": operator_products.vendor,
    "repeats": operator_runs.repeats,
    "refusals": operator_runs.refusals,
    "row sums": operator_runs.planted_sum,
    "update": operator_update.everything,
    "times": operator_times.everything,
}

if __name__ == "__main__":
    if "--child" not in sys.argv:
        began = time.time()
        compiled = operator_products.precompile()
        print(f"{len(compiled)} products compiled in {time.time() - began:.0f} s", *filter(None, compiled), sep="\n", flush=True)
    main("operators", SECTIONS)
