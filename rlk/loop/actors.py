"""The two engines as Ray actors. Each lives in its own process and imports its engine there, never here."""

from __future__ import annotations

import functools
import gc
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from rlk.contract.arms import Mode
from rlk.contract.numerics import Numerics
from rlk.contract.records import Request, Response
from rlk.contract.update import AdamParams, GrpoParams
from rlk.loop.profile import Device
from rlk.parallel.transport import Transport

if TYPE_CHECKING:
    from rlk.rollout.vllm.engine import VllmEngine
    from rlk.train.batch import Sample
    from rlk.train.trainer import MegatronTrainer

Identity = tuple[int, str]
"""Weight version and model hash, as the engine itself reads them back."""

ROLLOUT_OPTIONS: dict[Device, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"kv_cache_bytes": 6 << 30, "max_num_batched_tokens": 2048, "max_num_seqs": 128},
}
"""Sizes of vLLM in the loop where they are not its defaults here; on the card the trainer needs most of the memory."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class EngineFault(RuntimeError):
    """An error inside an engine's process as one line; ``trace`` is the traceback there. Plain text, so that it can travel anywhere."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message, trace)
        self.message, self.trace = message, trace

    def __str__(self) -> str:
        return self.message


def _plain_errors(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """An engine's exception class may not be importable where the answer goes, so its text travels instead."""

    @functools.wraps(method)
    def wrapped(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except EngineFault:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise EngineFault(f"{type(error).__name__}: {text}", traceback.format_exc()) from None

    return wrapped


class _Process:
    """An actor's process."""

    def pid(self) -> int:
        """Its number on this host."""
        return os.getpid()


class RolloutActor(_Process):
    """A vLLM engine that serves one run after another: every run starts from its checkpoint under a new weight version."""

    def __init__(self, mode: Mode, device: Device, numerics: Numerics, tp: int = 1, transport: Transport | None = None) -> None:
        self._mode, self._device, self._numerics, self._tp, self._transport = mode, device, numerics, tp, transport
        self._engine: VllmEngine | None = None
        self._kernels_before: dict[tuple[str, ...], int] = {}

    @_plain_errors
    def turn_to(self, mode: Mode) -> None:
        """Serve this mode: what runs now is closed if it is another one, and :meth:`open` starts anew."""
        if mode != self._mode and self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()
        self._mode = mode

    @_plain_errors
    def open(self, checkpoint: Path, context: int) -> Identity:
        """Start the engine, or give it the weights of ``checkpoint`` again; returns what it serves now."""
        if self._engine is None:
            from rlk.rollout.vllm.engine import VllmEngine

            self._engine = VllmEngine(
                checkpoint,
                mode=self._mode,
                device=self._device,
                numerics=self._numerics,
                max_model_len=context,
                tensor_parallel_size=self._tp,
                transport=self._transport,
                **ROLLOUT_OPTIONS[self._device],
            )
        else:
            self._engine.load_weights(checkpoint, int(self._engine.readback()["weight_version"]) + 1)
        found = self._engine.readback()
        self._kernels_before = {_kernel(ran): ran["calls"] for ran in found["kernels"]}
        return found["weight_version"], found["model_hash"]

    @_plain_errors
    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Responses in the order of ``requests``."""
        return self._running.generate(requests)

    @_plain_errors
    def trace(self, requests: Sequence[Request], path: Path, positions: Sequence[int] | None = None) -> list[Response]:
        """Like :meth:`generate` from a cold prefix cache; the intermediates of every computed position, or of those in ``positions``, go to
        ``path`` (safetensors)."""
        return self._running.trace(requests, path, positions=positions)

    @_plain_errors
    def load(self, path: Path, version: int, announced: str) -> Identity:
        """Serve a published checkpoint, which must hash to ``announced``; the prefix cache is dropped. Returns what is served now."""
        self._running.load_weights(path, version, announced=announced)
        return self._running.identity()

    @_plain_errors
    def seconds(self) -> dict[str, float]:
        """Of the parts of the last :meth:`load`, by name."""
        return self._running.seconds()

    @_plain_errors
    def readback(self) -> dict[str, Any]:
        """The engine's own read-back; ``kernels`` counts the calls since :meth:`open`."""
        found = self._running.readback()
        since = [{**ran, "calls": ran["calls"] - self._kernels_before.get(_kernel(ran), 0)} for ran in found["kernels"]]
        return {**found, "kernels": [ran for ran in since if ran["calls"]]}

    @property
    def _running(self) -> VllmEngine:
        if self._engine is None:
            raise EngineFault("the rollout engine is not open: call open first")
        return self._engine


class TrainActor(_Process):
    """One rank of a Megatron trainer, built anew for another checkpoint; it is never given a rollout's logprobs.

    device: "cpu", "cuda" or "cuda:1". port: rendezvous of the ranks on loopback. transport: how they exchange bytes. All ranks get the same
    calls; they give the same answers but to :meth:`pid`, :meth:`seconds` and :meth:`readback`.
    """

    def __init__(
        self, mode: Mode, device: str, numerics: Numerics, port: int, tp: int = 1, cp: int = 1, rank: int = 0, transport: Transport = "gloo"
    ) -> None:
        self._mode, self._device, self._numerics, self._transport = mode, device, numerics, transport
        self._port, self._tp, self._cp, self._rank = port, tp, cp, rank
        self._trainer: MegatronTrainer | None = None
        self._samples: list[Sample] = []
        self._scores: list[list[float]] = []
        self._reference: list[list[float]] = []

    @_plain_errors
    def turn_to(self, mode: Mode) -> None:
        """Train in this mode: a model of another one is dropped, and :meth:`open` builds anew."""
        if mode != self._mode:
            self._drop()
        self._mode = mode

    @_plain_errors
    def open(self, checkpoint: Path, micro_batch_size: int, grpo: GrpoParams, adam: AdamParams) -> None:
        """Build the model from ``checkpoint``, whose weights are also the reference of the KL term, unless it was built from it before;
        :meth:`adopt` takes it back to its weights."""
        from rlk.kernels import dispatch
        from rlk.train.trainer import MegatronTrainer

        if self._trainer is None or self._trainer.checkpoint != Path(checkpoint):
            self._drop()
            self._trainer = MegatronTrainer(
                checkpoint, mode=self._mode, device=self._device, numerics=self._numerics, grpo=grpo, adam=adam, port=self._port,
                tp=self._tp, cp=self._cp, rank=self._rank, transport=self._transport,
            )  # fmt: skip
            gc.collect()
            gc.freeze()  # a full collection, which looks at all that is loaded, stops a step for a quarter of a second and more
        trainer = self._trainer
        trainer.micro_batch_size, trainer.grpo, trainer.optimizer.params = micro_batch_size, grpo, adam
        dispatch.reset_readback()

    def _drop(self) -> None:
        self._trainer = None
        gc.unfreeze()
        gc.collect()

    @_plain_errors
    def adopt(self, checkpoint: Path, version: int) -> Identity:
        """Hold the weights of ``checkpoint`` under the version that the rollout gave them; returns version and hash read back."""
        self._running.load(checkpoint, version)
        return self.identity()

    @_plain_errors
    def score(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[int, list[float]]:
        """Logprob of every response token by sample id, computed from the ids; the batch stays for :meth:`update`."""
        from rlk.train.batch import pair

        self._samples = pair(requests, responses)
        self._scores, self._reference = self._running.score(self._samples), []
        return {sample.sample_id: scores for sample, scores in zip(self._samples, self._scores, strict=True)}

    @_plain_errors
    def trace(self, requests: Sequence[Request], responses: Sequence[Response], path: Path) -> None:
        """Intermediates of scoring as "{sample}/{name}" in ``path`` (safetensors); rows are the tokens of the sample, prompt first."""
        if self._tp * self._cp > 1:
            raise EngineFault("intermediates are whole on one rank only: trace with tp=1 and cp=1")
        from safetensors.torch import save_file

        from rlk.train.batch import pair

        traced = self._running.trace(pair(requests, responses))
        save_file({f"{sample}/{name}": rows.contiguous() for sample, found in traced.items() for name, rows in found.items()}, path)

    @_plain_errors
    def reference(self) -> None:
        """Score the batch under the start weights, for the KL term and its figure."""
        self._reference = self._running.reference_score(self._samples)

    @_plain_errors
    def update(self, rewards: dict[int, float], groups: dict[int, int], lr: float) -> dict[str, Any]:
        """One update on the scored batch; rewards and groups by sample id. Returns ``StepMetrics`` as plain values."""
        ids = [sample.sample_id for sample in self._samples]
        metrics = self._running.step(
            self._samples,
            [rewards[i] for i in ids],
            [groups[i] for i in ids],
            self._scores,
            lr=lr,
            reference_scores=self._reference,
        )
        return metrics.as_dict()

    @_plain_errors
    def gradient_hashes(self) -> dict[str, str]:
        """SHA-256 of every gradient of the last update, by packed name."""
        return self._running.gradient_hashes()

    @_plain_errors
    def publish(self, directory: Path, version: int) -> str:
        """Write the weights as a Hugging Face checkpoint; returns their hash."""
        return self._running.publish(directory, version).model_hash

    @_plain_errors
    def identity(self) -> Identity:
        """Version and hash of the weights that the model computes with."""
        found = self._running.readback()
        return found["weight_version"], found["model_hash"]

    @_plain_errors
    def seconds(self) -> dict[str, float]:
        """Of the parts of the last :meth:`update` and :meth:`gradient_hashes`, by name."""
        return self._running.clock.seconds

    @_plain_errors
    def readback(self) -> dict[str, Any]:
        """The trainer's own read-back, and the process it runs in."""
        return {**self._running.readback(), "pid": os.getpid()}

    @property
    def _running(self) -> MegatronTrainer:
        if self._trainer is None:
            raise EngineFault("the trainer is not open: call open first")
        return self._trainer


def _kernel(ran: dict[str, Any]) -> tuple[str, ...]:
    return ran["op"], ran["backend"], ran["kernel_id"]
