"""The step recorder: rows find their sample and position whatever batches the engine made, and only wanted positions are kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from rlk.rollout.vllm.tracing import StepRecorder


class Runner:
    """What the recorder reads of vLLM's runner: two requests, whose rows of a step are ``counts``."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=["7-a", "3-b"], num_reqs=2)
        self.query_start_loc = SimpleNamespace(np=np.zeros(3, dtype=np.int32))

    def step(self, recorder: StepRecorder, positions: list[list[int]]) -> None:
        self.query_start_loc.np[:] = np.cumsum([0, *(len(p) for p in positions)])
        flat = torch.tensor([p for held in positions for p in held])
        trace = recorder.begin(flat)
        assert trace is not None
        trace.put("x", torch.stack([flat, 10 * flat], dim=1))
        recorder.put_last_rows("logits", torch.tensor([[float(held[-1])] for held in positions]))


def recorded(positions: list[int] | None) -> dict[str, torch.Tensor]:
    runner = Runner()
    recorder = StepRecorder(runner, lambda request: int(request.partition("-")[0]))
    recorder.switch(True, positions)
    runner.step(recorder, [[0, 1, 2], [0, 1]])
    runner.step(recorder, [[3], [2, 3, 4]])
    return recorder.tensors()


def test_rows_are_sorted_by_sample_and_position() -> None:
    found = recorded(None)
    assert found["7/x"].tolist() == [[p, 10 * p] for p in range(4)]
    assert found["3/x.positions"].tolist() == [0, 1, 2, 3, 4]
    assert found["3/logits.positions"].tolist() == [1, 4]
    assert found["7/logits"].tolist() == [[2.0], [3.0]]


def test_only_wanted_positions_are_kept() -> None:
    found = recorded([0, 3, 4])
    assert found["7/x"].tolist() == [[0, 0], [3, 30]]
    assert found["3/x"].tolist() == [[0, 0], [3, 30], [4, 40]]
    assert found["3/x.positions"].tolist() == [0, 3, 4]
    assert (found["7/logits.positions"].tolist(), found["3/logits.positions"].tolist()) == ([3], [4])
    assert "3/logits" in found


def test_a_sample_without_a_wanted_position_has_no_rows() -> None:
    assert {name.partition("/")[0] for name in recorded([4])} == {"3"}
