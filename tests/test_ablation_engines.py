"""Mixed models in real Megatron and real vLLM: with every route this project's they are the strict engine, byte for byte.

vLLM runs in a process of its own: this file run as a script is the far end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.acceptance.matrix import ROUTE_OPERATORS
from rlk.contract.arms import MIXED_MODES, ROUTES, routes_of
from rlk.contract.numerics import ContractError
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.weights import save_checkpoint

pytestmark = pytest.mark.slow

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=128,
)  # fmt: skip
PROMPTS = tuple(tuple(range(first, first + length)) for first, length in ((3, 5), (40, 31), (90, 70), (7, 16)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "random"
    generator = torch.Generator().manual_seed(0)
    make = lambda shape: torch.randn(*shape, generator=generator) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
    save_checkpoint(path, CONFIG, {name: make(shape).bfloat16() for name, shape in hf_shapes(CONFIG).items()})
    return path


@pytest.fixture
def every_route_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode "native" builds a mixed model all of whose routes are this project's."""
    from rlk.train import trainer
    from rlk.train.mixed import MixedModel

    monkeypatch.setitem(trainer._MODELS, "native", partial(MixedModel, routes=ROUTES))


def samples() -> list[Any]:
    from rlk.train.batch import Sample

    generator = torch.Generator().manual_seed(1)
    made = []
    for at, prompt in enumerate(PROMPTS):
        answer = tuple(torch.randint(0, CONFIG.vocab_size, (4 + at,), generator=generator).tolist())
        request = Request(at, prompt, SamplingParams())
        made.append(Sample(request, Response(at, prompt, answer, (0.0,) * len(answer), None, "length", 0, 0)))
    return made


def update(mode: Any, checkpoint: Path) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    """Trainer, scores and packed fp32 gradients of one update."""
    from rlk.train.trainer import MegatronTrainer

    trainer, batch = MegatronTrainer(checkpoint, mode=mode, micro_batch_size=1), samples()
    scores = trainer.score(batch)
    trainer.step(batch, [0.0, 1.0, 0.0, 2.0], [0] * 4, scores, lr=1e-3, reference_scores=scores)
    gradients = {name: parameter.main_grad.clone() for name, parameter in trainer.model.parameters.items()}
    return trainer, list(chain.from_iterable(scores)), trainer.model.to_packed(gradients)


def test_a_trainer_with_every_route_is_the_strict_one(checkpoint: Path, every_route_mixed: None) -> None:
    _, strict, wanted = update("strict", checkpoint)
    trainer, scores, gradients = update("native", checkpoint)
    assert scores == strict
    found = trainer.readback()
    assert found["operators"] == dict.fromkeys(ROUTES, "rlk")
    assert all(what["runs"] and what["kernels"] for what in found["routes"].values())
    # The embedding stays Megatron's own, whose gradient autograd rounds to bf16.
    for name, gradient in gradients.items():
        assert torch.equal(gradient, wanted[name]) or name == "embedding", name
    torch.testing.assert_close(gradients["embedding"], wanted["embedding"], atol=1e-1, rtol=2e-2)


@pytest.mark.parametrize("mode", MIXED_MODES)
def test_a_mixed_trainer_computes_each_route_with_the_operators_of_its_mode(checkpoint: Path, mode: Any) -> None:
    trainer, scores, gradients = update(mode, checkpoint)
    _, strict, wanted = update("strict", checkpoint)
    found, own = trainer.readback(), routes_of(mode)
    assert found["operators"] == {route: "rlk" if route in own else "native" for route in ROUTES}
    backward = {kernel["op"].partition(".")[0] for kernel in found["routes"]["backward"]["kernels"]}
    assert backward == {op for route in own for op in ROUTE_OPERATORS[route]}
    for route in ROUTES:
        assert found["routes"][route]["runs"] > 0
        assert bool(found["routes"][route]["kernels"]) == (route in own)
    difference = (torch.tensor(scores) - torch.tensor(strict)).abs()
    assert 0 < difference.max() < 6e-2
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() < 0.1 * wanted[name].norm(), name


def test_a_mixed_trainer_refuses_a_trace_and_several_ranks(checkpoint: Path) -> None:
    from rlk.train.trainer import MegatronTrainer

    with pytest.raises(ValueError, match="a mixed model records no intermediates"):
        MegatronTrainer(checkpoint, mode="ffn").trace(samples())
    with pytest.raises(ContractError, match="ffn mode with TP=2, CP=1: run the ffn arm in one process"):
        MegatronTrainer(checkpoint, mode="ffn", tp=2, port=1)


@pytest.fixture(scope="module")
def rollout(checkpoint: Path) -> dict[str, Any]:
    """What vLLM answered and read back, by engine."""
    done = subprocess.run(
        [sys.executable, __file__, str(checkpoint)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_with_every_route_is_the_strict_engine(rollout: dict[str, Any]) -> None:
    assert rollout["every route"]["operators"] == dict.fromkeys(ROUTES, "rlk")
    assert rollout["every route"]["answers"] == rollout["strict"]["answers"]
    assert sum(len(ids) for ids, _ in rollout["strict"]["answers"]) > 20


@pytest.mark.parametrize("mode", ["attention", "ffn+logp"])
def test_a_mixed_vllm_computes_each_route_with_the_operators_of_its_mode(rollout: dict[str, Any], mode: Any) -> None:
    own = routes_of(mode)
    assert rollout[mode]["operators"] == {route: "rlk" if route in own else "native" for route in ROUTES}
    for route in ROUTES:
        assert rollout[mode]["routes"][route]["runs"] > 0
        assert bool(rollout[mode]["routes"][route]["kernels"]) == (route in own)


def test_a_mixed_vllm_serves_published_weights(rollout: dict[str, Any]) -> None:
    assert rollout["ffn+logp"]["reloaded"] == rollout["ffn+logp"]["answers"]


def test_a_route_that_was_left_native_is_refused_at_the_start(rollout: dict[str, Any]) -> None:
    assert "ffn engine runs operators=" in rollout["left out"]["refused"]
    assert "'ffn': 'native'" in rollout["left out"]["refused"].partition("asked for")[0]


def serve(checkpoint: Path) -> dict[str, Any]:
    """The far end: every engine, one after another."""
    from rlk.rollout.vllm import engine, mixed, settings, wanted

    requests = [Request(at, prompt, SamplingParams(0.7, 0.9, 50, 12, seed=at)) for at, prompt in enumerate(PROMPTS)]
    plain = [Request(at, prompt, SamplingParams(max_tokens=12, seed=at)) for at, prompt in enumerate(PROMPTS)]

    def answers(made: engine.VllmEngine, asked: list[Request]) -> list[Any]:
        return [(response.token_ids, response.logprobs) for response in made.generate(asked)]

    def run(mode: Any, asked: list[Request], again: bool = False) -> dict[str, Any]:
        made = engine.VllmEngine(checkpoint, mode=mode, max_model_len=128)
        found = {"answers": answers(made, asked), **{name: made.readback()[name] for name in ("operators", "routes")}}
        if again:
            made.load_weights(checkpoint, 1)
            found["reloaded"] = answers(made, asked)
        made.close()
        return found

    result: dict[str, Any] = {"strict": run("strict", requests)}
    result |= {"attention": run("attention", plain), "ffn+logp": run("ffn+logp", requests, again=True)}
    carried = mixed.carried_routes
    mixed.carried_routes = lambda config: ()  # type: ignore[attr-defined]
    try:
        result["left out"] = {"refused": "", **run("ffn", plain)}
    except settings.EngineRefusal as refused:
        result["left out"] = {"refused": str(refused)}
    mixed.carried_routes = carried  # type: ignore[attr-defined]
    for module in (engine, wanted):
        module.routes_of = lambda mode: ROUTES  # type: ignore[attr-defined]
    for module in (settings, wanted):
        module.architecture = lambda routes: settings.MIXED_ARCHITECTURE  # type: ignore[attr-defined]
    result["every route"] = run("attention", requests)
    return result


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]))))
