"""Adam with decoupled weight decay: one written-out fp32 formula over fp32 master weights.

The formula and its scalars are stated in ``rlk.contract.update``. Here every line is an elementwise operation of torch that rounds once;
scalars are 0-dim fp32 tensors, because torch on CUDA turns a division by a Python number into a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from rlk.contract.update import MAX_GRAD_NORM, AdamParams, AdamStep, clip_scale
from rlk.parallel.collectives import Group
from rlk.train.norm import gradient_norm

_KINDS = ("master", "m", "v")


class OptimizerError(ValueError):
    """An update or a state that breaks the contract; the message names the value or tensor."""


def adam(
    master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, step: AdamStep, decays: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New (master, m, v) from fp32 tensors of one shape; decays: whether weight decay applies to this tensor."""
    s = {name: torch.tensor(value, dtype=torch.float32, device=master.device) for name, value in asdict(step).items()}
    m = s["beta1"] * m + s["one_minus_beta1"] * gradient
    v = s["beta2"] * v + (s["one_minus_beta2"] * gradient) * gradient
    change = (m / s["correction1"]) / (torch.sqrt(v / s["correction2"]) + s["eps"])
    if decays:
        change = change + s["weight_decay"] * master
    return master - s["lr"] * change, m, v


class Adam:
    """State of this rank's parameters by packed name, in model order: fp32 master, m, v, and the number of updates done.

    Parameters are bf16 and carry their fp32 ``main_grad``. real_rows: number of this rank's real rows of each weight with padded
    vocabulary rows. tp: the ranks that hold the other shards.
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
    ) -> None:
        self.parameters, self.params, self.shards, self.real_rows, self.max_norm = parameters, params, shards, real_rows, max_norm
        self._tp = tp
        self.reset()

    def reset(self) -> None:
        """Start over from the parameters' present values: master exact, moments +0, no update done."""
        self.updates = 0
        self.master = {name: parameter.detach().float() for name, parameter in self.parameters.items()}
        self.m = {name: torch.zeros_like(master) for name, master in self.master.items()}
        self.v = {name: torch.zeros_like(master) for name, master in self.master.items()}
        self.require_padding()

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The fp32 main gradients, before clipping."""
        return {name: parameter.main_grad for name, parameter in self.parameters.items()}  # type: ignore[attr-defined]

    def state(self) -> dict[str, torch.Tensor]:
        """Master and moments by kind and packed name, "m.layers.3.qkv"."""
        return {f"{kind}.{name}": tensor for kind in _KINDS for name, tensor in getattr(self, kind).items()}

    def restore(self, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Go on from :meth:`state` after ``updates`` updates; the parameters become bf16(master)."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.updates = updates
        self.publish()
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
        self.require_padding()
        gradients = self.gradients
        norm = gradient_norm(gradients, self.shards, self._tp)
        scale = clip_scale(norm, self.max_norm)
        for name, parameter in self.parameters.items():
            gradient = gradients[name]
            if scale < 1:
                gradient = gradient * torch.tensor(scale, dtype=torch.float32, device=gradient.device)
            state = (self.master[name], self.m[name], self.v[name])
            self.master[name], self.m[name], self.v[name] = adam(*state, gradient, step, parameter.dim() == 2)
        self.updates += 1
        self.publish()
        return norm, scale

    def publish(self) -> None:
        """Set the parameters to RNE bf16(master)."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.master[name])

    def require_padding(self) -> None:
        """Raise OptimizerError unless padded vocabulary rows are +0, bit for bit, in weight, gradient, master and moments."""
        gradients = self.gradients
        for name, rows in self.real_rows.items():
            held = {
                "weight": self.parameters[name],
                "gradient": gradients[name],
                "master": self.master[name],
                "m": self.m[name],
                "v": self.v[name],
            }
            for kind, tensor in held.items():
                if tensor[rows:].detach().contiguous().view(torch.uint8).any():
                    raise OptimizerError(f"{kind} of {name} has a padded row at or after {rows} that is not +0: keep gradients off padding")
