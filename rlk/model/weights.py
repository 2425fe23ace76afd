"""Checkpoints in and out: Hugging Face layout, bf16 safetensors, every weight named by the SHA-256 of its bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
    digest = _digest_of(tensor)
    for piece in _host_pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def model_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over the sorted lines "name tensor_hash": the identity of a model, whatever files hold it."""
    return _joined(tensor_hashes(tensors))


def tensor_hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """:func:`tensor_hash` of every tensor, asked for and hashed in a few threads, so that a mapping may make each when it is asked."""
    return _for_each(tensors, lambda name: tensor_hash(tensors[name]))


class TensorHashes:
    """:func:`tensor_hash` of tensors that come one by one, on half of the cores beside other work; at most ``HELD`` wait or are hashed.

    A tensor must not change before :meth:`wait`.
    """

    HELD = 32

    def __init__(self) -> None:
        self._pool, self._room = ThreadPoolExecutor(max(1, _threads() // 2)), BoundedSemaphore(self.HELD)
        self._begun: dict[str, Future[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one more, as soon as there is room. Never raises what its hash does."""
        self._room.acquire()
        self._begun[name] = self._pool.submit(tensor_hash, tensor)
        self._begun[name].add_done_callback(lambda done: self._room.release())

    def wait(self) -> None:
        """Until every tensor so far is hashed, or cannot be."""
        wait(self._begun.values())

    def result(self) -> dict[str, str]:
        """Hashes by name, of all that were added; nothing can be added afterwards."""
        with self._pool:
            return {name: begun.result() for name, begun in self._begun.items()}


def _joined(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {found}\n" for name, found in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _for_each(tensors: Mapping[str, torch.Tensor], action: Callable[[str], str]) -> dict[str, str]:
    """What ``action`` says of each name, in their order, from a few threads. Names outside the layers come first: a vocabulary weight
    takes longest, and the others fill the time beside it."""
    with ThreadPoolExecutor(_threads()) as pool:
        begun = {name: pool.submit(action, name) for name in sorted(tensors, key=lambda name: "layers." in name)}
        return {name: begun[name].result() for name in tensors}


def _threads() -> int:
    return min(_HASHERS, len(os.sched_getaffinity(0)))


def _digest_of(tensor: torch.Tensor) -> hashlib._Hash:
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())


def _host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The raw row-major bytes in host memory, in order; from a card through one pinned buffer, which the next piece overwrites."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cuda:
        yield from (piece.numpy().data for piece in raw.split(_PIECE))
        return
    with torch.cuda.device(raw.device):
        ready, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(ready)
        buffer = torch.empty(min(_PIECE, raw.numel()), dtype=torch.uint8, pin_memory=True)
        for piece in raw.split(_PIECE):
            with torch.cuda.stream(stream):
                buffer[: piece.numel()].copy_(piece, non_blocking=True)
            stream.synchronize()
            yield buffer[: piece.numel()].numpy().data
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
    """Write ``tensors`` (HF names, bf16) as a Hugging Face checkpoint and return its model hash, taken of the very bytes that are written.

    companions: a checkpoint whose config.json, tokenizer and generation files are copied unchanged; without it config.json is produced.
    files: further text files by plain name. The directory appears whole or not at all (sibling directory, then rename).
    Raises CheckpointError if the directory exists, for a wrong tensor, and for companions of another architecture.
    """
    directory = Path(directory)
    if directory.exists():
        raise CheckpointError(f"{directory}: exists already; checkpoints are never overwritten, choose another directory")
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    check_shapes({name: shape for name, (shape, _) in found.items()}, hf_shapes(config), f"weights for {directory}")
    for name, (_, dtype) in found.items():
        if dtype != torch.bfloat16:
            raise CheckpointError(f"weights for {directory}: tensor {name} is {dtype}, checkpoints hold torch.bfloat16")
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
        written = _write(partial / _SINGLE, tensors, hf_shapes(config))
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _write(file: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Write bf16 ``tensors`` of these shapes as the safetensors library would and return their model hash. Several tensors are on their way
    at once, and each piece of one is written while it is hashed.

    The format: size of the header in 8 bytes (little-endian), the header (JSON, filled with spaces to a multiple of 8), then the raw
    row-major bytes of the tensors in the order of their names.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + math.prod(shape) * torch.bfloat16.itemsize
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    with file.open("xb") as opened, ThreadPoolExecutor(_threads()) as writers:
        opened.write(head)
        opened.truncate(len(head) + end)
        opened.flush()

        def stored(name: str) -> str:
            tensor, at = tensors[name], len(head) + entries[name]["data_offsets"][0]
            digest = _digest_of(tensor)
            for piece in _host_pieces(tensor):
                writing = writers.submit(_put, opened.fileno(), piece, at)
                digest.update(piece)
                writing.result()
                at += len(piece)
            return digest.hexdigest()

        return _joined(_for_each(tensors, stored))


def _put(file: int, piece: memoryview, at: int) -> None:
    while piece:
        done = os.pwrite(file, piece, at)
        at, piece = at + done, piece[done:]


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
