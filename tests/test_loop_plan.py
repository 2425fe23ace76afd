"""Plans: what is resolved, what is refused, and how samples, groups and seeds are numbered."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.contract.numerics import ContractError
from rlk.loop.cluster import ClusterError, trainer_places
from rlk.loop.labels import PrepareError
from rlk.loop.plan import PlanError, RunPlan, describe, make_plan, sample_seed, unusable_prompts
from rlk.loop.prepare import tiny_config
from rlk.loop.profile import Device, ProfileError, load_profile
from rlk.loop.tokenizer import byte_tokenizer_files
from rlk.model.config import CheckpointError
from rlk.model.layout import hf_shapes
from rlk.model.weights import save_checkpoint


@pytest.fixture
def plan(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    monkeypatch.chdir(tmp_path)
    return lambda **options: make_plan(load_profile({"model": model, **options}, None, {}))


def test_a_plan_writes_nothing_and_travels_as_json(plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    resolved = plan(steps=5, temperature=0.7, top_p=0.95, top_k=50, lr=1e-4)
    assert list(tmp_path.iterdir()) == []
    assert RunPlan.model_validate_json(json.dumps(resolved.as_json())) == resolved
    assert (resolved.strict, resolved.samples, resolved.checkpoint.kind) == (True, 128, "unlabelled")
    assert resolved.directory.parent == tmp_path / "artifacts" / "runs"
    assert (resolved.sampling.top_k, resolved.adam.lr, resolved.grpo.group_size) == (50, 1e-4, 8)


def test_vllm_may_take_two_ranks(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    resolved = plan(rollout_tp=2)
    assert resolved.topology.rollout_tp == 2
    assert "rollout TP 2" in dict(describe(resolved))["topology"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    with pytest.raises(PlanError, match="rollout_tp=2 needs as many CPUs, here are 1: use 1"):
        plan(rollout_tp=2)


def test_the_learning_rate_follows_the_checkpoint(plan: Callable[..., RunPlan]) -> None:
    assert plan().adam.lr == 5e-7


def test_the_description_names_every_choice(plan: Callable[..., RunPlan]) -> None:
    rows = dict(describe(plan(mode="consistency", temperature=0, kl_coef=0.1, seed=9, port=0, keep_versions=3)))
    text = " ".join(rows.values())
    for part in ("trainer strict", "rollout strict", "greedy", "KL coefficient 0.1", "the last 3 kept", "canonical_tp 8", "loopback"):
        assert part in text
    assert "native" in dict(describe(plan(mode="native")))["engines"]


def test_samples_groups_and_seeds(plan: Callable[..., RunPlan]) -> None:
    resolved = plan(steps=3, prompts=2, group_size=3, seed=5)
    steps = [resolved.requests(step, [(1,), (2,)]) for step in (1, 2, 3)]
    every = [request for requests in steps for request in requests]
    assert [request.sample_id for request in every] == list(range(18))
    assert [resolved.group(request.sample_id) for request in steps[1]] == [2, 2, 2, 3, 3, 3]
    assert [request.prompt_ids for request in steps[0]] == [(1,)] * 3 + [(2,)] * 3
    seeds = [request.sampling.seed for request in every]
    assert len(set(seeds)) == 18
    assert seeds[7] == sample_seed(5, 2, 7)
    assert seeds == [request.sampling.seed for step in (1, 2, 3) for request in resolved.requests(step, [(1,), (2,)])]
    assert seeds[0] != plan(seed=6).requests(1, [(1,)])[0].sampling.seed
    greedy = plan(steps=3, prompts=2, group_size=3, temperature=0)
    assert [greedy.group(i) for i in range(0, 18, 3)] == [0, 0, 1, 1, 2, 2]
    tasks = [task for step in (1, 2, 3) for task in resolved.tasks(step)]
    assert tasks == plan(steps=1, prompts=6, seed=5).tasks(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 3}, "tp=3 does not divide the canonical 8"),
        ({"tp": 4, "cp": 4}, "tp=4, cp=4 does not run here: the trainer has at most 8 ranks"),
        ({"cp": 2, "mode": "native"}, "mode=native with tp=1, cp=2"),
        ({"rollout_tp": 4}, "rollout_tp=4 does not run on cpu: use one of 1, 2"),
        ({"rollout_cp": 2}, "rollout_cp=2 does not run in the loop"),
        ({"rollout_tp": 2, "mode": "native"}, "mode=native with rollout_tp=2"),
        ({"rollout_cp": 16}, "rollout_cp=16 does not divide the canonical 8"),
        ({"temperature": -1}, "temperature=-1.0"),
        ({"temperature": "nan"}, "temperature=nan"),
        ({"temperature": 0.001}, "temperature=0.001 would be raised to 0.01"),
        ({"top_p": 0}, "top_p=0.0 is outside (0, 1]"),
        ({"top_p": 1.5}, "top_p=1.5 is outside (0, 1]"),
        ({"top_k": 0}, "top_k=0 is neither -1 nor >= 1"),
        ({"lr": 0}, "lr=0.0 is not a positive finite number"),
        ({"weight_decay": "inf"}, "weight_decay=inf"),
        ({"kl_coef": -1}, "kl_coef=-1.0"),
        ({"max_response_len": 600}, "max_response_len=600 after a prompt of 26 tokens exceeds the context of 512: use 486 or less"),
        ({"mode": "native", "top_p": 0.9}, "mode=native: the stock engine does not hand over retained ids"),
        ({"mode": "native", "top_k": 5}, "mode=native: the stock engine does not hand over retained ids"),
    ],
)
def test_an_impossible_run_is_refused(plan: Callable[..., RunPlan], options: dict[str, Any], said: str) -> None:
    with pytest.raises((PlanError, ContractError)) as caught:
        plan(**options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_card_is_asked_for_by_name(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match="--device: 'auto' is not accepted: input should be 'cpu' or 'cuda'"):
        plan(device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="device=cuda: torch sees no CUDA card here: use --device cpu"):
        plan(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resolved = plan(device="cuda")
    assert (resolved.device, plan().device) == ("cuda", "cpu")
    assert dict(describe(resolved))["engines"].endswith("on cuda")


def test_every_rank_of_vllm_needs_a_card(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert plan(device="cuda", rollout_tp=2, tp=2, cp=2).topology.rollout_tp == 2
    with pytest.raises(PlanError, match="rollout_tp=4 needs as many cards, torch sees 2: use 2"):
        plan(device="cuda", rollout_tp=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    with pytest.raises(PlanError, match="rollout_tp=8 needs as many cards, torch sees 7: use 4"):
        plan(device="cuda", rollout_tp=8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)))
    with pytest.raises(PlanError, match="rollout_tp=4 needs as many CPUs, here are 3: use 2"):
        plan(device="cuda", rollout_tp=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="torch sees no CUDA card here"):
        plan(device="cuda", rollout_tp=2)


@pytest.mark.parametrize(
    ("device", "ranks", "cards", "expected"),
    [
        ("cpu", 4, 0, ("gloo", ["cpu"] * 4)),
        ("cuda", 1, 2, ("gloo", ["cuda"])),
        ("cuda", 2, 2, ("peer", ["cuda:0", "cuda:1"])),
        ("cuda", 4, 2, ("shm", ["cuda:0", "cuda:0", "cuda:1", "cuda:1"])),
        ("cuda", 8, 1, ("shm", ["cuda:0"] * 8)),
    ],
)
def test_trainer_ranks_share_cards_evenly(
    device: Device, ranks: int, cards: int, expected: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert trainer_places(device, ranks) == expected
    carrier, devices = expected
    if carrier == "shm":
        with pytest.raises(ClusterError, match=f"transport nccl wants a card for each of {ranks} ranks, torch sees {cards}"):
            trainer_places(device, ranks, "nccl")
    else:
        assert trainer_places(device, ranks, "nccl") == ("nccl" if carrier == "peer" else carrier, devices)


@pytest.mark.parametrize(("device", "cards"), [("cpu", 0), ("cuda", 1)])
def test_a_transport_of_cards_wants_one_for_each_rank(
    plan: Callable[..., RunPlan], device: Device, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    with pytest.raises(PlanError, match=r"transport=nccl wants a card for each rank of an engine: leave --transport out"):
        plan(device=device, tp=2, transport="nccl")


def test_the_context_may_be_shorter_than_the_model_s(plan: Callable[..., RunPlan]) -> None:
    assert (plan().context, plan(context=100).context) == (512, 100)
    with pytest.raises(PlanError, match="context=513 exceeds the 512 positions of the model"):
        plan(context=513)
    with pytest.raises(PlanError, match="max_response_len=64 after a prompt of 26 tokens exceeds the context of 80"):
        plan(context=80)


def test_the_longest_possible_response_is_accepted(plan: Callable[..., RunPlan]) -> None:
    assert plan(max_response_len=486).sampling.max_tokens == 486


def test_a_busy_port_is_refused_and_a_free_one_is_not(plan: Callable[..., RunPlan]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} on 127.0.0.1 cannot be opened"):
            plan(port=port)
        with pytest.raises(PlanError, match=f"port {port} on 127.0.0.1"):
            plan(port=port, ray_address=f"127.0.0.1:{port}")
    assert plan(port=port).port == port


def test_an_address_without_an_answer_is_refused(plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(PlanError, match=r"ray_address=127.0.0.1:1 does not answer .*: start Ray there"):
        plan(ray_address="127.0.0.1:1")
    with pytest.raises(PlanError, match=r"ray_address=127.0.0.1:99999 does not answer"):
        plan(ray_address="127.0.0.1:99999")


def test_an_existing_run_directory_is_refused(plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(PlanError, match="choose another --run-id"):
        plan(run_id="mine")


def test_checkpoints_are_checked_before_anything_starts(plan: Callable[..., RunPlan], model: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"artifacts/models/tiny: run `rlk prepare --tiny`"):
        plan(model=None)
    with pytest.raises(PlanError, match=r"no checkpoint in .*gone: check --model"):
        plan(model="gone")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert plan(model=copy).checkpoint.model_hash == plan().checkpoint.model_hash
    (copy / "rlk.json").write_text("{}")
    with pytest.raises(PrepareError, match=r"rlk.json"):
        plan(model=copy)
    (copy / "rlk.json").unlink()
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-4])
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        plan(model=copy)
    (copy / "model.safetensors").write_bytes(weights)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json"):
        plan(model=copy)


def test_prompts_that_do_not_fit_are_counted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable_prompts([26, 40, 20], 4, 40) == (1,)
    with pytest.raises(PlanError, match="fills the context of 26"):
        unusable_prompts([26, 26], 4, 26)
    config = replace(tiny_config(), max_position_embeddings=20)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(config).items()}
    save_checkpoint(tmp_path / "short", config, tensors, files=byte_tokenizer_files(20))
    with pytest.raises(PlanError, match=r"every prompt .* fills the context of 20"):
        make_plan(load_profile({"model": tmp_path / "short", "workspace": tmp_path}, None, {}))
