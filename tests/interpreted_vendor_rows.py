"""Run by test_vendor_attention.py under TRITON_INTERPRET=1: where the copies of keys and values put every row, on a CPU.

Exact copies: bytes are judged. Fresh memory is NaN.
"""

from __future__ import annotations

import torch

from rlk.acceptance.poison import poisoned_memory
from rlk.contract.topology import padded_length, zigzag_positions
from rlk.kernels.attention import vendor
from rlk.kernels.attention.context import Segment
from rlk.kernels.attention.vendor_library import BLOCK
from rlk.kernels.attention.vendor_rows import place_rows


def check(at: vendor.Placement, k: torch.Tensor, v: torch.Tensor, firsts: list[int], counts: list[int]) -> None:
    """Every sequence is where the library is told, +0 follows it up to the next block edge, and nothing overlaps."""
    with poisoned_memory():
        placed = place_rows(k, v, at.rows, at.blocks)
    assert at.lengths.tolist() == counts
    starts = at.k_starts.tolist()
    assert starts[-1] == BLOCK * at.blocks
    ends = [start + -(-count // BLOCK) * BLOCK for start, count in zip(starts, counts)]
    assert all(start % BLOCK == 0 and end <= following for start, end, following in zip(starts, ends, starts[1:]))
    for original, copy in zip((k, v), placed):
        assert copy.shape == (BLOCK * at.blocks, *original.shape[1:])
        for start, end, first, count in zip(starts, ends, firsts, counts):
            assert torch.equal(copy[start : start + count], original[first : first + count])
            assert not copy[start + count : end].view(torch.int16).any()


def main() -> None:
    torch.manual_seed(0)
    for lengths, heads in (([5], 2), ([128, 1, 0, 127, 129, 0, 256, 300], 2), ([0, 0], 2), ([1] * 260, 1)):
        rows = sum(lengths)
        joined = torch.randn(rows, 6, 40).bfloat16()
        k, v = joined[:, :heads], joined[:, 3 : 3 + heads]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        check(vendor.place_whole(cu, rows), k, v, cu[:-1].tolist(), lengths)
        assert vendor.place_whole(cu, rows).q_starts.tolist() == cu.tolist()
    lengths = [padded_length(n) for n in (33, 100, 1, 300)]
    cu = torch.tensor([0, *lengths]).cumsum(0).tolist()
    k, v = torch.randn(2, cu[-1], 2, 32).bfloat16()
    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            segments: list[Segment] = []
            for first, n in zip(cu, lengths):
                positions = zigzag_positions(n, ranks, rank)
                half = len(positions) // 2
                for piece in (positions[:half], positions[half:]):
                    segments.append(Segment(sum(s.rows for s in segments), half, piece[0], first, n))
            at = vendor.place_owned(torch.tensor(segments), k.device)
            check(at, k, v, [s.gathered for s in segments], [s.position + s.rows for s in segments])
            assert at.q_starts.tolist() == [0, *torch.tensor([s.rows for s in segments]).cumsum(0).tolist()]
    print("every row is in its place")


if __name__ == "__main__":
    main()
