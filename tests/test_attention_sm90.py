"""Attention in CUDA C++ for Hopper, without a card: which calls come to it, and that its sources and its generated header fit together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rlk.kernels._native.wgmma import instruction
from rlk.kernels.attention import sm90
from rlk.kernels.attention import triton as backend
from rlk.kernels.attention.triton import Tiles
from rlk.kernels.registry import declared_kernels

HEADS, KV_HEADS = 8, 2
OFFSETS = torch.tensor([0, 5, 12])


def rows(heads: int, dim: int = sm90.DIM, count: int = 12) -> torch.Tensor:
    return torch.zeros(count, heads, dim, dtype=torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "hopper", lambda device: True)


def test_a_cpu_has_none_of_these_kernels() -> None:
    assert not sm90.takes(HEADS, KV_HEADS, OFFSETS, rows(HEADS), rows(KV_HEADS))


@pytest.mark.usefixtures("hopper")
def test_rows_that_the_copy_engine_reads() -> None:
    packed = rows(HEADS + 2 * KV_HEADS)
    q, k, v = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    assert sm90.takes(HEADS, KV_HEADS, OFFSETS, rows(HEADS), rows(KV_HEADS), rows(KV_HEADS))
    assert sm90.takes(HEADS, KV_HEADS, OFFSETS, q, k, v)
    by_head = torch.zeros(KV_HEADS, 12, sm90.DIM, dtype=torch.bfloat16).transpose(0, 1)
    shifted = torch.zeros(12 * 2 * sm90.DIM + 1, dtype=torch.bfloat16)[1:].view(12, 2, sm90.DIM)
    for refused in (by_head, shifted, rows(KV_HEADS, 64), rows(KV_HEADS)[..., ::2], rows(KV_HEADS, count=0), rows(1).expand(12, 2, 128)):
        assert not sm90.takes(HEADS, KV_HEADS, OFFSETS, rows(HEADS), refused)
    assert not sm90.takes(HEADS, KV_HEADS, OFFSETS.int(), rows(HEADS), rows(KV_HEADS))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("heads", "kv_heads", "taken"), [(8, 8, True), (64, 1, True), (128, 1, False), (40, 8, False), (12, 4, False)])
def test_groups_that_fill_a_block(heads: int, kv_heads: int, taken: bool) -> None:
    assert sm90.takes(heads, kv_heads, OFFSETS, rows(heads), rows(kv_heads)) is taken


@pytest.mark.usefixtures("hopper")
def test_calls_that_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("forward", "query_gradient", "key_gradient"):
        monkeypatch.setattr(sm90, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(backend.SOURCE, "launch", lambda *_, **__: called.append("triton"))
    q, k, sums = rows(HEADS), rows(KV_HEADS), torch.zeros(12, HEADS)
    keys, segments, inputs = backend.packed(k, k), backend.whole(OFFSETS), (q, k, k, q, sums, sums)
    parts = backend.owned(torch.tensor([[0, 5, 0, 0, 5], [5, 7, 0, 5, 7]]), q.device)

    def ran(run: Any, *arguments: Any) -> str:
        called.clear()
        run(*arguments)
        return " ".join(called)

    for of in (segments, parts):
        assert ran(backend.run_forward, "attention", q, keys, of, 1.0, 64, 256, True) == "forward"
        assert ran(backend.run_query_gradient, inputs, of, 1.0) == "query_gradient"
        assert ran(backend.run_key_gradient, inputs, of, 1.0) == "key_gradient"
    assert ran(backend.run_forward, "attention", q, keys, segments, 1.0, 128, 256, True) == "triton"
    assert ran(backend.run_forward, "attention", q, keys, segments, 1.0, 64, 256, True, Tiles(64, 64, 4, 2), 1) == "triton"
    assert ran(backend.run_query_gradient, inputs, segments, 1.0, Tiles(64, 64, 4, 2)) == "triton"
    assert ran(backend.run_key_gradient, inputs, segments, 1.0, Tiles(32, 64, 4, 2)) == "triton"


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("columns", [64, 128, 136])
def test_an_instruction_names_each_operand_once(columns: int, held: bool) -> None:
    text = instruction("multiply", columns, held=held, across=True)
    used = [int(number) for number in re.findall(r"%(\d+)", text)]
    operands = text[text.index('\\n}"') :].count("(o[") + (4 if held else 1) + 2
    assert sorted(used) == list(range(operands))
    assert text.count('"+f"') == columns // 2


@pytest.mark.parametrize("source", [sm90.FORWARD, sm90.BACKWARD])
def test_a_source_has_the_instructions_that_it_uses(source: Any) -> None:
    assert re.fullmatch(r"cuda:attention:[0-9a-f]{12}", source.kernel_id)
    text = "".join(path.read_text() for path in source.files if path.suffix == ".h")
    for name in re.findall(r"void (\w+)\(float", sm90._INSTRUCTIONS[source]):
        assert re.search(rf"\b{name}\(", text), name
    kernels = [name for name in sm90._SHARED if f"{name}(" in text]
    assert kernels
    assert all(1024 + sm90._SHARED[name] + 4096 <= 232_448 for name in kernels)


def test_both_sources_are_declared_under_names_of_their_own() -> None:
    assert sm90.FORWARD.kernel_id != sm90.BACKWARD.kernel_id
    assert all(declared_kernels()[source.kernel_id] == ("attention",) for source in (sm90.FORWARD, sm90.BACKWARD))
