"""Scores of the Megatron trainer: equal bytes to the offline model, whatever the packing, and accurate against torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from rlk.contract.numerics import DEFAULT, ContractError
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import Topology
from rlk.kernels import dispatch
from rlk.kernels.attention import attention
from rlk.kernels.logp import logp, support_mask
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.qwen3 import Qwen3Dense
from rlk.model.trace import Trace
from rlk.model.weights import load_checkpoint, save_checkpoint
from rlk.parallel.rendezvous import listen
from rlk.train import process
from rlk.train.batch import Sample, micro_batch, micro_batches, pair
from rlk.train.scoring import NonFiniteError
from rlk.train.tokens import LayoutError
from rlk.train.trainer import MegatronTrainer

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512,
)  # fmt: skip


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=generator)
    return {n: (1 + 0.1 * draw(s) if "norm" in n else 0.06 * draw(s)).bfloat16() for n, s in hf_shapes(CONFIG).items()}


def random_samples(seed: int = 1) -> list[Sample]:
    """Five samples whose lengths straddle groups, tiles and splits; one truncated, one greedy, one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: tuple(torch.randint(0, 260, (count,), generator=generator).tolist())
    made = []
    for i, (prompt, answer) in enumerate([(5, 9), (17, 48), (1, 1), (33, 17), (64, 31)]):
        sampling = SamplingParams(temperature=(0.7, 1.0, 0.0, 1.3, 0.7)[i], top_k=5 if i == 3 else -1)
        ids, tokens = draw(prompt), draw(answer)
        support = tuple(tuple(sorted({t, *draw(4)})) for t in tokens) if sampling.truncates else None
        made.append(Sample(Request(i, ids, sampling), Response(i, ids, tokens, (0.0,) * answer, support, "length", 0, 0)))
    return made


def offline(model: Qwen3Dense, sample: Sample, trace: Trace | None = None) -> list[float]:
    """Score of one sample by the engine-free model."""
    ids = torch.tensor(sample.ids)
    edges = torch.tensor([0, len(ids)])
    keys = {"scale": CONFIG.attention_scale, "kv_tile": DEFAULT.kv_tile, "kv_split": DEFAULT.kv_split}
    attend = lambda _, q, k, v: attention(q, k, v, edges, **keys).flatten(1)
    logits = model.logits(model(ids, torch.arange(len(ids)), attend, trace), trace)
    answer = sample.response.token_ids
    kept = sample.response.support
    return logp(
        logits[-len(answer) - 1 : -1],
        torch.tensor(answer),
        torch.full((len(answer),), sample.request.sampling.scoring_temperature),
        vocab_size=CONFIG.vocab_size,
        padded_vocab=CONFIG.padded_vocab(DEFAULT),
        support=None if kept is None else support_mask(kept, CONFIG.vocab_size),
    ).tolist()


def flat(scores: list[list[float]]) -> torch.Tensor:
    return torch.tensor(list(chain.from_iterable(scores)))


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    yield
    process.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, groups: None) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(path, CONFIG, random_weights(0))
    return path


@pytest.fixture(scope="module")
def trainer(checkpoint: Path) -> MegatronTrainer:
    return MegatronTrainer(checkpoint, micro_batch_size=8)


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> Qwen3Dense:
    model = Qwen3Dense(CONFIG, DEFAULT)
    model.load_hf(load_checkpoint(checkpoint).tensors)
    return model


def test_scores_are_the_offline_models_bytes(trainer: MegatronTrainer, dense: Qwen3Dense) -> None:
    samples = random_samples()
    assert trainer.score(samples) == [offline(dense, sample) for sample in samples]


def test_neither_packing_nor_order_nor_micro_batch_changes_a_byte(trainer: MegatronTrainer) -> None:
    # Case 23: micro-batch 1 against 8.
    samples = random_samples()
    expected = trainer.score(samples)
    assert [trainer.score([sample])[0] for sample in samples] == expected
    assert trainer.score(samples[::-1]) == expected[::-1]
    renamed = [Sample(replace(s.request, sample_id=9 - i), replace(s.response, sample_id=9 - i)) for i, s in enumerate(samples)]
    assert trainer.score(renamed) == expected
    for size in (1, 2, 3):
        trainer.micro_batch_size = size
        try:
            assert trainer.score(samples) == expected
        finally:
            trainer.micro_batch_size = 8
    # Control: the test sees one changed id.
    other = replace(samples[0].response, prompt_ids=(1, *samples[0].response.prompt_ids[1:]))
    changed = Sample(replace(samples[0].request, prompt_ids=other.prompt_ids), other)
    assert trainer.score([changed, *samples[1:]])[0] != expected[0]
    assert trainer.score([changed, *samples[1:]])[1:] == expected[1:]


def test_every_intermediate_is_the_offline_models_bytes(trainer: MegatronTrainer, dense: Qwen3Dense) -> None:
    samples = random_samples()[:3]
    traced = trainer.trace(samples)
    for sample in samples:
        expected = Trace()
        offline(dense, sample, expected)
        found = traced[sample.sample_id]
        assert set(found) == {*expected.names(), "logp"}
        for name, tensor in expected.tensors().items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_support_that_keeps_everything_changes_nothing(trainer: MegatronTrainer) -> None:
    sample = random_samples()[0]
    whole = (tuple(range(260)),) * len(sample.response.token_ids)
    sampling = replace(sample.request.sampling, top_k=260)
    kept = Sample(replace(sample.request, sampling=sampling), replace(sample.response, support=whole))
    assert trainer.score([kept]) == trainer.score([sample])


def test_rescoring_at_the_requests_temperature_gives_the_rollout(trainer: MegatronTrainer, dense: Qwen3Dense) -> None:
    # Case 19: a re-score at a hard-coded temperature; here T = 0.7 comes from the request.
    sample = random_samples()[0]
    rolled = tuple(offline(dense, sample))
    sample = Sample(sample.request, replace(sample.response, logprobs=rolled))
    assert tuple(trainer.score([sample])[0]) == rolled
    hard_coded = Sample(replace(sample.request, sampling=SamplingParams(temperature=1.0)), sample.response)
    assert tuple(trainer.score([hard_coded])[0]) != rolled


def crafted(path: Path, logits: list[float]) -> MegatronTrainer:
    """A model that predicts exactly these logits everywhere: constant hidden states, of which the head reads the first column."""
    weights = {name: torch.zeros(shape).bfloat16() for name, shape in hf_shapes(CONFIG).items()}
    weights["model.embed_tokens.weight"] += 1.0
    weights["model.norm.weight"][:2] = 1.0
    whole = torch.tensor([*logits, *[-30000.0] * (260 - len(logits))])
    # Two bf16 columns hold a logit that one cannot, 20.0625 = 20 + 0.0625.
    weights["lm_head.weight"][:, 0] = whole.bfloat16()
    weights["lm_head.weight"][:, 1] = (whole - whole.bfloat16().float()).bfloat16()
    save_checkpoint(path, CONFIG, weights)
    return MegatronTrainer(path)


def one_token(token: int, sampling: SamplingParams, support: tuple[int, ...] | None = None) -> Sample:
    kept = None if support is None else (support,)
    return Sample(Request(0, (7,), sampling), Response(0, (7,), (token,), (0.0,), kept, "length", 0, 0))


def test_temperature_is_applied_once(tmp_path: Path, groups: None) -> None:
    # Case 1: applied twice gives -0.016739, not at all -0.126928.
    trainer = crafted(tmp_path / "model", [2.0, 0.0])
    assert trainer.score([one_token(0, SamplingParams(temperature=0.7))])[0][0] == pytest.approx(-0.055844, abs=1e-6)
    assert trainer.score([one_token(0, SamplingParams())])[0][0] == pytest.approx(-0.126928, abs=1e-6)


def test_retained_ids_renormalise(tmp_path: Path, groups: None) -> None:
    # Case 20: without the support the score is off by log S = -0.126928.
    trainer = crafted(tmp_path / "model", [2.0, 1.0, 0.0, -1.0])
    kept = trainer.score([one_token(0, SamplingParams(top_k=2), (0, 1))])[0][0]
    whole = trainer.score([one_token(0, SamplingParams())])[0][0]
    assert kept == pytest.approx(-0.313262, abs=1e-6)
    assert whole - kept == pytest.approx(-0.126928, abs=1e-6)


def test_logits_stay_fp32(tmp_path: Path, groups: None) -> None:
    # Case 22: through bf16 the two logits are equal and the logprob is -0.693147.
    trainer = crafted(tmp_path / "model", [20.0625, 20.0])
    assert trainer.score([one_token(0, SamplingParams())])[0][0] == pytest.approx(-0.662385, abs=1e-6)


def test_non_finite_logits_raise(tmp_path: Path, groups: None) -> None:
    trainer = crafted(tmp_path / "model", [float("inf"), 0.0])
    with pytest.raises(NonFiniteError, match="row 0"):
        trainer.score([one_token(1, SamplingParams())])


def test_native_agrees_within_bf16_and_runs_no_kernel(checkpoint: Path, trainer: MegatronTrainer) -> None:
    samples = random_samples()
    strict = flat(trainer.score(samples))
    native = MegatronTrainer(checkpoint, mode="native")
    dispatch.reset_readback()
    difference = (flat(native.score(samples)) - strict).abs()
    assert native.readback()["kernels"] == []
    assert difference.max() < 6e-2
    assert difference.mean() < 1e-2
    # Zero would mean that the two arms are the same code.
    assert (difference > 0).float().mean() > 0.5
    # Control: weights in the strict layout are wrong for Megatron's own MLP, and the tolerance sees it.
    packed = {name: parameter.detach() for name, parameter in trainer.model.parameters.items()}
    for name, parameter in native.model.parameters.items():
        parameter.data.copy_(packed[name])
    assert (flat(native.score(samples)) - strict).abs().max() > 6e-2


def test_readback_names_megatrons_classes_and_ours(trainer: MegatronTrainer, checkpoint: Path) -> None:
    dispatch.reset_readback()
    trainer.score(random_samples()[:1])
    found = trainer.readback()
    modules = found["modules"]
    assert modules["model"]["stock"] == "megatron.core.models.gpt.gpt_model.GPTModel"
    assert modules["decoder"]["class"] == "megatron.core.transformer.transformer_block.TransformerBlock"
    linears = "megatron.core.tensor_parallel.layers."
    for name, ours, stock in (
        ("decoder.layers.1", "StrictLayer", "megatron.core.transformer.transformer_layer.TransformerLayer"),
        ("decoder.layers.1.self_attention.linear_qkv", "StrictColumn", linears + "ColumnParallelLinear"),
        ("decoder.layers.1.self_attention.linear_proj", "StrictRow", linears + "RowParallelLinear"),
        ("decoder.layers.1.self_attention.core_attention", "StrictAttention", "megatron.core.transformer.module.MegatronModule"),
        ("decoder.layers.0.mlp.linear_fc1", "StrictColumn", linears + "ColumnParallelLinear"),
        ("decoder.final_layernorm", "StrictNorm", "torch.nn.modules.normalization.RMSNorm"),
        ("embedding.word_embeddings", "StrictEmbedding", linears + "VocabParallelEmbedding"),
        ("output_layer", "StrictOutput", linears + "ColumnParallelLinear"),
    ):
        assert modules[name] == {"class": f"rlk.train.modules.{ours}", "stock": stock}
    operators = {"attention", "det_gemm", "embedding", "lm_head", "logp", "qk_norm", "rms_norm", "rope", "swiglu"}
    assert {kernel["op"] for kernel in found["kernels"]} == operators
    assert found["model_hash"] == load_checkpoint(checkpoint).model_hash
    assert (found["weight_version"], found["mode"], found["flushes_subnormals"]) == (0, "strict", False)
    native = MegatronTrainer(checkpoint, mode="native").readback()["modules"]
    assert not any(entry["class"].startswith("rlk.") for name, entry in native.items() if name != "rotary_pos_emb")
    assert native["rotary_pos_emb"]["class"] == "rlk.train.native.CpuRotaryEmbedding"


def test_layout_can_be_neither_missing_nor_stale(trainer: MegatronTrainer) -> None:
    model = trainer.model
    batch, other = (next(micro_batches([sample], 1, DEFAULT)) for sample in random_samples()[:2])
    with pytest.raises(LayoutError, match="no token layout"):
        model._logp(batch)
    with model.tokens.use(other), pytest.raises(LayoutError, match="14 rows under a layout of 65 tokens"):
        model._logp(batch)
    with model.tokens.use(batch):
        scores, _ = model._logp(batch)
        with pytest.raises(LayoutError, match="already in flight"), model.tokens.use(other):
            pass
    with pytest.raises(LayoutError, match="backward ran after"):
        scores.backward(torch.ones_like(scores))


def test_samples_that_do_not_fit_are_refused(trainer: MegatronTrainer) -> None:
    a, b, *_ = random_samples()
    with pytest.raises(ContractError, match="share one id"):
        trainer.score([a, a])
    with pytest.raises(ContractError, match="different ids or prompts"):
        Sample(a.request, b.response)
    with pytest.raises(ContractError, match="no retained ids"):
        Sample(replace(a.request, sampling=SamplingParams(top_k=3)), a.response)
    with pytest.raises(ContractError, match=r"\[1\] have no request"):
        pair([a.request], [a.response, b.response])
    prompted = lambda prompt: Sample(replace(a.request, prompt_ids=prompt), replace(a.response, prompt_ids=prompt))
    with pytest.raises(IndexError, match="id 260"):
        trainer.score([prompted((260,))])
    with pytest.raises(IndexError, match="id 261"):
        trainer.score([Sample(a.request, replace(a.response, token_ids=(3,) * 8 + (261,)))])
    with pytest.raises(ValueError, match="has 514 tokens, the model 512"):
        trainer.score([prompted((1,) * 505)])
    assert [s.sample_id for s in pair([b.request, a.request], [a.response, b.response])] == [0, 1]


def test_an_empty_response_has_no_scores(trainer: MegatronTrainer) -> None:
    a, b, *_ = random_samples()
    empty = Sample(b.request, replace(b.response, token_ids=(), logprobs=()))
    assert trainer.score([a, empty]) == [trainer.score([a])[0], []]
    assert micro_batch([a], DEFAULT).tokens == 14


def test_a_busy_port_is_one_line() -> None:
    listener = listen(0)
    port = listener.getsockname()[1]
    with pytest.raises(process.ProcessGroupError, match=f"port {port} on 127.0.0.1 cannot be opened"):
        listen(port)
    listener.close()


def test_another_topology_in_one_process_is_refused(trainer: MegatronTrainer) -> None:
    with pytest.raises(process.ProcessGroupError, match="start another process"):
        process.start(topology=Topology(tp=2), port=1)
    with pytest.raises(process.ProcessGroupError, match="over gloo: start another process"):
        process.start(port=1, transport="shm")


def test_a_process_that_vllm_has_patched_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(process.ProcessGroupError, match="another process"):
        MegatronTrainer(checkpoint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "auto"}, "device='auto' is unknown: use cpu, cuda or cuda:1"),
        ({"device": "cuda:99"}, r"sees \d+ cards here"),
        ({"state": "host"}, "state='host' on cpu: use 'device', or 'host' beside a card"),
        ({"state": "disk"}, "state='disk' on cpu"),
    ],
)
def test_places_that_cannot_be_are_refused(checkpoint: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronTrainer(checkpoint, **settings)
