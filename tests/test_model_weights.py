"""Checkpoints: written and read back exactly, hashed by bytes, broken ones refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlk.model import weights as checkpoints
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.weights import TensorHashes, load_checkpoint, model_hash, save_checkpoint, tensor_hash, tensor_hashes

CONFIG = Qwen3Config(
    vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
)  # fmt: skip


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in hf_shapes(CONFIG).items()}


def write_sharded(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_round_trip_single_and_sharded(tmp_path: Path) -> None:
    tensors = weights()
    written = save_checkpoint(tmp_path / "single", CONFIG, tensors)
    write_sharded(tmp_path / "sharded", tensors)
    for name in ("single", "sharded"):
        loaded = load_checkpoint(tmp_path / name)
        assert loaded.config == CONFIG
        assert list(loaded.tensors) == list(tensors)
        assert loaded.model_hash == written == model_hash(tensors)
        assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_hash_sees_every_bit_shape_dtype_and_name() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    minus_zero = tensor.clone()
    minus_zero[3, 5] = -0.0
    variants = [tensor, minus_zero, tensor.reshape(6, 4), tensor.view(torch.int16)]
    assert len({tensor_hash(t) for t in variants}) == 4
    assert tensor_hash(tensor.t().contiguous().t()) == tensor_hash(tensor)
    assert model_hash({"a": tensor, "b": minus_zero}) != model_hash({"a": minus_zero, "b": tensor})
    assert model_hash({"a": tensor, "b": minus_zero}) == model_hash({"b": minus_zero, "a": tensor})


def plain_hash(tensor: torch.Tensor) -> str:
    """What a hash means, in one line."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode() + raw).hexdigest()


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 24])
def test_pieces_threads_and_order_change_no_hash(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(checkpoints, "_PIECE", piece)
    tensors = {**weights(), "fp32": torch.randn(3, 5), "view": torch.randn(6, 4).t()[1:], "one": torch.ones(()), "none": torch.ones(0, 3)}
    found = tensor_hashes(tensors)
    assert found == {name: plain_hash(tensor) for name, tensor in tensors.items()}
    assert list(found) == list(tensors)
    one_by_one = TensorHashes()
    for name, tensor in tensors.items():
        one_by_one.add(name, tensor)
    assert one_by_one.result() == found
    lines = "".join(f"{name} {found[name]}\n" for name in sorted(found))
    assert model_hash(tensors) == hashlib.sha256(lines.encode()).hexdigest()
    last = tensors["fp32"].clone()
    last.view(torch.uint8)[-1, -1] ^= 1
    assert tensor_hash(last) != found["fp32"]


def test_no_more_tensors_are_held_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most, lock = 0, 0, threading.Lock()

    def slow(tensor: torch.Tensor) -> str:
        nonlocal held, most
        with lock:
            held, most = held + 1, max(most, held + 1)
        time.sleep(0.02)
        with lock:
            held -= 1
        if not tensor.numel():
            raise ValueError("nothing to hash")
        return "hash"

    monkeypatch.setattr(checkpoints, "tensor_hash", slow)
    monkeypatch.setattr(checkpoints, "_threads", lambda: 8)
    for room in (1, 3):
        monkeypatch.setattr(TensorHashes, "HELD", room)
        most, hashes = 0, TensorHashes()
        for number in range(9):
            hashes.add(str(number), torch.ones(1))
        assert len(hashes.result()) == 9
        assert most == room
    hashes = TensorHashes()
    hashes.add("empty", torch.ones(0))
    with pytest.raises(ValueError, match="nothing to hash"):
        hashes.result()


def test_written_files_are_those_of_the_safetensors_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: written(file, data[:9], at))  # a disk may take less than it is given
    save_checkpoint(tmp_path / "a", CONFIG, weights())
    save_file(weights(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_hash_of_a_saved_checkpoint_is_that_of_its_bytes(tmp_path: Path) -> None:
    class Restless(dict[str, torch.Tensor]):
        """Weights that are others each time they are asked for."""

        def __getitem__(self, name: str) -> torch.Tensor:
            return super().__getitem__(name).add_(1)

    tensors = Restless(weights())
    saved = save_checkpoint(tmp_path / "a", CONFIG, tensors)
    assert saved == load_checkpoint(tmp_path / "a").model_hash != model_hash(tensors)


def test_saving_never_overwrites_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", CONFIG, weights())
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(tmp_path / "a", CONFIG, weights(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is torch\.float32"):
        save_checkpoint(tmp_path / "b", CONFIG, {**weights(), "lm_head.weight": torch.zeros(19, 16)})
    with pytest.raises(CheckpointError, match="plain name"):
        save_checkpoint(tmp_path / "c", CONFIG, weights(), files={"../label.json": "{}"})
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_companions_are_copied_and_must_describe_the_same_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", CONFIG, weights(), files={"tokenizer.json": "{ }", "label.json": "not a companion"})
    raw = {**json.loads((tmp_path / "base" / "config.json").read_text()), "eos_token_id": 3}
    (tmp_path / "base" / "config.json").write_text(json.dumps(raw))
    save_checkpoint(tmp_path / "next", CONFIG, weights(1), companions=tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "next").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "next" / "config.json").read_text())["eos_token_id"] == 3
    (tmp_path / "base" / "config.json").write_text(json.dumps({**raw, "rope_theta": 5e5, "rope_parameters": None}))
    with pytest.raises(CheckpointError, match="another model"):
        save_checkpoint(tmp_path / "third", CONFIG, weights(1), companions=tmp_path / "base")


def _truncate(directory: Path) -> None:
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _remove_shard(directory: Path) -> None:
    (directory / "model-00001-of-00002.safetensors").unlink()


def _edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        raw = json.loads(index.read_text())
        change(raw["weight_map"])
        index.write_text(json.dumps(raw))

    return edit


def _resave(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def resave(directory: Path) -> None:
        tensors = weights()
        change(tensors)
        (directory / "model.safetensors.index.json").unlink()
        save_file(tensors, directory / "model.safetensors")

    return resave


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, r"model-00002-of-00002\.safetensors: truncated"),
        (_remove_shard, r"model-00001-of-00002\.safetensors: weight file is missing"),
        (_edit_index(lambda m: m.pop("lm_head.weight")), r"lm_head\.weight is in the file but not in the index"),
        (_edit_index(lambda m: m.update({"lm_head.bias": "model-00001-of-00002.safetensors"})), r"lm_head\.bias is in the index but not"),
        (_edit_index(lambda m: m.update({"lm_head.weight": "../x.safetensors"})), r"'\.\./x\.safetensors' must be a plain name"),
        (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "not a safetensors index"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "holds both"),
        (lambda d: [path.unlink() for path in d.glob("*.safetensors*")], "holds neither"),
        (_resave(lambda t: t.pop("model.norm.weight")), r"tensor model\.norm\.weight is missing"),
        (_resave(lambda t: t.update({"model.extra": torch.zeros(1).bfloat16()})), r"unexpected tensor model\.extra"),
        (_resave(lambda t: t.update({"lm_head.weight": torch.zeros(20, 16).bfloat16()})), r"lm_head\.weight has shape \[20, 16\]"),
        (_resave(lambda t: t.update({"lm_head.weight": torch.zeros(19, 16)})), r"lm_head\.weight is F32"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    directory = tmp_path / "model"
    write_sharded(directory, weights())
    load_checkpoint(directory)
    spoil(directory)
    with pytest.raises(CheckpointError, match=says) as error:
        load_checkpoint(directory)
    assert "\n" not in str(error.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        load_checkpoint(tmp_path / "nowhere")
