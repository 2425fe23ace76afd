"""Adam with decoupled weight decay: one written-out fp32 formula over fp32 master weights.

The formula and its scalars are stated in ``rlk.contract.update``. Here every line is an elementwise operation that rounds once.
Factors and summands are Python numbers that fp32 holds exactly; divisors are fp32 tensors, because torch on CUDA turns a division by a
number into a product. On the CPU the square root is numpy's: torch's, from MKL, is off by one unit in a fifth of all fp32 values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from rlk.contract.update import MAX_GRAD_NORM, AdamParams, AdamStep, clip_scale
from rlk.parallel.collectives import Group
from rlk.train.norm import gradient_norm

_KINDS = ("master", "m", "v")
_AT_ONCE = 1 << 24
"""Elements that are updated at a time, so that what is computed on the way stays small; no byte depends on it."""


class OptimizerError(ValueError):
    """An update or a state that breaks the contract; the message names the value or tensor."""


def scalars(step: AdamStep, device: torch.device) -> dict[str, Any]:
    """The numbers of a step, the two divisors as 0-dim fp32 tensors on ``device``."""
    divisors = {name: getattr(step, name) for name in ("correction1", "correction2")}
    return asdict(step) | {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in divisors.items()}


def adam(master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, s: Mapping[str, Any], decays: bool) -> None:
    """Update master, m and v in place, fp32 tensors of one shape; s: :func:`scalars`; decays: whether weight decay applies."""
    m.mul_(s["beta1"]).add_(s["one_minus_beta1"] * gradient)
    v.mul_(s["beta2"]).add_((s["one_minus_beta2"] * gradient).mul_(gradient))
    change = (m / s["correction1"]).div_(_root(v / s["correction2"]).add_(s["eps"]))
    if decays:
        change.add_(s["weight_decay"] * master)
    master.sub_(change.mul_(s["lr"]))


def _root(x: torch.Tensor) -> torch.Tensor:
    return x.sqrt_() if x.is_cuda else torch.from_numpy(np.sqrt(x.numpy()))


class Adam:
    """State of this rank's parameters by packed name, in model order: fp32 master, m, v, and the number of updates done.

    Parameters are bf16 and carry their fp32 ``main_grad``. real_rows: number of this rank's real rows of each weight with padded
    vocabulary rows. tp: the ranks that hold the other shards. on_host: keep the state in pinned host memory, and on the card only the
    tensor that is being updated; no byte depends on it.
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
    ) -> None:
        self.parameters, self.params, self.shards, self.real_rows, self.max_norm = parameters, params, shards, real_rows, max_norm
        self._tp, self._on_host = tp, on_host
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
        norm = gradient_norm(gradients, self.shards, self._tp)
        scale = clip_scale(norm, self.max_norm)
        device = next(iter(gradients.values())).device
        numbers = scalars(step, device)
        for name, parameter in self.parameters.items():
            tensors = (gradients[name], parameter.data, *(getattr(self, kind)[name] for kind in _KINDS))
            for gradient, weight, *held in zip(*(tensor.view(-1).split(_AT_ONCE) for tensor in tensors)):
                master, m, v = (part.to(device) for part in held)
                adam(master, m, v, gradient * scale if scale < 1 else gradient, numbers, parameter.dim() == 2)
                weight.copy_(master)
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
