"""Tiles of the Triton det_gemm, by shape. Every row gives the same bytes: a tile only says which program computes an element, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the output and depth of the contraction that one program holds at a time; its warps and pipeline stages.

    descriptors: operands come through the card's tensor copy engine. park: finished subtrees of half as many leaves or more wait in an
    fp32 workspace (0: all in registers). resident: programs that a multiprocessor holds, where programs go on from tile to tile.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool = False
    park: int = 0
    resident: int = 1


# (at most this many rows of output, at most this many columns, tile), the first that fits; None: any number.
# Measured on an H200: up to 4096 columns there are too few tiles for two programs a multiprocessor, so that more stages pay.
_CUDA_PLAIN = (
    (16, None, Tile(16, 32, 256, 4, 4)),
    (32, None, Tile(32, 32, 256, 4, 3)),
    (64, 4096, Tile(64, 32, 128, 4, 6)),
    (64, None, Tile(64, 32, 128, 4, 4)),
    (128, 4096, Tile(64, 64, 128, 4, 4)),
    (128, None, Tile(64, 64, 64, 4, 6, descriptors=True, resident=2)),
    (256, 4096, Tile(128, 64, 64, 4, 6)),
    (256, None, Tile(128, 128, 64, 8, 5, descriptors=True)),
    (512, 4096, Tile(128, 128, 64, 8, 5, descriptors=True)),
    (None, None, Tile(128, 256, 64, 8, 4, descriptors=True)),
)
_CUDA_SPLIT = (
    (16, None, Tile(16, 64, 128, 4, 3)),
    (64, None, Tile(64, 64, 64, 4, 4)),
    (IN_REGISTERS := 128, None, Tile(128, 64, 64, 4, 4)),
    (256, None, Tile(128, 64, 64, 8, 3, descriptors=True)),
    (None, None, Tile(128, 128, 64, 8, 3, descriptors=True, park=8)),
)
_HIP_PLAIN = (
    (16, None, Tile(16, 32, 128, 4, 2)),
    (64, None, Tile(64, 64, 64, 4, 2)),
    (None, None, Tile(128, 128, 64, 8, 2)),
)
_HIP_SPLIT = (
    (16, None, Tile(16, 64, 128, 4, 2)),
    (None, None, Tile(64, 64, 64, 4, 2)),
)
_TABLES = {("cuda", False): _CUDA_PLAIN, ("cuda", True): _CUDA_SPLIT, ("hip", False): _HIP_PLAIN, ("hip", True): _HIP_SPLIT}
_TOKENS = {"cuda": Tile(64, 64, 32, 4, 3), "hip": Tile(64, 64, 32, 4, 2)}
_DESCRIBED_TOKENS = {"cuda": Tile(64, 128, 64, 4, 4, descriptors=True, park=4, resident=2)}

MOST_LEAVES = 8
"""Leaves that one program joins in registers, at most."""
_LEAST_DEPTH = 64


def product_tile(platform: str, rows: int, columns: int, depth: int, leaves: int) -> tuple[Tile, bool]:
    """Tile of x·wᵀ or dy·w of [rows, columns] with ``leaves`` leaves of ``depth``, and whether a program joins all leaves in registers.

    Otherwise separate programs compute the leaves: that keeps the card busy when there are few rows, and leaves that end within a tile
    would take more registers than there are (on an H200 three to four times as long).
    """
    table = _TABLES[platform, leaves > 1]
    tile = next(tile for most, wide, tile in table if (most is None or rows <= most) and (wide is None or columns <= wide))
    fitting = tile.depth
    while fitting > _LEAST_DEPTH and depth % fitting:
        fitting //= 2
    joined = leaves == 1 or (rows > IN_REGISTERS and depth % _LEAST_DEPTH == 0)
    return replace(tile, depth=fitting), leaves <= MOST_LEAVES and joined


def token_tile(platform: str, describable: bool) -> Tile:
    """Tile of a weight gradient whose rows the copy engine can read, or cannot; its depth counts tokens."""
    return (_DESCRIBED_TOKENS if describable and platform in _DESCRIBED_TOKENS else _TOKENS)[platform]
