"""pack and unpack: exact copies, gradients both ways, padding by selection, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.pack import pack, reference, unpack

SHAPE = (len(WS1.lengths), WS1.pad_to)


def _mask(left: bool) -> torch.Tensor:
    columns, lengths = torch.arange(WS1.pad_to), torch.tensor(WS1.lengths)[:, None]
    return columns >= WS1.pad_to - lengths if left else columns < lengths


def _ragged_mask() -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(29)) < 0.5


MASKS = {"right": _mask(left=False), "left": _mask(left=True), "holes": _ragged_mask(), "all": torch.ones(SHAPE, dtype=torch.bool)}


def _rows(*shape: int) -> torch.Tensor:
    """bf16 bit patterns of every kind: NaN payloads, infinities, subnormals and both zeros."""
    generator = torch.Generator().manual_seed(31)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 5)])
def test_copies_keep_every_bit(name: str, trailing: tuple[int, ...]) -> None:
    mask = MASKS[name]
    x = _rows(*SHAPE, *trailing)
    packed = pack(x, mask)
    assert _same(packed.view(torch.int16), reference.pack(x.view(torch.int16), mask))
    assert _same(unpack(packed, mask, 7).view(torch.int16)[mask], x.view(torch.int16)[mask])
    assert (unpack(packed, mask, 7)[~mask] == 7).all()
    assert _same(pack(unpack(packed, mask, math.nan), mask), packed)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_any_dtype(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (*SHAPE, 3), generator=torch.Generator().manual_seed(37)).to(dtype)
    packed = pack(x, MASKS["left"])
    assert _same(packed, reference.pack(x, MASKS["left"]))
    assert _same(unpack(packed, MASKS["left"], 1), reference.unpack(packed, MASKS["left"], 1))


def test_padding_side_does_not_change_the_packed_rows() -> None:
    rows = torch.randn(WS1.packed, 6, generator=torch.Generator().manual_seed(41)).bfloat16()
    for side in ("left", "right"):
        assert _same(pack(unpack(rows, MASKS[side], math.nan), MASKS[side]), rows)
    assert not _same(unpack(rows, MASKS["left"]), unpack(rows, MASKS["right"]))


@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_copies(name: str) -> None:
    mask, generator = MASKS[name], torch.Generator().manual_seed(43)
    x = torch.randn(*SHAPE, 4, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(int(mask.sum()), 4, generator=generator).bfloat16()
    pack(x, mask).backward(dy)
    assert x.grad is not None
    assert _same(x.grad, unpack(dy, mask, 0))
    rows = dy.clone().requires_grad_()
    seed = torch.where(mask[..., None], torch.randn(*SHAPE, 4, generator=generator), math.nan).bfloat16()
    unpack(rows, mask).backward(seed)
    assert rows.grad is not None
    assert _same(rows.grad, seed[mask])


def test_padding_is_selected_away_and_never_multiplied() -> None:
    """NaN and infinities under the mask leave no trace; a product with the mask would spread them and turn −0 into +0."""
    mask = MASKS["right"]
    clean = torch.full((*SHAPE, 2), -0.0).bfloat16()
    dirty = torch.where(mask[..., None], clean, math.nan).bfloat16()
    assert _same(pack(dirty, mask), pack(clean, mask))
    assert _same(unpack(pack(dirty, mask), mask), torch.where(mask[..., None], clean, 0.0).bfloat16())
    assert (dirty * mask[..., None]).isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_strides_do_not_matter(threads: int) -> None:
    x = _rows(WS1.pad_to, len(WS1.lengths), 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = pack(x.transpose(0, 1), MASKS["holes"])
    torch.set_num_threads(before)
    assert _same(packed.view(torch.int16), x.transpose(0, 1).view(torch.int16)[MASKS["holes"]])


def test_a_batch_without_tokens() -> None:
    x, mask = _rows(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    assert pack(x, mask).shape == (0, 4)
    assert (unpack(pack(x, mask), mask, 5) == 5).all()


def test_wrong_arguments_are_refused() -> None:
    x, mask = _rows(*SHAPE, 3), MASKS["holes"]
    for wrong in (mask.int(), mask[1:], mask[:, 1:], mask[..., None]):
        with pytest.raises(ValueError, match="pack: mask"):
            pack(x, wrong)
    packed = pack(x, mask)
    for wrong in (mask.int(), mask[0]):
        with pytest.raises(ValueError, match="unpack: mask"):
            unpack(packed, wrong)
    for rows in (packed[1:], torch.cat((packed, packed[:1]))):
        with pytest.raises(ValueError, match=f"unpack: {len(rows)} rows for {len(packed)} true places"):
            unpack(rows, mask)
    with pytest.raises(BackendUnavailable):
        pack(x, mask, backend="triton")


def test_what_ran_is_read_back() -> None:
    mask = MASKS["left"]
    reset_readback()
    unpack(pack(_rows(*SHAPE, 3), mask), mask)
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [("pack", "cpu", 1), ("pack.unpack", "cpu", 1)]


def test_operators_are_well_registered() -> None:
    mask = MASKS["holes"]
    x = torch.randn(*SHAPE, 3).bfloat16()
    torch.library.opcheck(torch.ops.rlk.pack, (x.clone().requires_grad_(), mask))
    torch.library.opcheck(torch.ops.rlk.unpack, (pack(x, mask).requires_grad_(), mask, 0))
