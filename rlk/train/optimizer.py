"""Adam with decoupled weight decay over fp32 master weights: the state of a rank's parameters and where it lives.

The formula and its scalars are stated in ``rlk.contract.update`` and computed in ``rlk.kernels.update``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch

from rlk.contract.update import MAX_GRAD_NORM, AdamParams, AdamStep, clip_scale
from rlk.kernels import update
from rlk.kernels.update import AdamTensors
from rlk.kernels.update import cpu as composed
from rlk.parallel.collectives import Group
from rlk.train.norm import GradientNorm, Squares

T = TypeVar("T")
Change = Callable[[AdamStep, float], None]
"""Applies a step at a scale of the gradients."""

_KINDS = ("master", "m", "v")
_AT_ONCE = 1 << 24
"""Elements of a state in host memory that are on the card at a time; no byte depends on it."""


class OptimizerError(ValueError):
    """An update or a state that breaks the contract; the message names the value or tensor."""


class _Kept(Generic[T]):
    """Something that was prepared for tensors, until one of them has other memory."""

    def __init__(self) -> None:
        self._where: list[int] = []
        self._made: T | None = None

    def get(self, tensors: Iterable[torch.Tensor], make: Callable[[], T]) -> T:
        where = [tensor.data_ptr() for tensor in tensors]
        if self._made is None or where != self._where:
            self._where, self._made = where, make()
        return self._made


class Adam:
    """State of this rank's parameters by packed name, in model order: fp32 master, m, v, and the number of updates done.

    Parameters are bf16 and carry their fp32 ``main_grad``. real_rows: number of this rank's real rows of each weight with padded
    vocabulary rows. tp: the ranks that hold the other shards. on_host: keep the state in pinned host memory, and on the card only the
    part that is being updated; no byte depends on it. fused: ``rlk.kernels.update``, else the same operations of torch one by one, which
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
        self._adam: Callable[[Sequence[AdamTensors], Sequence[bool]], Change] = update.adam if fused else composed.adam
        self._squares: Squares = update.square_sums if fused else composed.square_sums
        self._norm = _Kept[GradientNorm]()
        self.reset()

    def reset(self) -> None:
        """Start over from the parameters' present values: master exact, moments +0, no update done."""
        self.updates = 0
        self._change = _Kept[Change]()
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
        gradients = self.gradients
        norm = self._norm.get(gradients.values(), lambda: GradientNorm(gradients, self.shards, self._tp, self._squares))
        squares = norm.squares()
        # A card adds squares for a while; until then the host prepares the rest, and what is said of padding is here when the norm is.
        change = self._prepared()
        faults, found = self._padding()
        found = found.to("cpu", non_blocking=True)
        value = norm.value(squares)
        self._refuse_padding(faults, found)
        scale = clip_scale(value, self.max_norm)
        change(step, scale)
        self.updates += 1
        return value, scale

    def _prepared(self) -> Change:
        """What updates all parameters."""
        decays = [parameter.dim() == 2 for parameter in self.parameters.values()]
        held = [
            AdamTensors(parameter.data, self.master[name], self.m[name], self.v[name], gradient)
            for (name, parameter), gradient in zip(self.parameters.items(), self.gradients.values())
        ]
        if self._on_host:
            return partial(self._in_parts, held, decays)
        return self._change.get((tensor for tensors in held for tensor in tensors), lambda: self._adam(held, decays))

    def _in_parts(self, held: Sequence[AdamTensors], decays: Sequence[bool], step: AdamStep, scale: float) -> None:
        for tensors, decay in zip(held, decays):
            for weight, *state, gradient in zip(*(tensor.view(-1).split(_AT_ONCE) for tensor in tensors)):
                master, m, v = (part.to(weight.device) for part in state)
                self._adam([AdamTensors(weight, master, m, v, gradient)], [decay])(step, scale)
                for part, new in zip(state, (master, m, v)):
                    part.copy_(new)

    def require_padding(self) -> None:
        """Raise OptimizerError unless padded vocabulary rows are +0, bit for bit, in weight, gradient, master and moments."""
        self._refuse_padding(*self._padding())

    def _padding(self) -> tuple[list[str], torch.Tensor]:
        """What may be wrong with padded vocabulary rows, and of each whether it is, on the gradients' device."""
        gradients = self.gradients
        kinds = {"weight": self.parameters, "gradient": gradients, **{kind: getattr(self, kind) for kind in _KINDS}}
        padded = {
            f"{kind} of {name} has a padded row at or after {rows}": tensors[name].detach()[rows:]
            for name, rows in self.real_rows.items()
            for kind, tensors in kinds.items()
            if tensors and rows < len(tensors[name])
        }
        device = next(iter(gradients.values())).device
        found = [rows.view(torch.int16).any().to(device) for rows in padded.values()]
        return list(padded), torch.stack(found) if found else torch.zeros(0, dtype=torch.bool)

    def _refuse_padding(self, faults: Sequence[str], found: torch.Tensor) -> None:
        for fault, present in zip(faults, found.tolist(), strict=True):
            if present:
                raise OptimizerError(f"{fault} that is not +0: keep gradients off padding")
