"""rope: the table, the written order to the byte, accuracy, gradients, invariance, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.pack import pack, unpack
from rlk.kernels.rope import reference, rope, rope_table, table_hash

Check = Callable[..., None]
HEADS, DIM, THETA, LENGTH = 3, 32, 1e6, 4096
TABLE = rope_table(DIM, THETA, LENGTH)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(2, WS1.packed, HEADS, DIM, generator=generator).bfloat16()
    return x, torch.randint(LENGTH, (WS1.packed,), generator=generator), dy


def _both_ways(x: torch.Tensor, positions: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = rope(leaf, positions, TABLE)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def test_table_holds_each_fp64_value_rounded_once() -> None:
    for position in (0, 1, 7, 1000, LENGTH - 1):
        for i in (0, 1, 5, DIM // 2 - 1):
            angle = position * THETA ** (-2 * i / DIM)
            assert TABLE[0, position, i] == torch.tensor(math.cos(angle), dtype=torch.float32)
            assert TABLE[1, position, i] == torch.tensor(math.sin(angle), dtype=torch.float32)


def test_table_does_not_depend_on_its_length_or_on_threads() -> None:
    before = torch.get_num_threads()
    for threads, length in ((1, 1), (2, 77), (3, LENGTH), (5, LENGTH)):
        torch.set_num_threads(threads)
        rope_table.cache_clear()
        assert torch.equal(_bits(rope_table(DIM, THETA, length)), _bits(TABLE[:, :length].contiguous()))
    torch.set_num_threads(before)


def test_table_is_a_plain_cpu_tensor_wherever_it_is_first_asked_for() -> None:
    rope_table.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        table = rope_table(DIM, THETA, LENGTH)
    x, positions, dy = _inputs()
    rope(x.requires_grad_(), positions, table).backward(dy)
    assert torch.equal(_bits(table), _bits(TABLE))


def test_an_fp32_table_would_be_another_one() -> None:
    inv_freq = THETA ** -(torch.arange(0, DIM, 2).float() / DIM)
    angle = torch.arange(LENGTH).float()[:, None] * inv_freq
    assert int((angle.cos() != TABLE[0]).sum()) > LENGTH


def test_hash_names_shape_and_every_bit() -> None:
    assert table_hash(TABLE) == table_hash(rope_table(DIM, THETA, LENGTH).clone())
    flipped = TABLE.clone()
    flipped.view(torch.int32)[1, LENGTH - 1, 3] ^= 1
    negative_zero = TABLE.clone()
    negative_zero[1, 0, 0] = -0.0
    others = [flipped, negative_zero, TABLE.reshape(2, LENGTH // 2, DIM), rope_table(DIM, THETA, 8), rope_table(DIM, 1e4, LENGTH)]
    assert len({table_hash(t) for t in [TABLE, *others]}) == 1 + len(others)


def test_forward_is_accurate(assert_accurate: Check) -> None:
    x, positions, _ = _inputs()
    assert_accurate("rope", FORWARD_ACCURACY, rope(x, positions, TABLE), reference.rope(x, positions, THETA))


def test_gradient_is_accurate(assert_accurate: Check) -> None:
    x, positions, dy = _inputs()
    exact = x.double().requires_grad_()
    reference.rope(exact, positions, THETA).backward(dy.double())
    assert exact.grad is not None
    assert_accurate("rope", GRADIENT_ACCURACY, _both_ways(x, positions, dy)[1], exact.grad)


def _rotate_in_torch(x: torch.Tensor, positions: torch.Tensor, sign: float, fused: bool) -> torch.Tensor:
    """The same rotation in torch's elementwise operators; ``fused`` keeps the first product of each sum unrounded, as an FMA does."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = TABLE[0, positions][:, None], sign * TABLE[1, positions][:, None]
    if fused:
        upper = (first.double() * cos.double() - (second * sin).double()).float()
        lower = (second.double() * cos.double() + (first * sin).double()).float()
    else:
        upper, lower = first * cos - second * sin, second * cos + first * sin
    return torch.cat((upper, lower), dim=-1)


def test_bytes_follow_the_written_order() -> None:
    x, positions, dy = _inputs()
    y, dx = _both_ways(x, positions, dy)
    assert torch.equal(_bits(y), _bits(_rotate_in_torch(x, positions, 1.0, fused=False).bfloat16()))
    assert torch.equal(_bits(dx), _bits(_rotate_in_torch(dy, positions, -1.0, fused=False).bfloat16()))


def test_a_fused_multiply_add_gives_other_bytes() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2000, HEADS, DIM, generator=generator).bfloat16()
    positions = torch.randint(LENGTH, (2000,), generator=generator)
    fused = _rotate_in_torch(x, positions, 1.0, fused=True)
    assert float((fused != _rotate_in_torch(x, positions, 1.0, fused=False)).float().mean()) > 0.2
    assert int((_bits(fused.bfloat16()) != _bits(rope(x, positions, TABLE))).sum()) > 0


def test_position_zero_changes_nothing() -> None:
    x, _, _ = _inputs()
    assert torch.equal(rope(x, torch.zeros(WS1.packed, dtype=torch.int64), TABLE), x)


def test_rows_and_their_gradients_are_invariant(assert_rows_invariant: Check) -> None:
    assert_rows_invariant(_both_ways, *_inputs())


@pytest.mark.parametrize("pad", [0, 3])
def test_left_padding_does_not_shift_positions(pad: int) -> None:
    """Left padding: positions count real tokens, so the rotated rows keep their bytes at pad 0 and pad 3."""
    x, _, _ = _inputs()
    expected = rope(x[:9], torch.arange(9), TABLE)
    mask = torch.tensor([[False] * pad + [True] * 9])
    positions = pack((mask.cumsum(1) - 1), mask)
    rotated = unpack(rope(pack(unpack(x[:9], mask, math.nan), mask), positions, TABLE), mask)
    assert torch.equal(_bits(rotated[0, pad:]), _bits(expected))
    column_numbers = pack(torch.arange(9 + pad).expand_as(mask), mask)
    assert torch.equal(rope(x[:9], column_numbers, TABLE), expected) == (pad == 0)


@pytest.mark.parametrize("bad", [-1, LENGTH, 2**62])
def test_position_outside_the_table_raises_before_anything_runs(bad: int) -> None:
    x, positions, _ = _inputs()
    positions[5] = bad
    reset_readback()
    with pytest.raises(IndexError, match=f"position {bad} of token 5 is outside the table of {LENGTH} positions"):
        rope(x, positions, TABLE)
    assert readback() == []


def test_wrong_arguments_are_refused() -> None:
    x, positions, _ = _inputs()
    wrong = [(x.float(), positions, TABLE), (x[0], positions, TABLE), (x, positions.int(), TABLE), (x, positions[1:], TABLE)]
    wrong += [(x, positions, TABLE.double()), (x, positions, TABLE[:1]), (x, positions, TABLE[:, :, 1:])]
    for arguments in wrong:
        with pytest.raises(ValueError, match="rope: "):
            rope(*arguments)
    for head_dim, theta, length in ((31, THETA, 8), (0, THETA, 8), (32, -1.0, 8), (32, math.nan, 8), (32, THETA, 0)):
        with pytest.raises(ValueError, match="rope_table: "):
            rope_table(head_dim, theta, length)
    with pytest.raises(BackendUnavailable):
        rope(x, positions, TABLE, backend="triton")


def test_what_ran_is_read_back() -> None:
    reset_readback()
    _both_ways(*_inputs())
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [("rope", "cpu", 1), ("rope.backward", "cpu", 1)]


def test_operator_is_well_registered() -> None:
    x, positions, _ = _inputs()
    torch.library.opcheck(torch.ops.rlk.rope, (x.requires_grad_(), positions, TABLE))
