"""Evidence of the operator judgments: runs an operator's case in every layout and hands in what the judge asks for, nothing else.

Memory is poisoned throughout. Operators that an operator depends on are judged again in its cells, at their short shapes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch

from rlk.acceptance.poison import poisoned_memory
from rlk.contract.judgments import Judgment
from rlk.contract.layouts import Placement, canonical, placements
from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import COMPOSITION, THREADS, Tier, judged_shapes, shape, shape_evidence
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import owned
from rlk.evidence.accuracy import measure_accuracy
from rlk.evidence.bytes import compare
from rlk.evidence.schema import Accuracy, Comparison
from rlk.kernels.case import Launch, OperatorCase, Tensors, build_case
from rlk.kernels.dispatch import Ran, readback, reset_readback

SIDE = "operator"
CP_RANKS = (2, 4, 8)


class Sink(Protocol):
    """Where evidence goes: ``rlk.acceptance.collector.Evidence``."""

    def comparison(self, outcome: Comparison) -> Comparison: ...
    def accuracy(self, outcome: Accuracy) -> Accuracy: ...
    def kernels(self, side: str, ran: Iterable[dict[str, Any]]) -> None: ...


def measure(operator: str, tier: Tier, judgment: Judgment, backend: str, sink: Sink) -> None:
    """Hand in everything that ``rlk.contract.operators.evidence_names`` lists for the cell, and the kernels that ran for it.

    What only prepares arguments, such as the table of rope, which is always built on the CPU, is not among these kernels.
    """
    calls: Counter[tuple[str, str, str]] = Counter()
    with poisoned_memory(), _full_precision():
        for name, at in judged_shapes(operator, tier):
            wanted = shape_evidence(name, at, judgment)
            case = replace(_case(name, at.name, backend), shape=at)
            reset_readback()
            if judgment.exact:
                _invariance(name, case, judgment, wanted, sink)
            else:
                _accuracy(name, case, judgment, wanted, sink)
            calls.update({(ran.op, ran.backend, ran.kernel_id): ran.calls for ran in readback()})
    sink.kernels(SIDE, [asdict(Ran(*kernel, count)) for kernel, count in sorted(calls.items())])


@contextmanager
def _full_precision() -> Iterator[None]:
    """fp32 products of the references in fp32: no TF32, no autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@functools.lru_cache(maxsize=2)
def _case(name: str, shape_name: str, backend: str) -> OperatorCase:
    """The four judgments of an operator follow each other: they share its arguments, never its results."""
    return build_case(name, shape(name, shape_name), backend)


def _accuracy(name: str, case: OperatorCase, judgment: Judgment, wanted: Sequence[str], sink: Sink) -> None:
    launch = case.canonical()
    if judgment.gradient:
        leaves = case.leaves(launch.placement, launch.placement.samples)
        candidates = {**case.gradients(launch), **case.finish_weights(case.weight_gradients(launch, leaves))}
    else:
        candidates = case.forward(launch)
    references = case.reference(judgment.gradient)
    for evidence in wanted:
        value = evidence.rsplit(".", 1)[1]
        sink.accuracy(measure_accuracy(evidence, name, value, judgment, candidates[value], references[value].detach()))


def _invariance(name: str, case: OperatorCase, judgment: Judgment, wanted: Sequence[str], sink: Sink) -> None:
    run = case.gradients if judgment.gradient else case.forward
    rows = _RowRuns(case, run)
    weights = _WeightRuns(case) if judgment.gradient else None
    layouts = dict.fromkeys(evidence.rsplit("/", 1)[1] for evidence in wanted)
    prefix = f"{name}.{case.shape.name}"
    for layout in layouts:
        found = rows.compared(layout, judgment)
        if weights is not None:
            found |= weights.compared(layout, judgment)
        for value, (actual, expected) in found.items():
            if f"{prefix}.{value}/{layout}" in wanted:
                sink.comparison(compare(f"{prefix}.{value}/{layout}", actual, expected))


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


class _RowRuns:
    """Values with one row per token: the layout is undone row by row."""

    def __init__(self, case: OperatorCase, run: Callable[[Launch], Tensors]) -> None:
        self._case, self._run = case, run
        self._expected = run(case.canonical())

    def compared(self, layout: str, judgment: Judgment) -> Pairs:
        case = self._case
        if not self._expected:
            return {}
        if layout == THREADS:
            with _other_thread_count():
                return _paired(self._run(case.canonical()), self._expected)
        if layout == COMPOSITION:
            composed = _composed(case, judgment)
            return {name: (composed[name], expected) for name, expected in self._expected.items()}
        launches = _placements(case, layout)
        actual: dict[str, list[torch.Tensor]] = {name: [] for name in self._expected}
        for placement in launches:
            places = case.places(placement)
            for name, tensor in self._run(case.launch(placement)).items():
                actual[name].append(tensor[places])
        tokens = torch.cat([case.tokens(placement) for placement in launches])
        return {name: (torch.cat(actual[name]), expected[tokens]) for name, expected in self._expected.items()}


class _WeightRuns:
    """Values that are sums over tokens in leaf order.

    A launch that does not hold every sample is compared with the sum over its samples in the canonical layout. Chunking is the cut over
    context-parallel ranks: each sums its own leaves, the pair tree joins them.
    """

    def __init__(self, case: OperatorCase) -> None:
        self._case = case
        self._launch = case.canonical()
        self._whole = self._sum(self._launch, self._launch.placement.samples)

    def compared(self, layout: str, judgment: Judgment) -> Pairs:
        if not self._whole:
            return {}
        if layout == THREADS:
            with _other_thread_count():
                return _paired(self._sum(self._launch, self._launch.placement.samples), self._whole)
        if layout == COMPOSITION:
            composed = _composed(self._case, judgment)
            return {name: (composed[name], expected) for name, expected in self._whole.items()}
        if layout == "chunking":
            cut = [self._over_ranks(ranks) for ranks in CP_RANKS]
            return {name: (_flat(c[name] for c in cut), _flat([whole] * len(cut))) for name, whole in self._whole.items()}
        pairs: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {name: ([], []) for name in self._whole}
        for placement in _placements(self._case, layout):
            sums = self._sum(self._case.launch(placement), placement.samples)
            expected = self._whole if placement.samples == self._launch.placement.samples else self._sum(self._launch, placement.samples)
            for name, (actual, wanted) in pairs.items():
                actual.append(sums[name])
                wanted.append(expected[name])
        return {name: (_flat(actual), _flat(wanted)) for name, (actual, wanted) in pairs.items()}

    def _sum(self, launch: Launch, samples: Sequence[int]) -> Tensors:
        return self._case.finish_weights(self._case.weight_gradients(launch, self._case.leaves(launch.placement, samples)))

    def _over_ranks(self, ranks: int) -> Tensors:
        index, offsets = self._case.leaves(self._launch.placement, self._launch.placement.samples)
        parts = []
        for rank in range(ranks):
            own = owned(ranks, rank, DEFAULT.canonical_cp)
            first, last = int(offsets[own.start]), int(offsets[own.stop])
            parts.append(self._case.weight_gradients(self._launch, (index[first:last], offsets[own.start : own.stop + 1] - first)))
        return self._case.finish_weights({name: fold_pairs([part[name] for part in parts], torch.add) for name in parts[0]})


def _placements(case: OperatorCase, layout: str) -> tuple[Placement, ...]:
    return placements(layout, case.batch, neighbours=case.shape.neighbours, shifts=case.shape.shifts)


def _composed(case: OperatorCase, judgment: Judgment) -> Tensors:
    if case.composed is None:
        raise LookupError(f"shape {case.shape.name}: the contract calls the operator composed, but its cells.py does not compose it")
    return case.composed(case.launch(canonical(case.batch)))[judgment.gradient]


def _paired(actual: Tensors, expected: Tensors) -> Pairs:
    return {name: (actual[name], expected[name]) for name in expected}


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors))


@contextmanager
def _other_thread_count() -> Iterator[None]:
    """One thread, or two where one is the rule."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
