"""Launches that overlap: only kernels that say so, only inside the context, and each waits before it touches memory."""

from __future__ import annotations

import re

import pytest
import torch

from rlk.kernels import overlap
from rlk.kernels._triton.aot import compile_launch
from rlk.kernels._triton.launch import recorded
from rlk.kernels.attention import triton as attention
from rlk.kernels.serving import triton as serving
from rlk.kernels.swiglu import triton as swiglu

EARLY = {"_rotate_into", "_add_norm", "_forward", "attention_decode"}


def test_a_cpu_never_overlaps() -> None:
    with overlap.overlapped(torch.device("cpu")):
        assert not overlap.overlaps()


def test_the_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "hopper", lambda device: device.type == "cpu")
    with overlap.overlapped(torch.device("cpu")):
        with overlap.overlapped(torch.device("meta")):
            assert overlap.constants() == {"EARLY": False}
        assert overlap.constants() == {"EARLY": True, "launch_pdl": True}
    assert not overlap.overlaps()


def test_a_kernel_waits_before_it_touches_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "overlaps", lambda: True)
    seen = set()
    for module in (serving, swiglu, attention):
        with recorded("cuda") as launches:
            module.examples()
        for launch in launches:
            if not launch.constants.get("EARLY") or launch.kernel.__name__ in seen:
                continue
            text = compile_launch(launch, "cuda:90").text
            touched = re.search(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async", text)
            assert touched is not None
            assert "griddepcontrol.launch_dependents" in text[: touched.start()]
            assert "griddepcontrol.wait" in text[: touched.start()]
            seen.add(launch.kernel.__name__)
    assert seen == EARLY
