"""What the worker processes of tests/test_ws2_trainer.py do; results are JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.train import process
from rlk.train.batch import Sample
from rlk.train.trainer import MegatronTrainer

LR = 1e-3


def samples() -> list[Sample]:
    """Three samples; the last one's retained ids lie in two of eight vocabulary shards."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda count: tuple(torch.randint(0, 256, (count,), generator=generator).tolist())
    made = []
    for i, (prompt, answer) in enumerate(((5, 9), (17, 30), (2, 4))):
        ids, tokens = draw(prompt), draw(answer)
        kept = tuple(tuple(sorted({token, 258})) for token in tokens) if i == 2 else None
        sampling = SamplingParams(temperature=0.7, top_k=2 if i == 2 else -1)
        made.append(Sample(Request(i, ids, sampling), Response(i, ids, tokens, (0.0,) * answer, kept, "length", 0, 0)))
    return made


def resume(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Two updates, saving in between; then the second one again from the saved state of ``job["state"]``."""
    try:
        trainer = _trainer(rank, job)
        _step(trainer)
        trainer.save_state(Path(job["out"]) / "state")
        second = _step(trainer)
        published = trainer.publish(Path(job["out"]) / "weights", 2)
        again = _trainer(rank, job)
        again.load_state(Path(job["state"]))
        resumed = _step(again)
        loaded = _trainer(rank, job)
        return {
            "second": second, "resumed": resumed, "published": published.model_hash, "loaded": loaded.load(published.path, 2),
            "same_scores": loaded.score(samples()) == trainer.score(samples()),
        }  # fmt: skip
    finally:
        process.stop()


def refuse(rank: int, job: dict[str, Any]) -> dict[str, str]:
    """Things that one rank or all get wrong, one after another in one job: what each rank says."""
    try:
        trainer = _trainer(rank, job)
        held = samples()
        said = {}
        odd = rank == trainer.parallel.link.size - 1
        response = held[0].response
        said["id"] = _error(lambda: trainer.score([Sample(held[0].request, replace(response, token_ids=(3,) * 8 + (261,)))]))
        said["micro batch"] = _error(lambda: (setattr(trainer, "micro_batch_size", 1 + odd), trainer.score(held)))
        trainer.micro_batch_size = 2
        said["one sample fewer"] = _error(lambda: trainer.score(held[: 3 - odd]))
        (token, _), *others = held[2].response.support or ((0, 0),)
        other = replace(held[2].response, support=((token, 258 + odd), *others))
        said["another retained id"] = _error(lambda: trainer.score([*held[:2], Sample(held[2].request, other)]))
        said["another lr"] = _error(lambda: _step(trainer, lr=LR * (1 + odd)))
        said["trace"] = _error(lambda: trainer.trace(held))
        if odd:
            trainer.optimizer.state()["m.lm_head"][-1, 0] = -0.0
        said["padded row"] = _error(lambda: _step(trainer))
        if odd:
            trainer.optimizer.state()["m.lm_head"][-1, 0] = 0.0
            trainer.model.parameters["layers.1.down_proj"].data[0, 0] = torch.inf
        said["infinity"] = _error(lambda: trainer.score(held))
        said["state"] = _error(lambda: (trainer.save_state(Path(job["out"]) / "twice"), trainer.save_state(Path(job["out"]) / "twice")))
        return said
    finally:
        process.stop()


def start(rank: int, job: dict[str, Any]) -> str:
    """How a trainer is refused at the start."""
    try:
        return _error(lambda: _trainer(rank, job))
    finally:
        process.stop()


def _trainer(rank: int, job: dict[str, Any]) -> MegatronTrainer:
    names = ("tp", "cp", "port", "timeout")
    checkpoint = job["checkpoints"][rank] if "checkpoints" in job else job["checkpoint"]
    return MegatronTrainer(Path(checkpoint), rank=rank, micro_batch_size=2, **{name: job[name] for name in names})


def _step(trainer: MegatronTrainer, lr: float = LR) -> dict[str, Any]:
    held = samples()
    metrics = trainer.step(held, [1.0, 0.0, 0.5], [0, 0, 0], trainer.score(held), lr=lr)
    return {**metrics.as_dict(), "gradient_hashes": trainer.gradient_hashes()}


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
