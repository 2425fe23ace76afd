"""Intermediates of a traced rollout, sorted by (sample id, position) whatever batches the engine made of the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlk.model.trace import Trace


@dataclass
class _Step:
    """rows: those that the trace keeps of the step's, by index; last_rows: each request's last one."""

    trace: Trace
    rows: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor
    last_rows: torch.Tensor
    extra: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class StepRecorder:
    """Keeps one :class:`Trace` per engine step together with whose row is where.

    runner: vLLM's model runner, whose batch names the request of each row; sample_of: request id -> sample id.
    """

    def __init__(self, runner: Any, sample_of: Callable[[str], int]) -> None:
        self._runner, self._sample_of = runner, sample_of
        self._steps: list[_Step] | None = None
        self._wanted: torch.Tensor | None = None

    def switch(self, on: bool, positions: Sequence[int] | None = None) -> None:
        """Start collecting into an empty record, at these positions of every sample (None: all), or stop and forget."""
        self._steps = [] if on else None
        self._wanted = None if positions is None else torch.tensor(positions)

    def begin(self, positions: torch.Tensor) -> Trace | None:
        """Called at the start of a forward pass with the positions [T] of its rows; None while no trace is on."""
        if self._steps is None:
            return None
        batch = self._runner.input_batch
        starts = torch.from_numpy(self._runner.query_start_loc.np[: batch.num_reqs + 1].copy()).long()
        samples = torch.tensor([self._sample_of(request) for request in batch.req_ids])
        places = positions.to("cpu", torch.int64, copy=True)
        rows = torch.arange(len(places)) if self._wanted is None else torch.isin(places, self._wanted).nonzero().flatten()
        trace = Trace(None if self._wanted is None else rows.to(positions.device))
        step = _Step(trace, rows, samples.repeat_interleave(starts.diff()), places, starts[1:] - 1)
        self._steps.append(step)
        return step.trace

    def put_last_rows(self, name: str, tensor: torch.Tensor, keep: list[int] | None = None) -> None:
        """Record one row per scheduled request (or per request index in ``keep``) at the position of its last token in this step."""
        if self._steps:
            step = self._steps[-1]
            rows = step.last_rows if keep is None else step.last_rows[keep]
            step.extra[name] = (rows, tensor.detach().clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Rows by ascending position under "{sample}/{name}", those positions (int64) under "{sample}/{name}.positions".

        A position that the prefix cache served was not computed and has no row; one that was computed twice (preemption) has two.
        """
        parts: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for step in self._steps or ():
            named = {name: (step.rows, tensor) for name, tensor in step.trace.tensors().items()} | step.extra
            for name, (rows, tensor) in named.items():
                wanted = torch.ones(len(rows), dtype=torch.bool) if self._wanted is None else torch.isin(step.positions[rows], self._wanted)
                for sample in step.samples[rows][wanted].unique().tolist():
                    mine = wanted & (step.samples[rows] == sample)
                    parts.setdefault((sample, name), []).append((step.positions[rows][mine], tensor[mine.to(tensor.device)]))
        result: dict[str, torch.Tensor] = {}
        for (sample, name), pieces in parts.items():
            positions = torch.cat([p for p, _ in pieces])
            order = positions.argsort(stable=True)
            result[f"{sample}/{name}"] = torch.cat([t for _, t in pieces]).cpu()[order].contiguous()
            result[f"{sample}/{name}.positions"] = positions[order]
        return result
