"""Optimizer state on disk: safetensors and JSON. Weights are not stored, they are bf16 of the masters."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlk.model.weights import model_hash

_TENSORS, _FACTS = "optimizer.safetensors", "trainer.json"


class StateError(ValueError):
    """A saved state that is damaged or belongs to another run; the message names the file and the field."""


def save(directory: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Path:
    """Write whole tensors and ``facts`` (JSON values); the directory must not exist and appears whole or not at all. Returns it."""
    directory = Path(directory)
    if directory.exists():
        raise StateError(f"{directory}: exists already, states are never overwritten: choose another directory")
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / _TENSORS)
        held = {**facts, "tensors": model_hash(tensors)}
        (partial / _FACTS).write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def load(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The facts and whole tensors of :func:`save`.

    Raises StateError where a file is damaged, a tensor is not fp32 of the given shape, or a stored fact differs from the same-named one
    of ``facts``.
    """
    directory = Path(directory)
    try:
        held: dict[str, Any] = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        tensors = load_file(directory / _TENSORS)
        int(held["updates"])
        stored_hash = str(held["tensors"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateError(f"{directory}: not a saved trainer state ({str(error).splitlines()[0]}): save it again") from error
    for name, value in facts.items():
        if held.get(name) != value:
            raise StateError(
                f"{directory / _FACTS}: {name} is {held.get(name)!r}, this trainer has {value!r}: resume with the saved settings"
            )
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise StateError(f"{directory / _TENSORS}: tensor {name} is missing or unknown: resume with the saved model")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape or tensors[name].dtype != torch.float32:
            raise StateError(f"{directory / _TENSORS}: {name} is {list(tensors[name].shape)} {tensors[name].dtype}, not {list(shape)} fp32")
    if model_hash(tensors) != stored_hash:
        raise StateError(f"{directory / _TENSORS}: its bytes are not those that were saved: copy it again")
    return held, tensors
