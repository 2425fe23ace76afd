"""Folds, groups, attention edges, packed rows and vocabulary tiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.arithmetic import AFTER_LAYERS, BEFORE_LAYERS, IN_LAYER, NO_CONTRACTION, trace_names
from rlk.contract.models import QWEN3_8B, TINY, ModelShape
from rlk.contract.numerics import ContractError, Numerics
from rlk.contract.orders import CONTRACTIONS, attention_splits, attention_tiles, fold_halves, fold_pairs, groups
from rlk.contract.packing import gate_up_order, qkv_order, shard_rows
from rlk.contract.vocabulary import padding_size, require_token_ids, vocabulary_shards, vocabulary_tiles
from rlk.kernels._native import build

ONE_SPLIT = Numerics(kv_split=0, attention_family="vendor-one-split")


def join(a: str, b: str) -> str:
    return f"({a}+{b})"


def test_pair_tree_is_the_stated_one() -> None:
    assert fold_pairs([f"p{i}" for i in range(8)], join) == "(((p0+p1)+(p2+p3))+((p4+p5)+(p6+p7)))"
    assert fold_pairs(["p0"], join) == "p0"


@pytest.mark.parametrize("parts", [0, 3, 6])
def test_pair_tree_refuses_a_ragged_tree(parts: int) -> None:
    with pytest.raises(ContractError, match=f"{parts} parts are not a power of two: give one per canonical shard or leaf"):
        fold_pairs(["p"] * parts, join)


def test_row_tree_adds_the_upper_half_to_the_lower() -> None:
    assert fold_halves([f"v{i}" for i in range(4)], join, "0") == "((v0+v2)+(v1+v3))"
    assert fold_halves(["v0", "v1", "v2"], join, "0") == "((v0+v2)+(v1+0))"


@given(st.integers(1, 200), st.integers(0, 50))
def test_groups_are_counted_from_their_own_first_term(count: int, first: int) -> None:
    cut = groups(count, first)
    assert [k for group in cut for k in group] == list(range(first, first + count))
    assert all((group.start - first) % 16 == 0 and len(group) <= 16 for group in cut)


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([Numerics(), Numerics(kv_tile=64, kv_split=256), ONE_SPLIT]))
def test_attention_edges_do_not_depend_on_how_many_keys_are_visible(short: int, more: int, numerics: Numerics) -> None:
    """A later query sees the earlier one's complete tiles and splits unchanged: prefill, chunk and decode share every edge."""
    for edges in (attention_tiles, attention_splits):
        before, after = edges(short, numerics), edges(short + more, numerics)
        assert [k for piece in before for k in piece] == list(range(short))
        assert before[:-1] == after[: len(before) - 1]
        assert before[-1].start == after[len(before) - 1].start


def test_attention_edges() -> None:
    assert [s.start for s in attention_splits(129)] == [0, 64, 128]
    assert [t.start for t in attention_tiles(65)] == [0, 32, 64]
    assert attention_splits(129, ONE_SPLIT) == (range(129),)
    assert attention_splits(0) == attention_splits(0, ONE_SPLIT) == ()


def test_a_direction_is_split_exactly_if_tp_divides_what_it_sums_over() -> None:
    column, row = {"qkv", "gate_up", "lm_head"}, {"o_proj", "down_proj"}
    assert {c.name for c in CONTRACTIONS if c.forward == "split"} == row
    assert {c.name for c in CONTRACTIONS if c.input_grad == "split"} == column
    assert {c.weight_grad for c in CONTRACTIONS} == {"token"}
    assert tuple(c.name for c in CONTRACTIONS) == tuple(g.name for g in TINY.gemms())


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(1, 4))
def test_packed_qkv_shards_hold_whole_groups(shards: int, per_group: int, head_dim: int) -> None:
    kv_heads, q_heads = 8, 8 * per_group
    order = qkv_order(q_heads, kv_heads, head_dim)
    assert sorted(order) == list(range((q_heads + 2 * kv_heads) * head_dim))
    for s in range(shards):
        rows = [order[r] for r in shard_rows(len(order), s, shards)]
        heads = [row // head_dim for row in rows]
        mine = range(s * kv_heads // shards, (s + 1) * kv_heads // shards)
        assert sorted({h for h in heads if h < q_heads}) == list(range(mine.start * per_group, mine.stop * per_group))
        assert sorted({h - q_heads for h in heads if q_heads <= h < q_heads + kv_heads}) == list(mine)
        assert sorted({h - q_heads - kv_heads for h in heads if h >= q_heads + kv_heads}) == list(mine)


def test_packed_gate_up_pairs_each_shard() -> None:
    assert gate_up_order(8, 2) == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
    assert sorted(gate_up_order(TINY.intermediate)) == list(range(2 * TINY.intermediate))


def test_packing_refusals() -> None:
    with pytest.raises(ContractError, match="query heads=6 are not a multiple of KV heads=4: use a model whose groups are equal"):
        qkv_order(6, 4, 32)
    with pytest.raises(ContractError, match="100 rows do not divide into 8 canonical shards: set canonical_tp to a divisor"):
        gate_up_order(100)
    with pytest.raises(ContractError, match="shard 8 is outside 8 canonical shards: use 0 … 7"):
        shard_rows(64, 8)


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8]))
def test_vocabulary_tiles_are_a_partition(vocab_size: int, canonical_tp: int) -> None:
    numerics = Numerics(canonical_tp=canonical_tp)
    shards = vocabulary_shards(vocab_size, numerics)
    tiles = [tile for shard in shards for tile in vocabulary_tiles(shard, numerics)]
    assert [t.start for t in tiles[1:]] == [t.stop for t in tiles[:-1]]
    assert (tiles[0].start, tiles[-1].stop) == (0, shards[-1].stop)
    assert shards[-1].stop % padding_size(numerics) == 0
    assert 0 <= shards[-1].stop - vocab_size < padding_size(numerics)
    assert len({len(s) for s in shards}) == 1


def test_vocabulary_of_the_models() -> None:
    assert [len(s) for s in vocabulary_shards(QWEN3_8B.vocab_size)] == [19072] * 8
    assert vocabulary_tiles(range(128, 256)) == (range(128, 256),)
    assert vocabulary_shards(TINY.vocab_size)[-1].stop == 1024


def test_padded_ids_are_refused() -> None:
    require_token_ids((0, 259), 260)
    for token in (-1, 260, 1023):
        with pytest.raises(ContractError, match=f"response 3: id {token} is outside the vocabulary of 260: padded columns are never"):
            require_token_ids((5, token), 260, "response 3")


def test_trace_names_cover_every_stored_value() -> None:
    names = trace_names(2)
    assert len(names) == len(set(names)) == len(BEFORE_LAYERS) + 2 * len(IN_LAYER) + len(AFTER_LAYERS)
    assert names[0] == "embedding"
    assert names[-3:] == ("final_norm", "logits", "logp")
    assert names.index("layers.0.q_norm") < names.index("layers.0.q_rope") < names.index("layers.1.q_norm")


def test_only_logits_and_logprob_stay_fp32() -> None:
    assert [p.name for p in (*BEFORE_LAYERS, *IN_LAYER, *AFTER_LAYERS) if p.storage == "fp32"] == ["logits", "logp"]


def test_the_native_build_forbids_contraction() -> None:
    assert NO_CONTRACTION["c++"] in build.FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(build.FLAGS)


@pytest.mark.parametrize("model", [TINY, QWEN3_8B])
def test_models_fit_the_default_contract(model: ModelShape) -> None:
    model.require_fits()
    assert model.rms_norm_eps == 1e-6


def test_a_model_that_does_not_fit_is_refused() -> None:
    four = ModelShape("four", 128, 256, 2, 16, 4, 32, 260, 512)
    with pytest.raises(ContractError, match="kv_heads=4 is not a multiple of canonical_tp=8: set canonical_tp=4 or less"):
        four.require_fits()
    four.require_fits(Numerics(canonical_tp=4))
