"""Which cards the processes of one acceptance session run on."""

from __future__ import annotations

import os

import pytest
import torch

from rlk.acceptance.platforms import own_card_first


@pytest.mark.parametrize(
    ("named", "worker", "expected"),
    [(None, 0, "0,1,2"), (None, 1, "1,2,0"), (None, 5, "2,0,1"), ("3,1", 1, "1,3"), ("3,1", 2, "3,1"), ("2", 7, "2")],
)
def test_every_worker_has_another_first_card_and_sees_all(
    named: str | None, worker: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if named is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    own_card_first(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
