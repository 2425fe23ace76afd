"""How the collectives of cards that write each other's memory are divided; their bytes are checked on cards (tests/gpu/check_nccl.py)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlk.contract.numerics import ContractError
from rlk.parallel.collectives import Group
from rlk.parallel.peer import BLOCKS, MOST, SLICED_FROM, SLOT, THREADS, Peer, divided, sum_form
from rlk.parallel.transport import Gloo

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


def without_card(ranks: int) -> Peer:
    peer = Peer.__new__(Peer)
    peer.rank, peer.size = 0, ranks
    return peer


def test_what_lies_in_host_memory_never_reaches_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gloo, "gather", lambda self, piece: torch.stack([piece, piece]))
    monkeypatch.setattr(Gloo, "exchange", lambda self, rows: torch.stack([rows[0], rows[0]]))
    group = Group.__new__(Group)
    group.name, group.rank, group.size, group._mover = "tp", 0, 2, without_card(2)
    group.link = SimpleNamespace(checking=False, message_bytes=1 << 28, run=lambda call, *_: call())  # type: ignore[assignment]
    held = torch.tensor([1.5, -0.0, 3.0, 4.0])
    (every,) = group.all_gather_many([held])
    assert torch.equal(every, torch.stack([held, held]))
    assert torch.equal(group.tree_all_reduce(held[:2].repeat(2)), 2 * held[:2].repeat(2))


def test_a_sum_that_the_kernels_cannot_form_is_refused() -> None:
    with pytest.raises(ContractError, match="3 ranks are not a power of two"):  # the kernels' tree would leave the third part out
        without_card(3).tree_sum(torch.empty(4, device="meta"), torch.float32)
    with pytest.raises(ValueError, match=f"{MOST + 1} elements"):
        without_card(2).tree_sum(torch.empty(MOST + 1, device="meta"), torch.float32)


def test_bytes_sent_are_those_of_the_form() -> None:
    part = torch.empty(1000, device="meta")
    assert without_card(2).bytes_sent(part, torch.bfloat16) == 4000
    assert without_card(8).bytes_sent(part, torch.bfloat16) == 7 * 125 * 6
    large = torch.empty(1 << 20, device="meta")
    assert without_card(2).bytes_sent(large, torch.bfloat16) == (1 << 19) * 6
    assert without_card(2).bytes_sent(large, torch.float32) == large.nbytes


def test_two_ranks_send_slices_from_a_size_on_and_more_ranks_always() -> None:
    for dtype, least in SLICED_FROM.items():
        assert [sum_form(2, size, dtype) for size in (16, least - 4, least)] == ["whole", "whole", "sliced"]
        assert {sum_form(ranks, size, dtype) for ranks in (4, 8) for size in (16, least)} == {"sliced"}
