"""logp and batch_invariant_logp on a card: accuracy, bytes in every layout, planted faults and times.

    OUT=. PYTHONPATH=. python tests/gpu/check_logp.py [section ...]

Qwen3-8B's vocabulary and hidden size. Writes $OUT/check_logp.json and exits 1 if a check failed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from planting import planted_module
from report import Report, graphed, main

from rlk.contract.topology import token_leaves
from rlk.kernels.batch_invariant_logp import (
    batch_invariant_logp,
    batch_invariant_logp_weight_grad,
    batch_invariant_logp_with_lse,
)
from rlk.kernels.batch_invariant_logp import triton as fused
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad
from rlk.kernels.logp import logp, logp_with_lse
from rlk.kernels.logp import triton as backend
from rlk.kernels.logp.shards import Columns, gradient, join, part

VOCAB, PADDED, SHARDS, HIDDEN = 151936, 152576, 8, 4096
SIZES = {"vocab_size": VOCAB, "padded_vocab": PADDED}
Optional = torch.Tensor | None


class Rows(NamedTuple):
    """logits [T, width] fp32, ids [T], temperature [T], seed [T], support [T, width]."""

    logits: torch.Tensor
    ids: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    support: torch.Tensor

    def at(self, rows: torch.Tensor | slice) -> Rows:
        return Rows(*(x[rows] for x in self))


def make(rows: int, width: int = VOCAB, seed: int = 0) -> Rows:
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    logits = draw(rows, width) * 4
    ids = torch.randint(0, VOCAB, (rows,), generator=generator, device="cuda")
    temperature = torch.rand(rows, generator=generator, device="cuda") + 0.5
    temperature[::3] = 1.0
    support = torch.rand(rows, width, generator=generator, device="cuda") < 1e-3
    support[:, VOCAB:] = False
    support[torch.arange(rows, device="cuda"), ids] = True
    return Rows(logits, ids, temperature, draw(rows), support)


def score(r: Rows, support: Optional = None, active: Optional = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, lse and dlogits."""
    logits = r.logits.detach().requires_grad_()
    out, lse = logp_with_lse(logits, r.ids, r.temperature, **SIZES, support=support, active=active)
    (grad,) = torch.autograd.grad(out, logits, r.seed)
    return out.detach(), lse, grad


NAMES = ("logp", "lse", "dlogits")


def accuracy(report: Report) -> None:
    r = make(27)
    for name, support in (("full", None), ("support", r.support)):
        logits = r.logits.double().requires_grad_()
        scaled = logits / r.temperature.double()[:, None]
        scaled = scaled if support is None else scaled.masked_fill(~support, -torch.inf)
        expected = scaled.gather(1, r.ids[:, None])[:, 0] - torch.logsumexp(scaled, 1)
        (wanted,) = torch.autograd.grad(expected, logits, r.seed.double())
        theirs = torch.log_softmax(scaled.float(), 1).gather(1, r.ids[:, None])[:, 0]
        out, _, grad = score(r, support)
        report.close(f"logp accuracy {name}", out, expected.detach(), 6e-2, 0.0, theirs)
        report.close(f"logp accuracy {name}, fp32 judgment", out, expected.detach(), 1e-5, 1e-6, theirs)
        report.close(f"dlogits accuracy {name}", grad, wanted, 5e-2, 0.0)
    report.holds("dlogits hold bf16 values", bool((grad.bfloat16().float() == grad).all()))
    extreme = make(4)
    extreme.logits[0, :100] = -torch.inf
    extreme.logits[1, 77] = torch.nan
    extreme.logits[2, 5] = torch.inf
    extreme.logits[3] = -3e38
    out = logp(extreme.logits, extreme.ids.clamp(min=100), extreme.temperature * 0 + 1, **SIZES)
    report.holds("NaN and inf show, -inf does not", out.isnan().tolist() == [False, True, True, False], out=str(out.tolist()))


def layouts(report: Report) -> None:
    """Rows alone, permuted, beside others; wider logits; tiles per program; ranks that hold some shards."""
    r = make(65)
    for name, support in (("full", None), ("support", r.support)):
        base = score(r, support)
        for label, rows in (
            ("one row", torch.tensor([7])), ("permuted", torch.randperm(65)), ("chunk of 7", torch.arange(21, 28)),
            ("2048 rows", torch.arange(2048) % 65),
        ):  # fmt: skip
            rows = rows.cuda()
            got = score(r.at(rows), None if support is None else support[rows])
            for what, a, b in zip(NAMES, got, base, strict=True):
                report.same(f"{label} {name}", what, a, b[rows])
        active = torch.arange(65, device="cuda") % 3 != 1
        hidden = r._replace(logits=r.logits.clone(), ids=r.ids.clone())
        hidden.logits[~active] = torch.nan
        hidden.ids[~active] = -5
        for what, a, b in zip(NAMES, score(hidden, support, active), base, strict=True):
            report.same(f"inactive rows {name}", what, a[active], b[active])
            report.holds(f"inactive rows {name} are +0", bool((a[~active] == 0).all()))
        wide = torch.full((65, PADDED), torch.nan, device="cuda")
        wide[:, :VOCAB] = r.logits
        wide_support = None if support is None else torch.nn.functional.pad(support, (0, PADDED - VOCAB))
        got = score(r._replace(logits=wide), wide_support)
        for what, a, b in zip(NAMES, got, base, strict=True):
            report.same(f"padded columns {name}", what, a[:, :VOCAB] if a.ndim == 2 else a, b)
        for each, warps in ((1, 1), (3, 1), (19, 1), (4, 2), (2, 4), (1, 8)):
            states = backend.Rows("logp", r.ids, r.temperature, support, None, VOCAB)
            states.start(PADDED, SHARDS, 1024)
            states.add(r.logits, 0, 0, SHARDS, each, warps)
            out, lse = backend.join(states.part()[None], r.ids, None, PADDED)
            report.same(f"tiles per program, warps {name}", f"{each} {warps} logp", out, base[0])
            report.same(f"tiles per program, warps {name}", f"{each} {warps} lse", lse, base[1])
        for ranks in (1, 2, 4, 8):
            columns = [Columns(k * PADDED // ranks, SHARDS // ranks, PADDED // SHARDS, VOCAB) for k in range(ranks)]
            cut = lambda x, c: None if x is None else x[:, c.first : c.first + c.width]
            parts = [
                part(cut(wide, c), r.ids, r.temperature, c, vocab_tile=1024, support=cut(wide_support, c)) for c in columns
            ]  # fmt: skip
            out, lse = join(torch.stack(parts), r.ids, columns[0])
            report.same(f"tensor parallel {name}", f"{ranks} logp", out, base[0])
            report.same(f"tensor parallel {name}", f"{ranks} lse", lse, base[1])
            grads = [gradient(cut(wide, c), r.ids, r.temperature, lse, r.seed, c, support=cut(wide_support, c)) for c in columns]
            report.same(f"tensor parallel {name}", f"{ranks} dlogits", torch.cat(grads, dim=1)[:, :VOCAB], base[2])
    for width, padded in ((260, 1024), (8 * 1500, 8 * 1500)):
        small = make(27, VOCAB)
        z, ids = small.logits[:, :width].contiguous(), small.ids % width
        sizes = {"vocab_size": width, "padded_vocab": padded}
        whole = logp(z, ids, small.temperature, **sizes)
        for row in range(27):
            one = slice(row, row + 1)
            report.same(f"small vocabulary {width}", str(row), logp(z[one], ids[one], small.temperature[one], **sizes), whole[one])


def _head(rows: int, width: int = PADDED) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    h = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
    w = (torch.randn(width, HIDDEN, generator=generator, device="cuda") * 0.05).bfloat16()
    w[VOCAB:] = 0
    return h, w


def fused_bytes(report: Report) -> None:
    """batch_invariant_logp gives the bytes of lm_head and logp, forward and both gradients, whatever it holds in memory at once."""
    h, w = _head(65)
    r = make(65, PADDED, 3)
    leaves = token_leaves((30, 35))
    index, starts = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    active = torch.arange(65, device="cuda") % 4 != 2
    for name, support, mask in (("full", None, None), ("support", r.support, None), ("active", None, active)):
        hidden = h.clone().requires_grad_()
        logits = lm_head(hidden, w)
        z = logits.detach().requires_grad_()
        out, lse = logp_with_lse(z, r.ids, r.temperature, **SIZES, support=support, active=mask)
        (dlogits,) = torch.autograd.grad(out, z, r.seed)
        (dh,) = torch.autograd.grad(logits, hidden, dlogits)
        dw = lm_head_weight_grad(h, dlogits.bfloat16(), index, starts)
        for at_once in (2048, 16):
            fused.ROWS, fused.LOGITS = at_once, at_once << 14
            leaf = h.clone().requires_grad_()
            got, got_lse = batch_invariant_logp_with_lse(leaf, w, r.ids, r.temperature, **SIZES, support=support, active=mask)
            (got_dh,) = torch.autograd.grad(got, leaf, r.seed)
            got_dw = batch_invariant_logp_weight_grad(
                h, w, r.ids, r.temperature, got_lse, r.seed, index, starts, vocab_size=VOCAB, support=support, active=mask
            )
            for what, a, b in (("logp", got, out), ("lse", got_lse, lse), ("dh", got_dh, dh), ("dw", got_dw, dw)):
                report.same(f"fused = lm_head and logp, {name}", f"{what} {at_once} rows", a.detach(), b.detach())
        fused.ROWS, fused.LOGITS = 2048, 1 << 25
        wanted = range(150000, 152000)
        piece = batch_invariant_logp_weight_grad(
            h, w, r.ids, r.temperature, lse, r.seed, index, starts, vocab_size=VOCAB, support=support, active=mask, wanted=wanted
        )
        report.same(f"fused = lm_head and logp, {name}", "dw of some rows", piece, dw[wanted.start : wanted.stop])
        one = batch_invariant_logp(
            h[3:4], w[:VOCAB], r.ids[3:4], r.temperature[3:4], **SIZES, support=None if support is None else support[3:4, :VOCAB]
        )
        report.same(f"fused = lm_head and logp, {name}", "one row, unpadded weight", one.detach(), out[3:4].detach())
    h32, w32 = h.double(), w[:VOCAB].double()
    expected = torch.log_softmax(h32 @ w32.T / r.temperature.double()[:, None], 1).gather(1, r.ids[:, None])[:, 0]
    report.close("batch_invariant_logp accuracy", batch_invariant_logp(h, w, r.ids, r.temperature, **SIZES), expected, 6e-2, 0.0)


def repetitions(report: Report) -> None:
    r = make(64)
    report.repeats("logp repeated", 1000, lambda: score(r))
    h, w = _head(64)
    run = lambda: batch_invariant_logp_with_lse(h, w, r.ids, r.temperature, **SIZES)
    report.repeats("batch_invariant_logp repeated", 1000, run)
    for name, call in (("logp", lambda: logp_with_lse(r.logits, r.ids, r.temperature, **SIZES)), ("batch_invariant_logp", run)):
        eager = [x.clone() for x in call()]
        replay, captured = graphed(call)
        for x in captured:
            x.zero_()
        replay()
        for a, b in zip(captured, eager, strict=True):
            report.same("graph = eager", name, a, b)


def planted(report: Report) -> None:
    """Faults that the byte comparisons above must see."""
    r = make(65)

    def run(module: object, each: int, warps: int) -> torch.Tensor:
        states = module.Rows("logp", r.ids, r.temperature, None, None, VOCAB)  # type: ignore[attr-defined]
        states.start(PADDED, SHARDS, 1024)
        states.add(r.logits, 0, 0, SHARDS, each, warps)
        return states.total

    tree = "s = tl.sum(row_tree(tl.reshape(column_tree(e), (1, LINE))), 0)"
    fault = (tree, "s = tl.sum(tl.sum(e, 0), 0)")
    faulty = planted_module(
        backend, fault, ('@cpu.logp.register_kernel("cuda")\n', ""), ('@cpu.logp_backward.register_kernel("cuda")\n', "")
    )
    report.same("control: row tree, 1 and 8 warps", "sums", run(backend, 1, 8), run(backend, 1, 1))
    report.differs("tl.sum of a tile, 1 and 8 warps", run(faulty, 1, 8), run(faulty, 1, 1))
    chunk = make(2048)
    theirs = lambda z: torch.log_softmax(z / 0.7, 1)
    out = logp(chunk.logits, chunk.ids, torch.full_like(chunk.temperature, 0.7), **SIZES)
    report.differs("torch's log_softmax", theirs(chunk.logits).gather(1, chunk.ids[:, None])[:, 0], out)
    report.differs("a product instead of a division", chunk.logits[:8] * (1 / 0.7), chunk.logits[:8] / torch.tensor(0.7, device="cuda"))


def _time_logits(report: Report) -> None:
    r = make(4096)
    ones = torch.ones_like(r.temperature)

    def torch_step() -> torch.Tensor:
        z = r.logits.detach().requires_grad_()
        out = torch.log_softmax(z, 1).gather(1, r.ids[:, None])[:, 0]
        return torch.autograd.grad(out, z, r.seed)[0]

    def our_step() -> torch.Tensor:
        z = r.logits.detach().requires_grad_()
        return torch.autograd.grad(logp(z, r.ids, ones, **SIZES), z, r.seed)[0]

    with torch.no_grad():
        arms = {"torch": lambda: torch.log_softmax(r.logits, 1).gather(1, r.ids[:, None])}
        arms["rlk"] = lambda: torch.ops.rlk.logp(r.logits, r.ids, ones, None, None, VOCAB, PADDED, SHARDS, 1024)
        for each in (1, 8, 19):
            states = backend.Rows("logp", r.ids, ones, None, None, VOCAB)
            states.start(PADDED, SHARDS, 1024)
            arms[f"states {each}"] = partial(states.add, r.logits, 0, 0, SHARDS, each)
            arms["part"] = states.part
        report.timed("logp forward 4096 rows", arms, megabytes=4096 * VOCAB * 4 / 1e6)
        small = r.at(slice(0, 16))
        report.timed("logp forward 16 rows", {
            "torch": graphed(lambda: torch.log_softmax(small.logits, 1).gather(1, small.ids[:, None]))[0],
            "rlk": graphed(lambda: torch.ops.rlk.logp(small.logits, small.ids, ones[:16], None, None, VOCAB, PADDED, SHARDS, 1024))[0],
        })  # fmt: skip
    report.timed("logp forward and backward 4096 rows", {"torch": torch_step, "rlk": our_step}, megabytes=3 * 4096 * VOCAB * 4 / 1e6)
    lse = logp_with_lse(r.logits, r.ids, ones, **SIZES)[1]
    rows = backend.Rows("logp.backward", r.ids, ones, None, None, VOCAB)
    report.timed("logp backward 4096 rows", {
        f"block {block}": partial(rows.slopes, r.logits, 0, lse, r.seed, torch.float32, block) for block in (512, 1024, 2048)
    })  # fmt: skip


def _time_head(report: Report) -> None:
    h, w = _head(2048)
    seed, ones = torch.randn(2048, device="cuda"), torch.ones(2048, device="cuda")
    ids = torch.randint(0, VOCAB, (2048,), device="cuda")

    def torch_fused() -> torch.Tensor:
        leaf = h.detach().requires_grad_()
        out = torch.log_softmax((leaf @ w.T).float(), 1).gather(1, ids[:, None])[:, 0]
        return torch.autograd.grad(out, leaf, seed)[0]

    def our_fused() -> torch.Tensor:
        leaf = h.detach().requires_grad_()
        return torch.autograd.grad(batch_invariant_logp(leaf, w, ids, ones, **SIZES), leaf, seed)[0]

    arms = {"torch": torch_fused, "rlk": our_fused}
    report.timed("head to logp, forward and backward, 2048 rows", arms, repetitions=9, gflop=3 * 2 * 2048 * HIDDEN * VOCAB / 1e9)
    report.timed("head to logp, forward, 2048 rows", {
        "torch": lambda: torch.log_softmax((h @ w.T).float(), 1).gather(1, ids[:, None]),
        "rlk": lambda: batch_invariant_logp(h, w, ids, ones, **SIZES),
    }, repetitions=9, gflop=2 * 2048 * HIDDEN * VOCAB / 1e9)  # fmt: skip
    for name, run in arms.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        report.times[f"head to logp peak memory {name}"] = {"gigabytes": round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)}


def times(report: Report) -> None:
    _time_logits(report)
    torch.cuda.empty_cache()
    _time_head(report)


SECTIONS = {run.__name__: run for run in (accuracy, layouts, fused_bytes, repetitions, planted, times)}

if __name__ == "__main__":
    main("check_logp", SECTIONS)
