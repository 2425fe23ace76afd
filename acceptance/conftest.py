"""What cells share: one cluster of real engines, one pool of ranks, one prepared checkpoint, each run done once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from acceptance.engines import Runs, snapshot_checkpoint
from acceptance.topologies import Topologies, scratch_runs
from rlk.acceptance.cell import Cell, Platform
from rlk.acceptance.matrix import CARDS, several_cards
from rlk.loop.cluster import Cluster


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of the loop on engines that start once and serve every cell."""
    platform: Platform = request.config.option.markexpr
    with Cluster(device="cpu" if platform == "cpu" else "cuda") as cluster:
        made = Runs(cluster, platform, Path(request.config.rootpath), tmp_path_factory.mktemp("traces"))
        yield made
        made.drop_weights()


@pytest.fixture(scope="session")
def snapshot(request: pytest.FixtureRequest) -> Path:
    """The pinned published weights; cells that need them are missing without."""
    return snapshot_checkpoint(Path(request.config.rootpath))


@pytest.fixture(autouse=True)
def cards(cell: Cell) -> None:
    """A card for each rank where a cell wants that; it is missing without."""
    if several_cards(cell) and (here := torch.cuda.device_count()) < CARDS:
        raise RuntimeError(f"{cell.subject} needs {CARDS} cards, here are {here}: run its cells where CUDA_VISIBLE_DEVICES names {CARDS}")


@pytest.fixture(scope="session")
def topologies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topologies]:
    """One pool of workers and one checkpoint for every topology."""
    platform: Platform = request.config.option.markexpr
    yield from scratch_runs(Path(request.config.rootpath), tmp_path_factory.mktemp("topologies"), platform)
