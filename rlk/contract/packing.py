"""Row order of the weights that hold several matrices, so that canonical shard s of a packed weight is one slice of adjacent rows."""

from __future__ import annotations

from rlk.contract.numerics import DEFAULT, ContractError


def qkv_order(q_heads: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """For each row of the packed qkv weight, its row in the concatenation [q; k; v].

    Packed rows are, for every KV group ascending, [q heads of the group | k | v]. Raises ContractError unless kv_heads divides q_heads.
    """
    if q_heads % kv_heads:
        raise ContractError(f"query heads={q_heads} are not a multiple of KV heads={kv_heads}: use a model whose groups are equal")
    per_group = q_heads // kv_heads
    k_start = q_heads * head_dim
    v_start = k_start + kv_heads * head_dim
    order: list[int] = []
    for g in range(kv_heads):
        order += range(g * per_group * head_dim, (g + 1) * per_group * head_dim)
        order += range(k_start + g * head_dim, k_start + (g + 1) * head_dim)
        order += range(v_start + g * head_dim, v_start + (g + 1) * head_dim)
    return tuple(order)


def gate_up_order(intermediate: int, shards: int = DEFAULT.canonical_tp) -> tuple[int, ...]:
    """For each row of the packed gate_up weight, its row in the concatenation [gate; up].

    Packed rows are, for every canonical shard s ascending, [gate rows of s | up rows of s]. Raises ContractError unless shards divides
    intermediate.
    """
    order: list[int] = []
    for s in range(shards):
        rows = shard_rows(intermediate, s, shards)
        order += rows
        order += range(intermediate + rows.start, intermediate + rows.stop)
    return tuple(order)


def shard_rows(rows: int, shard: int, shards: int = DEFAULT.canonical_tp) -> range:
    """Rows of canonical shard ``shard`` in a packed weight of ``rows`` rows; raises ContractError on an uneven cut or an unknown shard."""
    if rows % shards:
        raise ContractError(f"{rows} rows do not divide into {shards} canonical shards: set canonical_tp to a divisor")
    if not 0 <= shard < shards:
        raise ContractError(f"shard {shard} is outside {shards} canonical shards: use 0 … {shards - 1}")
    each = rows // shards
    return range(shard * each, (shard + 1) * each)
