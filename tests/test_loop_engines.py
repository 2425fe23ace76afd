"""The loop with the real engines on the real Ray: runs, native arms, reuse, interrupts, dead and hanging engines, loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlk.acceptance.validate import ValidationRefused
from rlk.evidence.rundir import RunDirectory
from rlk.loop.cluster import Cluster, ClusterError, EngineLost, listeners, require_loopback
from rlk.loop.controller import RunFailed, run_loop
from rlk.loop.plan import RunPlan, make_plan
from rlk.loop.prepare import prepare_tiny
from rlk.loop.profile import load_profile
from rlk.loop.records import RunSummary, StepResult
from rlk.loop.show import outcome
from rlk.loop.validate import seal, validate_run

pytestmark = pytest.mark.slow
SMALL = {"prompts": 4, "group_size": 4, "max_response_len": 32}
PATIENCE = 600


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def model(room: Path) -> Path:
    return prepare_tiny(room / "tiny", steps=40).path


def rlk(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from rlk.cli import main; main()", *arguments]


def options(room: Path, model: Path, run_id: str) -> list[str]:
    small = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return ["--model", str(model), "--workspace", str(room / "runs"), "--run-id", run_id, *small]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RLK_REPRO_")}


@pytest.fixture(scope="module")
def finished(room: Path, model: Path) -> Path:
    """`rlk run --steps 2` on a cluster of its own."""
    command = rlk("run", "--steps", "2", "--temperature", "0.7", "--top-p", "0.95", *options(room, model, "whole"))
    done = subprocess.run(command, cwd=room, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "update 2/2: 0 of " in done.stdout
    assert "2 updates" not in done.stderr
    return room / "runs" / "whole"


def test_a_run_compares_every_byte_and_changes_the_weights(finished: Path) -> None:
    assert validate_run(finished) == []
    steps = [StepResult.model_validate_json(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(step.logprob.equal and step.logprob.elements > 20 for step in steps)
    assert len({step.hash_before for step in steps} | {steps[-1].hash_after}) == 3
    manifest = json.loads((finished / "manifest.json").read_text())
    ran = {(use["side"], use["op"]) for use in manifest["kernels"]}
    assert {("rollout", "attention.paged"), ("train", "attention.backward"), ("train", "logp")} <= ran
    assert manifest["engines"]["rollout"]["pid"] != manifest["engines"]["train"]["pid"]
    assert manifest["provenance"].keys() >= {"sha", "dirty", "tree_digest"}
    assert manifest["environment"]["packages"]["ray"]
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert len({tuple(sample["token_ids"]) for sample in samples if sample["group"] == 0}) > 1
    assert all(len(sample["retained"]) == len(sample["token_ids"]) for sample in samples)
    assert not psutil.pid_exists(manifest["engines"]["rollout"]["pid"])


@pytest.fixture(scope="module")
def cluster(finished: Path) -> Iterator[Cluster]:
    with Cluster(timeout_s=PATIENCE) as own:
        yield own


@dataclass
class Runs:
    """Runs one plan after another on one cluster."""

    cluster: Cluster
    room: Path
    model: Path

    def plan(self, run_id: str, **more: Any) -> RunPlan:
        wanted = {"model": self.model, "workspace": self.room / "runs", "run_id": run_id, "steps": 1, **SMALL, **more}
        return make_plan(load_profile(wanted, None, {}))

    def __call__(self, run_id: str, **more: Any) -> RunSummary:
        return run_loop(self.plan(run_id, **more), self.cluster)


@pytest.fixture(scope="module")
def runs(cluster: Cluster, room: Path, model: Path) -> Runs:
    return Runs(cluster, room, model)


def test_sampling_rows_share_engines_and_start_over(runs: Runs) -> None:
    first = runs("full")
    again = runs("rows", temperature=1.3, top_k=20, kl_coef=0.1, steps=2)
    assert first.mismatched_tokens == again.mismatched_tokens == 0 < again.tokens
    assert first.model_hashes[0] == again.model_hashes[0]
    assert (first.manifest.start or (0,))[0] < (again.manifest.start or (0,))[0]
    assert first.manifest.engines["rollout"]["pid"] == again.manifest.engines["rollout"]["pid"]
    assert first.manifest.engines["train"]["updates"] == 1
    assert again.manifest.engines["train"]["updates"] == 2
    assert again.kls[0] == 0 < again.kls[1]
    heads = [{use.side: use.calls for use in run.manifest.kernels if use.op == "lm_head"} for run in (first, again)]
    assert heads[1]["train"] == 2 * heads[0]["train"]
    assert validate_run(again.directory) == []


def test_native_engines_differ_and_the_run_reports_it(runs: Runs) -> None:
    native = runs("native", mode="native")
    assert 0 < native.mismatched_tokens <= native.tokens
    assert native.manifest.kernels == ()
    assert native.model_hashes[0] != native.model_hashes[1]
    assert validate_run(native.directory) == []


def test_everything_listens_on_loopback(runs: Runs) -> None:
    names = " ".join(name for _, _, name in listeners(psutil.Process()))
    assert "gcs_server" in names
    assert "raylet" in names
    require_loopback()


def test_a_listener_on_every_interface_is_seen() -> None:
    import socket

    with socket.socket() as open_to_all:
        open_to_all.bind(("0.0.0.0", 0))
        open_to_all.listen()
        with pytest.raises(ClusterError, match=r"listens on 0.0.0.0:\d+, not on loopback"):
            require_loopback()


def test_a_second_cluster_in_one_process_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="already in use by this process"), Cluster():
        pass


def test_an_interrupted_run_is_readable_and_leaves_a_foreign_cluster_alone(runs: Runs) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = rlk("run", "--ray-address", address, *options(runs.room, runs.model, "stopped"))
    process = subprocess.Popen(command, cwd=runs.room, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = runs.room / "runs" / "stopped" / "metrics.jsonl"
    began = time.monotonic()
    while not metrics.exists() and process.poll() is None and time.monotonic() - began < PATIENCE:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (out, err)
    assert err == f"rlk: interrupted, what was done is in {metrics.parent}\n"
    assert validate_run(metrics.parent) == ["the run failed: interrupted"]
    assert outcome(metrics.parent) == "failed: interrupted"
    lines = metrics.read_text().splitlines()
    assert all(StepResult.model_validate_json(line).logprob.equal for line in lines)
    assert json.loads((metrics.parent / "manifest.json").read_text())["outcome"] == "failed"
    assert runs.cluster.train("strict").call("identity")


def test_a_hanging_engine_is_given_up(runs: Runs) -> None:
    rollout = runs.cluster.rollout("strict")
    process = psutil.Process(rollout.call("readback")["pid"])
    process.suspend()
    try:
        with pytest.raises(EngineLost, match=r"rollout \(strict\) readback gave no answer in 1 s; Ray's logs: /"):
            replace(rollout, timeout_s=1).call("readback")
    finally:
        process.resume()
    assert rollout.call("readback")


def test_a_killed_engine_ends_the_run_with_its_name(runs: Runs) -> None:
    import ray

    class Killer:
        def phase(self, step: int, name: str) -> None:
            if (step, name) == (2, "score"):
                ray.kill(runs.cluster.train("strict").actors[0])

        def finished(self, result: StepResult) -> None:
            pass

    plan = runs.plan("killed", steps=3)
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"train \(strict\) score: its process died"):
        run_loop(plan, runs.cluster, observer=Killer())
    assert time.monotonic() - began < 60
    assert validate_run(plan.directory)[0].startswith("the run failed: train (strict) score: its process died")
    assert len((plan.directory / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_topology_of_training_changes_no_byte(runs: Runs) -> None:
    runs.cluster.stop()
    alone, cut = runs("one-rank", top_p=0.9), runs("four-ranks", top_p=0.9, tp=2, cp=2)
    assert alone.model_hashes == cut.model_hashes
    assert [step.gradient_hashes for step in alone.steps] == [step.gradient_hashes for step in cut.steps]
    files = [(run.directory / "logprobs-step1.safetensors").read_bytes() for run in (alone, cut)]
    assert files[0] == files[1]
    assert cut.mismatched_tokens == 0 < cut.tokens
    ranks = cut.manifest.engines["train"]["ranks"]
    assert "ranks" not in alone.manifest.engines["train"]
    assert len({rank["pid"] for rank in ranks}) == 4
    assert len({rank["model_hash"] for rank in ranks}) == 1
    assert all("attention.backward" in {ran["op"] for ran in rank["kernels"]} for rank in ranks)
    assert validate_run(cut.directory) == []


def test_a_killed_rank_ends_the_run_with_its_name(runs: Runs) -> None:
    import ray

    class Killer:
        def phase(self, step: int, name: str) -> None:
            if name == "score":
                ray.kill(runs.cluster.train("strict", 2, 2).actors[3])

        def finished(self, result: StepResult) -> None:
            pass

    plan = runs.plan("killed-rank", tp=2, cp=2)
    with pytest.raises(RunFailed, match=r"train \(strict\) score, rank 3: its process died"):
        run_loop(plan, runs.cluster, observer=Killer())
    assert validate_run(plan.directory)[0].startswith("the run failed: train (strict) score, rank 3: its process died")
    runs.cluster.stop()


def test_stopped_engines_are_gone_and_start_anew(cluster: Cluster) -> None:
    cluster.stop()  # one of these engines may be dead already
    before = [remote.call("pid") for remote in (cluster.train("strict"), cluster.rollout("native"))]
    cluster.stop()
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert cluster.train("strict").call("pid") not in before


def test_what_an_engine_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
    while not (ranks := psutil.Process(engine.pid).children()):
        time.sleep(0.01)
    pids = SimpleNamespace(each=lambda: [engine.pid])
    own = Cluster()
    own._engines["rollout", "strict", 2, 1] = SimpleNamespace(start=lambda method: pids)  # type: ignore[assignment]
    monkeypatch.setattr("rlk.loop.cluster._kill", lambda remote: engine.kill())
    try:
        own.stop()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


def edit_json(name: str, change: Callable[[dict[str, Any]], None], line: int | None = None) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        lines = (run / name).read_text().splitlines() if line is not None else [(run / name).read_text()]
        value = json.loads(lines[line or 0])
        change(value)
        lines[line or 0] = json.dumps(value)
        (run / name).write_text("\n".join(lines) + "\n")

    return tamper


def flip_logprob(run: Path) -> None:
    rows = load_file(run / "logprobs-step2.safetensors")
    rows["train"].view(torch.int32)[0] ^= 1
    save_file(rows, run / "logprobs-step2.safetensors")


def without_line(name: str, at: int) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:at] + lines[at + 1 :]))

    return tamper


def cut(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-2])


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped_bit": (flip_logprob, "logprobs-step2.safetensors compares otherwise"),
    "missing_logprobs": (lambda run: (run / "logprobs-step1.safetensors").unlink(), "logprobs-step1.safetensors is unreadable"),
    "cut_metrics": (cut, "metrics.jsonl is truncated"),
    "dropped_update": (without_line("metrics.jsonl", 1), "holds updates [1]"),
    "other_count": (edit_json("metrics.jsonl", lambda v: v.update(tokens=9), 0), "compares otherwise"),
    "unchanged_hash": (edit_json("metrics.jsonl", lambda v: v.update(hash_after=v["hash_before"]), 1), "update 2 changed no weight"),
    "stale_rollout": (edit_json("metrics.jsonl", lambda v: v.update(rollout=[1, v["hash_before"]]), 1), "update 2 published"),
    "other_reward": (edit_json("samples.jsonl", lambda v: v.update(reward=0.5), 3), "sample 3: reward 0.5 does not follow"),
    "other_token": (edit_json("samples.jsonl", lambda v: v.update(token_ids=[9, 9, 9]), 0), "does not hold the tokens"),
    "lost_sample": (without_line("samples.jsonl", 5), "holds 31 samples"),
    "forged_kernel": (edit_json("manifest.json", lambda v: v["kernels"][0].update(kernel_id="mine")), "kernel id 'mine'"),
    "no_kernel": (edit_json("manifest.json", lambda v: v.update(kernels=[])), "the strict rollout engine reports 0 rlk operators"),
    "other_start": (edit_json("plan.json", lambda v: v["checkpoint"].update(model_hash="0" * 64)), "the run started from"),
    "other_hashes": (edit_json("manifest.json", lambda v: v["model_hashes"].pop()), "the hashes of manifest.json"),
    "unknown_field": (edit_json("metrics.jsonl", lambda v: v.update(extra=1), 0), "metrics.jsonl line 1 is not a record"),
    "killed": (lambda run: (run / "manifest.json").unlink(), "manifest.json is missing: the run is not at its end"),
    "lost_weights": (lambda run: shutil.rmtree(run / "weights" / "v2"), "weights of update 2"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_tampered_run_is_not_valid(finished: Path, tmp_path: Path, attack: str) -> None:
    change, said = ATTACKS[attack]
    run = shutil.copytree(finished, tmp_path / "run")
    change(run)
    problems = validate_run(run)
    assert any(said in problem for problem in problems), problems
    with pytest.raises(ValidationRefused):
        seal(run)


def with_provenance(finished: Path, run: Path, **changes: Any) -> Path:
    shutil.copytree(finished, run)
    clean = {"sha": "a" * 40, "dirty": False, "dirty_files": [], "problem": ""}
    edit_json("manifest.json", lambda value: value["provenance"].update({**clean, **changes}))(run)
    return run


@pytest.mark.parametrize("changes", [{"dirty": True}, {"sha": ""}, {"problem": "the sources changed"}], ids=lambda c: next(iter(c)))
def test_only_a_clean_commit_is_sealed(finished: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    run = with_provenance(finished, tmp_path / "run", **changes)
    assert validate_run(run) == []
    with pytest.raises(ValidationRefused, match="not a clean commit"):
        seal(run)
    assert not RunDirectory(run).sealed


def test_a_seal_holds_every_file(finished: Path, tmp_path: Path) -> None:
    run = with_provenance(finished, tmp_path / "run")
    seal(run)
    assert validate_run(run) == []
    assert outcome(run) == "finished, sealed"
    with pytest.raises(ValidationRefused, match="sealed already"):
        seal(run)
    with (run / "samples.jsonl").open("a") as file:
        file.write(" ")
    assert "samples.jsonl was changed after the run was sealed" in validate_run(run)
