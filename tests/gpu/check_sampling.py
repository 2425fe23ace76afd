"""The batched sampler on a card, at Qwen3's vocabulary: ids and supports of the numpy rule, bytes in every batch, graphs, waits and times.

    OUT=. PYTHONPATH=. python tests/gpu/check_sampling.py [section ...]

Writes $OUT/check_sampling.json and exits 1 if a check failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from report import Report, graphed, main

from rlk.contract.numerics import DEFAULT
from rlk.contract.sampling import SamplingParams
from rlk.kernels.logp import logp_with_lse
from rlk.kernels.logp import triton as score
from rlk.kernels.sampling import Drawn, sample
from rlk.kernels.sampling import triton as backend
from rlk.rollout.sampling import sample_rows
from rlk.rollout.sampling_device import DeviceSample, DeviceSampler, Staged, SupportLog

VOCAB, PADDED = 151936, 152576
CARD = torch.device("cuda")
KINDS = [
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 50},
    {"temperature": 0.7, "top_k": 4000, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 0.6, "top_p": 1 - 2**-40},
    {"temperature": 1.0, "top_k": VOCAB + 1},
]


def draw_logits(rows: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return scale * torch.randn(rows, VOCAB, generator=generator, device=CARD)


def peaked(rows: int) -> torch.Tensor:
    """As a trained model's: a few ids far above a wide floor."""
    logits = draw_logits(rows, 2.0, 5)
    top = torch.randint(0, VOCAB, (rows, 30), generator=torch.Generator("cuda").manual_seed(6), device=CARD)
    return logits.scatter_add(1, top, 12 + 3 * torch.rand(rows, 30, generator=torch.Generator("cuda").manual_seed(7), device=CARD))


def kinds(rows: int) -> list[SamplingParams]:
    return [SamplingParams(**KINDS[i % len(KINDS)], seed=2**62 - 977 * i) for i in range(rows)]  # type: ignore[arg-type]


def make(rows: int) -> DeviceSampler:
    return DeviceSampler(rows, VOCAB, PADDED, DEFAULT, CARD)


def rule(report: Report) -> None:
    """Every id and every support bit is that of the numpy rule."""
    sampler = make(64)
    special = {
        "all equal": torch.full((16, VOCAB), -3.5, device=CARD),
        "two values": (torch.arange(VOCAB, device=CARD) % 7 == 0).float().repeat(16, 1),
        "in steps": torch.arange(VOCAB, device=CARD).div(1000, rounding_mode="floor").neg().float().repeat(16, 1) / 30,
        "far apart": torch.linspace(-3e4, 3e4, VOCAB, device=CARD).repeat(16, 1),
    }
    for name, logits in ({f"normal {s}": draw_logits(16, s) for s in (0.01, 1.0, 5.0)} | {"peaked": peaked(16)} | special).items():
        params, positions = kinds(16), list(range(16))
        drawn = sampler.sample(logits, sampler.stage(params, positions))
        expected = sample_rows(logits.cpu(), params, positions, vocab_size=VOCAB, padded_vocab=PADDED, numerics=DEFAULT)
        log = SupportLog(VOCAB, PADDED, CARD)
        assert drawn.support is not None
        log.put(drawn.support, list(range(16)))
        report.holds("ids of the rule", torch.equal(drawn.ids.cpu(), expected.ids), case=name, ids=drawn.ids.tolist())
        for i, kept in enumerate(expected.supports):
            report.holds("supports of the rule", log.ids(i) == (tuple(range(VOCAB)) if kept is None else kept), case=f"{name} {params[i]}")
        report.close("logprobs", drawn.logprobs.cpu(), expected.logprobs, 6e-2, 0.0)
    sampler.check()


@contextmanager
def triton_alone() -> Iterator[None]:
    """The kernels of a card that is not Hopper."""
    before, backend.hopper = backend.hopper, lambda device: False
    try:
        yield
    finally:
        backend.hopper = before


def kernels(report: Report) -> None:
    """Hopper's kernel and Triton's give the same ids, supports and failures: 128 rows of every kind, and rows that are hard to cut."""
    hard = [
        torch.full((VOCAB,), -3.5, device=CARD),
        (torch.arange(VOCAB, device=CARD) % 7 == 0).float(),
        torch.arange(VOCAB, device=CARD).div(1000, rounding_mode="floor").neg() / 30,
        torch.linspace(-3e4, 3e4, VOCAB, device=CARD),
        torch.tensor([0.0, -0.0, -1.0], device=CARD).repeat(VOCAB // 3 + 1)[:VOCAB],
        torch.tensor([2e38, -2e38, 0.0, 1e-40], device=CARD).repeat(VOCAB // 4),
        torch.nn.functional.one_hot(torch.tensor(77, device=CARD), VOCAB) * 1000.0,
    ]
    broken = draw_logits(1, 1.0)
    broken[0, 150000] = float("inf")
    cases = {"hard": torch.stack(hard).repeat(8, 1), "peaked": peaked(128), "broken": torch.cat((peaked(2), broken))}
    for name, logits in (cases | {f"normal {s}": draw_logits(128, s) for s in (0.01, 1.0, 5.0)}).items():
        sampler = make(len(logits))
        staged = sampler.stage(kinds(len(logits)), range(len(logits)))
        failed, other_failed = torch.zeros(2, 3, dtype=torch.int64, device=CARD)
        drawn = _draw(logits, staged, failed)
        with triton_alone():
            other = _draw(logits, staged, other_failed)
        assert drawn.support is not None
        assert other.support is not None
        finite = (logits / staged.rows.temperature[:, None]).isfinite().all(1)
        pairs = ((drawn.ids, other.ids), (failed, other_failed), (drawn.support[finite], other.support[finite]))
        same = [torch.equal(a, b) for a, b in pairs]
        report.holds("Hopper's kernel = Triton's", all(same), case=name, same=same)


def batches(report: Report) -> None:
    """A row's bytes do not depend on the other rows, nor on the width, the stride or the limits of others."""
    logits, params = torch.cat((draw_logits(64, 1.0), peaked(64))), kinds(128)
    sampler = make(128)
    whole = sampler.sample(logits, sampler.stage(params, range(128)))
    assert whole.support is not None
    wide = torch.full((128, PADDED), float("nan"), device=CARD)
    wide[:, :VOCAB] = logits
    for name, given in (("padded", wide), ("strided", wide[:, :VOCAB])):
        again = sampler.sample(given, sampler.stage(params, range(128)))
        _same(report, name, again, whole, slice(0, 128))
    for size in (1, 3, 17):
        for first in range(0, 128, 31 if size == 1 else 37):
            piece = slice(first, min(first + size, 128))
            part = sampler.sample(logits[piece], sampler.stage(params[piece], range(128)[piece]))
            _same(report, f"{size} rows", part, whole, piece)


def _same(report: Report, name: str, part: DeviceSample, whole: DeviceSample, rows: slice) -> None:
    assert whole.support is not None
    report.holds("ids in every batch", torch.equal(part.ids, whole.ids[rows]), case=name)
    report.same("logprobs in every batch", name, part.logprobs, whole.logprobs[rows])
    if part.support is not None:
        report.holds("supports in every batch", torch.equal(part.support, whole.support[rows]), case=name)


def graphs(report: Report) -> None:
    """A replay draws with the parameters that were staged last; no call waits for the card."""
    sampler, logits, params = make(16), peaked(16), kinds(16)
    log = SupportLog(VOCAB, PADDED, CARD)
    staged = sampler.stage(params, range(16))
    eager = [sampler.sample(logits, sampler.stage(params, range(at, at + 16))) for at in (0, 100)]
    replay, captured = graphed(lambda: sampler.sample(logits, staged))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step = sampler.stage(params, range(16))
            log.put(sampler.sample(logits, step).support, list(range(16)))  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for at, expected in zip((0, 100), eager, strict=True):
        captured.ids.zero_()
        sampler.stage(params, range(at, at + 16))
        replay()
        _same(report, f"graph at {at}", captured, expected, slice(0, 16))
    report.holds("positions matter", not torch.equal(eager[0].ids, eager[1].ids))
    report.repeats("sampling repeated", 200, lambda: (sampler.sample(logits, staged).ids.to(torch.int32),))
    bad = logits.clone()
    bad[5, 150000] = float("nan")
    sampler.sample(bad, sampler.stage(params, range(16)))
    try:
        sampler.check()
        report.holds("not finite", False)
    except FloatingPointError as error:
        report.holds("not finite", f"seed {params[5].seed} at position 5" in str(error), said=str(error))


def _torch_sample(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """As vLLM's native sampler: sort, cumulative sum, mask, softmax, exponential race."""
    z, order = (logits / 0.7).sort(dim=-1)
    z = z.masked_fill(z.softmax(-1).cumsum(-1) <= 1 - top_p, -torch.inf)
    z = torch.empty_like(z).scatter_(1, order, z)
    probabilities = z.softmax(-1, dtype=torch.float32)
    return probabilities.div(torch.empty_like(z).exponential_()).argmax(-1), z.log_softmax(-1)  # type: ignore[return-value]


def times(report: Report) -> None:
    _decode_logp(report)
    failed = torch.zeros(3, dtype=torch.int64, device=CARD)
    for rows, (shape, logits) in itertools.product((1, 16, 128), (("normal", draw_logits(128, 1.0)), ("peaked", peaked(128)))):
        z = logits[:rows].contiguous()
        arms, samplers = dict[str, Callable[[], None]](), list[DeviceSampler]()
        for name, kind in (("top_p", KINDS[0]), ("all", KINDS[1]), ("top_k", KINDS[3]), ("both", KINDS[4])):
            sampler = make(rows)  # one for each arm: a replay reads what its sampler staged last
            samplers.append(sampler)
            staged = sampler.stage([SamplingParams(**kind, seed=i) for i in range(rows)], range(rows))  # type: ignore[arg-type]
            arms[name] = graphed(lambda staged=staged, z=z, sampler=sampler: sampler.sample(z, staged))[0]
            if name == "top_p":
                arms["top_p draw"] = graphed(lambda staged=staged, z=z: _draw(z, staged, failed))[0]
                with triton_alone():
                    arms["top_p draw, Triton"] = graphed(lambda staged=staged, z=z: _draw(z, staged, failed))[0]
        if shape == "normal":
            arms["torch top_p"] = graphed(lambda z=z: _torch_sample(z, 0.95))[0]
        report.timed(f"sampling {rows} rows {shape}", arms)
        for sampler in samplers:
            sampler.check()
    report.holds("every row that was timed was drawn", not failed.any())
    for rows in (1, 16, 128):
        sampler, z = make(rows), draw_logits(rows, 1.0)
        params = [SamplingParams(temperature=0.7, top_p=0.95, seed=i) for i in range(rows)]
        staged = sampler.stage(params, range(rows))
        report.host_time(f"sampling {rows} rows, host", {
            "stage": lambda s=sampler, p=params, n=rows: s.stage(p, range(n)),
            "sample": lambda s=sampler, z=z, staged=staged: s.sample(z, staged),
        }, repetitions=50)  # fmt: skip
    print({name: row for name, row in report.times.items() if "host" in name}, flush=True)


def _draw(z: torch.Tensor, staged: Staged, failed: torch.Tensor) -> Drawn:
    """The step without its logprobs."""
    return sample(z, staged.rows, failed, vocab_size=VOCAB, padded_vocab=PADDED, by_count=staged.by_count, by_weight=staged.by_weight)


def _decode_logp(report: Report) -> None:
    """logp of a decode step, and how its tiles are best dealt out; the bytes are the same in all."""
    for rows in (1, 16, 128):
        z, ones = draw_logits(rows, 3.0), torch.ones(rows, device=CARD)
        ids = torch.randint(0, VOCAB, (rows,), device=CARD)
        bits = torch.full((rows, PADDED // 8), 255, dtype=torch.uint8, device=CARD)
        bits[:, VOCAB // 8 :] = 0
        plain = logp_with_lse(z, ids, ones, vocab_size=VOCAB, padded_vocab=PADDED)
        packed = logp_with_lse(z, ids, ones, vocab_size=VOCAB, padded_vocab=PADDED, support=bits)
        for a, b in zip(plain, packed, strict=True):
            report.same("logp over bits", f"{rows} rows", a, b)

        def variant(
            warps: int, each: int, rows: int = rows, z: torch.Tensor = z, ids: torch.Tensor = ids, ones: torch.Tensor = ones
        ) -> torch.Tensor:
            states = score.Rows("logp", ids, ones, None, None, VOCAB)
            states.start(PADDED, 8, 1024)
            states.add(z, 0, 0, 8, each, warps)
            return states.score()[0]

        arms = {"torch": graphed(lambda z=z, ids=ids: torch.log_softmax(z, 1).gather(1, ids[:, None]))[0]}
        arms["rlk"] = graphed(lambda z=z, i=ids, o=ones: torch.ops.rlk.logp(z, i, o, None, None, VOCAB, PADDED, 8, 1024))[0]
        arms["bits"] = graphed(lambda z=z, i=ids, o=ones, b=bits: torch.ops.rlk.logp(z, i, o, b, None, VOCAB, PADDED, 8, 1024))[0]
        for warps, each in ((1, 1), (2, 1), (4, 1), (1, 4)):
            report.same("logp however dealt out", f"{rows} rows {warps} {each}", variant(warps, each), plain[0])
            arms[f"w{warps} e{each}"] = graphed(lambda w=warps, e=each, v=variant: v(w, e))[0]
        report.timed(f"logp {rows} rows", arms)


SECTIONS = {run.__name__: run for run in (rule, kernels, batches, graphs, times)}

if __name__ == "__main__":
    main("check_sampling", SECTIONS)
