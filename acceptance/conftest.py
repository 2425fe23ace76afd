"""What the engine cells share: one cluster of real engines, one prepared checkpoint, each run done once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.engines import Runs, tiny_checkpoint
from rlk.loop.cluster import Cluster


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of the loop on engines that start once and serve every cell."""
    root = Path(request.config.rootpath)
    checkpoint = tiny_checkpoint(root)
    with Cluster() as cluster:
        yield Runs(cluster, checkpoint, root / "artifacts" / "runs", tmp_path_factory.mktemp("traces"))
