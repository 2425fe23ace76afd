"""VllmEngine: real vLLM as a rollout engine, strict (the contract's operators), native (untouched) or mixed by routes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlk.contract.arms import MIXED_MODES, Mode, routes_of
from rlk.contract.numerics import DEFAULT, Numerics
from rlk.contract.records import Request, Response
from rlk.model.config import Qwen3Config
from rlk.parallel.rendezvous import LOOPBACK
from rlk.parallel.transport import Transport
from rlk.rollout.requests import eos_token_ids, refusal, refused_response, require_distinct
from rlk.rollout.vllm import convert
from rlk.rollout.vllm.plugin import register_imported
from rlk.rollout.vllm.settings import EngineRefusal, architecture
from rlk.rollout.vllm.wanted import Device, Wanted, default_cudagraph_sizes


class VllmEngine:
    """One vLLM engine on the CPU, on one card, or on one card for each rank.

    strict: model, attention and sampler of the contract inside vLLM's scheduler, paged cache, chunked prefill and prefix cache; anything
    unsupported is refused at start by name. native: stock Qwen3, stock attention and sampler; requests are drawn from the engine's seed,
    not from their own, and return no support. Both have the same scheduler settings and model runner, and every start compares what was
    built with what was asked for. On a card a strict engine replays one CUDA graph per decode step, captured without compiling the model,
    and a native one compiles and captures as vLLM does by itself; unless enforce_eager. A mode that names routes (``rlk.contract.arms``) is
    stock Qwen3 with this project's operators in them, on one rank and always eager; it draws as strict does where logp is among them.

    The engine runs in this process, where vLLM replaces ``torch.set_num_threads`` and ``torch.accelerator.*``: never share it with a
    trainer. separate_process=True gives it a process of its own, at the price of a slower start; the process that starts it must then be
    importable by ``multiprocessing`` (a script needs its ``__main__`` guard).
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        mode: Mode,
        device: Device = "cpu",
        enforce_eager: bool | None = None,
        cudagraph_sizes: Sequence[int] | None = None,
        numerics: Numerics = DEFAULT,
        max_model_len: int = 512,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 64,
        kv_cache_bytes: int = 256 << 20,
        stop_token_ids: Sequence[int] | None = None,
        weight_version: int = 0,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        transport: Transport | None = None,
        separate_process: bool = False,
        rpc_timeout: float = 600.0,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        """checkpoint: directory in Hugging Face layout; its weights are served as ``weight_version``.

        enforce_eager: no CUDA graphs and no compilation; None is True on the CPU, which has neither, and False on a card.
        cudagraph_sizes: rows of the graphs that a strict engine captures; None takes ``wanted.default_cudagraph_sizes``. A decode step of
        fewer rows than a graph is filled up.
        max_model_len: tokens of prompt and response together. max_num_batched_tokens: budget of one step, which longer prompts are chunked
        by. kv_cache_bytes: size of the paged cache of each rank. stop_token_ids: None takes the checkpoint's end-of-sequence ids. seed: of
        native draws. tensor_parallel_size: ranks that share the model, one for a mixed one; more run in processes of their own, each on
        its share of the CPUs or on a card of its own, which needs a process to start from as separate_process does. transport: what moves
        the bytes of strict ranks; None is gloo on the CPU and peer on cards, which also take nccl. Native ranks sum as vLLM does.
        rpc_timeout: seconds. engine_options: further arguments of ``vllm.LLM``.
        Raises CheckpointError or EngineRefusal, each naming what is wrong.
        """
        eager = device == "cpu" or mode in MIXED_MODES if enforce_eager is None else enforce_eager
        sizes = [] if eager else cudagraph_sizes or default_cudagraph_sizes(min(max_num_seqs, max_num_batched_tokens))
        wanted = Wanted(
            checkpoint=checkpoint,
            mode=mode,
            device=device,
            eager=eager,
            cudagraph_sizes=tuple(sorted(set(sizes))),
            numerics=numerics,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_bytes=kv_cache_bytes,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            transport=transport,
        )
        self.mode, self.device, self.numerics, self.max_model_len = mode, device, numerics, max_model_len
        self.config = Qwen3Config.from_json(checkpoint)
        self._draws_strictly = "logp" in routes_of(mode)
        self._stop = tuple(eos_token_ids(checkpoint) if stop_token_ids is None else stop_token_ids)
        self._rpc_timeout = rpc_timeout
        self._broken: str | None = None
        self._processes: tuple[int, ...] = ()
        arguments = wanted.arguments()
        for name in engine_options or {}:
            if name in arguments:
                raise EngineRefusal(f"engine_options may not set {name}: it is fixed by the mode or has its own argument")
        self._asked = wanted.read_back(self.config.num_hidden_layers)
        self.tensor_parallel_size = tensor_parallel_size
        _prepare_environment(separate_process, tensor_parallel_size)
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.device_type != device:
            raise EngineRefusal(
                f"device={device!r}, but the vLLM installed here is built for {current_platform.device_type!r}: install vLLM for {device}"
            )
        if mode != "native":
            register_imported(architecture(routes_of(mode)))
        self._llm = LLM(**arguments, **(engine_options or {}))
        self._rpc("rlk_start")
        found = self._ranks("rlk_readback")
        self._require_asked(found)
        for each in found:
            wanted.require_captured(each["cudagraphs"])
        self._processes = tuple(each["pid"] for each in found)
        self._rpc("rlk_serve", weight_version)

    def generate(self, requests: Sequence[Request], *, supports: bool = True) -> list[Response]:
        """Generate all requests together, in vLLM's continuous batches; responses come in the order of ``requests``.

        supports: keep and hand over the retained ids of truncating requests; without, their responses have none and cannot be scored.

        A sample that cannot be generated comes back without tokens and with finish_reason "refused: …". Raises ValueError for a sample id
        given twice and EngineRefusal if the weight version is unknown or changed underway, or if an earlier call broke the engine.
        """
        if self._broken:
            raise EngineRefusal(f"an earlier call left requests inside vLLM ({self._broken}): start another engine")
        require_distinct(requests)
        version = self._rpc("rlk_begin", supports)
        if version is None:
            raise EngineRefusal("the weight version is unknown after a failed update: load a checkpoint before generating")
        reasons = [refusal(request, self.config.vocab_size, self.max_model_len) for request in requests]
        accepted = [request for request, reason in zip(requests, reasons) if reason is None]
        outputs = self._run(accepted) if accepted else []
        finished = self._rpc("rlk_finish")
        if finished["weight_version"] != version:
            raise EngineRefusal(f"the weight version went from {version} to {finished['weight_version']} underway: generate again")
        kept = dict(finished["supports"])
        done = {
            r.sample_id: convert.response(r, output, kept.get(r.sample_id), version) for r, output in zip(accepted, outputs, strict=True)
        }
        for request in accepted if self._draws_strictly else ():
            if supports and request.sampling.truncates and done[request.sample_id].support is None:
                raise EngineRefusal(f"sample {request.sample_id}: truncated sampling returned no retained ids")
        return [
            done[request.sample_id] if reason is None else refused_response(request, reason, version)
            for request, reason in zip(requests, reasons)
        ]

    def load_weights(self, path: Path, version: int, *, announced: str | None = None) -> str:
        """Serve the checkpoint in ``path`` as ``version``: returns the model hash read back from inside the worker.

        The prefix cache is dropped. EngineRefusal for a version that is not newer, and for files whose hash is not ``announced``; the
        engine then keeps serving the old weights. After any later failure the version is unknown and :meth:`generate` refuses.
        """
        current = self._rpc("rlk_begin", False)
        if current is not None and version <= current:
            raise EngineRefusal(f"weight version {version} is not newer than {current}: publish under a higher version")
        loaded: str = self._rpc("rlk_load_weights", str(path), announced)
        self.reset_prefix_cache()
        self._rpc("rlk_serve", version)
        return loaded

    def identity(self) -> tuple[int, str]:
        """Version that the worker serves, and the hash that it found when it took these weights. EngineRefusal while there is none."""
        version, found = self._rpc("rlk_identity")
        if version is None:
            raise EngineRefusal("the weight version is unknown after a failed update: load a checkpoint again")
        return version, found

    def seconds(self) -> dict[str, float]:
        """What the parts of the last :meth:`load_weights` took on the first rank: "read" the files and hash them, "copy", "hash" what is
        live."""
        found: dict[str, float] = self._ranks("rlk_seconds")[0]
        return found

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. EngineRefusal if vLLM did not."""
        if self._llm.reset_prefix_cache() is not True:
            raise EngineRefusal("vLLM did not reset its prefix cache: wait for running requests, or restart the engine")

    def trace(
        self, requests: Sequence[Request], path: Path, *, positions: Sequence[int] | None = None, cold: bool = True
    ) -> list[Response]:
        """Generate as usual and write the intermediates of every computed position to ``path`` (safetensors, strict mode only).

        positions: of every sample, whose rows are written; None writes all, which is megabytes a token for a large model.

        Tensors are named "{sample}/{name}", rows by ascending position, with their positions in "{sample}/{name}.positions".
        cold: drop the prefix cache first; a prefix that is served from it, or shared inside the call, has no rows.
        """
        if self.tensor_parallel_size > 1:
            raise EngineRefusal("intermediates are whole on one rank only: trace with tensor_parallel_size=1")
        if cold:
            self.reset_prefix_cache()
        self._rpc("rlk_trace", True, None if positions is None else list(positions))
        try:
            responses = self.generate(requests)
            self._rpc("rlk_save_trace", str(path))
        finally:
            self._rpc("rlk_trace", False)
        return responses

    def readback(self) -> dict[str, Any]:
        """What the worker really built and ran, JSON-able: runner, model, sampler, attention, settings, versions, weight version and hash,
        operators that ran since the start, counters of vLLM's scheduler. Of several ranks it is rank 0's, and "ranks" has what each holds
        and ran. EngineRefusal if any of it differs from what was asked for."""
        found = self._ranks("rlk_readback")
        self._require_asked(found)
        ranks = [
            {**(f["rank"] or {}), **{name: f[name] for name in ("model_hash", "kernels", "kv_cache", "pid", "threads")}} for f in found
        ]
        return {"mode": self.mode, **found[0], "ranks": ranks, "counters": self._counters()}

    def peak_memory(self) -> list[dict[str, int]]:
        """Of each rank since its start: most bytes on its card that torch had reserved, and of them allocated."""
        return self._ranks("rlk_peak_memory")

    def close(self) -> None:
        """Stop the engine and release its process group; the object is unusable afterwards, the process may start another engine."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _run(self, requests: Sequence[Request]) -> list[Any]:
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [convert.vllm_params(request, self._stop, self._draws_strictly) for request in requests]
        try:
            return self._llm.generate(prompts, params, use_tqdm=False)
        except BaseException as error:
            self._broken = self._gone() or repr(error)
            raise

    def _counters(self) -> dict[str, int]:
        wanted = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
        return {m.name.removeprefix("vllm:"): m.value for m in self._llm.get_metrics() if m.name.removeprefix("vllm:") in wanted}

    def _rpc(self, method: str, *arguments: Any) -> Any:
        """What every rank answers alike."""
        answers = self._ranks(method, *arguments)
        if any(answer != answers[0] for answer in answers):
            raise EngineRefusal(f"ranks answer {method} differently ({answers}): start another engine")
        return answers[0]

    def _ranks(self, method: str, *arguments: Any) -> list[Any]:
        # A worker that dies on the answer would leave the caller waiting for ever, hence always a timeout.
        call = (method, arguments) if self.tensor_parallel_size == 1 else ("rlk_answer", (method, *arguments))
        try:
            answers: list[Any] = self._llm.collective_rpc(call[0], timeout=self._rpc_timeout, args=call[1])
        except Exception as error:
            if gone := self._gone():
                raise EngineRefusal(gone) from error
            if type(error) is Exception:  # all that vLLM lets through of an error in another process
                raise EngineRefusal(str(error)) from error
            raise
        if self.tensor_parallel_size == 1:
            return answers
        for said, _ in answers:
            if said:
                raise EngineRefusal(said)
        return [answer for _, answer in answers]

    def _gone(self) -> str:
        """One line that names the ranks whose processes have ended, "" if none has; vLLM ends all when one dies."""
        gone = [f"rollout rank {rank} (process {pid})" for rank, pid in enumerate(self._processes) if not _lives(pid)]
        return f"{' and '.join(gone)} ended: vLLM's log names the first, start another engine" if gone else ""

    def _require_asked(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        for found in ranks:
            for name, asked in self._asked.items():
                if found[name] != asked:
                    raise EngineRefusal(f"{self.mode} engine runs {name}={found[name]!r}, asked for {asked!r}")
        if len(ranks) != self.tensor_parallel_size or len({found["model_hash"] for found in ranks}) != 1:
            raise EngineRefusal(f"{len(ranks)} ranks hold {sorted({found['model_hash'] for found in ranks})}: start another engine")
        strangers = [module for module in ranks[0]["modules"] if module.split(".")[0] == "rlk"]
        if self.mode == "native" and strangers:
            raise EngineRefusal(f"native engine holds modules of rlk: {', '.join(strangers)}")


def _prepare_environment(separate_process: bool, ranks: int) -> None:
    """Variables that vLLM reads when it is imported or started; set here and nowhere else. No network, no usage report, one runner."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_HOST_IP=LOOPBACK,
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if separate_process else "0",
        VLLM_CPU_OMP_THREADS_BIND="auto" if ranks == 1 else _cpu_shares(ranks),
    )
    if ranks > 1:
        # A forked rank would hang in OpenMP if this process has used it.
        os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn", GLOO_SOCKET_IFNAME="lo")
        # Sums inside a switch are in nobody's order, and strict mode leaves vLLM's own collectives unused.
        os.environ.update(NCCL_NVLS_ENABLE="0", VLLM_ALLREDUCE_USE_SYMM_MEM="0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_bytes, in whole GiB


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cpu_shares(ranks: int) -> str:
    """CPUs of each rank as vLLM writes them; EngineRefusal if this process has fewer than one for each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < ranks:
        raise EngineRefusal(f"tensor_parallel_size={ranks} needs as many CPUs, this process may use {len(cpus)}: take fewer ranks")
    return "|".join(",".join(map(str, cpus[rank::ranks])) for rank in range(ranks))
