"""Fingerprints of tensors: whatever differs shows, per canonical shard, and parts of ranks are rows of the whole."""

from __future__ import annotations

import pytest
import torch

from acceptance import fingerprints as made
from acceptance.fingerprints import fingerprints


def held() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "m.layers.0.qkv": torch.randn(64, 5, generator=draw),
        "parameter.layers.0.o_proj": torch.randn(7, 64, generator=draw).bfloat16(),
        "v.final_norm": torch.randn(9, generator=draw),
    }


def test_one_bit_shows_in_its_own_shard() -> None:
    before = fingerprints(held(), 8)
    assert {name: tuple(rows.shape) for name, rows in before.items()} == {
        "m.layers.0.qkv": (8, 16), "parameter.layers.0.o_proj": (8, 16), "v.final_norm": (1, 16),
    }  # fmt: skip
    for name, place, shard in (("m.layers.0.qkv", (17, 3), 2), ("parameter.layers.0.o_proj", (6, 63), 7), ("v.final_norm", (8,), 0)):
        tensors = held()
        kind = torch.int16 if tensors[name].element_size() == 2 else torch.int32
        tensors[name].view(kind)[place] ^= 1
        after = fingerprints(tensors, 8)
        for other, rows in after.items():
            differ = (rows != before[other]).any(dim=1).nonzero().flatten().tolist()
            assert differ == ([shard] if other == name else [])


def test_swapped_values_and_signs_of_zero_show() -> None:
    name, values = "v.final_norm", torch.tensor([1.0, 2.0, 0.0, 4.0])
    rows = (values, values[[1, 0, 2, 3]], torch.tensor([1.0, 2.0, -0.0, 4.0]))
    assert len({bytes(fingerprints({name: row}, 8)[name][0].tolist()) for row in rows}) == 3


def test_the_parts_of_a_rank_are_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprints(held(), 8)
    monkeypatch.setattr(made, "_AT_ONCE", 7)
    assert all(torch.equal(rows, whole[name]) for name, rows in fingerprints(held(), 8).items())
    half = {name: tensor.chunk(2, cut)[1] for (name, tensor), cut in zip(held().items(), (0, 1, 0)) if name != "v.final_norm"}
    assert all(torch.equal(rows, whole[name][4:]) for name, rows in fingerprints(half, 4).items())
