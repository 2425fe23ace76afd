"""Checkpoints in and out: Hugging Face layout, bf16 safetensors, every weight named by the SHA-256 of its bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.layout import check_shapes, hf_shapes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HASHERS = 16
_PIECE = 16 << 20
# What an engine needs beside the weights; a copied checkpoint keeps these files byte for byte.
_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: architecture and bf16 CPU tensors by HF name, in model order."""

    path: Path
    config: Qwen3Config
    tensors: dict[str, torch.Tensor]

    @property
    def model_hash(self) -> str:
        """See :func:`model_hash`."""
        return model_hash(self.tensors)


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) over dtype, shape and raw row-major bytes, so that equal bytes of another shape or dtype hash differently."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    for piece in _host_pieces(tensor.detach().contiguous().reshape(-1).view(torch.uint8)):
        digest.update(piece.numpy().data)
    return digest.hexdigest()


def model_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over the sorted lines "name tensor_hash": the identity of a model, whatever files hold it."""
    lines = "".join(f"{name} {found}\n" for name, found in sorted(tensor_hashes(tensors).items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def tensor_hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """:func:`tensor_hash` of every tensor, asked for and hashed in a few threads, so that a mapping may make each when it is asked."""
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(lambda name: tensor_hash(tensors[name]), tensors)))


def _host_pieces(raw: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of ``raw`` in host memory, in order; from a card through one pinned buffer, which the next piece overwrites."""
    if not raw.is_cuda:
        yield raw
        return
    with torch.cuda.device(raw.device):
        ready, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(ready)
        buffer = torch.empty(min(_PIECE, raw.numel()), dtype=torch.uint8, pin_memory=True)
        for piece in raw.split(_PIECE):
            with torch.cuda.stream(stream):
                buffer[: piece.numel()].copy_(piece, non_blocking=True)
            stream.synchronize()
            yield buffer[: piece.numel()]
        raw.record_stream(stream)


def load_checkpoint(directory: Path) -> Checkpoint:
    """Load a single or sharded (``model.safetensors.index.json``) bf16 checkpoint onto the CPU.

    Raises CheckpointError in one line that names the file or tensor: unreadable or truncated file, missing, extra, wrongly shaped or
    non-bf16 tensor, an index that points outside the directory or disagrees with its shards. Shapes are checked before data is read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a checkpoint directory")
    config = Qwen3Config.from_json(directory)
    expected = hf_shapes(config)
    files = _weight_files(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _header(file).items():
            if name in shapes:
                raise CheckpointError(f"{file}: tensor {name} is already in another shard; each tensor belongs to one file")
            shapes[name] = shape
    check_shapes(shapes, expected, str(directory))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = opened.get_tensor(name)
    return Checkpoint(directory, config, {name: tensors[name] for name in expected})


def save_checkpoint(
    directory: Path,
    config: Qwen3Config,
    tensors: Mapping[str, torch.Tensor],
    *,
    companions: Path | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    """Write ``tensors`` (HF names, bf16) as a Hugging Face checkpoint and return its model hash.

    companions: a checkpoint whose config.json, tokenizer and generation files are copied unchanged; without it config.json is produced.
    files: further text files by plain name. The directory appears whole or not at all (sibling directory, then rename).
    Raises CheckpointError if the directory exists, for a wrong tensor, and for companions of another architecture.
    """
    directory = Path(directory)
    if directory.exists():
        raise CheckpointError(f"{directory}: exists already; checkpoints are never overwritten, choose another directory")
    check_shapes({name: tuple(t.shape) for name, t in tensors.items()}, hf_shapes(config), f"weights for {directory}")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise CheckpointError(f"weights for {directory}: tensor {name} is {tensor.dtype}, checkpoints hold torch.bfloat16")
    if companions is not None and Qwen3Config.from_json(companions) != config:
        raise CheckpointError(f"{companions}: its config.json describes another model than the weights for {directory}")
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if companions is None:
            (partial / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        else:
            for name in _COMPANIONS:
                if (companions / name).is_file():
                    shutil.copyfile(companions / name, partial / name)
        for name, text in (files or {}).items():
            (partial / _plain_name(name, "files")).write_text(text, encoding="utf-8")
        stored = {name: tensors[name].detach().cpu().contiguous() for name in hf_shapes(config)}
        save_file(stored, partial / _SINGLE, metadata={"format": "pt"})
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model_hash(stored)


def _weight_files(directory: Path) -> list[Path]:
    """Weight files in sorted order; for a sharded checkpoint the index must agree with what its shards hold."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{directory}: holds both {_SINGLE} and {_INDEX}; remove the one that is stale")
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{directory}: holds neither {_SINGLE} nor {_INDEX}; only safetensors checkpoints are read")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index with a weight_map; download it again") from error
    files = [directory / _plain_name(file, str(index)) for file in sorted(set(listed.values()))]
    for file in files:
        held = {name for name, where in listed.items() if where == file.name}
        stored = set(_header(file))
        for name in sorted(held ^ stored):
            problem = "in the index but not in the file" if name in held else "in the file but not in the index"
            raise CheckpointError(f"{file}: tensor {name} is {problem}; copy the checkpoint again")
    return files


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, from the header alone. Raises CheckpointError for an unreadable or truncated file and for another dtype."""
    if not file.is_file():
        raise CheckpointError(f"{file}: weight file is missing")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                view = opened.get_slice(name)
                if view.get_dtype() != "BF16":
                    raise CheckpointError(f"{file}: tensor {name} is {view.get_dtype()}, only BF16 is read; convert the checkpoint")
                shapes[name] = tuple(view.get_shape())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not safetensors ({str(error).splitlines()[0]}); copy it again") from error
    return shapes


def _plain_name(name: str, where: str) -> str:
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{where}: file name {name!r} must be a plain name inside the checkpoint directory")
    return name
