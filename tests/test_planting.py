"""Faults that a card's check plants find the lines that they replace, so that a change of those lines is seen where there is no card."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rlk.kernels.rms_norm import triton as rms_norm

GPU = Path(__file__).with_name("gpu")


def test_the_planted_row_sum_replaces_lines_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GPU)
    check = importlib.import_module("check_planted")
    copy = check.planted_module(rms_norm, check._LAYOUT, check._ROW_SUM, *check._REGISTERED)
    assert copy.normalise is not rms_norm.normalise
    with pytest.raises(AssertionError, match="no such line"):
        check.planted_module(rms_norm, ("no such line", ""))
