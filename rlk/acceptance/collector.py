"""What a cell's test hands in, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rlk.acceptance.judge import Findings
from rlk.evidence.bytes import Token, compare, compare_fp32, compare_tokens
from rlk.evidence.schema import Accuracy, Comparison, Control, KernelUse


class Evidence:
    """Where a cell's test hands in what it found. Nothing raises on a mismatch: the judge decides once the test has returned.

    Afterwards it is closed and every method raises RuntimeError, so that nothing found in a tear-down stays unseen.
    """

    def __init__(self) -> None:
        self._findings = Findings()
        self._closed = False

    def close(self) -> Findings:
        """End the hand-in and give all of it to the judge."""
        self._closed = True
        return self._findings

    def compare(self, name: str, actual: torch.Tensor | Sequence[float], expected: torch.Tensor | Sequence[float]) -> Comparison:
        """Compare two tensors, or two lists of fp32 values, byte for byte and hand the outcome in."""
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            return self.comparison(compare(name, actual, expected))
        if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
            raise TypeError(f"{name}: a tensor against {type(expected).__name__}: hand in two tensors or two lists")
        return self.comparison(compare_fp32(name, actual, expected))

    def compare_tokens(
        self, name: str, actual_tokens: Sequence[Token], actual: torch.Tensor, expected_tokens: Sequence[Token], expected: torch.Tensor
    ) -> Comparison:
        """Compare rows of tokens aligned by (sample id, position) and hand the outcome in."""
        return self.comparison(compare_tokens(name, actual_tokens, actual, expected_tokens, expected))

    def comparison(self, outcome: Comparison) -> Comparison:
        """Hand in a comparison made elsewhere by ``rlk.evidence.bytes``; one that is equal without a digest raises ValueError."""
        if outcome.equal and not outcome.digest:
            raise ValueError(f"{outcome.name}: equal without a digest: hand in what rlk.evidence.bytes.compare returns")
        self._open().comparisons.append(outcome)
        return outcome

    def accuracy(self, outcome: Accuracy) -> Accuracy:
        """Hand in an accuracy measured by ``rlk.evidence.accuracy``; one that passed without a digest raises ValueError."""
        if outcome.passed and not outcome.digest:
            raise ValueError(f"{outcome.name}: measured without a digest: hand in what rlk.evidence.accuracy.measure_accuracy returns")
        self._open().accuracies.append(outcome)
        return outcome

    def kernels(self, side: str, ran: Iterable[dict[str, Any]]) -> None:
        """Hand in a worker's own read-back: dicts with op, backend, kernel_id, calls."""
        self._open().kernels.extend(KernelUse(side=side, **use) for use in ran)

    def control(self, name: str, caught: bool, detail: str) -> None:
        """Hand in a planted fault, whether it was caught, and what the check that it aims at said."""
        self._open().controls.append(Control(name=name, caught=caught, detail=detail))

    def fact(self, name: str, value: Any) -> None:
        """Record a JSON-able fact; a second one of the same name raises ValueError."""
        facts = self._open().facts
        if name in facts:
            raise ValueError(f"fact {name!r} was handed in before: choose another name")
        facts[name] = value

    def timing(self, name: str, milliseconds: Iterable[float]) -> None:
        """Record raw timing samples in milliseconds; dropped if the cell is not green."""
        timings = self._open().timings_ms
        timings[name] = (*timings.get(name, ()), *milliseconds)

    def _open(self) -> Findings:
        if self._closed:
            raise RuntimeError("evidence was handed in after the cell was judged: hand it in inside the test")
        return self._findings
