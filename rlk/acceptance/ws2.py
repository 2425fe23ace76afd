"""Cells of the ws2 scope: one update of the trainer is the same bytes at every TP and CP, and what could hide a difference is caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlk.acceptance.cell import Cell
from rlk.acceptance.platforms import Platform
from rlk.contract.models import QWEN3_8B, TINY, ModelShape

WIDE = replace(QWEN3_8B, name="qwen3-8b-2layers-mlp1536-synthetic", layers=2, intermediate=1536, vocab_size=1000, max_positions=512)
"""Residual stream and attention of full width; depth, MLP and vocabulary are cut so that eight ranks with optimizer state share a card."""
MODEL: dict[Platform, ModelShape] = {"cpu": TINY, "cuda": WIDE, "rocm": WIDE}

SIDE = "train"
UPDATES = 3

TOPOLOGIES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))
"""Training (tp, cp), each against (1, 1); (1, 1) against a second run of itself in another process."""
CARD_TOPOLOGIES = ((2, 1), (1, 2))
CARD_TRANSPORTS = ("nccl", "peer")
"""Training (tp, cp) whose ranks have a card each, over each of these transports, against (1, 1) on one card."""
LAYOUTS: dict[Platform, tuple[str, ...]] = {"cpu": ("packed", "single", "short"), "cuda": ("packed", "short"), "rocm": ("packed", "short")}
"""packed: samples of uneven length share micro-batches. single: every sample is a micro-batch of its own. short: so few tokens that most
context parallel ranks hold none."""
FAULTS = ("ring_order", "killed_rank", "other_contract_version", "unequal_tokens")
"""Planted on purpose: sums over ranks in plain ring order; a rank killed within an update; one that runs another version of the contract;
one that was given other tokens."""

OPERATORS = (
    "embedding", "rms_norm", "qk_norm", "rope", "det_gemm", "attention", "swiglu", "lm_head", "logp",
    "embedding.weight_grad", "rms_norm.backward", "rms_norm.gamma_grad", "qk_norm.backward", "qk_norm.gamma_grad", "rope.backward",
    "det_gemm.input_grad", "det_gemm.weight_grad", "attention.backward", "swiglu.backward", "lm_head.input_grad", "lm_head.weight_grad",
    "logp.backward",
)  # fmt: skip
"""What every rank must report to have run."""
FACTS = (
    "topology", "ranks", "partition", "communication", "reduction_order", "traffic_per_update", "layer_bytes", "engine_collectives",
    "gradient_scales", "tokens_compared", "model_hashes",
)  # fmt: skip

STATE = ("parameter", "master", "m", "v")
"""Kinds of tensors that an update changes."""
_LAYER = ("input_norm", "qkv", "q_norm", "k_norm", "o_proj", "post_norm", "gate_up", "down_proj")


def subject(tp: int, cp: int, transport: str = "") -> str:
    """How cells name a topology, and the transport if ranks with a card each are to use that one."""
    return f"tp{tp}cp{cp}" + (f"_{transport}" if transport else "")


CARD_SUBJECTS = {subject(*pair, transport): (*pair, transport) for pair in CARD_TOPOLOGIES for transport in CARD_TRANSPORTS}
_SUBJECTS = {subject(*pair): (*pair, "") for pair in TOPOLOGIES} | CARD_SUBJECTS


def topology(name: str) -> tuple[int, int, str]:
    """(tp, cp, transport) of a cell's subject; transport "" leaves it to the machine."""
    return _SUBJECTS[name]


def parameter_names(model: ModelShape) -> tuple[str, ...]:
    """Packed names of every parameter, in model order."""
    return ("embedding", *(f"layers.{i}.{name}" for i in range(model.layers) for name in _LAYER), "final_norm", "lm_head")


def ws2_cells(platform: Platform) -> Iterator[Cell]:
    """Every cell of the scope on one platform, topologies in order."""
    model = MODEL[platform]
    strict = tuple((SIDE, op) for op in OPERATORS)
    for name, (tp, cp, transport) in _SUBJECTS.items():
        if transport and platform == "cpu":
            continue
        names = _names(model, tp * cp)
        for layout in LAYOUTS[platform] if not transport else ("packed",):
            for judgment, handed_in in names.items():
                if judgment != "checkpoint" or layout == "packed":
                    facts = (*FACTS, "state_written_by") if judgment == "checkpoint" else FACTS
                    yield Cell(
                        platform, "ws2", name, f"{model.name}-{layout}", judgment, strict=strict, facts=facts, names=handed_in,
                        unsupported="AMD cards do not write each other's memory yet" if (platform, transport) == ("rocm", "peer") else "",
                    )  # fmt: skip
    for fault in FAULTS:
        yield Cell(platform, "ws2", fault, f"{model.name}-packed", "caught", expect="caught")


def _names(model: ModelShape, ranks: int) -> dict[str, tuple[str, ...]]:
    """Judgment -> comparisons that its cell must hand in: the whole tensors, and that every rank holds its part of them."""
    updates = range(1, UPDATES + 1)
    every_rank = tuple(f"rank {rank}" for rank in range(ranks))
    return {
        "logprob": (*(f"before update {i}" for i in updates), "after all updates", *every_rank),
        "loss": every_rank,
        "gradients": (*(f"update {i}: {name}" for i in updates for name in parameter_names(model)), *every_rank),
        "norm": every_rank,
        "parameters": (*(f"update {i}: {kind}" for i in updates for kind in STATE), *every_rank),
        "checkpoint": ("state file", "published weights", "logprob after loading", "parameters one update later"),
    }
