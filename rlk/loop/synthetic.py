"""``rlk prepare --synthetic SHAPE``: random weights of a named model shape, the same bytes on every machine and device.

Element i of a tensor comes from integers alone: a 64-bit counter, key + (i + 1)·0x9E3779B97F4A7C15, mixed as in splitmix64 (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators", §5); the sum of its four 16-bit fields less 131070 is a bell-shaped integer
of at most 18 bits, exact in fp32. One fp32 product scales it, norm gains add 1, and bf16 is rounded once. The key is the first 64 bits of
SHA-256 over seed and tensor name, so neither chunks nor devices nor other tensors move a value.

Scales keep values sane at any depth: matrices 1/sqrt(inputs), so that a normalised row gives outputs of about 1; those that write to the
residual (o_proj, down_proj) also 1/sqrt(2·layers), so that it grows by a factor, not by a power; embeddings 1; norm gains 1 ± 0.1; lm_head
:data:`LOGIT_STD`/sqrt(hidden), so that sampling at temperature 1 spreads over thousands of tokens and top-p at 0.7 over few.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from rlk.contract.models import QWEN3_8B, QWEN3_8B_UPDATED, TINY, ModelShape
from rlk.loop.labels import PrepareError, SyntheticLabel, require_new, save_labelled, shape_config
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.weights import model_hash

SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in (TINY, QWEN3_8B, QWEN3_8B_UPDATED)}
GENERATOR = "splitmix64-four-fields-1"
LOGIT_STD = 4.0
GAIN_STD = 0.1

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CENTRE = 131070
_FIELDS_STD = math.sqrt(4 * (2**32 - 1) / 12)
"""Standard deviation of the sum of four uniform 16-bit integers."""
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}
"""Elements made at once: what fits a cache, and what fills a card. No value depends on it."""


@dataclass(frozen=True)
class SyntheticCheckpoint:
    """A prepared checkpoint directory; device: where its weights were made."""

    path: Path
    model_hash: str
    config: Qwen3Config
    device: str


def prepare_synthetic(shape: str, directory: Path, *, layers: int | None = None, seed: int = 0) -> SyntheticCheckpoint:
    """Write random bf16 weights of a shape of :data:`SHAPES` as a Hugging Face checkpoint labelled synthetic, with the byte tokenizer.

    layers: fewer decoder layers than the shape has. The directory appears whole or not at all. Raises PrepareError if it exists, for an
    unknown shape and for a number of layers that the shape does not have.
    """
    directory = Path(directory)
    if shape not in SHAPES:
        raise PrepareError(f"shape {shape!r} is unknown: use one of {', '.join(SHAPES)}")
    require_new(directory)
    most = SHAPES[shape].layers
    if layers is not None and not 1 <= layers <= most:
        raise PrepareError(f"layers={layers} is not between 1 and the {most} of {shape}: choose one of these")
    config, device = shape_config(SHAPES[shape], layers), "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: synthetic_tensor(name, size, config, seed, device).cpu() for name, size in hf_shapes(config).items()}
    label = SyntheticLabel(
        kind="synthetic",
        shape=shape,
        layers=config.num_hidden_layers,
        seed=seed,
        generator=GENERATOR,
        model_hash=model_hash(tensors),
    )
    save_labelled(directory, config, tensors, label)
    return SyntheticCheckpoint(directory, label.model_hash, config, device)


def synthetic_tensor(name: str, size: tuple[int, ...], config: Qwen3Config, seed: int, device: str) -> torch.Tensor:
    """bf16 weights of one tensor, by HF name."""
    count, chunk = math.prod(size), _CHUNK[device]
    scale = torch.tensor(_std(name, size, config) / _FIELDS_STD, dtype=torch.float32, device=device)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
    values = torch.empty(count, dtype=torch.bfloat16, device=device)
    for first in range(0, count, chunk):
        scaled = _bell(key, first, min(chunk, count - first), device).to(torch.float32) * scale
        values[first : first + chunk] = scaled + 1 if len(size) == 1 else scaled
    return values.view(size)


def _std(name: str, size: tuple[int, ...], config: Qwen3Config) -> float:
    if len(size) == 1:
        return GAIN_STD
    if name == "model.embed_tokens.weight":
        return 1.0
    gain = LOGIT_STD if name == "lm_head.weight" else 1.0
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        gain = 1 / math.sqrt(2 * config.num_hidden_layers)
    return gain / math.sqrt(size[1])


def _bell(key: int, first: int, count: int, device: str) -> torch.Tensor:
    """int64 [count]: centred sums of four 16-bit fields, elements ``first`` and following of the stream ``key``."""
    z = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN)).add_(_signed(key))
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    z.bitwise_xor_(_shifted(z, 31))
    total = z & 0xFFFF
    for at in (16, 32, 48):
        total += _shifted(z, at) & 0xFFFF
    return total - _CENTRE


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift of the 64-bit pattern, filled with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - (1 << 64) if value >= 1 << 63 else value
