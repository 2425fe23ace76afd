"""How the collectives of cards that write each other's memory are divided; their bytes are checked on cards (tests/gpu/check_nccl.py)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from rlk.parallel.peer import BLOCKS, SLOT, THREADS, divided

VECTORS = (
    1,
    2,
    THREADS,
    THREADS + 1,
    4096,
    BLOCKS * THREADS,
    BLOCKS * THREADS + 1,
    BLOCKS * SLOT,
    BLOCKS * SLOT + 1,
    3 * BLOCKS * SLOT - 5,
)


def rooms(vectors: int, ranks: int) -> list[tuple[int, int, range]]:
    """(block, slice, vectors) of every room that the kernels fill in one launch, as their loops go. ranks: slices of a sum, 1 if uncut."""
    blocks, each = divided(-(-vectors // ranks))
    found = []
    for block in range(blocks):
        for first in range(block * each * ranks, vectors, blocks * each * ranks):
            for piece in range(ranks):
                at = first + piece * each
                found.append((block, piece, range(at, max(at, min(at + each, vectors)))))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("vectors", VECTORS)
def test_every_vector_has_one_room_that_holds_it(vectors: int, ranks: int) -> None:
    held = rooms(vectors, ranks)
    assert all(len(span) <= SLOT and block < BLOCKS for block, _, span in held)
    spans = sorted((span.start, span.stop) for _, _, span in held if span)
    assert spans[0][0] == 0
    assert spans[-1][1] == vectors
    assert all(left[1] == right[0] for left, right in pairwise(spans))


def test_small_sums_spread_over_blocks_and_large_ones_fill_them() -> None:
    assert divided(1) == (1, THREADS)
    assert divided(BLOCKS * THREADS) == (BLOCKS, THREADS)
    assert divided(100 * BLOCKS * SLOT) == (BLOCKS, SLOT)
    assert Counter(block for block, _, _ in rooms(2 * BLOCKS * SLOT, 1)) == dict.fromkeys(range(BLOCKS), 2)
