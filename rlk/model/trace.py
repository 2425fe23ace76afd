"""Named intermediates of a forward pass, collected when somebody asks for them."""

from __future__ import annotations

import torch


class Trace:
    """Collects intermediates by name; rows are tokens. It only copies, so a traced run computes the same bytes as an untraced one.

    Names: "embedding", "layers.{i}." + one of "input_norm", "qkv", "q_norm", "k_norm", "q_rope", "k_rope", "v", "attention", "o_proj",
    "attn_residual", "post_norm", "gate_up", "swiglu", "down_proj", "mlp_residual", then "final_norm", "logits", "logp".
    """

    def __init__(self, rows: torch.Tensor | None = None) -> None:
        """rows: int64, the rows to keep of every tensor, in this order; None keeps all."""
        self._rows = rows
        self._parts: dict[str, list[torch.Tensor]] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of ``tensor``, or of its rows to keep, under ``name``; later calls (the next chunk or step) append rows."""
        held = tensor.detach()
        self._parts.setdefault(name, []).append(held.clone() if self._rows is None else held[self._rows])

    def names(self) -> tuple[str, ...]:
        """Names in the order in which the forward pass first produced them."""
        return tuple(self._parts)

    def tensor(self, name: str) -> torch.Tensor:
        """All rows collected under ``name``, in arrival order. Raises KeyError for a name that never arrived."""
        return torch.cat(self._parts[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every name with all of its rows."""
        return {name: self.tensor(name) for name in self._parts}
