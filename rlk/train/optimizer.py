"""Adam with decoupled weight decay over fp32 master weights: the state of a rank's parameters and where it lives.

The formula and its scalars are stated in ``rlk.contract.update`` and computed in ``rlk.kernels.update``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rlk.contract.update import MAX_GRAD_NORM, AdamParams, clip_scale
from rlk.kernels import update
from rlk.kernels.update import cpu as composed
from rlk.parallel.collectives import Group
from rlk.train.norm import Squares, gradient_norm

_KINDS = ("master", "m", "v")
_AT_ONCE = 1 << 24
"""Elements that are updated at a time, so that what is computed on the way stays small; no byte depends on it."""


class OptimizerError(ValueError):
    """An update or a state that breaks the contract; the message names the value or tensor."""


class Adam:
    """State of this rank's parameters by packed name, in model order: fp32 master, m, v, and the number of updates done.

    Parameters are bf16 and carry their fp32 ``main_grad``. real_rows: number of this rank's real rows of each weight with padded
    vocabulary rows. tp: the ranks that hold the other shards. on_host: keep the state in pinned host memory, and on the card only the
    tensor that is being updated; no byte depends on it. fused: ``rlk.kernels.update``, else the same operations of torch one by one, which
    is what a native trainer does; no byte depends on that either.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        params: AdamParams,
        *,
        shards: int,
        real_rows: Mapping[str, int],
        max_norm: float = MAX_GRAD_NORM,
        tp: Group | None = None,
        on_host: bool = False,
        fused: bool = True,
    ) -> None:
        self.parameters, self.params, self.shards, self.real_rows, self.max_norm = parameters, params, shards, real_rows, max_norm
        self._tp, self._on_host = tp, on_host
        self._adam = update.adam if fused else composed.adam
        self._squares: Squares = update.block_squares if fused else composed.block_squares
        self.reset()

    def reset(self) -> None:
        """Start over from the parameters' present values: master exact, moments +0, no update done."""
        self.updates = 0
        self.master: dict[str, torch.Tensor] = {}
        self.m: dict[str, torch.Tensor] = {}
        self.v: dict[str, torch.Tensor] = {}
        self.require_padding()

    def _allocate(self) -> None:
        """Make the state when it is first needed: a trainer that only scores has none."""
        if not self.master:
            self.master = {name: self._placed(parameter.detach().float()) for name, parameter in self.parameters.items()}
            self.m = {name: self._placed(torch.zeros_like(master)) for name, master in self.master.items()}
            self.v = {name: self._placed(torch.zeros_like(master)) for name, master in self.master.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory() if self._on_host else tensor

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The fp32 main gradients, before clipping."""
        return {name: parameter.main_grad for name, parameter in self.parameters.items()}  # type: ignore[attr-defined]

    def state(self) -> dict[str, torch.Tensor]:
        """Master and moments by kind and packed name, "m.layers.3.qkv"."""
        self._allocate()
        return {f"{kind}.{name}": tensor for kind in _KINDS for name, tensor in getattr(self, kind).items()}

    def restore(self, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Go on from :meth:`state` after ``updates`` updates; the parameters become bf16(master)."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.updates = updates
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.master[name])
        self.require_padding()

    def zero_gradients(self) -> None:
        """Set every main gradient to +0."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def update(self, lr: float) -> tuple[float, float]:
        """One update at learning rate lr; the parameters become RNE bf16(master).

        Returns the gradient norm before clipping and the factor (1: not clipped). Raises GradientNormError on a non-finite gradient,
        ContractError on a bad lr, OptimizerError on a padded vocabulary row that is not +0; nothing has changed then.
        """
        step = replace(self.params, lr=lr).step(self.updates + 1)
        self._allocate()
        self.require_padding()
        gradients = self.gradients
        norm = gradient_norm(gradients, self.shards, self._tp, self._squares)
        scale = clip_scale(norm, self.max_norm)
        device = next(iter(gradients.values())).device
        for name, parameter in self.parameters.items():
            tensors = (gradients[name], parameter.data, *(getattr(self, kind)[name] for kind in _KINDS))
            for gradient, weight, *held in zip(*(tensor.view(-1).split(_AT_ONCE) for tensor in tensors)):
                master, m, v = (part.to(device) for part in held)
                self._adam(weight, master, m, v, gradient, step, scale=scale, decays=parameter.dim() == 2)
                if self._on_host:
                    for part, new in zip(held, (master, m, v)):
                        part.copy_(new)
        self.updates += 1
        return norm, scale

    def require_padding(self) -> None:
        """Raise OptimizerError unless padded vocabulary rows are +0, bit for bit, in weight, gradient, master and moments."""
        gradients = self.gradients
        for name, rows in self.real_rows.items():
            held = {"weight": self.parameters[name], "gradient": gradients[name]}
            held |= {kind: tensors[name] for kind in _KINDS if (tensors := getattr(self, kind))}
            for kind, tensor in held.items():
                if tensor[rows:].detach().contiguous().view(torch.uint8).any():
                    raise OptimizerError(f"{kind} of {name} has a padded row at or after {rows} that is not +0: keep gradients off padding")
