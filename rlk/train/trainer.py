"""The trainer: scores, updates, publishes and resumes one Megatron-core model."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from rlk.contract.arms import MIXED_MODES, Mode, routes_of
from rlk.contract.numerics import DEFAULT, ContractError, Numerics
from rlk.contract.topology import Topology
from rlk.contract.update import MAX_GRAD_NORM, AdamParams, GrpoParams
from rlk.evidence.clock import Clock
from rlk.kernels import dispatch
from rlk.kernels.rope import table_hash
from rlk.model import shards
from rlk.model.layout import Unpacked, pack_weights
from rlk.model.trace import Trace
from rlk.model.weights import TensorHashes, load_checkpoint, model_hash, save_checkpoint
from rlk.parallel.rendezvous import Transport
from rlk.train import parameters, process, readback, state
from rlk.train.batch import MicroBatch, Sample, micro_batches
from rlk.train.mixed import MixedModel
from rlk.train.native import NativeModel
from rlk.train.objective import BatchLoss, LossSummary, Scores
from rlk.train.optimizer import Adam
from rlk.train.strict import StrictModel

State = Literal["device", "host"]
Model = StrictModel | NativeModel
_MODELS: dict[Mode, Callable[..., Model]] = {
    "strict": StrictModel,
    "native": NativeModel,
    **{mode: partial(MixedModel, routes=routes_of(mode)) for mode in MIXED_MODES},
}


@dataclass(frozen=True)
class Published:
    """A checkpoint written for the rollout engine; model_hash names its bytes."""

    path: Path
    version: int
    model_hash: str


@dataclass(frozen=True)
class StepMetrics(LossSummary):
    """One update: the loss's figures and the optimizer's.

    grad_norm: before clipping. grad_scale: factor of the clip, 1 if none. model_hash_before, model_hash_after: of the bf16 weights.
    """

    grad_norm: float
    grad_scale: float
    lr: float
    updates: int
    model_hash_before: str
    model_hash_after: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class MegatronTrainer:
    """One model in tp·cp processes, this one its ``rank``; none of them must run vLLM in-process as well.

    All ranks make the same calls with the same arguments and get the same results: every public method is a collective.

    checkpoint: Hugging Face Qwen3 dense, bf16; its weights are also the frozen reference. mode: "strict" computes with this project's
    operators, "native" with Megatron's and torch's own, the others (``rlk.contract.arms``) with a mix. micro_batch_size: samples per
    forward; it changes no score byte, and is the unit in which gradients are folded. port: rendezvous on loopback, 0 for a free one
    (tp·cp = 1 only). rank counts TP ranks first. timeout: seconds after which a collective that nobody answers ends every rank. Modes but
    strict run in one process.
    device: "cpu", "cuda" (the process's current card) or "cuda:1"; operators run on the backend of the device. state: where master
    weights, moments and the reference live; "host" keeps them in pinned memory and brings a tensor to the card when it is needed, at equal
    bytes. transport: how ranks exchange bytes, see ``rlk.parallel.rendezvous.Transport``. clock: seconds of the parts of :meth:`step`.
    Raises CheckpointError, ContractError, ProcessGroupError or MismatchError in one line.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        mode: Mode = "strict",
        numerics: Numerics = DEFAULT,
        micro_batch_size: int = 8,
        grpo: GrpoParams = GrpoParams(),  # noqa: B008 (frozen)
        adam: AdamParams = AdamParams(),  # noqa: B008 (frozen)
        max_norm: float = MAX_GRAD_NORM,
        port: int = 0,
        tp: int = 1,
        cp: int = 1,
        rank: int = 0,
        timeout: float = process.TIMEOUT,
        device: str = "cpu",
        state: State = "device",
        transport: Transport = "gloo",
    ) -> None:
        self.device = process.require_device(device)
        if mode not in _MODELS:
            raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(_MODELS)}")
        topology = Topology(tp=tp, cp=cp, numerics=numerics)
        if mode != "strict" and topology.train_ranks > 1:
            raise ContractError(f"{mode} mode with TP={tp}, CP={cp}: run the {mode} arm in one process")
        if state not in ("device", "host") or (state == "host" and self.device.type == "cpu"):
            raise ContractError(f"state={state!r} on {device}: use 'device', or 'host' beside a card")
        source = load_checkpoint(checkpoint)
        self.parallel = process.start(rank, port, topology, timeout, self.device, transport)
        self.checkpoint, self.mode, self.numerics, self.grpo = Path(checkpoint), mode, numerics, grpo
        self.config, self.micro_batch_size, self.version = source.config, micro_batch_size, 0
        packed = pack_weights(source.tensors, source.config, numerics)
        self.parallel.link.agree("checkpoint", source.model_hash)
        self.model: Model = _MODELS[mode](source.config, numerics, packed, self.parallel, self.device)
        kept = torch.device("cpu") if state == "host" else self.device
        self._reference = {name: parameter.detach().to(kept, copy=True) for name, parameter in self.model.parameters.items()}
        self._reference_hash = self._model_hash = source.model_hash
        self.optimizer = Adam(
            self.model.parameters, adam, shards=numerics.canonical_tp, real_rows=self._real_rows(), max_norm=max_norm,
            tp=self.parallel.tp, on_host=state == "host", fused=mode == "strict",
        )  # fmt: skip
        self._traffic: list[dict[str, Any]] = []
        self._hashes, self.clock = TensorHashes(), Clock(self.device)

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Logprob of every response token under the present weights, fp32 values, aligned with ``samples``.

        Scores exactly the ids of each response, at its request's temperature and over its retained ids; its logprobs are not read.
        """
        scores: dict[int, list[float]] = {sample.sample_id: [] for sample in samples}
        with self.parallel.link.unit("score", self._batch_note(samples)):
            for batch in self._batches(samples):
                scores.update(zip((sample.sample_id for sample in batch.samples), batch.per_sample(self.model.score(batch))))
        return [scores[sample.sample_id] for sample in samples]

    def reference_score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The same under the weights of the checkpoint that the trainer started from."""
        with self._weights(self._reference):
            return self.score(samples)

    def trace(self, samples: Sequence[Sample]) -> dict[int, dict[str, torch.Tensor]]:
        """Intermediates of scoring by sample id and name (``rlk.model.trace``), in host memory; rows are the sample's tokens, prompt first.

        "logp" is +0 in rows that predict no response token. Strict mode only.
        """
        result: dict[int, dict[str, torch.Tensor]] = {}
        for batch in self._batches(samples):
            trace = Trace()
            self.model.score(batch, trace)
            edges = batch.cu_seqlens.tolist()
            found = {name: rows.cpu() for name, rows in trace.tensors().items()}
            for sample, start, end in zip(batch.samples, edges, edges[1:]):
                result[sample.sample_id] = {name: rows[start:end] for name, rows in found.items()}
        return result

    def step(
        self,
        samples: Sequence[Sample],
        rewards: Sequence[float],
        groups: Sequence[int],
        old_scores: Scores,
        *,
        lr: float,
        reference_scores: Scores | None = None,
    ) -> StepMetrics:
        """One GRPO update; all lists are aligned with ``samples``.

        groups: samples with one number are compared with each other. old_scores: :meth:`score` before the update; reference_scores:
        :meth:`reference_score`, needed for a KL term. Raises LossError, GradientError, GradientNormError, OptimizerError or ContractError;
        weights and moments are then as before.
        """
        loss = BatchLoss(samples, rewards, groups, old_scores, reference_scores, self.grpo)
        link = self.parallel.link
        link.traffic.reset()
        with link.unit("step", self._batch_note(samples, rewards, groups, old_scores, reference_scores, lr)):
            with self.clock("gradients"):
                self._zero_gradients()
                self._hashes = TensorHashes()  # a step that is refused has none
                for batch in self._batches(samples):
                    self.model.accumulate(batch, partial(loss.seeds, batch))
                summary = loss.summary()
            before = self._model_hash
            with self.clock("optimizer"):
                if not self.parallel.alone:
                    link.together(self.optimizer.require_padding)
                norm, scale = self.optimizer.update(lr)
            self._traffic = link.traffic.rows()
            self._hash_gradients()
            with self.clock("model hash"):
                self._model_hash = self._hash()
        return StepMetrics(
            **vars(summary),
            grad_norm=norm,
            grad_scale=scale,
            lr=lr,
            updates=self.optimizer.updates,
            model_hash_before=before,
            model_hash_after=self._model_hash,
        )

    def gradient_hashes(self) -> dict[str, str]:
        """SHA-256 of every whole fp32 main gradient of the last :meth:`step`, before clipping, by packed name.

        They are taken from its end on, beside whatever comes next; here, and before gradients change, they are waited for.
        """
        with self.clock("gradient hashes"):
            found = json.loads(self.parallel.link.lead(lambda: json.dumps(self._hashes.result())))
        return {name: found[name] for name in self.model.parameters}

    def publish(self, directory: Path, version: int) -> Published:
        """Write the weights as a Hugging Face checkpoint with the start checkpoint's tokenizer files; the directory must not exist."""
        facts = {"rlk_version.json": json.dumps({"version": version, "updates": self.optimizer.updates, "mode": self.mode}) + "\n"}
        packed = self._packed()
        save = lambda: save_checkpoint(directory, self.config, self._unpacked(packed), companions=self.checkpoint, files=facts)
        written = self.parallel.link.lead(save)
        self.version = version
        return Published(Path(directory), version, written)

    def load(self, directory: Path, version: int) -> str:
        """Take weights from a checkpoint of the same architecture and start the optimizer over; returns the model's hash read back.

        The reference stays the checkpoint that the trainer started from.
        """
        source = load_checkpoint(directory)
        packed = pack_weights(source.tensors, self.config, self.numerics)
        parameters.load(self.model.parameters, self.model.from_packed(packed))
        self._zero_gradients()
        self.optimizer.reset()
        self.version = version
        self._model_hash = self._hash()
        return self._model_hash

    def save_state(self, directory: Path) -> None:
        """Everything needed to go on, at this or any other topology: masters, moments, counters and the settings they belong to."""
        tensors = shards.whole(self.optimizer.state(), self.parallel.tp)
        facts = {**self._identity(), "version": self.version, "model_hash": self._model_hash, "updates": self.optimizer.updates}
        self.parallel.link.lead(lambda: str(state.save(directory, tensors, facts)))

    def load_state(self, directory: Path) -> None:
        """Go on from :meth:`save_state` with equal bytes, whatever topology wrote it; raises StateError for a state of another model,
        reference or setting, and then nothing has changed."""
        tp = self.parallel.tp
        shapes = {name: shards.whole_shape(name, tensor.shape, tp) for name, tensor in self.optimizer.state().items()}
        held, tensors = state.load(directory, shapes, self._identity())
        self.optimizer.restore({name: shards.part(name, tensor, tp) for name, tensor in tensors.items()}, int(held["updates"]))
        self.version = int(held["version"])
        self._model_hash = self._hash()
        if self._model_hash != held["model_hash"]:
            raise state.StateError(f"{directory}: the restored weights hash to {self._model_hash}, not {held['model_hash']}: save it again")

    def readback(self) -> dict[str, Any]:
        """JSON values read from what is built and has run: classes, versions, kernels, hashes of the weights and the rope table."""
        found: dict[str, Any] = {
            "engine": "megatron-core",
            "mode": self.mode,
            **readback.process(self.device),
            "numerics": self.numerics.record(self.config.vocab_size, dispatch.declared(self.device)),
            "modules": readback.modules(self.model.module),
            "gradient_scales": readback.gradient_scales(self.model.module.config),
            "kernels": readback.kernels(),
            "weight_version": self.version,
            "updates": self.optimizer.updates,
            "model_hash": self._hash(),
            "reference_hash": self._reference_hash,
            "parallel": readback.parallel(self.parallel),
            "traffic": self._traffic,
        }
        if isinstance(self.model, StrictModel):
            found["rope_table"] = table_hash(self.model.module.config.table)
        if isinstance(self.model, MixedModel):
            found |= {"operators": self.model.log.operators(), "routes": self.model.log.readback()}
        return found

    def _identity(self) -> dict[str, Any]:
        adam = {name: value for name, value in asdict(self.optimizer.params).items() if name != "lr"}
        return {
            "mode": self.mode, "numerics": self.numerics.as_dict(), "config": self.config.to_dict(), "adam": adam,
            "max_norm": self.optimizer.max_norm, "grpo": asdict(self.grpo), "reference_hash": self._reference_hash,
        }  # fmt: skip

    def _batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        for sample in samples:
            if len(sample.ids) > self.config.max_position_embeddings:
                raise ValueError(
                    f"sample {sample.sample_id} has {len(sample.ids)} tokens, the model {self.config.max_position_embeddings} positions"
                )
        cp = self.parallel.cp
        held = micro_batches(samples, self.micro_batch_size, self.numerics, cp.size, cp.rank)
        return (batch.to(self.device) for batch in held)

    def _batch_note(self, samples: Sequence[Sample], *more: Any) -> str:
        """What all ranks must hold equally before they compute: counts to read, and a digest of everything; "" of a rank alone."""
        if self.parallel.alone:
            return ""
        tokens = sum(len(sample.ids) for sample in samples)
        said = [(sample.request, {**vars(sample.response), "support": None}) for sample in samples]
        digest = hashlib.sha256(repr((self.micro_batch_size, said, more)).encode())
        for support in (sample.response.support for sample in samples):  # thousands of times as many ids as tokens
            digest.update(repr(None if support is None else [len(kept) for kept in support]).encode())
            digest.update(array("q", chain.from_iterable(support or ())).tobytes())
        return f"{len(samples)} samples of {tokens} tokens, {digest.hexdigest()}"

    def _hash(self) -> str:
        """Hash of the weights that the model computes with, taken by rank 0."""
        packed = self._packed()
        return self.parallel.link.lead(lambda: model_hash(self._unpacked(packed)))

    def _packed(self) -> dict[str, torch.Tensor]:
        """Whole packed weights that the model computes with, on rank 0; the others send it their parts and keep nothing."""
        link, tp = self.parallel.link, self.parallel.tp
        held = {name: parameter.detach() for name, parameter in self.model.parameters.items()}
        if link.rank == 0:
            return self.model.to_packed(held)
        for _ in shards.each_whole(held, tp) if 0 in tp.members else ():
            pass
        return {}

    def _unpacked(self, packed: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """By HF name; each is made when it is asked for."""
        return Unpacked(packed, self.config, self.numerics)

    def _hash_gradients(self) -> None:
        """Hand the whole main gradients to rank 0's threads while the next ones are gathered; it alone holds any, a few at a time."""
        tp = self.parallel.tp
        for name, tensor in shards.each_whole(self.optimizer.gradients, tp) if 0 in tp.members else ():
            if self.parallel.link.rank == 0:
                self._hashes.add(name, tensor)

    def _zero_gradients(self) -> None:
        self._hashes.wait()
        self.optimizer.zero_gradients()

    def _real_rows(self) -> dict[str, int]:
        """This rank's rows of the vocabulary weights that are no padding."""
        rows = {name: self.model.parameters[name].shape[0] for name in ("embedding", "lm_head")}
        return {name: min(max(self.config.vocab_size - self.parallel.tp.rank * held, 0), held) for name, held in rows.items()}

    @contextmanager
    def _weights(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with other weights of the same layout, and put the own ones back."""
        own = {name: parameter.data for name, parameter in self.model.parameters.items()}
        try:
            for name, parameter in self.model.parameters.items():
                parameter.data = tensors[name].to(self.device)
            yield
        finally:
            for name, parameter in self.model.parameters.items():
                parameter.data = own[name]
