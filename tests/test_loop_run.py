"""The controller against engines of plain Python: every failure has a name and leaves a readable directory."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlk.contract.records import Request, Response
from rlk.evidence.rundir import RunDirectoryError
from rlk.loop.actors import EngineFault
from rlk.loop.arithmetic import Problem
from rlk.loop.cluster import EngineLost
from rlk.loop.controller import RunFailed, align, run_loop
from rlk.loop.plan import RunPlan, make_plan
from rlk.loop.prepare import tiny_config
from rlk.loop.profile import load_profile
from rlk.loop.records import RunSummary
from rlk.loop.show import outcome, run_directories, run_report, step_line, workspace_table
from rlk.loop.validate import validate_run
from rlk.model.weights import load_checkpoint, model_hash, save_checkpoint

KERNEL = {"op": "logp", "backend": "cpu", "kernel_id": "cpu:logp:0123456789ab", "calls": 3}
NORM = "model.norm.weight"


def fp32(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def score(sample: int, position: int) -> float:
    """What both fake engines agree on."""
    return fp32(-0.1 - sample / 7 - position / 13)


class FakeRollout:
    seconds = staticmethod(lambda: {"copy": 0.25})

    def __init__(self, mode: str) -> None:
        self.mode, self.version, self.hash = mode, -1, ""

    def open(self, checkpoint: Path, context: int) -> tuple[int, str]:
        self.version, self.hash = self.version + 1, load_checkpoint(checkpoint).model_hash
        return self.version, self.hash

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request, text: bytes = b"#12", finish: str = "stop") -> Response:
        ids = tuple(text[: 1 + request.sample_id % 3]) if request.sample_id % 2 else tuple(text)
        logprobs = tuple(score(request.sample_id, at) for at in range(len(ids)))
        return Response(request.sample_id, request.prompt_ids, ids, logprobs, None, finish, 0, self.version)

    def load(self, path: Path, version: int, announced: str) -> tuple[int, str]:
        self.version, self.hash = version, load_checkpoint(path).model_hash
        assert self.hash == announced
        return self.version, self.hash

    def readback(self) -> dict[str, Any]:
        return {"mode": self.mode, "model_hash": self.hash, "kernels": [KERNEL] if self.mode == "strict" else []}


class FakeTrain:
    gradient_hashes = staticmethod(lambda: {"embedding": "00"})
    seconds = staticmethod(lambda: {"optimizer": 0.5})

    def __init__(self, mode: str) -> None:
        self.mode, self.version, self.updates, self.seen = mode, -1, 0, list[Response]()

    def open(self, checkpoint: Path, micro_batch_size: int, grpo: object, adam: object) -> None:
        self.tensors, self.updates = load_checkpoint(checkpoint).tensors, 0

    def adopt(self, checkpoint: Path, version: int) -> tuple[int, str]:
        self.version = version
        return self.identity()

    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        self.seen = list(responses)
        return {r.sample_id: [score(r.sample_id, at) for at in range(len(r.token_ids))] for r in responses}

    def reference(self) -> None:
        pass

    def update(self, rewards: dict[int, float], groups: dict[int, int], lr: float) -> dict[str, Any]:
        before = model_hash(self.tensors)
        self.change()
        self.updates += 1
        values = list(rewards.values())
        flat = [g for g in set(groups.values()) if len({rewards[i] for i in groups if groups[i] == g}) == 1]
        return {
            "loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "tokens": sum(len(r.token_ids) for r in self.seen),
            "reward_mean": sum(values) / len(values), "reward_std": 0.0, "reward_min": min(values), "reward_max": max(values),
            "flat_groups": flat, "empty_samples": [r.sample_id for r in self.seen if not r.token_ids], "grad_norm": 1.0, "grad_scale": 1.0,
            "lr": lr, "updates": self.updates,
            "model_hash_before": before, "model_hash_after": model_hash(self.tensors),
        }  # fmt: skip

    def change(self) -> None:
        self.tensors = {**self.tensors, NORM: self.tensors[NORM] + 1}

    def publish(self, directory: Path, version: int) -> str:
        self.version = version
        return save_checkpoint(directory, tiny_config(), self.tensors)

    def identity(self) -> tuple[int, str]:
        return self.version, model_hash(self.tensors)

    def readback(self) -> dict[str, Any]:
        return {"mode": self.mode, "model_hash": self.identity()[1], "kernels": [KERNEL] if self.mode == "strict" else []}


class FakeRemote:
    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    def start(self, method: str, *arguments: Any) -> Any:
        class Answer:
            result = staticmethod(lambda: self.call(method, *arguments))
            each = staticmethod(lambda: [self.call(method, *arguments)])

        return Answer


class FakeCluster:
    """Keeps its engines from run to run, as the real one does."""

    device = "cpu"

    def __init__(self, rollout: type[FakeRollout] = FakeRollout, train: type[FakeTrain] = FakeTrain) -> None:
        self.kinds, self.engines = {"rollout": rollout, "train": train}, dict[tuple[str, str], Any]()
        self.transports: list[str | None] = []

    def _get(self, side: str, mode: str) -> Any:
        return FakeRemote(self.engines.setdefault((side, mode), self.kinds[side](mode)))

    def rollout(self, mode: str, tp: int = 1, transport: str | None = None) -> Any:
        self.transports.append(transport)
        return self._get("rollout", mode)

    def train(self, mode: str, tp: int = 1, cp: int = 1, transport: str | None = None) -> Any:
        self.transports.append(transport)
        return self._get("train", mode)


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Callable[..., RunPlan]:
    def make(**options: Any) -> RunPlan:
        base = {"model": model, "workspace": tmp_path / "runs", "steps": 3, "prompts": 2, "group_size": 2, "run_id": "a"}
        return make_plan(load_profile({**base, **options}, None, {}))

    return make


def failure(plan: RunPlan, cluster: FakeCluster, **more: Any) -> str:
    """The reason of a run that must fail, after checking what every failed run leaves."""
    with pytest.raises(RunFailed) as caught:
        run_loop(plan, cluster, **more)
    reason = caught.value.reason
    assert (plan.directory / "FAILED").read_text().splitlines()[0] == reason
    manifest = json.loads((plan.directory / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["reason"]) == ("failed", reason)
    assert validate_run(plan.directory) == [f"the run failed: {reason}"]
    assert outcome(plan.directory) == f"failed: {reason}"
    return reason


def test_a_good_run_is_on_record_and_valid(plan: Callable[..., RunPlan]) -> None:
    resolved, cluster = plan(), FakeCluster()
    summary = run_loop(resolved, cluster)
    assert validate_run(resolved.directory) == []
    assert len(summary.steps) == 3
    assert len(set(summary.model_hashes)) == 4
    assert summary.mismatched_tokens == 0 < summary.tokens
    assert [step.published_version for step in summary.steps] == [1, 2, 3]
    assert sorted(path.name for path in (resolved.directory / "weights").iterdir()) == ["v2", "v3"]
    assert {(use.side, use.op) for use in summary.manifest.kernels} == {("rollout", "logp"), ("train", "logp")}
    lines = [json.loads(line) for line in (resolved.directory / "samples.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == list(range(12))
    assert len({line["seed"] for line in lines}) == 12
    assert [line["group"] for line in lines] == [i // 2 for i in range(12)]
    assert RunSummary(directory=resolved.directory, manifest=summary.manifest, steps=summary.steps) == summary
    assert run_report(resolved.directory)[0] is not None
    assert "3/3" in step_line(summary.steps[-1], 3)
    assert all(step.gradient_hashes == {"embedding": "00"} for step in summary.steps)
    assert all(step.parts_s == {"train optimizer": 0.5, "rollout copy": 0.25} for step in summary.steps)
    assert all(list(step.timings_s) == ["generate", "score", "compare", "reference", "update", "publish", "load"] for step in summary.steps)


def test_both_engines_are_those_of_the_plans_transport(plan: Callable[..., RunPlan]) -> None:
    resolved, cluster = plan(), FakeCluster()
    run_loop(resolved, cluster)
    run_loop(resolved.model_copy(update={"directory": resolved.directory.with_name("b"), "transport": "nccl"}), cluster)
    assert cluster.transports == [None, None, "nccl", "nccl"]
    assert validate_run(resolved.directory.with_name("b")) == []


def test_the_trainer_is_never_sent_a_rollout_logprob(plan: Callable[..., RunPlan]) -> None:
    cluster = FakeCluster()
    run_loop(plan(), cluster)
    seen = cluster.engines["train", "strict"].seen
    assert any(response.logprobs for response in seen)
    assert not any(any(response.logprobs) for response in seen)


def test_engines_are_reused_and_start_over(plan: Callable[..., RunPlan]) -> None:
    cluster = FakeCluster()
    first = run_loop(plan(), cluster)
    again = run_loop(plan(run_id="b"), cluster)
    assert len(cluster.engines) == 2
    assert again.model_hashes == first.model_hashes
    assert first.manifest.start == (0, first.model_hashes[0])
    assert again.manifest.start == (4, first.model_hashes[0])
    assert validate_run(again.directory) == []


def test_a_cluster_of_another_device_is_refused(plan: Callable[..., RunPlan]) -> None:
    elsewhere = FakeCluster()
    elsewhere.device = "cuda"
    assert failure(plan(), elsewhere) == "the cluster's engines run on cuda, the plan asks for cpu: open a cluster for it"


def test_synthetic_weights_are_paid_for_even_ids(plan: Callable[..., RunPlan]) -> None:
    resolved = plan()
    synthetic = resolved.model_copy(update={"checkpoint": resolved.checkpoint.model_copy(update={"kind": "synthetic"})})
    summary = run_loop(synthetic, FakeCluster())
    assert 0 < summary.rewards[0] < 1
    assert validate_run(summary.directory) == []


def test_an_existing_directory_is_refused(plan: Callable[..., RunPlan]) -> None:
    resolved = plan()
    resolved.directory.mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="choose another --run-id"):
        run_loop(resolved, FakeCluster())
    assert list(resolved.directory.iterdir()) == []


class OneBit(FakeTrain):
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        scores = super().score(requests, responses)
        last = max(scores)
        bits = struct.unpack("I", struct.pack("f", scores[last][-1]))[0] ^ 1
        scores[last][-1] = struct.unpack("f", struct.pack("I", bits))[0]
        return scores


def test_one_flipped_bit_ends_a_strict_run(plan: Callable[..., RunPlan]) -> None:
    resolved = plan()
    reason = failure(resolved, FakeCluster(train=OneBit))
    assert reason.startswith("update 1: logprobs, trainer against rollout: 1 of ")
    assert "(1 bytes), first at [" in reason
    manifest = json.loads((resolved.directory / "manifest.json").read_text())
    assert manifest["failed_comparison"]["mismatched_bytes"] == 1
    assert manifest["kernels"]
    assert (resolved.directory / "logprobs-step1.safetensors").is_file()
    assert run_report(resolved.directory) == (None, ["the run failed before its first update was complete"])


def test_a_native_run_reports_mismatches_and_goes_on(plan: Callable[..., RunPlan]) -> None:
    summary = run_loop(plan(mode="native"), FakeCluster(train=OneBit))
    assert summary.mismatched_tokens == 3
    assert summary.manifest.kernels == ()
    assert validate_run(summary.directory) == []


def test_a_mixed_arm_reports_mismatches(plan: Callable[..., RunPlan]) -> None:
    mixed = plan().model_copy(update={"rollout_mode": "native"})
    summary = run_loop(mixed, FakeCluster(train=OneBit))
    assert summary.mismatched_tokens == 3
    assert {use.side for use in summary.manifest.kernels} == {"train"}


class Frozen(FakeTrain):
    def change(self) -> None:
        pass


class Stale(FakeRollout):
    def load(self, path: Path, version: int, announced: str) -> tuple[int, str]:
        return version, self.hash


class OldVersion(FakeRollout):
    def load(self, path: Path, version: int, announced: str) -> tuple[int, str]:
        served = super().load(path, version, announced)
        self.version -= 1
        return served


class OtherStart(FakeTrain):
    def adopt(self, checkpoint: Path, version: int) -> tuple[int, str]:
        self.change()
        return super().adopt(checkpoint, version)


class Drift(FakeTrain):
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        self.change()
        return super().score(requests, responses)


class Misprint(FakeTrain):
    def publish(self, directory: Path, version: int) -> str:
        super().publish(directory, version)
        return "0" * 64


class Short(FakeTrain):
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        return {i: values[1:] for i, values in super().score(requests, responses).items()}


class Lost(FakeTrain):
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        return {i: values for i, values in super().score(requests, responses).items() if i}


class NotANumber(FakeTrain):
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        return {i: [float("nan")] * len(values) for i, values in super().score(requests, responses).items()}


class Permuted(FakeRollout):
    def generate(self, requests: Sequence[Request]) -> list[Response]:
        return super().generate(requests)[::-1]


class Dead(FakeRollout):
    def generate(self, requests: Sequence[Request]) -> list[Response]:
        if self.version == 2:
            raise EngineLost("rollout (strict) generate: its process died")
        return super().generate(requests)


class Broken(FakeTrain):
    def reference(self) -> None:
        raise EngineFault("train (strict) reference: LossError: no", "Traceback of the actor")


class Mute(FakeRollout):
    def answer(self, request: Request, text: bytes = b"", finish: str = "stop") -> Response:
        return super().answer(request, b"", "refused: a test")


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ({"train": Frozen}, "update 1 changed no bf16 weight (gradient norm 1, "),
        ({"rollout": Stale}, "update 1: published (1, "),
        ({"rollout": OldVersion}, "update 2: sample 4 comes from weight version 0, not 1"),
        ({"train": OtherStart}, "the engines start from (0, "),
        ({"train": Drift}, "update 1: the trainer updated "),
        ({"train": Misprint}, "update 1: the trainer holds "),
        ({"train": Short}, "update 1: sample 0: 2 scores for 3 tokens"),
        ({"train": Lost}, "update 1: samples [0] were generated or scored, not both"),
        ({"train": NotANumber}, "update 1: logprobs, trainer against rollout: NaN or Inf"),
        ({"rollout": Permuted}, "update 1: the rollout engine did not answer the 4 requests one by one"),
        ({"rollout": Dead}, "rollout (strict) generate: its process died"),
        ({"train": Broken}, "train (strict) reference: LossError: no"),
        ({"rollout": Mute}, "update 1: no response has a token"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_every_failure_has_its_reason(plan: Callable[..., RunPlan], kinds: dict[str, Any], reason: str) -> None:
    assert failure(plan(), FakeCluster(**kinds)).startswith(reason)


def test_a_traceback_of_an_engine_is_kept(plan: Callable[..., RunPlan]) -> None:
    resolved = plan()
    failure(resolved, FakeCluster(train=Broken))
    assert "Traceback of the actor" in (resolved.directory / "FAILED").read_text()


def test_an_interrupt_leaves_a_readable_directory(plan: Callable[..., RunPlan]) -> None:
    class Interrupted(FakeTrain):
        def update(self, *arguments: Any) -> dict[str, Any]:
            if self.updates == 1:
                raise KeyboardInterrupt
            return super().update(*arguments)

    resolved = plan()
    with pytest.raises(KeyboardInterrupt):
        run_loop(resolved, FakeCluster(train=Interrupted))
    assert (resolved.directory / "FAILED").read_text() == "interrupted\n"
    assert len((resolved.directory / "metrics.jsonl").read_text().splitlines()) == 1
    assert validate_run(resolved.directory) == ["the run failed: interrupted"]


def test_an_interrupt_that_a_callback_swallows_still_ends_the_run(plan: Callable[..., RunPlan]) -> None:
    class Swallowed(FakeTrain):
        def update(self, *arguments: Any) -> dict[str, Any]:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return super().update(*arguments)

    resolved, before = plan(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_loop(resolved, FakeCluster(train=Swallowed))
    assert (resolved.directory / "FAILED").read_text() == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_refused_and_equal_samples_are_reported_not_fatal(plan: Callable[..., RunPlan]) -> None:
    class Partial(FakeRollout):
        def answer(self, request: Request, text: bytes = b"#1", finish: str = "stop") -> Response:
            refused = len(request.prompt_ids) > 100
            return super().answer(request, b"" if refused else text, "refused: too long" if refused else finish)

    long = Problem((1,) * 60)
    summary = run_loop(plan(), FakeCluster(rollout=Partial), tasks=lambda step: [Problem((1, 2, 3, 4)), long])
    first = summary.steps[0]
    assert first.refused == {2: "refused: too long", 3: "refused: too long"}
    assert first.empty_samples == (2, 3)
    assert first.finish_reasons == {"stop": 2, "refused": 2}
    assert set(first.flat_groups) == {0, 1}
    assert "2 refused" in step_line(first, 3)
    assert "2 groups with equal rewards" in step_line(first, 3)
    assert validate_run(summary.directory) == []


def test_align_orders_by_sample_and_position() -> None:
    responses = [Response(i, (1,), (5, 6), (-1.0 - i, -2.0 - i), None, "stop", 0, 0) for i in (3, 1)]
    rows = align(responses, {1: [-10.0, -11.0], 3: [-30.0, -31.0]})
    assert rows["sample_ids"].tolist() == [1, 1, 3, 3]
    assert rows["positions"].tolist() == [0, 1, 0, 1]
    assert rows["train"].tolist() == [-10.0, -11.0, -30.0, -31.0]
    assert rows["rollout"].tolist() == [-2.0, -3.0, -4.0, -5.0]


def test_a_workspace_lists_its_runs(plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    finished = run_loop(plan(), FakeCluster()).directory
    tmp_path = tmp_path / "workspace"
    shutil.copytree(finished, tmp_path / "b")
    shutil.copytree(finished, tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    (tmp_path / "link").symlink_to(finished)
    assert [path.name for path in run_directories(tmp_path)] == ["a", "b"]
    assert outcome(tmp_path / "a").startswith("unfinished: manifest.json is missing")
    assert workspace_table(tmp_path).row_count == 2
