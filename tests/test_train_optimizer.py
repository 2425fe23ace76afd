"""Gradient norm and Adam against scalar arithmetic that is rounded to fp32 by hand, bit for bit."""

from __future__ import annotations

import math
import weakref
from operator import add

import pytest
import torch

from rlk.contract.numerics import ContractError, round_fp32
from rlk.contract.orders import fold_halves, fold_pairs
from rlk.contract.update import NORM_BLOCK, AdamParams, AdamStep
from rlk.kernels.update import AdamTensors, adam, square_sums
from rlk.train import optimizer as optimizers
from rlk.train.norm import GradientNorm, GradientNormError
from rlk.train.optimizer import Adam, OptimizerError
from rlk.train.parameters import prepare_gradients

F = round_fp32


def square_sum(x: torch.Tensor) -> float:
    return float(square_sums([x[None]], NORM_BLOCK)()[0])


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scalar_adam(w: float, m: float, v: float, g: float, s: AdamStep, decays: bool) -> tuple[float, float, float]:
    """The formula of the contract on Python numbers; fp64 +, ·, / and sqrt of fp32 values rounded once more are the fp32 operations."""
    m = F(F(s.beta1 * m) + F(s.one_minus_beta1 * g))
    v = F(F(s.beta2 * v) + F(F(s.one_minus_beta2 * g) * g))
    change = F(F(m / s.correction1) / F(F(math.sqrt(F(v / s.correction2))) + s.eps))
    if decays:
        change = F(change + F(s.weight_decay * w))
    return F(w - F(s.lr * change)), m, v


@pytest.mark.parametrize("decays", [True, False])
def test_update_is_the_scalar_formula(decays: bool) -> None:
    params = AdamParams(lr=1e-3, weight_decay=0.1)
    # A vector body and a tail, and enough square roots to meet one that a library rounds the wrong way.
    count = 1021
    state = [(F(w), 0.0, 0.0) for w in random(count, seed=1).tolist()]
    w, m, v = torch.tensor([s[0] for s in state]), torch.zeros(count), torch.zeros(count)
    weight = w.bfloat16()
    for number in range(1, 5):
        gradient = random(count, seed=10 + number) * 10.0 ** (number - 4)
        adam([AdamTensors(weight, w, m, v, gradient)], [decays])(params.step(number), 1.0)
        state = [scalar_adam(*s, g, params.step(number), decays) for s, g in zip(state, gradient.tolist())]
    expected = torch.tensor(state, dtype=torch.float32)
    for at, tensor in enumerate((w, m, v)):
        assert torch.equal(tensor.view(torch.int32), expected[:, at].contiguous().view(torch.int32))
    assert torch.equal(weight, w.bfloat16())


def parameters() -> dict[str, torch.nn.Parameter]:
    made = {
        "embedding": torch.cat([random(5, 4, seed=5), torch.zeros(3, 4)]),
        "layers.0.input_norm": random(4, seed=6),
        "layers.0.o_proj": random(4, 16, seed=7),
    }
    found = {name: torch.nn.Parameter(tensor.bfloat16()) for name, tensor in made.items()}
    prepare_gradients(found)
    return found


def optimizer(max_norm: float = 1e9) -> Adam:
    return Adam(parameters(), AdamParams(weight_decay=0.1), shards=4, real_rows={"embedding": 5}, max_norm=max_norm)


def give_gradients(made: Adam) -> None:
    for at, (name, gradient) in enumerate(made.gradients.items()):
        gradient.copy_(random(*gradient.shape, seed=20 + at))
        if name == "embedding":
            gradient[5:] = 0.0


def test_parameters_become_rounded_masters_and_norms_do_not_decay() -> None:
    made = optimizer()
    before = {name: parameter.detach().float() for name, parameter in made.parameters.items()}
    give_gradients(made)
    norm, scale = made.update(1e-2)
    step = AdamParams(lr=1e-2, weight_decay=0.1).step(1)
    assert (scale, made.updates) == (1.0, 1)
    assert norm > 0
    for name, parameter in made.parameters.items():
        m, v, decays = torch.zeros_like(before[name]), torch.zeros_like(before[name]), name != "layers.0.input_norm"
        expected = before[name].clone()
        adam([AdamTensors(parameter.detach().clone(), expected, m, v, made.gradients[name])], [decays])(step, 1.0)
        assert torch.equal(made.master[name], expected)
        assert torch.equal(parameter.data, expected.bfloat16())
        assert not torch.equal(expected, before[name])


def test_a_state_on_the_host_is_updated_in_parts_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_AT_ONCE", 5)
    states = []
    for on_host in (False, True):
        made = optimizer(max_norm=0.5)
        made.state()
        made._on_host = on_host  # where there is no card, memory cannot be pinned
        for _ in range(2):
            give_gradients(made)
            made.update(1e-2)
        states.append({**made.state(), **{name: parameter.data for name, parameter in made.parameters.items()}})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_tensors_that_moved_are_found_again() -> None:
    stays, moves = optimizer(), optimizer()
    for made in (stays, moves):
        give_gradients(made)
        made.update(1e-2)
    for parameter in moves.parameters.values():
        parameter.data, parameter.main_grad = parameter.data.clone(), parameter.main_grad * 2  # type: ignore[attr-defined]
    for gradient in stays.gradients.values():
        gradient *= 2
    moves.m = {name: m.clone() for name, m in moves.m.items()}
    assert stays.update(1e-2) == moves.update(1e-2)
    assert all(torch.equal(tensor, moves.state()[name]) for name, tensor in stays.state().items())
    assert all(torch.equal(parameter, moves.parameters[name]) for name, parameter in stays.parameters.items())


def test_an_optimizer_that_starts_over_keeps_no_state() -> None:
    made = optimizer()
    give_gradients(made)
    made.update(1e-2)
    old = [weakref.ref(tensor) for tensor in made.state().values()]
    made.reset()
    assert [tensor for held in old if (tensor := held()) is not None] == []


def test_clip_multiplies_only_below_one() -> None:
    free, clipped = optimizer(), optimizer(max_norm=0.5)
    give_gradients(free)
    give_gradients(clipped)
    norm, _ = free.update(1e-3)
    _, scale = clipped.update(1e-3)
    assert scale == F(0.5 / (norm + 1e-6))
    for name in free.m:
        gradient = free.gradients[name] * torch.tensor(scale)
        assert torch.equal(clipped.m[name], torch.tensor(F(1 - 0.9)) * gradient)
        assert torch.equal(clipped.gradients[name], free.gradients[name])


def test_padded_rows_stay_positive_zero() -> None:
    made = optimizer()
    give_gradients(made)
    made.update(1e-2)
    for tensor in (made.parameters["embedding"], made.master["embedding"], made.m["embedding"], made.v["embedding"]):
        assert not tensor[5:].detach().contiguous().view(torch.uint8).any()


@pytest.mark.parametrize("value", [1e-30, -0.0])
def test_a_touched_padded_row_raises(value: float) -> None:
    made = optimizer()
    give_gradients(made)
    made.gradients["embedding"][6, 1] = value
    with pytest.raises(OptimizerError, match="of embedding has a padded row"):
        made.update(1e-2)


def test_lr_must_be_positive_and_finite() -> None:
    made = optimizer()
    for lr in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ContractError, match="lr="):
            made.update(lr)
    assert made.updates == 0


@pytest.mark.parametrize("count", [1, 3, 1024, 1025, 5000])
def test_square_sum_is_two_row_trees(count: int) -> None:
    x = random(count)
    squares = [value * value for value in x.tolist()]
    blocks = [fold_halves((squares[at : at + 1024] + [0.0] * 1024)[:1024], add, 0.0) for at in range(0, count, 1024)]
    assert square_sum(x) == fold_halves(blocks, add, 0.0)


def test_norm_joins_shards_by_the_tree_then_tensors_in_order() -> None:
    row, column, norm = random(16, 300, seed=1), random(12, 800, seed=2), random(64, seed=3)
    gradients = {"layers.0.qkv": row, "layers.0.o_proj": column, "final_norm": norm}
    by_rows = fold_pairs([square_sum(row[4 * s : 4 * s + 4]) for s in range(4)], add)
    by_columns = fold_pairs([square_sum(column[:, 200 * s : 200 * s + 200]) for s in range(4)], add)
    made = GradientNorm(gradients, 4)
    assert made.value(made.squares()) == math.sqrt(by_rows + by_columns + square_sum(norm))


def test_shards_of_several_tensors_are_added_as_each_alone() -> None:
    tensors = [random(8, 3, 700), random(2, 2100, seed=4), random(8, 20, 105, seed=5), random(1, 9, seed=6)]
    found = square_sums(tensors, NORM_BLOCK)()
    assert found.tolist() == [square_sum(shard) for shards in tensors for shard in shards]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradient_is_named_and_changes_nothing(value: float) -> None:
    made = optimizer()
    give_gradients(made)
    made.gradients["layers.0.o_proj"][2, 3] = value
    before = made.state()["master.embedding"].clone()
    with pytest.raises(GradientNormError, match=r"layers\.0\.o_proj is not finite"):
        made.update(1e-2)
    assert torch.equal(made.master["embedding"], before)
    assert made.updates == 0
