"""Preparing the tiny checkpoint: loadable, labelled with its hash, repeatable, never over something that exists."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlk.contract.models import TINY
from rlk.contract.numerics import Numerics
from rlk.loop.labels import LABEL_FILE, PrepareError, verify_checkpoint
from rlk.loop.prepare import prepare_tiny, tiny_config
from rlk.loop.tokenizer import TextTokenizer
from rlk.model.config import CheckpointError
from rlk.model.weights import load_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("prepare") / "tiny", seed=3, steps=4).path


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    target.mkdir()
    for file in tiny.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_label_names_the_weights(tiny: Path) -> None:
    label = verify_checkpoint(tiny)
    loaded = load_checkpoint(tiny)
    assert (label.kind, label.seed, label.steps, label.model_hash) == ("tiny-warmed-up", 3, 4, loaded.model_hash)
    assert 0 < label.final_loss < math.log(TINY.vocab_size) + 0.5
    assert loaded.config == tiny_config()
    loaded.config.require(Numerics(canonical_tp=8))
    assert loaded.config.padded_vocab(Numerics()) == 1024


def test_transformers_loads_model_and_generation_settings(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    assert {model.generation_config.eos_token_id} == TextTokenizer.load(tiny).stop_ids
    tensors = load_checkpoint(tiny).tensors
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_a_seed_repeats_itself_and_the_caller_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    threads = torch.get_num_threads()
    again = prepare_tiny(tmp_path / "again", seed=3, steps=4)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert again.model_hash == verify_checkpoint(tiny).model_hash
    other = prepare_tiny(tmp_path / "other", seed=4, steps=4)
    assert other.model_hash != again.model_hash


def test_warm_up_learns(tmp_path: Path) -> None:
    short, longer = (prepare_tiny(tmp_path / str(steps), steps=steps).final_loss for steps in (1, 12))
    assert longer < short - 1


def test_refusals(tiny: Path, tmp_path: Path) -> None:
    before = (tiny / "model.safetensors").read_bytes()
    with pytest.raises(PrepareError, match="exists already"):
        prepare_tiny(tiny, steps=1)
    assert (tiny / "model.safetensors").read_bytes() == before
    with pytest.raises(PrepareError, match="steps=-1"):
        prepare_tiny(tmp_path / "new", steps=-1)
    assert list(tmp_path.iterdir()) == []


def test_verification_sees_one_flipped_bit(copy: Path) -> None:
    verify_checkpoint(copy)
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 0x80
    (copy / "model.safetensors").write_bytes(raw)
    with pytest.raises(PrepareError, match="weights hash to"):
        verify_checkpoint(copy)


def test_verification_refuses_a_broken_label_or_checkpoint(copy: Path) -> None:
    label = json.loads((copy / LABEL_FILE).read_text())
    (copy / LABEL_FILE).write_text(json.dumps({**label, "kind": "trained"}))
    with pytest.raises(PrepareError, match="kind"):
        verify_checkpoint(copy)
    (copy / LABEL_FILE).unlink()
    with pytest.raises(PrepareError, match="cannot be read"):
        verify_checkpoint(copy)
    (copy / LABEL_FILE).write_text(json.dumps(label))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        verify_checkpoint(copy)
