"""The paged engine on one to four ranks: bytes of the offline forward pass and of the trainer, whatever the batches, chunks and ranks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.records import Request
from rlk.contract.sampling import SamplingParams
from rlk.kernels.attention import attention
from rlk.kernels.logp import logp, support_mask
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.qwen3 import Qwen3Dense
from rlk.model.weights import load_checkpoint, save_checkpoint
from rlk.parallel.pool import Outcome, Pool, free_port, require
from rlk.rollout.sampling import draw, retained_ids

WORKERS = Path(__file__).with_name("paged_workers.py")
CONFIG = Qwen3Config(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)  # fmt: skip
SAMPLINGS = (
    SamplingParams(1.0, 1.0, -1, 9, 1),
    SamplingParams(0.7, 0.9, -1, 17, 2),
    SamplingParams(0.0, 1.0, -1, 6, 3),
    SamplingParams(1.3, 0.99, 3, 12, 4),
    SamplingParams(0.7, 1.0, 1, 5, 5),
    SamplingParams(1.0, 1.0, -1, 1, 6),
)
PROMPTS = (1, 33, 16, 70, 5, 2)
"""Below, at and above a page, a tile and a split; the third sampling row leaves at most 3 of 8 vocabulary shards with a retained id."""


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    prompt = lambda n: tuple(torch.randint(0, CONFIG.vocab_size, (n,), generator=generator).tolist())
    return [Request(10 + i, prompt(n), sampling) for i, (n, sampling) in enumerate(zip(PROMPTS, SAMPLINGS))]


def weights(seed: int, config: Qwen3Config = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    normal = lambda shape: torch.randn(shape, generator=generator)
    return {n: (1 + 0.2 * normal(s) if len(s) == 1 else 0.15 * normal(s)).bfloat16() for n, s in hf_shapes(config).items()}


@dataclass
class Bench:
    """Four workers, checkpoints by name with their hashes, and what one rank answers to :func:`requests` in one call."""

    pool: Pool
    paths: dict[str, Path]
    hashes: dict[str, str]
    alone: dict[str, Any]

    def run(self, tp: int, cp: int, function: str = "generate", **job: Any) -> list[Any]:
        """What every rank returns; calls: the requests of each call of ``generate``."""
        return require(self.outcomes(tp, cp, function, **job))

    def outcomes(self, tp: int, cp: int, function: str, calls: list[list[Request]] | None = None, **job: Any) -> list[Outcome]:
        rows = [[asdict(request) for request in call] for call in calls or [requests()]]
        job = {"tp": tp, "cp": cp, "checkpoint": str(self.paths["first"]), "calls": rows, **job}
        return self.pool.run(tp * cp, WORKERS, function, {**job, "port": free_port() if tp * cp > 1 else 0}, timeout=240)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return self.alone["answers"][0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("checkpoints")
    broken = weights(0)
    broken["model.norm.weight"][3] = float("inf")
    other = Qwen3Config(**{**vars(CONFIG), "rope_theta": 20000.0})
    made = {"first": (CONFIG, weights(0)), "second": (CONFIG, weights(1)), "broken": (CONFIG, broken), "other": (other, weights(0))}
    hashes = {name: save_checkpoint(root / name, config, tensors) for name, (config, tensors) in made.items()}
    with Pool(4, ["rlk.rollout.paged.engine"]) as pool:
        held = Bench(pool, {name: root / name for name in made}, hashes, {})
        held.alone = held.run(1, 1)[0]
        yield held


def words(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def logits_of(model: Qwen3Dense, ids: list[int]) -> torch.Tensor:
    edges = torch.tensor([0, len(ids)])
    sizes: dict[str, Any] = {"scale": CONFIG.attention_scale, "kv_tile": DEFAULT.kv_tile, "kv_split": DEFAULT.kv_split}
    attend: Callable[..., torch.Tensor] = lambda _, q, k, v: attention(q, k, v, edges, **sizes).flatten(1)
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))


def test_every_token_is_that_of_the_offline_pass(bench: Bench) -> None:
    model = Qwen3Dense(CONFIG, DEFAULT)
    model.load_hf(load_checkpoint(bench.paths["first"]).tensors)
    assert [answer["sample_id"] for answer in bench.answers] == [r.sample_id for r in requests()]
    for request, answer in zip(requests(), bench.answers):
        ids, sampling = answer["token_ids"], request.sampling
        rows = logits_of(model, [*request.prompt_ids, *ids[:-1]])[len(request.prompt_ids) - 1 :]
        kept = [retained_ids(row, sampling) for row in rows]
        assert ids == [draw(row, sampling, ids_kept, at) for at, (row, ids_kept) in enumerate(zip(rows, kept))]
        assert answer["support"] == (kept if sampling.truncates else None)
        scores = logp(
            rows, torch.tensor(ids), torch.full((len(ids),), sampling.scoring_temperature), vocab_size=CONFIG.vocab_size,
            padded_vocab=CONFIG.padded_vocab(DEFAULT), support=support_mask(kept, CONFIG.vocab_size) if sampling.truncates else None,
        )  # fmt: skip
        assert words(answer["logprobs"]) == words(scores.tolist())
        assert (len(ids), answer["finish_reason"]) == (sampling.max_tokens, "length")


@pytest.mark.slow
@pytest.mark.parametrize("trained", [(1, 1), (1, 2)])
def test_every_logprob_is_the_trainers(bench: Bench, trained: tuple[int, int]) -> None:
    for scores in bench.run(*trained, "score", answers=bench.answers):
        assert [words(row) for row in scores] == [words(answer["logprobs"]) for answer in bench.answers]


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), (2, 2)])
def test_several_ranks_answer_as_one(bench: Bench, tp: int, cp: int) -> None:
    ranks = bench.run(tp, cp)
    found = [rank["readback"] for rank in ranks]
    for rank in ranks:
        assert rank["answers"] == bench.alone["answers"]
    assert {f["model_hash"] for f in found} == {bench.hashes["first"]}
    assert len({f["shard_hash"] for f in found}) == tp
    assert [f["kv_positions_of_6"] for f in found] == [list(range(rank, 6, cp)) for rank in range(cp) for _ in range(tp)]
    assert {f["kv_heads"] for f in found} == {CONFIG.num_key_value_heads // tp}
    # Nobody computes a row that another context parallel rank computes.
    whole = bench.alone["readback"]["counters"]["rows"]
    assert sum(f["counters"]["rows"] for f in found) == whole * tp
    assert len({f["counters"]["steps"] for f in found}) == 1
    assert {row["group"] for row in found[0]["traffic"]} >= {axis for axis, size in (("tp", tp), ("cp", cp)) if size > 1}


def test_the_order_of_the_ranks_pages_is_seen(bench: Bench) -> None:
    # A slot that nobody wrote holds NaN, so a row that looks into it cannot go unnoticed.
    assert all("not finite" in outcome.error for outcome in bench.outcomes(1, 2, "generate", fault="rank_order"))


@pytest.mark.parametrize(
    ("tp", "cp", "options"),
    [
        (1, 1, {"max_num_batched_tokens": 7, "page": 4}),
        (1, 1, {"max_num_batched_tokens": 512, "page": 32}),
        (1, 1, {"max_num_batched_tokens": 16, "max_num_seqs": 2}),
        (1, 2, {"max_num_batched_tokens": 9, "page": 3}),
        (1, 2, {"max_num_batched_tokens": 512, "pages": 3}),
        (2, 1, {"max_num_batched_tokens": 16, "pages": 6, "page": 16}),
    ],
)
def test_chunks_pages_and_room_change_nothing(bench: Bench, tp: int, cp: int, options: dict[str, int]) -> None:
    for rank in bench.run(tp, cp, options=options):
        assert rank["answers"] == bench.alone["answers"]
        counters = rank["readback"]["counters"]
        assert (counters["unfinished_chunks"] > 0) == (options["max_num_batched_tokens"] < max(PROMPTS))
        if "max_num_seqs" in options or "pages" in options:
            assert counters["most_sequences"] < len(PROMPTS)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 2)])
def test_neighbours_change_nothing(bench: Bench, tp: int, cp: int) -> None:
    held = requests()
    for rank in bench.run(tp, cp, calls=[held[::-1], *([request] for request in held[:3]), [held[3], held[1]]]):
        by_id = {answer["sample_id"]: answer for answer in bench.answers}
        for call in rank["answers"]:
            assert call == [by_id[answer["sample_id"]] for answer in call]


def test_a_seed_is_a_samples_own(bench: Bench) -> None:
    prompt = requests()[1].prompt_ids
    seeds = [Request(i, prompt, SamplingParams(max_tokens=8, seed=seed)) for i, seed in enumerate((5, 5, 6))]
    (answers,) = bench.run(1, 1, calls=[seeds])[0]["answers"]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] != answers[2]["token_ids"]


def test_it_stops_at_an_end_token_and_at_the_context(bench: Bench) -> None:
    request, answer = requests()[0], bench.answers[0]
    stop = answer["token_ids"][4]
    first = answer["token_ids"].index(stop) + 1
    stopped = bench.run(1, 1, calls=[[request]], options={"stop_token_ids": [stop]})[0]["answers"][0][0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (answer["token_ids"][:first], "stop")
    long, whole = requests()[1], bench.answers[1]
    cut = bench.run(1, 1, calls=[[long]], options={"max_model_len": 40})[0]["answers"][0][0]
    assert (cut["token_ids"], cut["finish_reason"]) == (whole["token_ids"][:7], "length")


def test_a_sample_that_does_not_fit_is_refused_alone(bench: Bench) -> None:
    held = requests()
    strange = Request(99, (CONFIG.vocab_size,), SamplingParams())
    (answers,) = bench.run(1, 1, calls=[[strange, held[3], held[0]]], options={"pages": 3})[0]["answers"]
    assert [answer["token_ids"] for answer in answers] == [[], [], bench.answers[0]["token_ids"]]
    assert "outside the vocabulary of 1000" in answers[0]["finish_reason"]
    assert answers[1]["finish_reason"] == "refused: 6 pages are needed of a cache of 3"


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_faults_are_heard_on_every_rank(bench: Bench, tp: int, cp: int) -> None:
    paths = {name: str(bench.paths[name]) for name in ("second", "broken", "other")}
    ranks = bench.run(tp, cp, "faults", **paths)
    for said in ranks:
        assert said["before"] == bench.answers
        assert said["loaded"] == bench.hashes["second"]
        assert {answer["weight_version"] for answer in said["after"]} == {3}
        assert [answer["token_ids"] for answer in said["after"]] != [answer["token_ids"] for answer in said["before"]]
        assert said["after"] == ranks[0]["after"]
        assert "given twice" in said["twice"]
        assert "version 0 is not newer" in said["version"]
        assert "announced was 00" in said["announced"]
        assert "config.json differs" in said["config"]
        assert "are not finite" in said["not finite"]
        assert said["requests"] == "no error" if tp * cp == 1 else "MismatchError: ranks differ" in said["requests"]
