"""A decoder layer in CUDA graphs of a few batch sizes, as a rollout engine replays them, against the same rows run eagerly and alone:

    OUT=. PYTHONPATH=. python tests/gpu/check_graphs.py

Every number of live rows from 1 to 33 is padded to the next captured size; the padding holds what the batch before left there. Writes
$OUT/graphs.json and exits 1 if a byte differs.
"""

from __future__ import annotations

import torch
from report import Report, main

from rlk.contract.numerics import DEFAULT
from rlk.kernels.attention import paged_attention
from rlk.kernels.det_gemm import det_gemm
from rlk.kernels.embedding import embedding
from rlk.kernels.lm_head import lm_head
from rlk.kernels.logp import logp
from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.rope import rope, rope_table
from rlk.kernels.swiglu import swiglu

SIZES = (1, 2, 4, 8, 16, 24, 32, 40)
HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 32, 8, 128, 4096, 12288, 8192
PAGE, LONGEST = 16, 1300
EPS = 1e-6


class Step:
    """One decoding step of ``rows`` requests: the tensors that an engine fills, and what comes out of a layer, the head and logp."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.table = torch.zeros(rows, LONGEST // PAGE + 1, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
        self.lengths = torch.zeros(rows, dtype=torch.int64, device="cuda")

    def fill(self, requests: list[int], spare: int) -> None:
        """Request r decodes the id r at position 37·r mod LONGEST. Rows after the requests keep stale ids and pages."""
        live = len(requests)
        for row, request in enumerate(requests):
            position = 37 * request % LONGEST
            pages = torch.arange(self.table.shape[1], dtype=torch.int32) + request * self.table.shape[1]
            pages[position // PAGE + 1 :] = 2**31 - 1
            self.ids[row], self.positions[row] = request, position
            self.slots[row] = int(pages[position // PAGE]) * PAGE + position % PAGE
            self.table[row] = pages.cuda()
            self.lengths[row] = position + 1
        self.slots[live:] = spare * PAGE
        self.lengths[live:] = 0
        self.starts.copy_(torch.arange(self.rows + 1).clamp(max=live))


class Layer:
    """Random weights, a cache whose pages belong to 64 requests, and one spare page."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        make = lambda *size: (torch.randn(*size, device="cuda") / 16).bfloat16()
        self.embedding, self.gamma, self.head_gamma = make(VOCABULARY, HIDDEN), make(HIDDEN), make(DIM)
        self.qkv, self.o_proj = make((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), make(HIDDEN, HEADS * DIM)
        self.gate_up, self.down, self.head = make(2 * INTERMEDIATE, HIDDEN), make(HIDDEN, INTERMEDIATE), make(VOCABULARY, HIDDEN)
        self.table = rope_table(DIM, 1e6, LONGEST).to("cuda")
        self.spare = 64 * (LONGEST // PAGE + 1)
        self.cache = make(self.spare + 1, KV_HEADS, PAGE, 2 * DIM)
        self.temperature = torch.full((max(SIZES),), 0.7, device="cuda")

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows after the layer [rows, HIDDEN] bf16, logprob of each row's own id [rows] fp32)."""
        x = embedding(step.ids, self.embedding, VOCABULARY)
        qkv = det_gemm(rms_norm(x, self.gamma, EPS), self.qkv).view(step.rows, -1, DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = (rope(qk_norm(heads, self.head_gamma, EPS), step.positions, self.table) for heads in (q, k))
        self.cache[step.slots // PAGE, :, step.slots % PAGE] = torch.cat((k, v), dim=-1)
        tiles = {"scale": DIM**-0.5, "kv_tile": DEFAULT.kv_tile, "kv_split": DEFAULT.kv_split}
        out = paged_attention(q, self.cache, step.table, step.starts, step.lengths, **tiles)
        x = x + det_gemm(out.flatten(1), self.o_proj, splits=8)
        x = x + det_gemm(swiglu(det_gemm(rms_norm(x, self.gamma, EPS), self.gate_up), 8), self.down, splits=8)
        logits = lm_head(rms_norm(x, self.gamma, EPS), self.head)
        return x, logp(logits, step.ids, self.temperature[: step.rows], vocab_size=VOCABULARY, padded_vocab=VOCABULARY)


def padded(report: Report) -> None:
    """Replays of batches of every size, each after a larger one."""
    layer = Layer()
    with torch.no_grad():
        expected = {}
        for request in range(64):
            step = Step(1)
            step.fill([request], layer.spare)
            expected[request] = layer.run(step)
        graphs = {}
        for size in SIZES:
            step, graph = Step(size), torch.cuda.CUDAGraph()
            step.fill(list(range(size)), layer.spare)
            layer.run(step)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = layer.run(step)
            graphs[size] = step, graph, captured
        for live in range(33, 0, -1):
            step, graph, captured = graphs[next(size for size in SIZES if size >= live)]
            for requests in (list(range(63, 63 - step.rows, -1)), [(5 * i + live) % 64 for i in range(live)]):  # a full batch first
                step.fill(requests, layer.spare)
                graph.replay()
                for row, request in enumerate(requests):
                    for name, found, wanted in zip(("layer", "logp"), captured, expected[request], strict=True):
                        case = f"{len(requests)} of {step.rows} rows, row {row}: {name}"
                        report.same("a row of a padded graph equals the row alone and eager", case, found[row : row + 1], wanted)


if __name__ == "__main__":
    main("graphs", {"padded": padded})
