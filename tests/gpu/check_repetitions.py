"""A thousand runs of each kernel give one digest, and graphs the bytes of eager runs:

    OUT=. PYTHONPATH=. python tests/gpu/check_repetitions.py [section ...]

Writes $OUT/repetitions.json and exits 1 if a check failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in an acceptance session

import check_attention
import check_logp
import operator_runs
from report import Report, main

SECTIONS: dict[str, Callable[[Report], None]] = {
    "operators": operator_runs.repeats,
    "logp": check_logp.repetitions,
    "attention": check_attention.repetitions,
}

if __name__ == "__main__":
    main("repetitions", SECTIONS)
