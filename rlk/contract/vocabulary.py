"""How the vocabulary is padded, sharded and tiled for the logprob."""

from __future__ import annotations

from rlk.contract.numerics import DEFAULT, ContractError, Numerics, padded_vocab_size
from rlk.contract.packing import shard_rows


def padding_size(numerics: Numerics = DEFAULT) -> int:
    """Multiple to which an engine must pad the vocabulary so that its shards are the canonical ones: 128·canonical_tp rows."""
    return padded_vocab_size(1, numerics.canonical_tp)


def vocabulary_shards(vocab_size: int, numerics: Numerics = DEFAULT) -> tuple[range, ...]:
    """Columns of each canonical shard of the padded vocabulary (Qwen3: 8 × 19072). Columns >= vocab_size are padding."""
    padded = padded_vocab_size(vocab_size, numerics.canonical_tp)
    return tuple(shard_rows(padded, s, numerics.canonical_tp) for s in range(numerics.canonical_tp))


def vocabulary_tiles(shard: range, numerics: Numerics = DEFAULT) -> tuple[range, ...]:
    """Tiles of one shard in the order they are merged: vocab_tile columns from the shard's start, the last tile short."""
    starts = range(shard.start, shard.stop, numerics.vocab_tile)
    return tuple(range(at, min(at + numerics.vocab_tile, shard.stop)) for at in starts)


def require_token_ids(ids: tuple[int, ...], vocab_size: int, what: str = "token ids") -> None:
    """Raise ContractError for an id outside 0 … vocab_size-1: padded columns can be neither selected nor supported."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ContractError(
                f"{what}: id {token} is outside the vocabulary of {vocab_size}: padded columns are never selected or supported"
            )
