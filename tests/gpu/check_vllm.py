"""vLLM's strict engine on a card, two layers of full width and few ids: graphs on and off, captured sizes, fills, chunks, reloads.

    OUT=. PYTHONPATH=. python tests/gpu/check_vllm.py [section ...]

Writes $OUT/check_vllm.json and exits 1 if a check failed.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import Report, main

from rlk.contract.models import QWEN3_8B_UPDATED
from rlk.contract.numerics import HOPPER
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.kernels import serving
from rlk.kernels.rope import rope_table
from rlk.kernels.serving import cpu as composed
from rlk.loop.synthetic import prepare_synthetic
from rlk.model.weights import load_checkpoint, save_checkpoint
from rlk.rollout.vllm.engine import VllmEngine

SIZES = [1, 2, 4, 8, 16, 32]
BUDGET = 64
TOKENS = 24
COUNTS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 40)
SHARED = Path(tempfile.gettempdir()) / "check_vllm"
CARD = torch.device("cuda")


def requests(count: int, length: int = 4, tokens: int = TOKENS, start: int = 0, **sampling: Any) -> list[Request]:
    """``count`` requests whose prompts differ; every other one truncates unless ``sampling`` says otherwise."""
    made = []
    for i in range(start, start + count):
        given = {"seed": i, **({"temperature": 0.7, "top_p": 0.9, "top_k": 50} if i % 2 else {}), **sampling}
        prompt = tuple((7 * k + 1013 * i + k * k) % QWEN3_8B_UPDATED.vocab_size for k in range(length))
        made.append(Request(i, prompt, SamplingParams(max_tokens=tokens, **given)))
    return made


def plain(response: Response) -> tuple[Any, ...]:
    if not response.token_ids:
        raise RuntimeError(f"sample {response.sample_id} has no tokens: {response.finish_reason}")
    return response.token_ids, struct.pack(f"{len(response.logprobs)}f", *response.logprobs), response.support


def differing(left: list[Response], right: list[Response]) -> int:
    return sum(plain(a) != plain(b) for a, b in zip(left, right, strict=True))


def replays(engine: VllmEngine) -> dict[int, int]:
    return {graph["rows"]: graph["replays"] for graph in engine.readback()["cudagraphs"]}


def steps(report: Report) -> None:
    """The fused steps give the bytes of their operators, and write no other slot."""
    torch.manual_seed(0)
    for group, heads, dim, width in ((4, 8, 128, 4096), (2, 8, 32, 256), (1, 2, 64, 192)):
        for tokens in (1, 5, 64, 300):
            case, per_token = f"{group} {heads} {dim} {tokens}", heads * (group + 2) * dim
            qkv = torch.randn(tokens, per_token + 64, device=CARD).bfloat16()[:, :per_token]
            q_gamma, k_gamma = torch.randn(2, dim, device=CARD).bfloat16()
            positions, table = torch.randint(0, 4000, (tokens,), device=CARD), rope_table(dim, 1e6, 4096).to(CARD)
            slots = torch.randperm(1024, device=CARD)[:tokens]
            slots[::3] = -1
            caches = [torch.full((64, heads, 16, 2 * dim), 7.0, device=CARD, dtype=torch.bfloat16) for _ in range(2)]
            fused = serving.rotate_into_cache(qkv, q_gamma, k_gamma, 1e-6, positions, table, caches[0], slots)
            alone = composed.rotate_into_cache(qkv, q_gamma, k_gamma, 1e-6, positions, table, caches[1], slots)
            report.same("rotate: queries", case, fused, alone)
            report.same("rotate: cache", case, caches[0], caches[1])
            key, beyond = torch.randn(tokens, heads, dim, device=CARD).bfloat16(), torch.randperm(1224, device=CARD)[:tokens] - 100
            serving.store_kv(key, -key, caches[0], beyond)
            composed.store_kv(key, -key, caches[1], beyond)
            report.same("store: cache", case, caches[0], caches[1])
            x, y = torch.randn(2, tokens, width, device=CARD).bfloat16()
            gamma = torch.randn(width, device=CARD).bfloat16()
            for name, a, b in zip(("sum", "norm"), serving.add_rms_norm(x, y, gamma, 1e-6), composed.add_rms_norm(x, y, gamma, 1e-6)):
                report.same(f"add_rms_norm: {name}", case, a, b)


def start(name: str, **options: Any) -> tuple[VllmEngine, Path]:
    """An engine on its own copy of the same weights, and the folder of that copy."""
    root = Path(tempfile.mkdtemp())
    prepare_synthetic(QWEN3_8B_UPDATED.name, root / "first")
    engine = VllmEngine(
        root / "first", mode="strict", device="cuda", numerics=HOPPER, max_model_len=1024, max_num_batched_tokens=BUDGET, max_num_seqs=40,
        kv_cache_bytes=1 << 30, stop_token_ids=(), **options,
    )  # fmt: skip
    print(name, engine.readback()["versions"], flush=True)
    return engine, root


def mixed() -> list[Request]:
    """Prompts below, at and above a page and a tile, most of them in chunks."""
    lengths = (1, 33, 100, 129, 300, 700)
    return [request for i, length in enumerate(lengths) for request in requests(1, length=length, start=200 + i)]


def everything(engine: VllmEngine, root: Path) -> dict[str, list[Response]]:
    """What both engines generate: batches of captured sizes and between them, chunked prompts, all again under other weights."""
    found = {f"batch of {count}": engine.generate(requests(count, start=100)) for count in COUNTS}
    engine.reset_prefix_cache()
    found["chunks"] = engine.generate(mixed())
    weights = load_checkpoint(root / "first")
    other = {name: (t.float() * 1.02).bfloat16() if t.ndim == 2 else t for name, t in weights.tensors.items()}
    announced = save_checkpoint(root / "second", weights.config, other)
    if engine.load_weights(root / "second", 1, announced=announced) != announced:
        raise RuntimeError("the reloaded hash is not the announced one")
    found["reloaded"] = engine.generate(mixed())
    engine.load_weights(root / "first", 2)
    return found


def keep(name: str, found: dict[str, list[Response]]) -> None:
    SHARED.mkdir(exist_ok=True)
    (SHARED / f"{name}.txt").write_text("".join(f"{key}\t{[plain(r) for r in answers]!r}\n" for key, answers in found.items()))


def kept(name: str) -> dict[str, str]:
    rows = (line.split("\t", 1) for line in (SHARED / f"{name}.txt").read_text().splitlines())
    return dict(rows)


def eager(report: Report) -> None:
    """No graphs: what every other engine is compared with."""
    engine, root = start("eager", enforce_eager=True)
    report.holds("an eager engine captures nothing", engine.readback()["cudagraphs"] == [])
    keep("eager", everything(engine, root))
    engine.close()


def apart(report: Report) -> None:
    """The engine in a process of its own."""
    engine, _ = start("apart", cudagraph_sizes=SIZES, separate_process=True)
    keep("apart", {"chunks": engine.generate(mixed())})
    engine.close()


def graphs(report: Report) -> None:
    """Captured sizes, exact replays, fills, prefixes, prompts against decoding, reloads."""
    engine, root = start("graphs", cudagraph_sizes=SIZES)
    found = engine.readback()
    report.holds("captured sizes", list(replays(engine)) == SIZES and found["cudagraph_mode"] == "FULL_DECODE_ONLY")
    before = replays(engine)
    sixteen = engine.generate(requests(16))
    after = replays(engine)
    moved = {size: after[size] - before[size] for size in SIZES if after[size] != before[size]}
    report.holds("a batch of exactly a captured size replays its graph", moved == {16: TOKENS - 1}, moved=moved)
    report.holds("nine live rows after sixteen", differing(engine.generate(requests(9)), sixteen[:9]) == 0)
    keep("graphs", everything(engine, root))
    report.holds("graphs were replayed after the reload", sum(replays(engine).values()) > sum(after.values()))

    engine.reset_prefix_cache()
    whole = engine.generate(mixed())
    report.holds("a long prompt came in chunks", engine.readback()["partial_prefill_rows"] > 0)
    warm = engine.generate(mixed())
    report.holds("a warm prefix", differing(warm, whole) == 0 and any(r.cached_tokens for r in warm))
    engine.reset_prefix_cache()
    report.holds("alone and together", differing([engine.generate([r])[0] for r in mixed()], whole) == 0)
    report.holds("in another order", differing(engine.generate(mixed()[::-1])[::-1], whole) == 0)
    traced = engine.trace(mixed(), root / "trace.safetensors", positions=(0, 700))
    report.holds("traced operator by operator", differing(traced, whole) == 0)
    without = engine.generate(mixed(), supports=False)
    report.holds("without supports", [plain(r)[:2] for r in without] == [plain(r)[:2] for r in whole])

    asked = requests(4, length=61, tokens=80, start=300, temperature=0.0, top_p=1.0, top_k=-1)
    decoded = engine.generate(asked)
    for cut in (1, 2, 3, 4, 40, 67, 68, 79):
        read = [Request(r.sample_id, (*r.prompt_ids, *r.token_ids[:cut]), SamplingParams(temperature=0.0, max_tokens=1)) for r in decoded]
        engine.reset_prefix_cache()
        same = all(a.logprobs[0] == b.logprobs[cut] and a.token_ids[0] == b.token_ids[cut] for a, b in zip(engine.generate(read), decoded))
        report.holds("a prompt of the same tokens predicts the next one", same, cut=cut)
    engine.close()


def together(report: Report) -> None:
    """What the engines wrote down."""
    without, captured, alone = kept("eager"), kept("graphs"), kept("apart")
    for key, answers in without.items():
        report.holds("graphs on and off", captured[key] == answers, case=key)
    report.holds("in a process of its own", alone["chunks"] == without["chunks"])
    report.holds("new weights show", without["reloaded"] != without["chunks"])


if __name__ == "__main__":
    main("check_vllm", {"steps": steps, "eager": eager, "graphs": graphs, "apart": apart, "together": together}, alone="together")
