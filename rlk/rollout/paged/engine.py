"""PagedEngine: generates with the one forward pass on tensor and context parallel ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlk.contract.records import Request, Response
from rlk.contract.topology import interleaved_positions
from rlk.kernels import dispatch
from rlk.kernels.logp import support_mask
from rlk.model.qwen3 import Qwen3Dense
from rlk.model.weights import load_checkpoint, model_hash
from rlk.parallel.state import Parallel
from rlk.rollout.paged.cache import CPU, PagedCache
from rlk.rollout.paged.forward import Step
from rlk.rollout.paged.schedule import Piece, Running, Scheduler
from rlk.rollout.requests import eos_token_ids, refusal, refused_response, require_distinct
from rlk.rollout.sampling import Sampled, sample_rows


class PagedEngine:
    """One model in tp·cp processes, this one with its place in them; strict mode only. Tokens are drawn on the host.

    All ranks make the same calls with the same arguments and get the same results. TP ranks hold canonical shards of heads, intermediate
    columns and vocabulary. CP ranks hold the tokens of every sequence in turn, compute their own tokens alone, and read each other's keys
    and values. A token is drawn by the ranks that hold its row, each for itself, and all must draw the same.

    checkpoint: Hugging Face Qwen3 dense, served as ``weight_version``. parallel: from ``rlk.parallel.state.enter``. device: of weights,
    cache and operators. page: tokens per page and rank. pages: of the cache. max_num_batched_tokens: of one step, which longer prompts are
    chunked by; max_num_seqs: sequences that run at once; max_model_len: prompt and response together. stop_token_ids: None takes the
    checkpoint's end-of-sequence ids.
    Raises CheckpointError, ContractError or MismatchError in one line.
    """

    def __init__(
        self,
        checkpoint: Path,
        parallel: Parallel,
        *,
        device: torch.device = CPU,
        page: int = 16,
        pages: int = 256,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 64,
        max_model_len: int = 512,
        stop_token_ids: Sequence[int] | None = None,
        weight_version: int = 0,
    ) -> None:
        source = load_checkpoint(checkpoint)
        self.config, self.numerics, self.parallel = source.config, parallel.topology.numerics, parallel
        if max_model_len > self.config.max_position_embeddings:
            raise ValueError(f"max_model_len={max_model_len} exceeds the {self.config.max_position_embeddings} positions of the model")
        self.max_model_len, self._batched, self._sequences = max_model_len, max_num_batched_tokens, max_num_seqs
        self._stop = frozenset(eos_token_ids(checkpoint) if stop_token_ids is None else stop_token_ids)
        self.device = device
        self._cache = PagedCache(self.config, pages, page, parallel.tp, parallel.cp, device)
        self._model = Qwen3Dense(self.config, self.numerics, max_positions=max_model_len, device=device, tp=parallel.tp)
        self._pages, self._counters = pages, {"steps": 0, "rows": 0, "unfinished_chunks": 0, "most_sequences": 0}
        self._take(source.tensors, source.model_hash, weight_version)

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Generate all requests together in continuous batches; responses come in the order of ``requests``.

        A sample that cannot be generated comes back without tokens and with finish_reason "refused: …". Raises ValueError for a sample id
        given twice, MismatchError on every rank if their requests differ, FloatingPointError for logits that are not finite.
        """
        require_distinct(requests)
        link = self.parallel.link
        link.traffic.reset()
        link.agree("requests", hashlib.sha256(repr(list(requests)).encode()).hexdigest())
        refused = {r.sample_id: refused_response(r, why, self.weight_version) for r in requests if (why := self._refusal(r))}
        accepted = {
            r.sample_id: Running(r, min(len(r.prompt_ids) + r.sampling.max_tokens, self.max_model_len), list(r.prompt_ids))
            for r in requests
            if r.sample_id not in refused
        }
        scheduler = Scheduler(self._cache, self._batched, self._sequences)
        scheduler.add(list(accepted.values()))
        while pieces := scheduler.step():
            # Everything that shapes depend on, and with it the tokens drawn so far.
            note = [(p.running.request.sample_id, p.start, p.stop, p.running.ids[-1]) for p in pieces]
            with link.unit("step", repr(note)):
                self._step(pieces, scheduler)
        return [refused.get(r.sample_id) or self._response(accepted[r.sample_id]) for r in requests]

    def load_weights(self, path: Path, version: int, *, announced: str | None = None) -> str:
        """Serve the checkpoint in ``path`` as ``version``: returns the model hash read back from the ranks' live shards.

        Raises ValueError for a version that is not newer, for another configuration, and for files whose hash is not ``announced``; the
        engine then keeps serving the old weights.
        """
        source = load_checkpoint(path)
        if version <= self.weight_version:
            raise ValueError(f"weight version {version} is not newer than {self.weight_version}: publish under a higher version")
        if source.config != self.config:
            raise ValueError(f"{path}: its config.json differs from the model that this engine was built for: start another engine")
        found = source.model_hash
        if announced is not None and found != announced:
            raise ValueError(f"{path}: weights hash to {found}, announced was {announced}: publish the checkpoint again")
        self._take(source.tensors, found, version)
        return found

    def readback(self) -> dict[str, Any]:
        """What this rank holds and ran, JSON-able: place, hashes of the model and of its own shards, layout of the cache, traffic of the
        last :meth:`generate`, operators that ran in this process."""
        tp, cp = self.parallel.tp, self.parallel.cp
        return {
            "engine": "paged",
            "label": self.parallel.link.presence.labels[self.parallel.link.rank],
            "numerics": self.numerics.record(self.config.vocab_size, dispatch.declared(self.device)),
            "weight_version": self.weight_version,
            "model_hash": self._hash(),
            "shard_hash": model_hash(self._model.parts()),
            "shards": list(self.parallel.shards),
            "tp_ranks": list(tp.members),
            "cp_ranks": list(cp.members),
            "kv_heads": self._cache.layers.shape[2],
            "kv_pages": [self._cache.page, self._pages],
            "kv_positions_of_6": list(interleaved_positions(6, cp.size, cp.rank)),
            "counters": dict(self._counters),
            "kernels": [vars(ran) for ran in dispatch.readback()],
            "traffic": self.parallel.link.traffic.rows(),
        }

    def _step(self, pieces: Sequence[Piece], scheduler: Scheduler) -> None:
        step = Step(pieces, self._cache, self.config, self.numerics)
        hidden = self._model(step.ids, step.positions, step.attend)
        drawn: list[Sampled] = []
        # A rank that draws nothing must hear of logits that are not finite.
        self.parallel.link.together(lambda: drawn.append(self._draw(step, hidden)))
        sampled = self._share(step, drawn[0])
        for piece, token, logprob, kept in zip(step.ready, sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.supports, strict=True):
            running = piece.running
            running.ids.append(token)
            running.logprobs.append(logprob)
            running.supports.append(kept)
            running.finish_reason = "stop" if running.ids[-1] in self._stop else "length" if len(running.ids) == running.limit else ""
            if running.finish_reason:
                scheduler.finish(running)
        most = max(self._counters["most_sequences"], len(pieces))
        counts = {"steps": 1, "rows": len(step.ids), "unfinished_chunks": len(pieces) - len(step.ready)}
        self._counters = {**{name: self._counters[name] + count for name, count in counts.items()}, "most_sequences": most}

    def _draw(self, step: Step, hidden: torch.Tensor) -> Sampled:
        """The tokens of the rows that this rank holds."""
        own = [piece.running for piece, owner in zip(step.ready, step.owners) if owner == self.parallel.cp.rank]
        if not own:
            return Sampled(torch.zeros(0, dtype=torch.int64, device=self.device), torch.zeros(0, device=self.device), [])
        return sample_rows(
            self._model.columns(hidden[step.last]),
            [running.request.sampling for running in own],
            [running.produced for running in own],
            vocab_size=self.config.vocab_size,
            padded_vocab=self.config.padded_vocab(self.numerics),
            numerics=self.numerics,
            tp=self.parallel.tp,
        )

    def _share(self, step: Step, mine: Sampled) -> Sampled:
        """The tokens of all ready pieces, on every CP rank."""
        cp, owners = self.parallel.cp, step.owners
        if cp.size == 1 or not owners:
            return mine
        most = max(owners.count(rank) for rank in range(cp.size))
        truncates = [piece.running.request.sampling.truncates for piece in step.ready]
        width = self.config.vocab_size if any(truncates) else 0
        kept = support_mask(mine.supports if width else [None] * len(mine.ids), width).to(self.device)
        sent = [torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])]) for rows in (mine.ids, mine.logprobs, kept)]
        rows = [owners[:at].count(owner) for at, owner in enumerate(owners)]
        ids, logprobs, masks = (gathered[owners, rows] for gathered in cp.all_gather_many(sent))
        supports = [tuple(mask.nonzero()[:, 0].tolist()) if truncated else None for mask, truncated in zip(masks.cpu(), truncates)]
        return Sampled(ids, logprobs, supports)

    def _response(self, running: Running) -> Response:
        request = running.request
        support = tuple(kept for kept in running.supports if kept is not None) if request.sampling.truncates else None
        ids = tuple(running.ids[len(request.prompt_ids) :])
        logprobs = tuple(running.logprobs)
        return Response(request.sample_id, request.prompt_ids, ids, logprobs, support, running.finish_reason, 0, self.weight_version)

    def _refusal(self, request: Request) -> str | None:
        need = self._cache.pages_for(min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len))
        room = f"refused: {need} pages are needed of a cache of {self._pages}" if need > self._pages else None
        return refusal(request, self.config.vocab_size, self.max_model_len) or room

    def _take(self, tensors: dict[str, torch.Tensor], found: str, version: int) -> None:
        self.parallel.link.agree("weights", f"version {version} of {found}")
        self._model.load_hf(tensors)
        self.weight_version = version
        if (live := self._hash()) != found:
            raise RuntimeError(f"live weights hash to {live}, the files to {found}: restart the engine")

    def _hash(self) -> str:
        tensors = self._model.hf_tensors()
        return self.parallel.link.lead(lambda: model_hash(tensors))
