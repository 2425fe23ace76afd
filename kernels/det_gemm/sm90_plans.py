"""Plans of the Hopper products, by shape. Every plan gives the same bytes: it only says which block computes an element, and when."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Products along the contraction in one line of a stage."""
MOST_LEAVES = 8
"""Leaves that one launch joins, at most."""
_KEPT = 48
"""Floats of a finished subtree that a thread keeps in registers beside a wide accumulator."""


@dataclass(frozen=True)
class Plan:
    """consumers: warpgroups of 64 output rows in a block; columns of its tile; stages of its ring of operands.

    groups: blocks of a cluster that divide the leaves of one tile. pair: "a" or "b" if two blocks of a cluster share the copies of that
    operand, as neighbours along the columns or the rows. lines: of 64 products each, that make a stage.
    """

    consumers: int
    columns: int
    stages: int
    groups: int = 1
    pair: str = ""
    lines: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def cluster(self) -> int:
        return 2 if self.pair else self.groups

    @property
    def cluster_rows(self) -> int:
        return self.rows * (2 if self.pair == "b" else 1)

    @property
    def cluster_columns(self) -> int:
        return self.columns * (2 if self.pair == "a" else 1)


def stage_bytes(plan: Plan, across: bool) -> int:
    """Bytes of one stage; ``across``: b lies [depth, columns], in chunks of 64 columns."""
    return (plan.rows + (-(-plan.columns // 64) * 64 if across else plan.columns)) * DEPTH * plan.lines * 2


def kept_floats(plan: Plan, leaves: int) -> tuple[int, int, int]:
    """Floats of each thread that wait in registers, per level of the tree over a block's ``leaves``; the others wait in shared memory."""
    floats, spare = plan.columns // 2, 128 if plan.columns <= 128 else plan.columns // 2 if plan.columns <= 192 else _KEPT
    kept = [0, 0, 0]  # the level that is used most comes first
    for level in range(leaves.bit_length() - 1):
        kept[level] = min(floats, spare)
        spare -= kept[level]
    return kept[0], kept[1], kept[2]


def shared_bytes(plan: Plan, leaves: int, across: bool) -> int:
    """Shared memory of a block that joins ``leaves`` leaves: stages, barriers, what waits; or, after them, what the blocks exchange."""
    floats, threads = plan.columns // 2, 128 * plan.consumers
    waiting = (leaves.bit_length() - 1) * floats - sum(kept_floats(plan, leaves))
    exchanged = floats if plan.groups > 1 else 0
    return 1024 + max(plan.stages * (stage_bytes(plan, across) + 16) + 4 * threads * waiting, 4 * threads * exchanged)


# (at most this many rows of output, at most this many columns, plan or None for the Triton tiles), the first that fits; None: any number.
# Measured on an H200 beside torch's default and the Triton tiles: about one tile a multiprocessor as long as there are few rows, then wide
# tiles whose pairs share copies. Narrow tiles want long stages: waiting for each costs as much as its products. Wide tiles lose in split
# order: too few registers are left for what waits. There a fifth stage takes 2 to 6 % off the time of four.
_Row = tuple[int | None, int | None, Plan | None]
_PLAIN: tuple[_Row, ...] = (
    (64, 1056, Plan(1, 8, 6, lines=4)),
    (64, 3168, Plan(1, 24, 9, lines=2)),
    (64, 6336, Plan(1, 48, 7, lines=2)),
    (64, 32768, Plan(1, 96, 8)),
    (64, None, None),
    (None, 3071, None),
    (128, 6336, Plan(2, 48, 8)),
    (128, 12672, Plan(2, 96, 7)),
    (128, None, Plan(2, 192, 5)),
    (256, 6336, Plan(2, 96, 7)),
    (256, None, Plan(2, 192, 5, pair="b")),
    (512, 12672, Plan(2, 192, 5)),
    (1024, 12672, Plan(2, 192, 5, pair="b")),
    (None, None, Plan(2, 256, 4, pair="b")),
)
_SPLIT: tuple[_Row, ...] = (
    (None, 2047, None),
    (64, 8192, Plan(1, 72, 10, groups=2)),
    (128, 8192, Plan(2, 64, 8, groups=2)),
    (256, 8192, Plan(2, 64, 8)),
    (256, None, None),
    (512, None, Plan(2, 128, 5)),
    (None, None, Plan(2, 128, 5, pair="b")),
)
_ACROSS_PLAIN: tuple[_Row, ...] = ((1024, None, None), (None, 2047, None), (None, None, Plan(2, 256, 4, pair="b")))
_ACROSS_SPLIT: tuple[_Row, ...] = ((1024, None, None), (None, 2047, None), (None, None, Plan(2, 128, 5, pair="b")))


def product_plan(rows: int, columns: int, leaves: int, across: bool) -> Plan | None:
    """Plan of x·wᵀ (dy·w: ``across``) of [rows, columns] in ``leaves`` leaves; None: the Triton tiles are for it."""
    if leaves not in (1, MOST_LEAVES):
        return None
    plain, split = (_ACROSS_PLAIN, _ACROSS_SPLIT) if across else (_PLAIN, _SPLIT)
    table = plain if leaves == 1 else split
    return next(plan for most, wide, plan in table if (most is None or rows <= most) and (wide is None or columns <= wide))
