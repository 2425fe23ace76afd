"""Engine settings that version 1 refuses, because they would add, move or scale values outside the contract's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlk.contract.numerics import DEFAULT, ContractError
from rlk.contract.topology import padded_length

REFUSED = {
    "sequence_parallel": "it moves tokens between TP ranks: turn it off",
    "distributed_optimizer": "it cuts tensors across parameters and reduces in its own order: turn it off",
    "tied_embeddings": "one tensor would gather two gradients in no stated order: use a checkpoint with its own lm_head",
    "dense_batch": "padding tokens would take part in weight gradients: pack the samples (thd)",
    "pipeline_parallel": "version 1 states no order across stages: use pipeline size 1",
}
"""Setting -> why it is refused and the remedy."""


def require_settings(settings: Mapping[str, bool]) -> None:
    """Raise ContractError for the first setting of :data:`REFUSED` that is on, or for one that the list does not know."""
    for name, on in settings.items():
        if name not in REFUSED:
            raise ContractError(f"{name} is not a setting the contract judges: use one of {', '.join(REFUSED)}")
        if on:
            raise ContractError(f"{name} is on: {REFUSED[name]}")


def require_padding(lengths: Sequence[int], padded: Sequence[int], canonical_cp: int = DEFAULT.canonical_cp) -> None:
    """Raise ContractError unless sample i is padded to exactly 2·canonical_cp·ceil(length/(2·canonical_cp)) tokens."""
    if len(lengths) != len(padded):
        raise ContractError(f"{len(padded)} padded lengths for {len(lengths)} samples: give one per sample")
    for sample, (length, got) in enumerate(zip(lengths, padded)):
        want = padded_length(length, canonical_cp)
        if got != want:
            raise ContractError(
                f"sample {sample} of {length} tokens is padded to {got}: pad to {want}, or chunks hold other tokens than leaves"
            )


def require_neutral(scales: Mapping[str, float]) -> None:
    """Raise ContractError for a factor the engine applies after the loss boundary that is not exactly 1; read the values back."""
    for name, value in scales.items():
        if value != 1.0:
            raise ContractError(f"{name}={value} scales gradients after the loss boundary: make it exactly 1 and normalise in the loss")
