"""Plans of the Hopper products, by shape. Every plan gives the same bytes: it only says which block computes an element, and when."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Products that a stage holds along the contraction."""
MOST_LEAVES = 8
"""Leaves that one launch joins, at most."""
_SHARED_BYTES = 232_448
_KEPT = 48
"""Floats of a finished subtree that a thread keeps in registers, at most; twice as many where its accumulator is half as wide."""


@dataclass(frozen=True)
class Plan:
    """consumers: warpgroups of 64 output rows in a block; columns of its tile; stages of its ring of operands.

    groups: blocks of a cluster that divide the leaves of one tile. pair: "a" or "b" if two blocks of a cluster share the copies of that
    operand, as neighbours along the columns or the rows.
    """

    consumers: int
    columns: int
    stages: int
    groups: int = 1
    pair: str = ""

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


@dataclass(frozen=True)
class Desks:
    """Where finished subtrees wait, per level of the tree: floats of each thread in registers and in shared memory.

    workspace: floats of a block in global memory for the rest.
    """

    kept: tuple[int, int, int]
    shared: tuple[int, int, int]
    workspace: int


def stage_bytes(plan: Plan, across: bool) -> int:
    """Bytes of one stage; ``across``: b lies [depth, columns], in chunks of 64 columns."""
    return (plan.rows + (-(-plan.columns // 64) * 64 if across else plan.columns)) * DEPTH * 2


def desks(plan: Plan, leaves: int) -> Desks:
    """Fastest places first: the level that is used most gets registers, then shared memory."""
    floats = plan.columns // 2
    levels = leaves.bit_length() - 1
    room = max(0, _SHARED_BYTES - 1024 - plan.stages * (stage_bytes(plan, True) + 16)) // (4 * 128 * plan.consumers) // 4 * 4
    spare = _KEPT * (2 if floats <= 64 else 1)
    kept, shared = [0, 0, 0], [0, 0, 0]
    for level in range(levels):
        kept[level] = min(floats, spare)
        spare -= kept[level]
        shared[level] = min(floats - kept[level], room)
        room -= shared[level]
    waits = [k + s < floats for k, s in zip(kept, shared, strict=True)][:levels]
    if waits and waits[0]:
        raise ValueError(f"{plan}: {leaves} leaves need {floats} floats of a thread in registers and shared memory: fewer stages")
    return Desks((kept[0], kept[1], kept[2]), (shared[0], shared[1], shared[2]), 2 * floats * 128 * plan.consumers if any(waits) else 0)


# (at most this many rows, leaf depth at most this, columns at least and at most this, plan or None for the Triton tiles), the first that
# fits; None: any number. Measured on an H200 against the Triton tiles.
_Row = tuple[int | None, int | None, int, int | None, Plan | None]
_PLAIN: tuple[_Row, ...] = (
    (32, None, 0, None, None),
    (64, None, 5120, 6336, Plan(1, 48, 8)),
    (64, None, 20480, 32768, Plan(1, 192, 6)),
    (128, None, 5120, 6336, Plan(2, 48, 8)),
    (128, None, 16384, None, Plan(2, 192, 4)),
    (256, None, 16384, 32768, Plan(2, 192, 4)),
    (512, None, 5120, 6336, Plan(2, 192, 4)),
    (1024, None, 0, None, None),
    (None, None, 4096, None, Plan(2, 256, 4)),
)
_SPLIT: tuple[_Row, ...] = (
    (32, None, 0, None, None),
    (64, None, 4096, 8192, Plan(1, 256, 4, groups=4)),
    (128, 512, 4096, 8192, Plan(2, 256, 3, groups=4)),
    (128, None, 0, None, None),
    (256, None, 4096, 8192, Plan(2, 128, 4, groups=2)),
    (512, None, 4096, 8192, Plan(2, 256, 3, groups=2)),
    (None, 1024, 4096, None, Plan(2, 128, 4)),
    (None, None, 4096, None, Plan(2, 256, 3)),
)
_ACROSS: tuple[_Row, ...] = (
    (1024, None, 0, None, None),
    (None, 1024, 4096, None, Plan(2, 128, 4)),
)


def product_plan(rows: int, columns: int, depth: int, leaves: int, across: bool) -> Plan | None:
    """Plan of x·wᵀ (dy·w: ``across``) of [rows, columns] with ``leaves`` leaves of ``depth``; None: the Triton tiles are for it."""
    if leaves not in (1, MOST_LEAVES) or (across and leaves == 1):
        return None
    table = _ACROSS if across else _PLAIN if leaves == 1 else _SPLIT
    fits = (
        plan for most, deep, narrow, wide, plan in table
        if (most is None or rows <= most) and (deep is None or depth <= deep) and columns >= narrow and (wide is None or columns <= wide)
    )  # fmt: skip
    return next(fits, None)
