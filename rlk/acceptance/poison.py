"""Poisoned memory: while it is on, what torch hands out uninitialised is NaN (or the largest integer), so that an unwritten row shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill ``torch.empty``, ``empty_like`` and their kin with NaN or the largest integer; raises RuntimeError if torch does not do so.

    Torch fills only while its deterministic algorithms are asked for, so these are on meanwhile, and with them a cuBLAS workspace of fixed
    size, without which torch refuses matrix products on a GPU. All three settings are put back afterwards.
    """
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    workspace = os.environ.get(WORKSPACE)
    os.environ[WORKSPACE] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            if not bool(torch.empty(4, device=device).isnan().all()):
                raise RuntimeError(f"torch.empty on {device} is not filled with NaN: this torch build cannot poison memory")
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            del os.environ[WORKSPACE]
