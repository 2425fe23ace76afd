"""Dimensions of everything that is run: the operator workload, shapes and sampling rows.

Operators' ``cells.py`` map these to arguments; tests, acceptance cells and benchmarks read the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlk.contract.sampling import SamplingParams


@dataclass(frozen=True)
class RaggedBatch:
    """Samples of unequal length with a common prompt length, and the layouts they are put in.

    lengths: prompt and response tokens of each sample in id order. permutation: sample ids in permuted order. chunk: tokens of a prefill
    chunk. pad_to: columns of the padded batch.
    """

    lengths: tuple[int, ...]
    prompt: int
    permutation: tuple[int, ...]
    chunk: int
    pad_to: int

    @property
    def packed(self) -> int:
        """Rows of the packed batch."""
        return sum(self.lengths)

    @property
    def active(self) -> int:
        """Response tokens, those that carry loss."""
        return sum(n - self.prompt for n in self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Packed row of each sample's first token."""
        return tuple(sum(self.lengths[:i]) for i in range(len(self.lengths)))

    @property
    def permuted_starts(self) -> tuple[int, ...]:
        """Row of each sample's first token, samples in id order, when the batch is packed in permuted order."""
        before = {sample: self.permutation[:at] for at, sample in enumerate(self.permutation)}
        return tuple(sum(self.lengths[s] for s in before[i]) for i in range(len(self.lengths)))

    def padded_starts(self, left: bool) -> tuple[int, ...]:
        """Row of each sample's first token in the flattened [samples, pad_to] batch, padded on the left or on the right."""
        return tuple(i * self.pad_to + (self.pad_to - n if left else 0) for i, n in enumerate(self.lengths))

    def chunks(self, sample: int) -> tuple[range, ...]:
        """Positions of each prefill chunk of one sample."""
        n = self.lengths[sample]
        return tuple(range(at, min(at + self.chunk, n)) for at in range(0, n, self.chunk))


WS1 = RaggedBatch(lengths=(11, 16, 13, 19), prompt=8, permutation=(2, 0, 3, 1), chunk=7, pad_to=20)
"""The operator workload: 59 packed tokens, 27 of them active; lengths lie below, at and above a group of 16."""

GEMM_ROWS = (1, 2, 7, 16, 31, 32, 33, 59, 63, 64, 65, 255, 256, 257)
"""Token counts of every linear layer and norm: both sides of the tile and dispatch edges where published kernels changed their order."""
GEMM_ROWS_LARGE = (512, 2048, 4096)
"""Token counts added on an accelerator."""


@dataclass(frozen=True)
class AttentionShape:
    """Sequences of one attention workload. chunks: prefill chunk lengths to compare with prefill at once; page: KV tokens per page."""

    name: str
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    page: int = 16


ATTENTION_EDGES = AttentionShape("edges", (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129), (7, 16, 64))
"""Both sides of a group, a tile and a split of the default numerics, and 129 rows against decode."""
ATTENTION_PREFIX = AttentionShape("prefix", (33,), (16, 32))
"""A prompt of two whole pages and one token, cold and after a prefix-cache hit."""
ATTENTION_LONG = AttentionShape("long", (2048, 4100, 8192), (4096, 4100))
"""Accelerators only: prompts of thousands of tokens; chunk ends at and off the split."""


@dataclass(frozen=True)
class LogprobShape:
    """tokens rows of logits over vocab_size real columns."""

    name: str
    tokens: int
    vocab_size: int


LOGPROB_SHAPES = (
    LogprobShape("tiny", 27, 260),
    LogprobShape("two_tiles", 27, 8 * 1500),
    LogprobShape("qwen3", 4, 151936),
)
LOGPROB_LARGE = LogprobShape("qwen3_large", 4096, 151936)
"""Accelerators only."""


@dataclass(frozen=True)
class SamplingRow:
    """One sampling setting of the integration scope, and how many updates it runs through."""

    name: str
    sampling: SamplingParams
    updates: int = 2


SAMPLING_ROWS = (
    SamplingRow("full", SamplingParams(1.0, 1.0, -1)),
    SamplingRow("nucleus", SamplingParams(0.7, 0.95, -1)),
    SamplingRow("nucleus_top_k", SamplingParams(1.3, 0.99, 128)),
    SamplingRow("greedy", SamplingParams(0.0, 1.0, -1)),
)

EIGHT_RANK_TRAIN = ((1, 8), (2, 4), (4, 2), (8, 1))
"""Training (tp, cp) on eight devices."""
ROLLOUT_TP = (1, 2, 4, 8)
"""Rollout TP, chosen independently of training."""
