"""Updates of the Megatron trainer: every gradient, against fp32 autograd; repeatable bytes; publication and resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import token_leaves
from rlk.contract.update import AdamParams, GrpoParams
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad
from rlk.kernels.logp import logp
from rlk.kernels.rms_norm import rms_norm_gamma_grad
from rlk.model import weights
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes, unpack_weights
from rlk.model.trace import Trace
from rlk.model.weights import load_checkpoint, save_checkpoint
from rlk.train import process
from rlk.train.batch import Sample, micro_batch
from rlk.train.loss import LossError
from rlk.train.modules import StrictColumn
from rlk.train.norm import GradientNormError
from rlk.train.objective import BatchLoss
from rlk.train.optimizer import OptimizerError
from rlk.train.state import StateError
from rlk.train.tokens import GradientError
from rlk.train.trainer import MegatronTrainer, StepMetrics

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512,
)  # fmt: skip
SHAPES = ((5, 9), (17, 48), (1, 1), (33, 17))
REWARDS = [1.0, 0.0, 0.5, 0.25]
GROUPS = [0, 0, 1, 1]
LR = 1e-3


def random_samples(seed: int = 1, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: tuple(torch.randint(0, 260, (count,), generator=generator).tolist())
    made = []
    for i, (prompt, answer) in enumerate(shapes):
        ids, tokens = draw(prompt), draw(answer)
        request = Request(i, ids, SamplingParams(temperature=(0.7, 1.0)[i % 2]))
        made.append(Sample(request, Response(i, ids, tokens, (0.0,) * answer, None, "length", 0, 0)))
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator)
    weights = {n: (1 + 0.1 * draw(s) if "norm" in n else 0.06 * draw(s)).bfloat16() for n, s in hf_shapes(CONFIG).items()}
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(path, CONFIG, weights)
    yield path
    process.stop()


def build(checkpoint: Path, micro_batch_size: int = 2, kl_coef: float = 0.0, **more: object) -> MegatronTrainer:
    return MegatronTrainer(checkpoint, micro_batch_size=micro_batch_size, grpo=GrpoParams(kl_coef=kl_coef), **more)


def one_step(trainer: MegatronTrainer, samples: list[Sample] | None = None, lr: float = LR) -> StepMetrics:
    samples = samples or random_samples()
    count = len(samples)
    old = trainer.score(samples)
    return trainer.step(samples, (REWARDS * 2)[:count], (GROUPS * 2)[:count], old, lr=lr, reference_scores=trainer.reference_score(samples))


def fp32_gradients(checkpoint: Path, samples: list[Sample], weights: list[list[float]]) -> dict[str, torch.Tensor]:
    """Gradients of Σ weight·logp by HF name, by transformers' fp32 model and autograd."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for sample, held in zip(samples, weights):
        answer = sample.response.token_ids
        logits = model(torch.tensor([sample.ids])).logits[0, -len(answer) - 1 : -1] / sample.request.sampling.scoring_temperature
        scores = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        (scores * torch.tensor(held)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["strict", "native"])
def test_every_gradient_is_accurate(checkpoint: Path, mode: str) -> None:
    samples = random_samples()
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(len(s.response.token_ids), generator=generator).tolist() for s in samples]
    expected = fp32_gradients(checkpoint, samples, weights)
    trainer = MegatronTrainer(checkpoint, mode=mode)
    trainer.model.accumulate(micro_batch(samples, DEFAULT), lambda scores: torch.tensor(list(chain.from_iterable(weights))))
    packed = trainer.model.to_packed(trainer.optimizer.gradients)
    found = unpack_weights(packed, CONFIG, DEFAULT)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 3e-2, f"{name}: relative error {error:.4f}"
    assert all(parameter.grad is None for parameter in trainer.model.parameters.values())


def test_weight_gradients_are_summed_in_token_order(checkpoint: Path) -> None:
    """The gradients of the last two modules, computed once more from the traced activations, outside the model."""
    samples = random_samples()
    trainer = build(checkpoint)
    batch = micro_batch(samples, DEFAULT)
    trace = Trace()
    trainer.model.score(batch, trace)
    weights = torch.linspace(-1, 1, len(batch.rows))
    trainer.model.accumulate(batch, lambda scores: weights)
    logits = torch.nn.functional.pad(trace.tensor("logits"), (0, 1024 - 260)).requires_grad_()
    targets, temperature, seed = torch.zeros(batch.tokens, dtype=torch.int64), torch.ones(batch.tokens), torch.zeros(batch.tokens)
    active = torch.zeros(batch.tokens, dtype=torch.bool)
    targets[batch.rows], temperature[batch.rows], active[batch.rows] = batch.targets, batch.temperature, True
    seed[batch.rows] = weights
    logp(logits, targets, temperature, vocab_size=260, padded_vocab=1024, active=active).backward(seed)
    leaves = token_leaves([len(sample.ids) for sample in samples])
    index, offsets = torch.tensor(leaves.index), torch.tensor(leaves.offsets)
    parameters, found = trainer.model.parameters, trainer.optimizer.gradients
    expected = lm_head_weight_grad(trace.tensor("final_norm"), logits.grad.bfloat16(), index, offsets)
    assert torch.equal(found["lm_head"], expected)
    hidden = trace.tensor("final_norm").requires_grad_()
    lm_head(hidden, parameters["lm_head"].detach(), grad_splits=8).backward(logits.grad)
    residual = trace.tensor("layers.1.mlp_residual")
    assert torch.equal(found["final_norm"], rms_norm_gamma_grad(residual, hidden.grad, CONFIG.rms_norm_eps, index, offsets))
    # Control: tokens in packed order, without leaves, give other bytes.
    packed, whole = torch.arange(batch.tokens), torch.tensor([0, batch.tokens])
    assert not torch.equal(found["lm_head"], lm_head_weight_grad(trace.tensor("final_norm"), logits.grad.bfloat16(), packed, whole))


def test_two_runs_have_equal_gradient_hashes(checkpoint: Path) -> None:
    # Case 24.
    trainers = [build(checkpoint) for _ in range(2)]
    first, second = (one_step(trainer) for trainer in trainers)
    assert first == second
    hashes, again = (trainer.gradient_hashes() for trainer in trainers)
    assert hashes == again == weights.tensor_hashes(trainers[0].optimizer.gradients)
    assert len(hashes) == 2 + 1 + 8 * CONFIG.num_hidden_layers
    assert len(set(hashes.values())) == len(hashes)
    # Control: one changed token is seen in every tensor.
    samples = random_samples()
    response = samples[1].response
    samples[1] = Sample(samples[1].request, replace(response, token_ids=(response.token_ids[0] ^ 1, *response.token_ids[1:])))
    one_step(trainers[1], samples)
    assert not set(trainers[1].gradient_hashes().values()) & set(hashes.values())


def test_gradients_wait_for_their_hashes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, trainer = weights.tensor_hash, build(checkpoint)

    def slow(tensor: torch.Tensor) -> str:
        time.sleep(0.05)
        return taken(tensor)

    monkeypatch.setattr(weights, "tensor_hash", slow)
    one_step(trainer)
    held = {name: gradient.clone() for name, gradient in trainer.optimizer.gradients.items()}
    trainer.load(checkpoint, 1)  # sets all gradients to zero
    assert trainer.gradient_hashes() == weights.tensor_hashes(held)
    # Control: without the wait hashes are of what came later.
    one_step(trainer)
    held = {name: gradient.clone() for name, gradient in trainer.optimizer.gradients.items()}
    trainer._hash_gradients()
    trainer.optimizer.zero_gradients()
    assert trainer.gradient_hashes() != weights.tensor_hashes(held)


def test_sample_order_does_not_matter(checkpoint: Path) -> None:
    plain = build(checkpoint)
    one_step(plain)
    trainer, samples = build(checkpoint), random_samples()[::-1]
    old = trainer.score(samples)
    trainer.step(samples, REWARDS[::-1], GROUPS[::-1], old, lr=LR, reference_scores=trainer.reference_score(samples))
    assert trainer.gradient_hashes() == plain.gradient_hashes()


def test_micro_batches_fold_in_order(checkpoint: Path) -> None:
    samples = random_samples()
    trainer = build(checkpoint, micro_batch_size=2)
    metrics = one_step(trainer)
    folded = {name: gradient.clone() for name, gradient in trainer.optimizer.gradients.items()}
    alone = []
    for part in (samples[:2], samples[2:]):
        fresh = build(checkpoint)
        old = fresh.score(samples)
        loss = BatchLoss(samples, REWARDS, GROUPS, old, None, GrpoParams())
        batch = micro_batch(part, DEFAULT)
        fresh.model.accumulate(batch, partial(loss.seeds, batch))
        alone.append(fresh.optimizer.gradients)
    for name, gradient in folded.items():
        assert torch.equal(gradient, (torch.zeros_like(gradient) + alone[0][name]) + alone[1][name]), name
    assert metrics.loss == pytest.approx(one_step(build(checkpoint, micro_batch_size=4)).loss, rel=1e-12)


def test_first_update_is_on_policy(checkpoint: Path) -> None:
    trainer = build(checkpoint, kl_coef=0.1)
    metrics = one_step(trainer)
    # Ratio 1 everywhere: the loss is the mean advantage per token, with a sign.
    tokens = [answer for _, answer in SHAPES]
    up, down = 0.5 / (0.5 + 1e-6), 0.125 / (0.125 + 1e-6)
    assert metrics.loss == pytest.approx(-(up * (tokens[0] - tokens[1]) + down * (tokens[2] - tokens[3])) / sum(tokens), rel=1e-9)
    assert (metrics.kl, metrics.clip_fraction, metrics.tokens, metrics.updates) == (0.0, 0.0, sum(tokens), 1)
    assert metrics.model_hash_before == load_checkpoint(checkpoint).model_hash
    assert metrics.model_hash_after != metrics.model_hash_before
    second = one_step(trainer)
    assert second.kl > 0
    assert second.model_hash_before == metrics.model_hash_after
    assert json.loads(json.dumps(second.as_dict()))["updates"] == 2


def test_update_raises_the_good_samples(checkpoint: Path) -> None:
    trainer, samples = build(checkpoint), random_samples()
    before = [sum(scores) / len(scores) for scores in trainer.score(samples)]
    for _ in range(3):
        one_step(trainer)
    after = [sum(scores) / len(scores) for scores in trainer.score(samples)]
    assert after[0] - before[0] > 0 > after[1] - before[1]


def test_reference_scores_are_those_of_the_start(checkpoint: Path) -> None:
    trainer, samples = build(checkpoint), random_samples()
    start = trainer.score(samples)
    one_step(trainer)
    assert trainer.score(samples) != start
    assert trainer.reference_score(samples) == start
    assert trainer.score(samples) != start


def test_empty_response_and_flat_group_are_reported_and_contribute_nothing(checkpoint: Path) -> None:
    samples = random_samples()
    empty = Sample(Request(9, (4, 5), SamplingParams()), Response(9, (4, 5), (), (), None, "abort", 0, 0))
    trainer = build(checkpoint)
    batch = [*samples, empty]
    metrics = trainer.step(batch, [1.0, 0.0, 0.5, 0.5, 0.5], [0, 0, 1, 1, 1], trainer.score(batch), lr=LR)
    assert (metrics.empty_samples, metrics.flat_groups) == ((9,), (1,))
    plain = build(checkpoint)
    plain.step(samples, [1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], plain.score(samples), lr=LR)
    assert trainer.gradient_hashes() == plain.gradient_hashes()


def test_all_rewards_equal_changes_no_weight_by_gradient(checkpoint: Path) -> None:
    trainer, samples = build(checkpoint, adam=AdamParams(weight_decay=0.0)), random_samples()
    metrics = trainer.step(samples, [1.0] * 4, GROUPS, trainer.score(samples), lr=LR)
    assert (metrics.flat_groups, metrics.grad_norm, metrics.loss) == ((0, 1), 0.0, 0.0)
    assert metrics.model_hash_after == metrics.model_hash_before


def test_padded_rows_stay_zero_and_a_touched_one_raises(checkpoint: Path) -> None:
    trainer = build(checkpoint)
    one_step(trainer)
    for name in ("embedding", "lm_head"):
        assert not trainer.model.parameters[name][260:].detach().contiguous().view(torch.uint8).any()
        assert not trainer.optimizer.gradients[name][260:].contiguous().view(torch.uint8).any()
    trainer.optimizer.state()["m.lm_head"][700, 3] = -0.0
    with pytest.raises(OptimizerError, match="m of lm_head has a padded row"):
        one_step(trainer)


def test_a_missing_gradient_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(checkpoint)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.parameters.items()}
    plain = StrictColumn._forward_impl

    def silent(self: StrictColumn, input: torch.Tensor, weight: torch.Tensor, **more: object) -> torch.Tensor:
        if weight.rlk_name != "layers.1.gate_up":
            return plain(self, input, weight, **more)
        return torch.ops.rlk.det_gemm(input, weight.detach(), 1, 8, torch.bfloat16)

    monkeypatch.setattr(StrictColumn, "_forward_impl", silent)
    with pytest.raises(GradientError, match=r"layers\.1\.gate_up got no gradient"):
        one_step(trainer)
    for name, parameter in trainer.model.parameters.items():
        assert torch.equal(parameter.data, before[name])


def test_a_gradient_through_autograd_is_named(checkpoint: Path) -> None:
    trainer = build(checkpoint)
    trainer.model.parameters["layers.0.o_proj"].grad = torch.zeros_like(trainer.model.parameters["layers.0.o_proj"])
    with pytest.raises(GradientError, match=r"layers\.0\.o_proj got a gradient through autograd"):
        one_step(trainer)


def test_a_second_backward_of_one_micro_batch_is_refused(checkpoint: Path) -> None:
    model, batch = build(checkpoint).model, micro_batch(random_samples()[:1], DEFAULT)
    with model.tokens.use(batch):
        scores, _ = model._logp(batch)
        scores.backward(torch.ones_like(scores), retain_graph=True)
        with pytest.raises(GradientError, match="two gradients from one micro-batch"):
            scores.backward(torch.ones_like(scores))


def test_a_non_finite_gradient_leaves_the_weights_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(checkpoint)
    before = trainer.readback()["model_hash"]
    accumulate = trainer.model.accumulate

    def poisoned(batch: object, seeds: object) -> None:
        accumulate(batch, seeds)
        trainer.optimizer.gradients["layers.1.k_norm"][0] = math.nan

    monkeypatch.setattr(trainer.model, "accumulate", poisoned)
    with pytest.raises(GradientNormError, match=r"layers\.1\.k_norm"):
        one_step(trainer)
    assert trainer.readback()["model_hash"] == before


def test_publish_and_load(checkpoint: Path, tmp_path: Path) -> None:
    trainer, samples = build(checkpoint), random_samples()
    metrics = one_step(trainer)
    published = trainer.publish(tmp_path / "v1", 1)
    assert (published.version, published.model_hash) == (1, metrics.model_hash_after)
    stored = load_checkpoint(published.path)
    assert (stored.model_hash, stored.config) == (published.model_hash, CONFIG)
    assert json.loads((published.path / "rlk_version.json").read_text()) == {"version": 1, "updates": 1, "mode": "strict"}
    found = trainer.readback()
    assert (found["weight_version"], found["model_hash"]) == (1, published.model_hash)
    fresh = build(checkpoint)
    assert fresh.load(published.path, 1) == published.model_hash
    assert fresh.score(samples) == trainer.score(samples)
    assert fresh.reference_score(samples) == trainer.reference_score(samples)


def test_native_publishes_what_it_loaded(checkpoint: Path, tmp_path: Path) -> None:
    native = MegatronTrainer(checkpoint, mode="native")
    start = load_checkpoint(checkpoint).model_hash
    assert native.publish(tmp_path / "v0", 0).model_hash == start
    samples = random_samples()
    metrics = native.step(samples, REWARDS, GROUPS, native.score(samples), lr=LR)
    assert metrics.model_hash_after != start
    assert native.publish(tmp_path / "v1", 1).model_hash == metrics.model_hash_after


@pytest.mark.parametrize("updates", [0, 2])
def test_resume_is_exact(checkpoint: Path, tmp_path: Path, updates: int) -> None:
    # Case 18: save, load, score before the next update; then the next update itself.
    trainer, samples = build(checkpoint), random_samples()
    for _ in range(updates):
        one_step(trainer)
    trainer.save_state(tmp_path / "state")
    resumed = build(checkpoint)
    resumed.load_state(tmp_path / "state")
    assert resumed.score(samples) == trainer.score(samples)
    assert one_step(resumed) == one_step(trainer)
    for kind in ("master", "m", "v"):
        for name, tensor in getattr(trainer.optimizer, kind).items():
            assert torch.equal(getattr(resumed.optimizer, kind)[name].view(torch.int32), tensor.view(torch.int32))
    # Control: weights without moments give another second update.
    if updates:
        weights_only = build(checkpoint)
        weights_only.load(trainer.publish(tmp_path / "weights", 1).path, 1)
        assert one_step(weights_only).model_hash_after != one_step(trainer).model_hash_after


def test_a_state_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    trainer = build(checkpoint)
    one_step(trainer)
    state = tmp_path / "state"
    trainer.save_state(state)
    with pytest.raises(StateError, match="exists already"):
        trainer.save_state(state)
    with pytest.raises(StateError, match=r"trainer\.json: grpo is"):
        build(checkpoint, kl_coef=0.5).load_state(state)
    with pytest.raises(StateError, match=r"trainer\.json: mode is 'strict', this trainer has 'native'"):
        MegatronTrainer(checkpoint, mode="native").load_state(state)
    raw = bytearray((state / "optimizer.safetensors").read_bytes())
    raw[-1] ^= 1
    (state / "optimizer.safetensors").write_bytes(raw)
    untouched = build(checkpoint)
    with pytest.raises(StateError, match="bytes are not those"):
        untouched.load_state(state)
    assert untouched.optimizer.updates == 0
    (state / "optimizer.safetensors").write_bytes(raw[:1000])
    with pytest.raises(StateError, match="not a saved trainer state"):
        untouched.load_state(state)


def test_kl_without_reference_scores_is_refused(checkpoint: Path) -> None:
    trainer, samples = build(checkpoint, kl_coef=0.1), random_samples()
    with pytest.raises(LossError, match=r"kl_coef=0\.1 needs"):
        trainer.step(samples, REWARDS, GROUPS, trainer.score(samples), lr=LR)
