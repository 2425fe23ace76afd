"""Which cards the processes of one acceptance session run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray._private.accelerators import AMDGPUAcceleratorManager, NvidiaGPUAcceleratorManager

from rlk.acceptance.platforms import VISIBLE, own_card_first
from rlk.acceptance.plugin import OTHER_CODE
from rlk.contract.numerics import DEFAULT
from rlk.loop.actors import EngineFault, RolloutActor
from rlk.loop.cluster import Cluster

pytest_plugins = ["pytester"]

TEMPLATE = Path(__file__).parent / "data" / "gate"


def leave_unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Unset now and, whatever sets them meanwhile, after the test."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("named", "worker", "expected"),
    [(None, 0, "0,1,2"), (None, 1, "1,2,0"), (None, 5, "2,0,1"), ("3,1", 1, "1,3"), ("3,1", 2, "3,1"), ("2", 7, "2")],
)
def test_every_worker_has_another_first_card_and_sees_all(
    named: str | None, worker: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    leave_unset(monkeypatch, "CUDA_VISIBLE_DEVICES")
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    own_card_first("cuda", worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("named", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_on_rocm_both_names_say_the_same(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unset(monkeypatch, *VISIBLE["rocm"])
    monkeypatch.setenv(named, "3,1")
    own_card_first("rocm", 1)
    assert {os.environ[name] for name in VISIBLE["rocm"]} == {"1,3"}


MANAGERS = {"CUDA_VISIBLE_DEVICES": NvidiaGPUAcceleratorManager, "HIP_VISIBLE_DEVICES": AMDGPUAcceleratorManager}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MANAGERS)
def test_ray_leaves_the_ranks_of_an_engine_every_card(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    process = SimpleNamespace(options=lambda **options: asked.update(options) or SimpleNamespace(remote=lambda *place: None))
    monkeypatch.setattr("ray.remote", lambda kind: process)
    monkeypatch.setattr("rlk.loop.cluster._log_directory", Path)
    Cluster(device="cuda").rollout("strict", ranks)
    for variable, value in asked.get("runtime_env", {"env_vars": {}})["env_vars"].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(name, "0,1")
    MANAGERS[name].set_current_process_visible_accelerator_ids(["0"])  # as Ray does before a process runs
    assert os.environ[name] == ("0" if ranks == 1 else "0,1")


def test_an_engine_of_another_transport_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[Any, ...]] = []
    process = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *place: places.append(place)))
    monkeypatch.setattr("ray.remote", lambda kind: process)
    monkeypatch.setattr("rlk.loop.cluster._log_directory", Path)
    cluster = Cluster(device="cuda")
    own, nccl, again = (cluster.rollout("strict", 2, transport) for transport in (None, "nccl", "nccl"))
    assert own is not nccl is again
    assert [place[-2:] for place in places] == [(2, None), (2, "nccl")]


def test_a_transport_reaches_the_engine_itself(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="transport='nccl' does not move bytes between ranks of vLLM on cpu: use gloo"):
        RolloutActor("strict", "cpu", DEFAULT, 2, "nccl").open(tmp_path, 64)


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
CLEAR = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_AUTO_NUM_WORKERS", *VISIBLE["rocm"], *OTHER_CODE)


def run_on_fake_cards(root: Path, platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(TEMPLATE, root, dirs_exist_ok=True)
    (root / "acceptance").mkdir()
    (root / "cells.py").rename(root / "acceptance" / "test_cells.py")
    (root / "fake_cards.py").write_text(FAKE + ("torch.version.hip = '7'\n" if platform == "rocm" else ""))
    command = [sys.executable, "-m", "pytest", "-p", "fake_cards", "-m", platform, "acceptance", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", OTHER_CODE)
def test_on_cards_no_session_starts_where_triton_runs_other_code(
    name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in CLEAR:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "1")
    done = run_on_fake_cards(pytester.path, "cuda")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        f"acceptance: under {name} other code runs than the kernels that are judged: unset it",
    )


@pytest.mark.parametrize("said", [0, 2])
@pytest.mark.parametrize("platform", VISIBLE)
def test_on_cards_auto_is_a_worker_for_each_card_unless_said_otherwise(
    platform: str, said: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CLEAR:
        monkeypatch.delenv(name, raising=False)
    if said:
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", str(said))
    done = run_on_fake_cards(pytester.path, platform, "-n", "auto")
    seen = {path.name: path.read_text() for path in pytester.path.glob("seen-*")}
    expected = {"seen-gw0": "0,1,2", "seen-gw1": "1,2,0", "seen-gw2": "2,0,1"}
    assert seen == dict(list(expected.items())[: said or 3]), done.stdout + done.stderr
