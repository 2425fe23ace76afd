"""Fused steps of a decoder layer: the bytes of the operators they are made of, and nothing written beside a slot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.kernels._triton.aot import TARGETS, compile_all
from rlk.kernels.attention import attention, paged_attention
from rlk.kernels.checked import check_once, trusted
from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.rope import rope, rope_table
from rlk.kernels.serving import add_rms_norm, rotate_into_cache, store_kv
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.qwen3 import Qwen3Dense, Qwen3Layer
from rlk.model.serving import serve

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)  # fmt: skip
GROUPS, EACH, DIM, PAGE, TOKENS = 2, 3, 16, 4, 9


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def cache(blocks: int = 5, groups: int = GROUPS, page: int = PAGE, dim: int = DIM) -> torch.Tensor:
    return torch.full((blocks, groups, page, 2 * dim), float("nan"), dtype=torch.bfloat16)


def test_rows_land_in_their_slots_and_nowhere_else() -> None:
    key, value = torch.randn(TOKENS, GROUPS, DIM).bfloat16(), torch.randn(TOKENS, GROUPS, DIM).bfloat16()
    slots = torch.tensor([3, -1, 19, 0, 7, 20, 12, -5, 8])
    kept = cache()
    store_kv(key, value, kept, slots)
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < 20:
            assert torch.equal(bits(kept[slot // PAGE, :, slot % PAGE]), bits(torch.cat([key[row], value[row]], dim=1)))
    written = {slot for slot in slots.tolist() if 0 <= slot < 20}
    rows = kept.transpose(1, 2).flatten(0, 1)
    assert all(bool(rows[slot].isnan().all()) != (slot in written) for slot in range(20))


def test_queries_and_cache_are_those_of_the_operators() -> None:
    qkv = torch.randn(TOKENS, GROUPS * (EACH + 2) * DIM).bfloat16()
    q_gamma, k_gamma = torch.randn(DIM).bfloat16(), torch.randn(DIM).bfloat16()
    positions, table = torch.randint(0, 40, (TOKENS,)), rope_table(DIM, 1e4, 40)
    slots = torch.randperm(20)[:TOKENS]
    kept, expected = cache(), cache()
    q = rotate_into_cache(qkv, q_gamma, k_gamma, 1e-6, positions, table, kept, slots)
    heads = qkv.view(TOKENS, GROUPS, EACH + 2, DIM)
    queries, key, value = heads[:, :, :EACH].reshape(TOKENS, -1, DIM), heads[:, :, EACH], heads[:, :, EACH + 1]
    assert torch.equal(bits(q), bits(rope(qk_norm(queries, q_gamma, 1e-6), positions, table)))
    store_kv(rope(qk_norm(key, k_gamma, 1e-6), positions, table), value, expected, slots)
    assert torch.equal(bits(kept), bits(expected))


def test_the_norm_reads_the_rounded_sum() -> None:
    x, y, gamma = torch.randn(7, 96).bfloat16(), torch.randn(7, 96).bfloat16(), torch.randn(96).bfloat16()
    total, normed = add_rms_norm(x, y, gamma, 1e-6)
    assert torch.equal(bits(total), bits(x + y))
    assert torch.equal(bits(normed), bits(rms_norm(x + y, gamma, 1e-6)))


@pytest.mark.parametrize("lengths", [(1,), (37,), (5, 70, 1)])
def test_a_served_model_is_the_model(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    make = lambda shape: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).bfloat16()
    dense = Qwen3Dense(CONFIG, DEFAULT)
    dense.load_hf({name: make(shape) for name, shape in hf_shapes(CONFIG).items()})
    tile: dict[str, Any] = {"scale": CONFIG.attention_scale, "kv_tile": DEFAULT.kv_tile, "kv_split": DEFAULT.kv_split}
    rows = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    ids, positions = torch.randint(0, 260, (sum(lengths),), generator=generator), torch.cat([torch.arange(n) for n in lengths])
    expected = dense(ids, positions, lambda _, q, k, v: attention(q, k, v, cu_seqlens, **tile).flatten(1))

    page, most = 16, 5
    block_table = torch.randperm(len(lengths) * most, generator=generator).view(len(lengths), most).int()
    slots = torch.cat([block_table[i, torch.arange(n) // page] * page + torch.arange(n) % page for i, n in enumerate(lengths)]).long()
    caches = [cache(len(lengths) * most, 8, page, 32) for _ in range(2)]

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        weights = dense.layers[layer]
        assert isinstance(weights, Qwen3Layer)
        gammas = weights.q_norm, weights.k_norm
        q = rotate_into_cache(qkv, *gammas, CONFIG.rms_norm_eps, positions, dense.rope_table, caches[layer], slots)
        return paged_attention(q, caches[layer], block_table, cu_seqlens, rows, **tile).flatten(1)

    assert torch.equal(bits(serve(dense, ids, attend)), bits(expected))


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache"):
        store_kv(torch.zeros(1, 3, DIM).bfloat16(), torch.zeros(1, 3, DIM).bfloat16(), cache(), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots"):
        store_kv(torch.zeros(1, 2, DIM).bfloat16(), torch.zeros(1, 2, DIM).bfloat16(), cache(), torch.zeros(1, dtype=torch.int32))
    ones, one = torch.ones(DIM).bfloat16(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="qkv"):
        rotate_into_cache(torch.zeros(1, 70).bfloat16(), ones, ones, 1e-6, one, rope_table(DIM, 1e4, 4), cache(), one)
    with pytest.raises(ValueError, match="add_rms_norm"):
        add_rms_norm(torch.zeros(1, 4).bfloat16(), torch.zeros(2, 4).bfloat16(), torch.ones(4).bfloat16(), 1e-6)


def test_compiled_steps_neither_fuse_nor_spill() -> None:
    compiled = list(compile_all(["serving"]))
    assert {row.target for row in compiled} == set(TARGETS)
    assert {row.kernel for row in compiled} == {"_store", "_rotate_into", "_add_norm"}
    assert [row.line() for row in compiled if row.spills > 16] == []
    cuda = [row for row in compiled if row.target == "cuda:90"]
    assert [row.line() for row in cuda if re.search(r"\bfma\.rn\.f32|\.ftz\b|\b(?:div|sqrt|rsqrt|rcp)\.(?:approx|full)", row.text)] == []


def test_interpreted_indices_and_masks() -> None:
    script = Path(__file__).with_name("interpreted_serving.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every index and mask is right\n")


def test_trusted_values_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card(SimpleNamespace):
        is_cuda, _version = True, 0
        is_inference = staticmethod(lambda: False)

    card: Any = Card()
    host, seen = torch.zeros(1), []
    with trusted():
        with trusted():
            check_once(card, "fact", lambda: seen.append("card"))
        check_once(card, "fact", lambda: seen.append("card"))
        with ThreadPoolExecutor(1) as other:  # as the thread of a backward pass
            other.submit(check_once, card, "fact", lambda: seen.append("card")).result()
        check_once(host, "fact", lambda: seen.append("host"))
    assert seen == ["host"]  # a host need not wait for itself
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_once(card, "fact", lambda: seen.append("card"))
    assert seen == ["host", "card"]
