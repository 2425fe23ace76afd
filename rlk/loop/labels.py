"""What a prepared checkpoint says about itself in ``rlk.json``, and the proof that its weights are the ones it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlk.contract.models import ModelShape
from rlk.loop.tokenizer import TextTokenizer, byte_tokenizer_files
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.weights import load_checkpoint, save_checkpoint

LABEL_FILE = "rlk.json"


class PrepareError(ValueError):
    """A checkpoint that cannot be prepared or verified; one line with the remedy."""


class TinyLabel(BaseModel):
    """The small model that ``rlk prepare --tiny`` trained; model_hash names its weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["tiny-warmed-up"]
    seed: int
    steps: int
    final_loss: float
    torch_version: str
    model_hash: str


class SyntheticLabel(BaseModel):
    """Random weights in the shape of a named model: nothing that they say about a model's quality means anything.

    generator: the rule that made the weights from (seed, shape, layers).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["synthetic"]
    shape: str
    layers: int
    seed: int
    generator: str
    model_hash: str


Label = TinyLabel | SyntheticLabel
_LABEL: TypeAdapter[Label] = TypeAdapter(Annotated[Label, Field(discriminator="kind")])


def shape_config(shape: ModelShape, layers: int | None = None) -> Qwen3Config:
    """A model shape of the contract as a checkpoint configuration, with fewer layers if asked for."""
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers if layers is None else layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        max_position_embeddings=shape.max_positions,
    )


def require_new(directory: Path) -> None:
    """Raise PrepareError if ``directory`` exists."""
    if directory.exists():
        raise PrepareError(f"{directory}: exists already; choose a new directory or remove it")


def save_labelled(directory: Path, config: Qwen3Config, tensors: Mapping[str, torch.Tensor], label: Label) -> None:
    """Write a checkpoint with the byte tokenizer and its label. Raises PrepareError if it cannot be written."""
    files = {**byte_tokenizer_files(config.max_position_embeddings), LABEL_FILE: label.model_dump_json(indent=2) + "\n"}
    try:
        save_checkpoint(directory, config, tensors, files=files)
    except CheckpointError as error:
        raise PrepareError(str(error)) from error


def read_label(directory: Path) -> Label:
    """The label of a prepared checkpoint. Raises PrepareError for a missing or malformed one."""
    path = Path(directory) / LABEL_FILE
    try:
        return _LABEL.validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrepareError(f"{path}: cannot be read ({error.strerror}); only checkpoints of `rlk prepare` carry this label") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise PrepareError(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'label'}: {first['msg']}; prepare the checkpoint again"
        ) from error


def verify_checkpoint(directory: Path) -> Label:
    """Load a prepared checkpoint and prove that its weights are the ones its label names.

    Raises PrepareError for a missing or malformed label and for another hash, CheckpointError for an unusable checkpoint.
    """
    label, found = read_label(directory), load_checkpoint(directory).model_hash
    if found != label.model_hash:
        raise PrepareError(f"{directory}: weights hash to {found}, its label says {label.model_hash}; prepare the checkpoint again")
    TextTokenizer.load(directory)
    return label
