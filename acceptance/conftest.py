"""What cells share: one cluster of real engines, one pool of ranks, one prepared checkpoint, each run done once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.engines import Runs, tiny_checkpoint
from acceptance.topologies import Topologies, scratch_runs
from rlk.loop.cluster import Cluster


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of the loop on engines that start once and serve every cell."""
    root = Path(request.config.rootpath)
    checkpoint = tiny_checkpoint(root)
    with Cluster() as cluster:
        yield Runs(cluster, checkpoint, root / "artifacts" / "runs", tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="session")
def topologies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topologies]:
    """One pool of workers and one checkpoint for every topology."""
    yield from scratch_runs(tiny_checkpoint(Path(request.config.rootpath)), tmp_path_factory.mktemp("topologies"))
