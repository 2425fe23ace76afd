"""Which cards the processes of one acceptance session run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlk.acceptance.platforms import own_card_first

pytest_plugins = ["pytester"]

TEMPLATE = Path(__file__).parent / "data" / "gate"


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


FAKE = """
import os, pathlib, types
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 3
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(name="card", major=9, minor=0, total_memory=1)


def pytest_collection_finish(session):
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        pathlib.Path("seen-" + worker).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_on_cards_auto_is_a_worker_for_each_card(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(TEMPLATE, pytester.path, dirs_exist_ok=True)
    (pytester.path / "acceptance").mkdir()
    (pytester.path / "cells.py").rename(pytester.path / "acceptance" / "test_cells.py")
    (pytester.path / "fake_cards.py").write_text(FAKE)
    command = [sys.executable, "-m", "pytest", "-p", "fake_cards", "-m", "cuda", "acceptance", "-n", "auto"]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=120, check=False)
    seen = {path.name: path.read_text() for path in pytester.path.glob("seen-*")}
    assert seen == {"seen-gw0": "0,1,2", "seen-gw1": "1,2,0", "seen-gw2": "2,0,1"}, done.stdout + done.stderr
