"""What every operator's ``cells.py`` builds: the operator at given dimensions, ready to run in any layout, beside its reference.

Tests, acceptance cells and benchmarks run an operator through its case, so that all of them use the same arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlk.contract.layouts import Placement, canonical
from rlk.contract.operators import OperatorShape
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import RaggedBatch
from rlk.kernels.dispatch import BACKENDS, BackendUnavailable

Tensors = dict[str, torch.Tensor]
Leaves = tuple[torch.Tensor, torch.Tensor]
POOL = 1_000_003  # a prime: no two rows of a large weight drawn from the pool are equal


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch, one row per token. live: [rows] bool, False for padding (NaN, or 0 for integers)."""

    placement: Placement
    rows: Tensors
    live: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows[name]


def nothing(launch: Launch, leaves: Leaves) -> Tensors:
    """``weight_gradients`` of an operator without weights."""
    return {}


@dataclass(frozen=True)
class OperatorCase:
    """One operator at one shape.

    rows: arguments and gradient seeds per token, samples packed in id order.
    forward: outputs, one row per row of the launch. gradients: gradients of the per-token arguments, likewise.
    weight_gradients: gradients that are sums over the tokens that the leaves (index, offsets) name, as one context-parallel rank holds
    them; the pair tree joins ranks. finish_weights: from the joined sums to the gradients.
    reference: outputs (False) or gradients (True) of ``reference.py`` in fp32 over ``rows``, same names and shapes.
    composed: outputs and gradients of the operators that this one is composed of, over ``rows``.
    """

    shape: OperatorShape
    rows: Tensors
    forward: Callable[[Launch], Tensors]
    gradients: Callable[[Launch], Tensors]
    reference: Callable[[bool], Tensors]
    weight_gradients: Callable[[Launch, Leaves], Tensors] = nothing
    finish_weights: Callable[[Tensors], Tensors] = lambda sums: sums
    composed: Callable[[Launch], tuple[Tensors, Tensors]] | None = None

    @property
    def batch(self) -> RaggedBatch:
        return self.shape.batch

    def canonical(self) -> Launch:
        """Samples packed in id order, nothing else."""
        return self.launch(canonical(self.batch))

    def launch(self, placement: Placement) -> Launch:
        """The tokens at the rows of ``placement``; other rows hold other tokens or garbage, as it says."""
        tokens, places = self.tokens(placement), self.places(placement)
        live = torch.full((placement.rows,), placement.neighbours)
        live[places] = True
        others = (13 * torch.arange(placement.rows) + 7) % self.batch.packed

        def place(rows: torch.Tensor) -> torch.Tensor:
            if placement.neighbours:
                batch = rows[others.to(rows.device)]
            else:
                garbage = float("nan") if rows.is_floating_point() else 0
                batch = torch.full((placement.rows, *rows.shape[1:]), garbage, dtype=rows.dtype, device=rows.device)
            batch[places.to(rows.device)] = rows[tokens.to(rows.device)]
            return batch

        rows = {name: place(tensor) for name, tensor in self.rows.items()}
        return Launch(placement, rows, live.to(next(iter(rows.values())).device))

    def tokens(self, placement: Placement) -> torch.Tensor:
        """Packed row of every token of the placement, piece by piece."""
        starts = self.batch.starts
        return torch.tensor([starts[p.sample] + p.first + i for p in placement.pieces for i in range(p.count)])

    def places(self, placement: Placement) -> torch.Tensor:
        """Launch row of every token of the placement, piece by piece."""
        return torch.tensor([p.row + i for p in placement.pieces for i in range(p.count)])

    def leaves(self, placement: Placement, samples: Sequence[int]) -> Leaves:
        """Token leaves of ``samples`` where the placement has them."""
        starts = placement.starts()
        leaves = token_leaves([self.batch.lengths[i] for i in samples], starts=[starts[i] for i in samples])
        device = next(iter(self.rows.values())).device
        return torch.tensor(leaves.index, device=device), torch.tensor(leaves.offsets, device=device)


def build_case(operator: str, shape: OperatorShape, backend: str) -> OperatorCase:
    """The case of an operator: ``rlk.kernels.<operator>.cells.build``. Raises BackendUnavailable where the backend's device is missing."""
    if backend not in BACKENDS:
        raise BackendUnavailable(f"{operator}: unknown backend {backend!r}, choose one of {', '.join(BACKENDS)}")
    if backend != "cpu" and not torch.cuda.is_available():
        raise BackendUnavailable(f"{operator}: backend {backend!r} needs a GPU, which this machine lacks")
    case: OperatorCase = importlib.import_module(f"rlk.kernels.{operator}.cells").build(shape, backend)
    return case


class Draw:
    """Reproducible arguments of a case; the same values for every backend."""

    def __init__(self, shape: OperatorShape, backend: str) -> None:
        self.tokens = shape.batch.packed
        self._device = "cpu" if backend == "cpu" else "cuda"
        self._generator = torch.Generator().manual_seed(20_011)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal values times ``scale``; a tensor of millions of elements repeats a pool of POOL."""
        count = torch.Size(size).numel()
        pool = (scale * torch.randn(min(count, POOL), generator=self._generator)).to(dtype)
        return pool.repeat(-(-count // POOL))[:count].reshape(size).to(self._device)

    def seed(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Gradient of an output, as a loss averaged over the tokens gives it: sums over many tokens are no larger than over 64."""
        return self.normal(*size, scale=min(1.0, (64 / self.tokens) ** 0.5), dtype=dtype)

    def weight(self, rows: int, k: int) -> torch.Tensor:
        """A weight [rows, k] whose products with normal rows are again of size one."""
        return self.normal(rows, k, scale=k**-0.5)

    def integers(self, limit: int, *size: int) -> torch.Tensor:
        """Integers in [0, limit)."""
        return torch.randint(limit, size, generator=self._generator).to(self._device)

    def support(self, ids: torch.Tensor, vocab: int, width: int) -> torch.Tensor:
        """[T, width] bool: every real column in even rows, about a third of them and the row's id in odd ones."""
        mask = torch.rand(len(ids), width, generator=self._generator) < 0.3
        mask[::2] = True
        mask[:, vocab:] = False
        mask[torch.arange(len(ids)), ids.cpu()] = True
        return mask.to(self._device)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 leaf of a reference."""
    return tensor.detach().float().requires_grad_()


def differentiate(output: torch.Tensor, seed: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the leaves for ``seed`` at the output."""
    return torch.autograd.grad(output, leaves, seed)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd follows from here."""
    return tensor.detach().clone().requires_grad_()
