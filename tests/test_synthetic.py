"""Synthetic checkpoints: the same bytes from any chunk, sane values, an honest label, never over something that exists."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from rlk.contract.models import QWEN3_8B, TINY
from rlk.contract.numerics import Numerics
from rlk.loop import synthetic
from rlk.loop.labels import LABEL_FILE, PrepareError, SyntheticLabel, shape_config, verify_checkpoint
from rlk.loop.synthetic import prepare_synthetic, synthetic_tensor
from rlk.model.weights import load_checkpoint

CONFIG = shape_config(TINY)
MASK = (1 << 64) - 1


def splitmix(key: int, at: int) -> int:
    """Element ``at`` of a stream, written out with Python's integers."""
    z = (key + (at + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_elements_follow_the_written_rule() -> None:
    for seed, name in ((0, "lm_head.weight"), (3, "model.layers.1.mlp.down_proj.weight")):
        key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
        wanted = [sum(splitmix(key, at) >> 16 * field & 0xFFFF for field in range(4)) - 131070 for at in range(5, 205)]
        assert synthetic._bell(key, 5, 200, "cpu").tolist() == wanted
    # splitmix64's published first output for the state 0.
    assert splitmix(0, 0) == 0xE220A8397B1DCDAF


def test_chunks_move_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = synthetic_tensor("lm_head.weight", (260, 128), CONFIG, 1, "cpu")
    monkeypatch.setitem(synthetic._CHUNK, "cpu", 77)
    assert torch.equal(synthetic_tensor("lm_head.weight", (260, 128), CONFIG, 1, "cpu"), whole)


def test_values_are_bell_shaped_and_scaled() -> None:
    rows = synthetic_tensor("model.layers.0.mlp.gate_proj.weight", (2048, 128), CONFIG, 0, "cpu").double()
    assert abs(float(rows.mean())) < 1e-3
    assert float(rows.std()) == pytest.approx(128**-0.5, rel=0.01)
    assert float((rows**4).mean() / rows.std() ** 4) == pytest.approx(3 - 1.2 / 4, rel=0.02)
    gains = synthetic_tensor("model.norm.weight", (4096,), CONFIG, 0, "cpu").double()
    assert float(gains.mean()) == pytest.approx(1, abs=0.01)
    assert float(gains.std()) == pytest.approx(0.1, rel=0.05)


def test_a_synthetic_checkpoint_is_labelled_and_verified(tmp_path: Path) -> None:
    made = prepare_synthetic("tiny", tmp_path / "a", layers=1, seed=4)
    label = verify_checkpoint(made.path)
    assert isinstance(label, SyntheticLabel)
    assert (label.kind, label.shape, label.layers, label.seed, label.model_hash) == ("synthetic", "tiny", 1, 4, made.model_hash)
    assert load_checkpoint(made.path).config == shape_config(TINY, 1) == made.config
    assert prepare_synthetic("tiny", tmp_path / "b", layers=1, seed=4).model_hash == made.model_hash
    assert prepare_synthetic("tiny", tmp_path / "c", layers=1, seed=5).model_hash != made.model_hash
    written = json.loads((made.path / LABEL_FILE).read_text())
    (made.path / LABEL_FILE).write_text(json.dumps({**written, "model_hash": "0" * 64}))
    with pytest.raises(PrepareError, match="weights hash to"):
        verify_checkpoint(made.path)


def test_the_bytes_are_pinned(tmp_path: Path) -> None:
    """Another hash here is another generator: give it another name."""
    assert synthetic.GENERATOR == "splitmix64-four-fields-1"
    assert prepare_synthetic("tiny", tmp_path / "tiny").model_hash == PINNED


def test_the_large_shape_fits_the_contract() -> None:
    config = shape_config(QWEN3_8B)
    config.require(Numerics())
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (36, 4096, 151936)


def test_refusals_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="shape 'large' is unknown: use one of tiny, qwen3-8b, qwen3-8b-2layers-vocab16000"):
        prepare_synthetic("large", tmp_path / "new")
    for layers in (0, 3):
        with pytest.raises(PrepareError, match=f"layers={layers} is not between 1 and the 2 of tiny"):
            prepare_synthetic("tiny", tmp_path / "new", layers=layers)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with pytest.raises(PrepareError, match="exists already"):
        prepare_synthetic("tiny", tmp_path / "old")


PINNED = "7465baf9d7d47a99e32c2f7c41f0108373ec0bcc34417e463f5397ed74d0198d"
