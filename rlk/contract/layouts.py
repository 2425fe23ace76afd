"""Where the tokens of a ragged batch lie in each layout that an invariance judgment compares with the canonical one.

Plain integers: an operator's rows, positions, sequence offsets and token leaves all follow from these placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlk.contract.numerics import ContractError
from rlk.contract.workloads import RaggedBatch


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sample: tokens first … first+count-1 lie at rows row … row+count-1."""

    sample: int
    first: int
    count: int
    row: int


@dataclass(frozen=True)
class Placement:
    """One launch: its rows, and the pieces that lie in them.

    neighbours: the other rows hold other tokens (True) or padding (False).
    """

    rows: int
    pieces: tuple[Piece, ...]
    neighbours: bool = False

    @property
    def samples(self) -> tuple[int, ...]:
        """Ids of the samples that take part, ascending."""
        return tuple(sorted({p.sample for p in self.pieces}))

    @property
    def gaps(self) -> tuple[range, ...]:
        """Rows between, before and after the pieces, as maximal runs."""
        taken = sorted((p.row, p.row + p.count) for p in self.pieces)
        edges = [(0, 0), *taken, (self.rows, self.rows)]
        return tuple(range(a, b) for (_, a), (b, _) in pairwise(edges) if b > a)

    def starts(self) -> dict[int, int]:
        """Row of token 0 of every sample; raises ContractError if a sample is not whole from its first token."""
        if any(p.first for p in self.pieces) or len(self.samples) != len(self.pieces):
            raise ContractError("a sample is cut in this placement: token leaves need whole samples")
        return {p.sample: p.row for p in self.pieces}


def canonical(batch: RaggedBatch) -> Placement:
    """Samples packed in id order."""
    return _whole(batch, batch.starts, batch.packed)


def placements(name: str, batch: RaggedBatch, *, neighbours: Sequence[int], shifts: Sequence[int]) -> tuple[Placement, ...]:
    """The launches of layout ``name`` (``rlk.contract.judgments.LAYOUT_TRANSFORMS``).

    batch_neighbours: for every total in ``neighbours``, as many samples as fit, from id 0 on, and other tokens up to that many rows.
    batch_size_one: each sample alone. permutation, padding_left, padding_right: as the batch says, padding is garbage.
    packing: the first and the second half of the samples, each half packed by itself. chunking: launch i holds chunk i of every sample.
    tile_position: all samples after ``shift`` rows of other tokens. decode_against_prefill: the last token of every sample in one launch.
    """
    if name not in _PLACEMENTS:
        raise ContractError(f"{name} is not a layout: use one of {', '.join(_PLACEMENTS)}")
    found = tuple(_PLACEMENTS[name](batch, neighbours, shifts))
    if not found:
        raise ContractError(f"layout {name} has no launch: give totals or shifts that fit {batch.packed} rows")
    return found


def _whole(
    batch: RaggedBatch, starts: Sequence[int], rows: int, samples: Sequence[int] | None = None, neighbours: bool = False
) -> Placement:
    ids = range(len(batch.lengths)) if samples is None else samples
    return Placement(rows, tuple(Piece(i, 0, batch.lengths[i], start) for i, start in zip(ids, starts)), neighbours)


def _packed(batch: RaggedBatch, samples: Sequence[int]) -> Placement:
    lengths = [batch.lengths[i] for i in samples]
    return _whole(batch, [sum(lengths[:at]) for at in range(len(lengths))], sum(lengths), samples)


def _neighbours(batch: RaggedBatch, totals: Sequence[int], _: Sequence[int]) -> Iterable[Placement]:
    for total in totals:
        fit = [i for i in range(len(batch.lengths)) if sum(batch.lengths[: i + 1]) <= total]
        if fit:
            yield _whole(batch, batch.starts, total, fit, neighbours=True)


def _alone(batch: RaggedBatch, _: Sequence[int], __: Sequence[int]) -> Iterable[Placement]:
    return (_packed(batch, [i]) for i in range(len(batch.lengths)))


def _permuted(batch: RaggedBatch, _: Sequence[int], __: Sequence[int]) -> Iterable[Placement]:
    return (_whole(batch, batch.permuted_starts, batch.packed),)


def _padded(left: bool) -> Callable[[RaggedBatch, Sequence[int], Sequence[int]], Iterable[Placement]]:
    return lambda batch, _, __: (_whole(batch, batch.padded_starts(left), len(batch.lengths) * batch.pad_to),)


def _halves(batch: RaggedBatch, _: Sequence[int], __: Sequence[int]) -> Iterable[Placement]:
    ids = range(len(batch.lengths))
    middle = (len(ids) + 1) // 2
    return (_packed(batch, half) for half in (ids[:middle], ids[middle:]) if half)


def _chunks(batch: RaggedBatch, _: Sequence[int], __: Sequence[int]) -> Iterable[Placement]:
    chunks = [batch.chunks(i) for i in range(len(batch.lengths))]
    for at in range(max(map(len, chunks))):
        yield _cut([(i, own[at]) for i, own in enumerate(chunks) if at < len(own)])


def _moved(batch: RaggedBatch, _: Sequence[int], shifts: Sequence[int]) -> Iterable[Placement]:
    return (_whole(batch, [s + shift for s in batch.starts], batch.packed + shift, neighbours=True) for shift in shifts)


def _decode(batch: RaggedBatch, _: Sequence[int], __: Sequence[int]) -> Iterable[Placement]:
    return (_cut([(i, range(n - 1, n)) for i, n in enumerate(batch.lengths)]),)


def _cut(parts: Sequence[tuple[int, range]]) -> Placement:
    row, pieces = 0, []
    for sample, positions in parts:
        pieces.append(Piece(sample, positions.start, len(positions), row))
        row += len(positions)
    return Placement(row, tuple(pieces))


_PLACEMENTS: dict[str, Callable[[RaggedBatch, Sequence[int], Sequence[int]], Iterable[Placement]]] = {
    "batch_neighbours": _neighbours,
    "batch_size_one": _alone,
    "permutation": _permuted,
    "padding_left": _padded(True),
    "padding_right": _padded(False),
    "packing": _halves,
    "chunking": _chunks,
    "tile_position": _moved,
    "decode_against_prefill": _decode,
}
